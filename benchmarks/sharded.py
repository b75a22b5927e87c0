"""`python -m benchmarks sharded`: stages 7 and 8 beside torch's own.

What the NaN check costs is measured too, and a hierarchical sum. Ours and torch's train copies of
one model in the same processes and take turns step by step. Everything runs on gloo and the CPU.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from ddp_course.collectives import hierarchical_all_reduce
from ddp_course.stage4_ring import ring_all_reduce
from ddp_course.stage5_bucketed import BucketedDDP
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer
from ddp_course.stage8_pipeline import (
    Pipeline,
    bubble,
    gpipe,
    layers_of,
    one_forward_one_backward,
    split,
)
from manyranks import finite
from manyranks.launching.launch import launch
from manyranks.links import Link

from .harness import Benchmark, Part, Promise, Row, medians, slowest, take_turns, timed
from .training import model_and_batch, step

MODELS = {
    "MLP, 4 M": ("synthetic", {"parameters": 2**22, "width": 512}, 32),
    "GPT, 1 M": ("bytes", {"parameters": 1_000_000}, 8),
}
SHARDING = 1.10  # Our step may take this many times torch's.
NAN_CHECK = 1.02  # A checked step may take this many times an unchecked one's.


class Delay(torch.nn.Module):
    """A layer that takes time, forward and backward, and leaves its inputs alone.

    The time is in milliseconds per sample. It sleeps, so that ranks which share a core do not slow
    each other down, and waiting shows up as waiting.
    """

    def __init__(self, forward_ms, backward_ms):
        super().__init__()
        self.forward_ms = forward_ms
        self.backward_ms = backward_ms

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(N, …) to the same, after N times `forward_ms`."""
        return _Sleep.apply(inputs, self.forward_ms, self.backward_ms)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, inputs: torch.Tensor, forward_ms: Any, backward_ms: Any
    ) -> torch.Tensor:
        context.backward_ms = backward_ms
        time.sleep(forward_ms * len(inputs) / 1000)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        time.sleep(context.backward_ms * len(gradient) / 1000)
        return gradient, None, None


def against(
    measure: Callable, most: float, ours: str, other: str, world_sizes: tuple[int, ...] = (2, 4)
) -> Callable:
    """Return a part that calls `measure` for every model and K.

    `ours` is to take at most `most` times the `other`'s time.
    """

    def part(args: argparse.Namespace) -> Part:
        """Return the seconds of a step, a row for each model and world size."""
        rows = []
        table = []
        promises = []
        for model in MODELS:
            for world_size in world_sizes:
                seconds = launch(
                    measure, model, args.repeats, world_size=world_size, device="cpu", timeout=600
                )[0]
                ratio = seconds[ours] / seconds[other]
                setting = {"model": model, "world_size": world_size}
                rows.append({**setting, **seconds})
                line: Row = dict(setting)
                for name, value in seconds.items():
                    line[f"{name}, ms"] = 1e3 * value
                table.append({**line, "ratio": ratio})
                words = f"{model}, K={world_size}: {ours}, times {other}"
                promises.append(Promise(words, ratio, most))
        return Part(rows, promises, table)

    return part


