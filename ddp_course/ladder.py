"""The one list of stages, from which comparison, script, figures and grader know them.

To add a stage, write its module and append a `Stage`. The stage then trains in `ddp-course compare
--stages …` and in `ddp_course.train --stage …`, and is drawn in its colour. Nothing is imported
until a stage is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder.

    `train(model, batches, lr, …)` trains in place and returns the loss of every step. If it is
    empty, the module's function `train` does this. It gets those settings of the job that it takes,
    and the job's `loss` and `optimizer`.

    `bytes_sent(job)` returns what the busiest rank sends in a step of a `job.Job`; it is None where
    nothing is sent. `step` says how a step goes on emulated devices: it is a name of
    `measuring.ideals.STEPS`, or None where no formula is known.
    """

    key: str
    name: str
    idea: str
    module: str
    colour: str
    time: str  # what its communication costs: p bytes over K ranks on links of b bytes/s
    train: Callable[..., list[float]] | str = ""
    one_process: bool = False
    splits_batch: bool = True  # whether each rank gets a K-th of the global batch, or all of it
    counted: bool = False  # whether its bytes go over our own wire, where they are counted
    bytes_sent: Callable[[Any], float] | None = None
    all_reduce: str | None = None  # the name of its closed form in `measuring.theory`
    step: str | None = None

    def trainer(self, settings: dict[str, Any]) -> Callable[..., list[float]]:
        """Return this stage's `train(model, batches, lr)` with those `settings` that it takes."""
        if callable(self.train):
            return self.train
        module, name = self.train.split(":") if self.train else (self.module, "train")
        train = getattr(import_module(f".{module}", __package__), name)
        # Without the job's loss and optimizer it would train something else.
        taken = {*signature(train).parameters, "loss", "optimizer"}
        chosen = {}
        for setting, value in settings.items():
            if setting in taken and value is not None:
                chosen[setting] = value
        return partial(train, **chosen)


def find(key: str) -> Stage:
    """Return the stage called `key`; raises ValueError if there is none."""
    if key not in STAGES:
        raise ValueError(f"unknown stage '{key}'; choose among {', '.join(STAGES)}")
    return STAGES[key]


def on_server(job: Any) -> float:
    """Return the bytes that a server sends, or each rank where whole gradients go around a ring."""
    return (job.world_size - 1) * job.gradient_bytes


def on_ring(job: Any) -> float:
    """Return the bytes that each rank sends in a ring all-reduce: reduce-scatter and allgather."""
    return 2 * (job.world_size - 1) * job.gradient_bytes / job.world_size


def sharded(job: Any) -> float:
    """Return the bytes that each rank sends in two allgathers and a reduce-scatter."""
    return 3 * (job.world_size - 1) * job.gradient_bytes / job.world_size


def along_pipeline(job: Any) -> float:
    """Return the bytes that the busiest rank of a pipeline sends, activations and gradients."""
    cuts = job.activation_bytes
    return max(right + left for right, left in zip([*cuts, 0], [0, *cuts], strict=True))


def within_layers(job: Any) -> float:
    """Return the bytes that each rank sends where layers are split: all-reduces of activations."""
    return 2 * (job.world_size - 1) * sum(job.reduced_bytes) / job.world_size


# The colours are near Okabe and Ito's, which people with any kind of colour vision can tell apart.
# Each is at least three times as dark as paper, so that a thin line can be seen.
STAGES: dict[str, Stage] = {
    stage.key: stage
    for stage in (
        Stage(
            "1",
            "single device",
            "forward, backward, update on one device",
            "stage1_single",
            colour="#8C8C8C",
            time="0",
            one_process=True,
            splits_batch=False,
            step="alone",
        ),
        Stage(
            "2",
            "DataParallel",
            "one process, K devices: scatter, replicate, gather, reduce",
            "stage2_dataparallel",
            colour="#C48400",
            time="the master carries it all",
            one_process=True,
            splits_batch=False,
            all_reduce="parameter_server",
            step="copied",
        ),
        Stage(
            "3",
            "parameter server",
            "K processes; one collects, averages, sends back",
            "stage3_paramserver",
            colour="#D55E00",
            time="2(K-1) p/b",
            counted=True,
            bytes_sent=on_server,
            all_reduce="parameter_server",
            step="averaged",
        ),
        Stage(
            "4w",
            "whole-gradient ring",
            "no server: whole gradients around a ring",
            "stage4_ring",
            colour="#332288",
            time="(K-1) p/b",
            train="variants:train_on_whole_ring",
            counted=True,
            bytes_sent=on_server,
            all_reduce="whole_gradient_ring",
            step="averaged",
        ),
        Stage(
            "4",
            "ring",
            "the chunked ring: reduce-scatter and allgather",
            "stage4_ring",
            colour="#0072B2",
            time="2(K-1)/K p/b",
            counted=True,
            bytes_sent=on_ring,
            all_reduce="ring",
            step="averaged",
        ),
        Stage(
            "5",
            "bucketed DDP",
            "buckets and hooks: communication under the backward pass",
            "stage5_bucketed",
            colour="#009E73",
            time="hidden behind compute",
            counted=True,
            bytes_sent=on_ring,
            all_reduce="ring",
            step="overlapped",
        ),
        Stage(
            "6",
            "complete DDP",
            "everything a real one needs: a drop-in for torch's `DistributedDataParallel`",
            "stage6_ddp",
            colour="#CC79A7",
            time="as 5",
            bytes_sent=on_ring,
            all_reduce="ring",
            step="overlapped",
        ),
        Stage(
            "7o",
            "sharded optimizer",
            "the optimizer's state split over the ranks",
            "stage7_sharded",
            colour="#117733",
            time="as 4",
            train="variants:train_with_sharded_optimizer",
            counted=True,
            bytes_sent=on_ring,
            all_reduce="ring",
            step="sharded",
        ),
        Stage(
            "7",
            "fully sharded",
            "parameters and gradients too: memory falls with K",
            "stage7_sharded",
            colour="#3B96CC",
            time="3(K-1)/K p/b",
            counted=True,
            bytes_sent=sharded,
            step="gathered",
        ),
        Stage(
            "8",
            "pipeline",
            "the model is split, not the data",
            "stage8_pipeline",
            colour="#882255",
            time="activations only",
            splits_batch=False,
            counted=True,
            bytes_sent=along_pipeline,
            step="pipelined",
        ),
        Stage(
            "9",
            "tensor parallel",
            "layers are split too, and a mesh combines the ways",
            "stage9_tensor",
            colour="#999933",
            time="two all-reduces of activations per block and pass",
            splits_batch=False,
            counted=True,
            bytes_sent=within_layers,
            step="split",
        ),
        Stage(
            "torch",
            "torch's DDP",
            "what you have built, as PyTorch ships it",
            "torch.nn.parallel",
            colour="#000000",
            time="as 5",
            train="variants:train_with_torch",
            bytes_sent=on_ring,
            all_reduce="ring",
            step="overlapped",
        ),
    )
}
MODULES = tuple(
    dict.fromkeys(stage.module for stage in STAGES.values() if stage.module.startswith("stage"))
)
