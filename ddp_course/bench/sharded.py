"""`ddp-course bench sharded`: stages 7 and 8 beside torch's own, the cost of the NaN check, a hierarchical all-reduce.

Ours and torch's train copies of one model in the same processes and take turns step by step, in alternating order.
A step's time is the slowest rank's; ratios of medians are compared. Everything runs on gloo and the CPU.
"""

import json
import statistics
import time
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from .. import problems
from ..collectives import hierarchical_all_reduce
from ..measuring import finite
from ..running.files import replace_file, writable_folder
from ..running.launch import launch
from ..running.links import Link
from ..stage4_ring import ring_all_reduce
from ..stage5_bucketed import BucketedDDP
from ..stage7_sharded import FullyShardedDataParallel, ShardedOptimizer
from ..stage8_pipeline import Pipeline, bubble, gpipe, layers_of, one_forward_one_backward, split
from .launch import machine

MODELS = {
    "MLP, 4 M": ("synthetic", {"parameters": 2**22, "width": 512}, 32),
    "GPT, 1 M": ("bytes", {"parameters": 1_000_000}, 8),
}
WORLD_SIZES = (2, 4)
SHARDING, NAN_CHECK = 1.10, 1.02  # at most this many times torch's step, and the step without the check


def add_parser(subparsers):
    """Add `sharded` to `ddp-course bench`."""
    parser = subparsers.add_parser("sharded", help="sharding and pipelines over torch's own")
    parser.add_argument("--repeats", type=int, default=15, help="steps of each kind; the median counts (default 15)")
    parser.add_argument("--only", choices=PARTS, help="measure only this")
    parser.add_argument("--out", default="results", metavar="DIR", help="where the results go (default results)")
    parser.set_defaults(run=main)


def main(args) -> int:
    """Measure, print a line for each promise, write bench_sharded.json; 1 if one is not kept, else 0."""
    folder = writable_folder(args.out)
    report, kept = {"machine": machine(), "repeats": args.repeats}, True
    for part in [args.only] if args.only else PARTS:
        report[part] = PARTS[part](args.repeats)
        for row in report[part]:
            verdict = {True: "ok  ", False: "MISS", None: "    "}[row["kept"]]
            kept &= row["kept"] is not False
            print(f"{verdict} {part}: {row['what']}", flush=True)
    replace_file(folder / "bench_sharded.json", json.dumps(report, indent=2).encode())
    return 0 if kept else 1


def alternating(steps, repeats):
    """Seconds of each of the functions in `steps`, repeated in turns in alternating order; the slowest rank's."""
    seconds = {name: [] for name in steps}
    for repeat in range(repeats + 2):
        for name in list(steps) if repeat % 2 else list(steps)[::-1]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(took.item())
    return {name: statistics.median(times[2:]) for name, times in seconds.items()}  # the first two warm up


def stepper(model, forward, optimizer, batch, after_backward=lambda: None):
    """A function that trains one step on `batch`."""

    def step():
        """Forward, backward, update."""
        optimizer.zero_grad()
        cross_entropy(forward(batch[0]), batch[1]).backward()
        after_backward()
        optimizer.step()

    return step


def models_and_batch(model, count):
    """`count` copies of a model, and this rank's share of a batch."""
    name, settings, samples = MODELS[model]
    problem = problems.make(name, **settings)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = next(problem.batches(samples * world_size, 1, 0, rank, world_size))
    return [problem.model() for _ in range(count)], batch


def optimizer_times(model, repeats):
    """Seconds of a step with torch's ZeroRedundancyOptimizer and with ours, gradients averaged by the same DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    (theirs, ours), batch = models_and_batch(model, 2)
    wrapped = [DistributedDataParallel(one) for one in (theirs, ours)]
    zero = ZeroRedundancyOptimizer(theirs.parameters(), Adam, lr=0.001)
    sharded = ShardedOptimizer(ours.parameters(), Adam, lr=0.001)
    steps = {"torch": stepper(theirs, wrapped[0], zero, batch), "ours": stepper(ours, wrapped[1], sharded, batch)}
    return alternating(steps, repeats)


def fully_sharded_times(model, repeats):
    """Seconds of a step with torch's fully_shard and with ours, the same blocks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    (theirs, ours), batch = models_and_batch(model, 2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in theirs.blocks if hasattr(theirs, "blocks") else theirs:
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    sharded = FullyShardedDataParallel(ours)
    steps = {
        "torch": stepper(theirs, theirs, Adam(theirs.parameters(), lr=0.001), batch),
        "ours": stepper(ours, sharded, Adam(sharded.parameters(), lr=0.001), batch),
    }
    return alternating(steps, repeats)