def optimizer_times(model: str, repeats: int) -> dict[str, float]:
    """Return the seconds of a step with torch's DDP and ZeroRedundancyOptimizer, and with ours.

    Ours averages by itself.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    make, *batch = model_and_batch(*MODELS[model])
    theirs = DistributedDataParallel(make())
    ours = make()
    their_optimizer = ZeroRedundancyOptimizer(theirs.parameters(), Adam, lr=0.001)
    our_optimizer = ShardedOptimizer(ours.parameters(), Adam, lr=0.001)
    ways = {
        "torch": timed(step, theirs, their_optimizer, *batch),
        "ours": timed(step, ours, our_optimizer, *batch),
    }
    return medians(ways, repeats)


def fully_sharded_times(model: str, repeats: int) -> dict[str, float]:
    """Return the seconds of a step with torch's fully_shard and with ours, the same blocks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    make, *batch = model_and_batch(*MODELS[model])
    theirs = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in getattr(theirs, "blocks", theirs):
        if list(block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    ours = FullyShardedDataParallel(make())
    ways = {}
    for name, model_of_kind in {"torch": theirs, "ours": ours}.items():
        optimizer = Adam(model_of_kind.parameters(), lr=0.001)
        ways[name] = timed(step, model_of_kind, optimizer, *batch)
    return medians(ways, repeats)


def pipeline_times(model: str, repeats: int) -> dict[str, float]:
    """Return the seconds of a step of torch's 1F1B and GPipe and of ours, forward and backward.

    There are 2 K micro-batches.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    make, inputs, targets = model_and_batch(*MODELS[model])
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    count = 2 * world_size

    def part():
        return split(layers_of(make()), world_size)[rank]

    ways = {}
    for name, schedule in {"torch 1F1B": Schedule1F1B, "torch GPipe": ScheduleGPipe}.items():
        stage = PipelineStage(part(), rank, world_size, torch.device("cpu"))
        train = schedule(stage, count, loss_fn=cross_entropy).step
        # Only the first stage is given inputs, and only the last one targets.
        if rank == world_size - 1:
            train = partial(train, target=targets)
        if rank == 0:
            train = partial(train, inputs)
        ways[name] = timed(train)
    for name, order in {"ours 1F1B": one_forward_one_backward, "ours GPipe": gpipe}.items():
        ways[name] = timed(Pipeline(part(), count, order).step, inputs, targets)
    return medians(ways, repeats)


def nan_check_times(model: str, repeats: int) -> dict[str, float]:
    """Return the seconds of a step of stage 5 with the check for NaN, and of the checks in it.

    The checks take less time than a step varies by, so they are timed by themselves, where they
    happen: in the backward pass, when the gradient has just been computed.
    """
    make, *batch = model_and_batch(*MODELS[model])
    watched = make()
    spent = [0.0]

    def check(parameter, name):
        began = time.perf_counter()
        finite.check(parameter.grad, name)
        spent[0] += time.perf_counter() - began

    for name, parameter in watched.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(check, name=name))
    train = timed(
        step, BucketedDDP(watched), torch.optim.SGD(watched.parameters(), lr=0.01), *batch
    )

    def both():
        spent[0] = 0.0
        return slowest(train()), slowest(spent[0])

    pairs = take_turns({"with": both}, repeats, warm_up=2)["with"]
    whole = statistics.median(step_s for step_s, _ in pairs)
    checks = statistics.median(check_s for _, check_s in pairs)
    return {"with": whole, "without": whole - checks, "check": checks}


def hierarchy(args: argparse.Namespace) -> Part:
    """Time a flat and a hierarchical all-reduce over two virtual hosts of two ranks each.

    The theory stands beside them.
    """
    link = Link("100Mbit", hosts=2)
    nbytes = 2**20
    seconds, *_ = launch(
        all_reduce_times, nbytes, args.repeats, world_size=4, device="cpu", link=link
    )
    # 2 (K - 1) / K of the bytes leave a host, where K are the ranks, or the hosts.
    link_s = nbytes * 8 / link.bandwidth
    theory = {"flat": 2 * 3 / 4 * link_s, "hierarchical": 2 * 1 / 2 * link_s}
    setting = {
        "hosts": 2,
        "ranks_per_host": 2,
        "bytes": nbytes,
        "bandwidth_bits_s": link.bandwidth,
        "mode": link.mode,
    }
    return Part(
        [
            {"ring": name, **setting, "measured_s": seconds[name], "theory_s": theory[name]}
            for name in theory
        ]
    )


def all_reduce_times(nbytes: int, repeats: int) -> dict[str, float]:
    """Return the seconds of both all-reduces of `nbytes` bytes."""
    tensor = torch.zeros(nbytes // 4)
    hierarchical = partial(hierarchical_all_reduce, ranks_per_host=2)
    return medians(
        {"flat": timed(ring_all_reduce, tensor), "hierarchical": timed(hierarchical, tensor)},
        repeats,
    )


def bubbles(args: argparse.Namespace) -> Part:
    """Return the measured bubble of both schedules beside the formula.

    Layers sleep instead of computing.
    """
    rows = []
    for microbatches in (2, 4, 8):
        for schedule in (gpipe, one_forward_one_backward):
            share = launch(
                idle_share, schedule, microbatches, args.repeats, world_size=3, device="cpu"
            )[0]
            setting = {"schedule": schedule.__name__, "world_size": 3, "microbatches": microbatches}
            rows.append({**setting, "measured": share, "formula": bubble(3, microbatches)})
    return Part(rows)


def idle_share(schedule: Callable, microbatches: int, repeats: int) -> float:
    """Return the share of a step in which a rank does not compute."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), Delay(forward_ms=20, backward_ms=40))
    inputs = torch.randn(microbatches, 4)
    targets = torch.randint(4, (microbatches,))
    train = timed(Pipeline(layers, microbatches, schedule).step, inputs, targets)
    step_s = medians({"step": train}, min(repeats, 5))["step"]
    computing_s = microbatches * (0.020 + 0.040)
    return 1 - computing_s / step_s


PARTS = {
    "ZeRO-1": against(optimizer_times, SHARDING, "ours", "torch"),
    "fully sharded": against(fully_sharded_times, SHARDING, "ours", "torch"),
    "pipeline": against(pipeline_times, SHARDING, "ours 1F1B", "torch 1F1B"),
    "NaN check": against(nan_check_times, NAN_CHECK, "with", "without", world_sizes=(2,)),
    "bubble": bubbles,
    "hierarchical": hierarchy,
}
BENCHMARK = Benchmark("sharded", "sharding and pipelines over torch's own", PARTS, repeats=15)
