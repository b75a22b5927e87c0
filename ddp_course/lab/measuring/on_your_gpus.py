"""Trains a lesson's stages on the GPUs that this machine has, in real time.

yours = on_your_gpus("3")           trains
show.compare_figure(yours)          "measured on 4 × NVIDIA H100", and what the numbers say
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from manyranks.devices import rank_device
from manyranks.devices.placement import usable_gpus
from manyranks.launching.launch import launch

from ... import ladder, problems, stage1_single
from .comparison import run
from .results import Comparison, StageResult
from .timing import stopwatch

LONG_ENOUGH_S = 0.05  # Shorter steps measure Python and the start of kernels, not the GPU.
WIDEST = 768  # No model is wider.
LARGEST_SHARE = 256  # No device gets more samples.
FAST_ENOUGH = 0.75  # The sentence about a larger batch promises this part of K times the speed.
MANY = 3  # The sentence about more stages names only the fastest and the slowest.
RATE = 0.05  # At this learning rate rounding errors do not grow from step to step.


class Size(NamedTuple):
    """What is trained: parameters of the bytes GPT, and samples in a global batch."""

    parameters: int
    global_batch: int


def on_your_gpus(stages: str) -> Comparison:
    """Train with `stages`, such as "3,4", and with one device, all on this machine's GPUs.

    There are as many ranks as GPUs, and at least 2. A probe finds a model and a batch that are so
    large that one device needs at least 50 ms for a step. Return the results of `comparison.run`,
    with `measured_on` and `message` in words. Without GPUs the ranks train a small model on the
    processor: weights are compared, and `compare_figure` shows the times of another machine, as
    those of two processes on one processor say nothing.
    """
    world_size = 1 if stages == "1" else max(2, usable_gpus())
    if usable_gpus():
        size, names = launch(find_size, world_size, world_size=1)[0]
        steps = 10
    else:
        size = next(sizes(world_size))
        names = []
        steps = 5
    results = run(
        world_size=world_size,
        stages=f"1,{stages}",
        device_speed="none",
        link=None,
        progress=True,
        **problem_options(size, steps),
    )
    results.measured_on = name_devices(names[:world_size], world_size)
    if names:
        results.message = message(results, len(names))
    else:
        print(
            "No GPU that CUDA can use is here. On the processor no weight is further than"
            f" {results.max_abs_diff:.0g} from one device's; the times are another machine's."
        )
    return results


def problem_options(size: Size, steps: int = 20) -> dict[str, Any]:
    """Return the options of `comparison.run` that train the bytes GPT of this size."""
    return {
        "problem": "bytes",
        "parameters": size.parameters,
        "global_batch": size.global_batch,
        "bucket_cap_mb": max(0.1, size.parameters * 4 / 2**20 / 8),  # for eight buckets
        "lr": RATE,
        "steps": steps,
    }


def large_problem(device: str, world_size: int) -> dict[str, Any]:
    """Return options of `comparison.run` for a problem that keeps one GPU busy for 50 ms a step.

    The ranks of a job all call this, and rank 0 tries the sizes.
    """
    found: list[Any] = [None]
    if not dist.is_initialized():
        found = launch(find_size, world_size, world_size=1, device=device)
    else:
        if dist.get_rank() == 0:
            found = [find_size(world_size)]
        dist.broadcast_object_list(found)
    [(size, _)] = found
    return problem_options(size)


def sizes(world_size: int) -> Iterator[Size]:
    """Yield growing sizes: wider and deeper models, then larger batches.

    All stages can use them, as there are layers and attention heads for every rank.
    """
    batch = 4 * world_size  # Stage 8 cuts a batch into four.
    width = 32 * world_size
    while batch <= LARGEST_SHARE * world_size:
        # Embedding and head are parts of a pipeline, too.
        layers = max(2, world_size - 2, math.ceil(width / 64))
        # A layer of a GPT has 12 width² parameters, and the rest of the model about 600 width.
        yield Size(12 * layers * width**2 + 600 * width, batch)
        if 2 * width <= WIDEST:
            width *= 2
        else:
            batch *= 2


def find_size(world_size: int) -> tuple[Size, list[str]]:
    """Return the first size for which this rank's device needs long enough, and all GPUs' names."""
    for size in sizes(world_size):
        if step_seconds(size) >= LONG_ENOUGH_S:
            break
    return size, [torch.cuda.get_device_name(number) for number in range(usable_gpus())]


def step_seconds(size: Size) -> float:
    """Return the seconds of a step on this rank's device, after one that is not timed."""
    problem = problems.make("bytes", parameters=size.parameters, device=rank_device())
    model = problem.model()
    stage1_single.train(model, problem.batches(size.global_batch, 1), RATE)
    with stopwatch() as watch:
        stage1_single.train(model, problem.batches(size.global_batch, 2), RATE)
    return watch.seconds / 2


