"""Stage 8: the model is split, not the data: micro-batches stream through all ranks' layers.

Rank r computes stage r of the model. With one batch at a time, all ranks but one would wait; cut
into M micro-batches, the ranks work on different ones at once. A schedule lists what each rank
does, in order. Three schedules, here for K = 3 and M = 4, with a backward pass (B) twice as long as
a forward pass (F). The last one splits it: B computes the gradient of the stage's input, for which
the rank before waits, and W that of the weights.

    GPipe          F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
                   .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
                   .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
    1F1B           F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
                   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
                   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    zero bubble    F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
                   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
                   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

In GPipe and 1F1B (one forward, one backward) a rank idles for (K-1)/(M+K-1) of the time, the
bubble; zero bubble's is (K-1)/(3M+K-1). GPipe keeps the activations of M micro-batches, 1F1B those
of at most K-r, zero bubble those of at most K. The interleaved schedule gives every rank several
thin stages, r, r+K, r+2K…: with two the bubble is half as long, and twice as many messages travel.
The gradients of all micro-batches add up to those of the whole batch.

One file per idea, in reading order:

    instructions  what a rank is told to do, and what passes between the stages
    schedules     which rank does what, and in which order
    timetable     how long a schedule takes, and whether it can work at all
    split         a model as stages of about equal size
    transfers     activations and gradients on their way between ranks
    pipeline      the class that runs a schedule on real layers

Sources: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019, and Megatron-LM,
SC 2021 (interleaved); Qi et al., Zero bubble pipeline parallelism, ICLR 2024.
"""

import torch.distributed as dist
from torch.optim import SGD

from ..base.losses import cross_entropy
from ..mesh import mesh
from ..stage3_paramserver import broadcast_parameters
from .instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction
from .pipeline import Pipeline, average_part
from .schedules import bubble, gpipe, interleaved, one_forward_one_backward, zero_bubble
from .split import layers_of, split
from .timetable import home_ranks, timetable

__all__ = [
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Forward",
    "Instruction",
    "Pipeline",
    "average_part",
    "bubble",
    "gpipe",
    "home_ranks",
    "interleaved",
    "layers_of",
    "one_forward_one_backward",
    "split",
    "timetable",
    "train",
    "zero_bubble",
]


def train(
    model,
    batches,
    lr,
    stages=None,
    microbatches=4,
    schedule=one_forward_one_backward,
    loss=cross_entropy,
    optimizer=SGD,
):
    """Train `model` in place as a pipeline over `stages` ranks (default: all); return its losses.

    Each rank trains its part, and at the end all ranks have the whole model. With fewer stages than
    ranks there are several pipelines side by side, and `batches` are the share of this rank's
    pipeline.
    """
    stages = stages or dist.get_world_size()
    groups = mesh(data=dist.get_world_size() // stages, pipeline=stages)
    broadcast_parameters(model)
    homes = home_ranks(schedule(dist.get_world_size(groups["pipeline"]), microbatches))
    parts = split(layers_of(model), len(homes))
    own = [
        parts[stage] for stage, rank in homes.items() if rank == dist.get_rank(groups["pipeline"])
    ]
    pipeline = Pipeline(own, microbatches, schedule, loss=loss, group=groups["pipeline"])
    optimizer = optimizer(pipeline.module.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        losses.append(pipeline.step(inputs, targets))
        average_part(pipeline.module, groups["data"])
        optimizer.step()
    for stage, part in enumerate(parts):
        broadcast_parameters(part, src=homes[stage], group=groups["pipeline"])
    everyones = [losses]
    dist.broadcast_object_list(everyones, group_src=homes[len(parts) - 1], group=groups["pipeline"])
    return everyones[0]
