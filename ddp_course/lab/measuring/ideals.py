"""Predicts a step of each stage on emulated devices, from compute and closed forms.

An ideal of C seconds of compute on one device, p bytes, K ranks, and links of b bytes per second:

    single          C
    averaged        C/K + the closed form of its all-reduce (`theory`): 2(K-1) p/b, 2(K-1)/K p/b …
    copied          C/K + K-1 copies, one after the other, of weights and gradients (2(K-1) p/b),
                    and of shards of the inputs, the outputs and the outputs' gradients
    overlapping     the simulator's: a bucket travels when it is full and the one before has arrived
    fully sharded   C/K, block by block: each waits until it has been gathered; the gather of the
                    next block and the sums of gradients share the link, one after the other
    sharded         stage 7 adds up a bitmap of used parameters as well, by a ring
    layers split    C of the slices of one rank + the closed form of each all-reduce of activations
    pipeline        micro-batches through K parts: a pass begins when its rank is free and its
                    message has arrived
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from manyranks.devices import Device
from manyranks.links import Link
from manyranks.torch_inside import tree_leaves

from ...job import Job, profile_of_step
from ...ladder import Stage
from ...problems import Batch
from ...stage7_sharded.blocks import assign_blocks, default_blocks
from ...stage8_pipeline import layers_of, one_forward_one_backward, split, timetable
from . import theory
from .simulate import Network, simulate
from .theory import Costs

MICROBATCHES = 4  # Stage 8 makes this many micro-batches by default.

# An event is (seconds of work so far, "forward", "backward", "done" or "end", block).
Event = tuple[float, str, int]


def ideals(stages: list[Stage], job: Job, device: Device, link: Link | None) -> dict[str, float]:
    """Return the milliseconds of a step, by the keys of those stages that have a formula."""
    costs = Costs.of_link(link.bandwidth, link.latency) if link else Costs(0.0, 0.0)
    return {
        stage.key: 1000 * STEPS[stage.step](stage, job, device, costs)
        for stage in stages
        if stage.step
    }


def compute_seconds(stage: Stage, job: Job, device: Device, costs: Costs) -> float:
    """Return the seconds of a step of one device that computes the whole batch."""
    return job.work(device).compute_s


def averaged_seconds(stage: Stage, job: Job, device: Device, costs: Costs) -> float:
    """Return the seconds of a step in which communication follows the backward pass."""
    nbytes = job.gradient_bytes
    seconds = job.work(device, job.world_size).compute_s
    return seconds + theory.seconds(str(stage.all_reduce), nbytes, job.world_size, costs)


def sharded_seconds(stage: Stage, job: Job, device: Device, costs: Costs) -> float:
    """Return the seconds of a step that averages into shards, and adds up stage 7's bitmap."""
    return averaged_seconds(stage, job, device, costs) + bitmap_seconds(job, costs)


def bitmap_seconds(job: Job, costs: Costs) -> float:
    """Return the seconds in which stage 7 adds up its bitmap: four bytes per parameter."""
    nbytes = 4 * len(list(job.model().parameters()))
    return theory.seconds("ring", nbytes, job.world_size, costs)


def copied_seconds(stage: Stage, job: Job, device: Device, costs: Costs) -> float:
    """Return the seconds of a step in which one process copies tensors to and from its devices."""
    model = job.model()
    inputs, _ = next(job.batches())
    with torch.no_grad():
        outputs = model(inputs)
    weights = [parameter.nbytes for parameter in model.parameters()]
    # Shards of the inputs go out, those of the outputs come back, and their gradients go out.
    tensors = tree_leaves([inputs, outputs, outputs])
    shards = [batch.nbytes / job.world_size for batch in tensors]
    # Weights go out, and gradients of the same sizes come back.
    copies_s = sum(costs.message(nbytes) for nbytes in [*weights, *weights, *shards])
    return job.work(device, job.world_size).compute_s + (job.world_size - 1) * copies_s


def overlapped_seconds(stage: Stage, job: Job, device: Device, costs: Costs) -> float:
    """Return the seconds of a step whose buckets travel under the backward pass."""
    work = job.work(device, job.world_size)
    step = simulate(work, job.world_size, Network(costs), str(stage.all_reduce), job.bucket_cap_mb)
    return step.step_s


def gathered_seconds(stage: Stage, job: Job, device: Device, costs: Costs) -> float:
    """Return the seconds of a step whose parameters are gathered block by block."""
    model = job.model()
    blocks = assign_blocks(model, default_blocks(model))
    batch = next(job.batches(0, job.world_size))
    events = events_of(model, blocks, batch, job.problem.training_loss, device)
    sizes = []
    for _, parameters in blocks:
        sizes.append(sum(parameter.nbytes for parameter in parameters))
    update_s = job.work(device, job.world_size).update_s / job.world_size
    passes_s = passes_seconds(events, sizes, job.world_size, costs)
    return passes_s + bitmap_seconds(job, costs) + update_s