def profile_step(size: Size, file: str) -> None:
    """Train with stage 6 on each rank; rank 0 writes a trace of a step to `file`."""
    rank = dist.get_rank()
    problem = problems.make("bytes", parameters=size.parameters, device=rank_device())
    model = problem.model()
    batches = problem.batches(size.global_batch, 4, 0, rank, dist.get_world_size())
    train = ladder.find("6").trainer({})
    third = torch.profiler.schedule(wait=0, warmup=3, active=1, repeat=1)
    with torch.profiler.profile(schedule=third, acc_events=True) as profiler:
        model.register_forward_pre_hook(lambda *_: profiler.step())
        train(model, batches, RATE)
    if rank == 0:
        profiler.export_chrome_trace(file)


def samples_needed(alone_ms: float, together_ms: float, ranks: int) -> int:
    """Return how many times as many samples a batch needs to keep `ranks` GPUs busy.

    With these the GPUs reach the part FAST_ENOUGH of their speed, if compute takes as many times as
    long, and messages take as long as now.
    """
    compute_ms = alone_ms / ranks
    messages_ms = together_ms - compute_ms
    # With this batch messages may take so long. Compute grows with the batch; messages do not.
    allowed_ms = compute_ms / FAST_ENOUGH - compute_ms
    return math.ceil(messages_ms / allowed_ms)


def name_devices(names: list[str], ranks: int) -> str:
    """Return the devices in words: "4 × NVIDIA H100", or the processor."""
    if not names:
        return "this machine's processor"
    gpus = " and ".join(f"{count} × {name}" for name, count in Counter(names).items())
    return gpus if ranks == len(names) else f"{gpus}, shared by {ranks} ranks"


def message(results: Comparison, gpus: int) -> str:
    """Return in words what the numbers say of one device and of the stages.

    If there are many stages, only the fastest and the slowest are named.
    """
    alone, *others = results.stages
    ranks = results.world_size
    size = f"{results.parameters:,} parameters and {results.global_batch} samples"
    parts = [f"One device needs {alone.step_ms:.0f} ms for a step of {size}"]
    if len(others) > MANY:
        fastest, *_, slowest = sorted(others, key=lambda stage: stage.step_ms)
        others = [fastest, slowest]
    last_reason = ""
    for stage in others:
        devices, reason = devices_and_reason(stage, alone.step_ms, ranks, gpus)
        ratio = stage.step_ms / alone.step_ms
        if ratio < 1:
            part = f"with {stage.name} {devices} are {1 / ratio:.1f} times as fast as one"
        else:
            part = f"with {stage.name} {devices} take {ratio:.1f} times the time of one"
            # The same reason is given once.
            if reason != last_reason:
                part += f": {reason}"
                last_reason = reason
        parts.append(part)
    return "; ".join(parts)


def devices_and_reason(
    stage: StageResult, alone_ms: float, ranks: int, gpus: int
) -> tuple[str, str]:
    """Return the devices of a stage in words, and why it is not faster than one device there."""
    if gpus < ranks:
        return f"{ranks} ranks", "they share what one could use alone"
    reason = "this model is too small for them"
    if ladder.find(stage.stage).splits_batch:
        times = samples_needed(alone_ms, stage.step_ms, ranks)
        fast = f"{FAST_ENOUGH * ranks:.2g} times as fast"
        reason += f"; with {times} times as many samples they would be {fast}"
    return f"{ranks} GPUs", reason