def pipeline_times(model, repeats):
    """Seconds of a step, forward and backward, of torch's 1F1B and GPipe and of ours, 2 K micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    models, (inputs, targets) = models_and_batch(model, 4)
    rank, world_size, steps = dist.get_rank(), dist.get_world_size(), {}
    parts = iter([split(layers_of(one), world_size)[rank] for one in models])
    count = 2 * world_size
    given = [inputs] if rank == 0 else []
    wanted = {"target": targets} if rank == world_size - 1 else {}
    for name, schedule in {"torch 1F1B": Schedule1F1B, "torch GPipe": ScheduleGPipe}.items():
        stage = PipelineStage(next(parts), rank, world_size, torch.device("cpu"))
        steps[name] = partial(schedule(stage, count, loss_fn=cross_entropy).step, *given, **wanted)
    for name, schedule in {"ours 1F1B": one_forward_one_backward, "ours GPipe": gpipe}.items():
        steps[name] = partial(Pipeline(next(parts), count, schedule).step, inputs, targets)
    return alternating(steps, repeats)


def nan_check_times(model, repeats):
    """Seconds of a step of stage 5 whose gradients are checked for NaN, and of the checks in it.

    They take less than a step varies by, so they are timed by themselves, where they happen: in the backward pass,
    when the gradient has just been computed.
    """
    [watched], batch = models_and_batch(model, 1)
    check, spent = finite.check, []

    def timed(gradient, name):
        """`finite.check`, with its time added to that of the step."""
        start = time.perf_counter()
        check(gradient, name)
        spent[-1] += time.perf_counter() - start

    finite.check = timed
    finite.watch(watched)
    train = stepper(watched, BucketedDDP(watched), torch.optim.SGD(watched.parameters(), lr=0.01), batch)
    whole = alternating({"with": lambda: (spent.append(0.0), train())}, repeats)["with"]
    checks = torch.tensor(statistics.median(spent[2:]))
    dist.all_reduce(checks, op=dist.ReduceOp.MAX)
    return {"with": whole, "without": whole - checks.item(), "check": checks.item()}


def against(measure, promise, name, other, world_sizes=WORLD_SIZES):
    """A part of the benchmark: `measure` for every model and K, and whether name/other keeps the promise."""

    def part(repeats):
        """Measure `repeats` steps for each model and world size; return a row for each."""
        rows = []
        for model in MODELS:
            for world_size in world_sizes:
                seconds = launch(measure, model, repeats, world_size=world_size, device="cpu", timeout=600)[0]
                ratio = seconds[name] / seconds[other]
                times = ", ".join(f"{key} {1000 * value:.1f} ms" for key, value in seconds.items())
                rows.append(
                    {
                        "what": f"{model}, K={world_size}: {times}; ratio {ratio:.3f}, at most {promise}",
                        "seconds": seconds,
                        "ratio": ratio,
                        "kept": ratio <= promise,
                    }
                )
        return rows

    return part


def hierarchy(repeats):
    """A flat and a hierarchical all-reduce over two virtual hosts of two ranks, beside the theory."""
    link, nbytes = Link("100Mbit", hosts=2), 2**20
    seconds = launch(all_reduce_times, nbytes, repeats, world_size=4, device="cpu", link=link)[0]
    base = nbytes * 8 / link.bandwidth
    theory = {"flat": 2 * 3 / 4 * base, "hierarchical": 2 * 1 / 2 * base}
    return [
        {
            "what": f"{name} ring, 2 hosts of 2 ranks, 1 MiB over {link}: {1000 * seconds[name]:.0f} ms, "
            f"theory {1000 * theory[name]:.0f} ms",
            "seconds": seconds[name],
            "theory": theory[name],
            "kept": None,
        }
        for name in theory
    ]


def all_reduce_times(nbytes, repeats):
    """Seconds of both all-reduces of `nbytes` bytes."""
    tensor = torch.zeros(nbytes // 4)
    steps = {
        "flat": lambda: ring_all_reduce(tensor),
        "hierarchical": lambda: hierarchical_all_reduce(tensor, ranks_per_host=2),
    }
    return alternating(steps, repeats)


def bubbles(repeats):
    """The measured bubble of both schedules beside the formula, with layers that sleep instead of computing."""
    rows = []
    for microbatches in (2, 4, 8):
        for schedule in (gpipe, one_forward_one_backward):
            shares = launch(idle_share, schedule, microbatches, repeats, world_size=3, device="cpu")
            formula = bubble(3, microbatches)
            what = f"{schedule.__name__}, K=3, M={microbatches}: {shares[0]:.3f}, formula {formula:.3f}"
            rows.append({"what": what, "measured": shares[0], "formula": formula, "kept": None})
    return rows


class Sleep(torch.autograd.Function):
    """Takes 20 ms forward and 40 ms backward, and no core."""

    @staticmethod
    def forward(ctx, inputs):
        """Sleep, and pass the inputs on."""
        time.sleep(0.02)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Sleep twice as long, and pass the gradient on."""
        time.sleep(0.04)
        return gradient


class SleepingLayer(torch.nn.Linear):
    """A small layer that takes as long as `Sleep`."""

    def forward(self, inputs):
        """(N, 4) to (N, 4)."""
        return Sleep.apply(super().forward(inputs))


def idle_share(schedule, microbatches, repeats):
    """The share of a step in which a rank does not compute."""
    pipeline = Pipeline(SleepingLayer(4, 4), microbatches, schedule)
    batch = torch.randn(microbatches, 4), torch.randint(4, (microbatches,))
    seconds = alternating({"step": lambda: pipeline.step(*batch)}, min(repeats, 5))["step"]
    return 1 - microbatches * 0.06 / seconds


PARTS = {
    "ZeRO-1": against(optimizer_times, SHARDING, "ours", "torch"),
    "fully sharded": against(fully_sharded_times, SHARDING, "ours", "torch"),
    "pipeline": against(pipeline_times, SHARDING, "ours 1F1B", "torch 1F1B"),
    "NaN check": against(nan_check_times, NAN_CHECK, "with", "without", world_sizes=(2,)),
    "bubble": bubbles,
    "hierarchical": hierarchy,
}