def pipelined_seconds(stage: Stage, job: Job, device: Device, costs: Costs) -> float:
    """Return the seconds of a step of a pipeline."""
    parts = split(layers_of(job.model()), job.world_size)
    blocks = [(part, list(part.parameters())) for part in parts]
    microbatch = next(job.problem.batches(job.global_batch // MICROBATCHES, 1, job.seed))
    loss = job.problem.training_loss
    events = events_of(nn.Sequential(*parts), blocks, microbatch, loss, device)
    forward, backward = passes_of(events)
    schedule = one_forward_one_backward(job.world_size, MICROBATCHES)
    messages = [nbytes / MICROBATCHES * costs.beta for nbytes in job.activation_bytes]
    rows = timetable(schedule, forward, backward, message=messages, latency=costs.alpha)
    passes_s = max(end for row in rows for _, _, end in row)
    return passes_s + job.work(device, job.world_size).update_s


def sliced_seconds(stage: Stage, job: Job, device: Device, costs: Costs) -> float:
    """Return the seconds of a step whose layers are split over all ranks."""
    sending_s = sum(
        theory.seconds("ring", nbytes, job.world_size, costs) for nbytes in job.reduced_bytes
    )
    return profile_of_step(job, device, sliced=True).compute_s + sending_s


# All functions take the same arguments, so that any can be called by its name.
STEPS = {
    "alone": compute_seconds,
    "averaged": averaged_seconds,
    "sharded": sharded_seconds,
    "copied": copied_seconds,
    "overlapped": overlapped_seconds,
    "gathered": gathered_seconds,
    "pipelined": pipelined_seconds,
    "split": sliced_seconds,
}


def events_of(
    model: nn.Module,
    blocks: Sequence[tuple[nn.Module, list[nn.Parameter]]],
    batch: Batch,
    loss: Callable,
    device: Device,
) -> list[Event]:
    """Return when each block begins its passes and has its gradients, by the device's clock.

    A block is a pair of a module and its parameters.
    """
    events = []
    numbers = {}
    missing = {}  # The block of each parameter that has no gradient yet.
    for number, (module, parameters) in enumerate(blocks):
        numbers[module] = number
        missing |= dict.fromkeys(parameters, number)
    with device.emulate(sleep=False) as emulation:

        def note(kind, number):
            """Note what begins or is done now."""
            events.append((emulation.busy_s, kind, number))

        def note_gradient(parameter):
            """Note that a block is done, if this was the last of its gradients."""
            number = missing.pop(parameter)
            if number not in missing.values():
                note("done", number)

        def note_backward(module, inputs, outputs):
            """Note later that a block's backward pass begins, when its output has a gradient."""
            outputs.register_hook(lambda _: note("backward", numbers[module]))

        for module in numbers:
            module.register_forward_pre_hook(lambda module, _: note("forward", numbers[module]))
            module.register_forward_hook(note_backward)
        for parameter in list(missing):
            parameter.register_post_accumulate_grad_hook(note_gradient)
        inputs, targets = batch
        loss(model(inputs), targets).backward()
        note("end", 0)
    return events


def passes_seconds(events: list[Event], sizes: list[int], world_size: int, costs: Costs) -> float:
    """Return the seconds of stage 7's passes with prefetch, for blocks of `sizes` bytes.

    Gathers and sums of gradients share one link: each leaves when the one before has arrived. A
    pass of a block begins when the block's parameters have arrived, and the gather of the next
    block leaves then.
    """
    now = 0.0
    worked = 0.0  # `now` without the waits for parameters, which the events do not have
    link_free = 0.0
    arrivals = {}

    def travel(block):
        """Return when a block's parameters or gradients, which are ready now, have gone around."""
        nonlocal link_free
        around = (world_size - 1) * costs.message(sizes[block] / world_size)
        link_free = max(now, link_free) + around
        return link_free

    for place, (moment, kind, block) in enumerate(events):
        now = now + moment - worked
        worked = moment
        if kind == "done":
            # The block's gradients are summed.
            travel(block)
        elif kind != "end":
            # The first block of each pass is not prefetched.
            if (kind, block) not in arrivals:
                arrivals[kind, block] = travel(block)
            now = max(now, arrivals[kind, block])
            blocks_to_come = [later for _, other, later in events[place + 1 :] if other == kind]
            if blocks_to_come:
                following = blocks_to_come[0]
                arrivals[kind, following] = travel(following)
    return max(now, link_free)


def passes_of(events: list[Event]) -> tuple[list[float], list[float]]:
    """Return the seconds of the forward and the backward passes of blocks in a row.

    Both lists are in the order of the blocks.
    """
    moments = [moment for moment, kind, _ in events if kind != "done"]
    seconds = [end - begin for begin, end in pairwise(moments)]
    middle = len(seconds) // 2
    # The backward pass goes through the blocks from the last to the first.
    return seconds[:middle], seconds[middle:][::-1]
