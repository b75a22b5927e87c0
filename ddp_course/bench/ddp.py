"""`ddp-course bench ddp`: stage 6 beside torch's own DistributedDataParallel, on gloo and the CPU.

Both train copies of the same model in the same processes and take turns step by step, in changing order, so that
whatever disturbs the machine disturbs both. A step's time is the slowest rank's; ratios of medians are compared.
Measured besides: what the Python hooks cost a parameter, memory, overlap, and "auto" buckets over a slow link.
"""

import json
import resource
import statistics
import time
from functools import partial
from itertools import permutations, product

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

from .. import problems
from ..collectives import pipelined_ring_all_reduce
from ..errors import LinkError
from ..running.files import replace_file, writable_folder
from ..running.launch import launch
from ..running.links import Link
from ..stage6_ddp import DistributedDataParallel
from .launch import machine
from .ring import medians

MIB = 2**20
WORLD_SIZES = (2, 4)
EACH, GEOMETRIC_MEAN, RING_EACH, MEMORY, SLOW_LINK, HOOK_MICROSECONDS = 1.05, 1.00, 1.10, 1.05, 0.95, 15
MODELS = {
    "MLP, 4 M": ("synthetic", {"parameters": 2**22, "width": 1024}, 64),
    "GPT, 1 M": ("bytes", {"parameters": 1_000_000}, 8),
    "GPT, 10 M": ("bytes", {"parameters": 10_000_000}, 4),
    "GPT, 1 M, large batch": ("bytes", {"parameters": 1_000_000}, 24),
}
STEPS, SLOW = list(MODELS)[:3], list(MODELS)[3]  # over the slow link, backward must take as long as the all-reduce
RING = {"all_reduce": pipelined_ring_all_reduce}
WRAPPERS = {"torch": TorchDDP, "ours": DistributedDataParallel, "ours, ring": partial(DistributedDataParallel, **RING)}
ORDERS = list(permutations(WRAPPERS))  # the last is the first, backwards
HOSTS_BANDWIDTH = "1Gbit"
PARTS = ("steps", "hooks", "memory", "overlap", "slow link")


def add_parser(subparsers):
    """Add `ddp` to `ddp-course bench`."""
    parser = subparsers.add_parser("ddp", help="stage 6 over torch's DistributedDataParallel")
    parser.add_argument("--repeats", type=int, default=20, help="steps of each kind; the median counts (default 20)")
    parser.add_argument("--only", choices=PARTS, help="measure only this, and keep the rest of an earlier report")
    parser.add_argument("--out", default="results", metavar="DIR", help="where the results go (default results)")
    parser.set_defaults(run=main)


def main(args) -> int:
    """Measure, print the verdicts, write bench_ddp.json; 1 if a bound is not kept, else 0."""
    file = writable_folder(args.out) / "bench_ddp.json"
    report = json.loads(file.read_text()) if args.only and file.exists() else {"verdicts": {}}
    measures = dict(zip(PARTS, (step_times, hook_costs, memory, overlap, slow_link), strict=True))
    for part in [args.only] if args.only else PARTS:
        report[part], report["verdicts"][part] = measures[part](args.repeats)
        for promise, kept in report["verdicts"][part].items():
            print(f"{'ok  ' if kept else 'MISS'} {promise}", flush=True)
    report |= {"machine": machine(), "repeats": args.repeats}
    replace_file(file, json.dumps(report, indent=2).encode())
    return 0 if all(kept for verdicts in report["verdicts"].values() for kept in verdicts.values()) else 1


def on_cpu(function, *args, world_size, **settings):
    """Rank 0's result of a launch on the CPU."""
    return launch(function, *args, world_size=world_size, device="cpu", **settings)[0]


# Step time


def step_times(repeats):
    """Seconds of a step with each wrapper for each network, model and K, and what is promised of the ratios.

    Where a model happens to lie in memory shifts its times by some percent. So the wrappers are made in several
    orders, each in a launch of its own; a row has the geometric means of the launches' medians.
    """
    rows = []
    for (network, link), model, world_size in product(networks().items(), STEPS, WORLD_SIZES):
        orders = ORDERS if link is None else (ORDERS[0], ORDERS[-1])  # slower, and more alike: two will do
        setting = {"world_size": world_size, "link": link}
        launches = [on_cpu(take_turns, model, repeats, order, **setting) for order in orders]
        seconds = {kind: statistics.geometric_mean([one[kind] for one in launches]) for kind in WRAPPERS}
        row = {"network": network, "model": model, "world_size": world_size, **seconds}
        ours, ring = row["ours"] / row["torch"], row["ours, ring"] / row["torch"]
        milliseconds, where = 1e3 * row["torch"], f"{network}, {model} K={world_size}"
        print(f"{where}: torch {milliseconds:.1f} ms, ours {ours:.3f}, with our ring {ring:.3f} times that", flush=True)
        rows.append(row)
    return rows, judge_steps(rows)


def networks():
    """{name: link}: loopback, and virtual hosts if this machine allows them and can carry their links."""
    link = virtual_hosts(HOSTS_BANDWIDTH, max(WORLD_SIZES))
    return {"loopback": None} | ({"virtual hosts": link} if link else {})


def virtual_hosts(bandwidth, world_size):
    """Links between virtual hosts, which torch's collectives feel too; None, with the reason printed, if not here."""
    try:
        link = Link(bandwidth, mode="hosts")
        link.check(world_size)
    except LinkError as error:
        print(f"not measured over virtual hosts: {error}", flush=True)
        return None
    return link


def judge_steps(rows):
    """Return {promise: kept} of the ratios to torch's step time, over all rows."""
    same = [row["ours"] / row["torch"] for row in rows]
    ring = [row["ours, ring"] / row["torch"] for row in rows]
    mean = statistics.geometric_mean(same)
    return {
        f"step time, geometric mean: {mean:.3f} of torch's (at most {GEOMETRIC_MEAN:.2f})": mean <= GEOMETRIC_MEAN,
        f"step time, slowest: {max(same):.3f} of torch's (at most {EACH:.2f})": max(same) <= EACH,
        f"step time with our ring, slowest: {max(ring):.3f} of torch's (at most {RING_EACH:.2f})": max(ring)
        <= RING_EACH,
    }


def take_turns(model, repeats, order):
    """On each rank: median seconds of a step for each wrapper in `order`, each with a model of its own."""
    return medians({name: training_step(WRAPPERS[name], model) for name in order}, repeats, warm_up=4)


def training_step(wrapper, model):
    """A function that trains one step on this rank's fixed batch and returns its seconds."""
    name, options, samples = MODELS[model]
    problem = problems.make(name, **options)
    inputs, targets = next(
        problem.batches(samples * dist.get_world_size(), 1, 0, dist.get_rank(), dist.get_world_size())
    )
    parallel = wrapper(problem.model())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)

    def step():
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
        return time.perf_counter() - began

    return step


# What the hooks cost


def hook_costs(repeats):
    """Microseconds that a wrapper adds to a step, a parameter, when nothing is communicated."""
    found = on_cpu(cost_without_communication, 5 * repeats, world_size=1)
    print(f"overhead a parameter without communication: ours {found['ours']:.1f} us, torch {found['torch']:.1f} us")
    promise = f"Python hooks cost {found['ours']:.1f} us a parameter (at most {HOOK_MICROSECONDS})"
    return found, {promise: found["ours"] <= HOOK_MICROSECONDS}


def cost_without_communication(repeats):
    """On each rank: the difference to the bare model, for 400 small parameters and a hook that sends nothing."""

    def nothing(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ways, inputs = {}, torch.randn(4, 8)
    for name, wrapper in {"bare": lambda module: module, "torch": TorchDDP, "ours": DistributedDataParallel}.items():
        module = wrapper(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(200)]))
        if name != "bare":
            module.register_comm_hook(None, nothing)
        ways[name] = partial(bare_step, module, inputs)
    seconds = medians(ways, repeats)
    return {name: (seconds[name] - seconds["bare"]) / 400 * 1e6 for name in ("torch", "ours")}


def bare_step(module, inputs):
    """Processor seconds of a forward and backward pass in this thread, which other processes cannot lengthen."""
    began = time.thread_time()
    module.zero_grad()
    module(inputs).sum().backward()
    return time.thread_time() - began


# Memory


def memory(repeats):
    """Peak bytes of tensors and peak resident bytes, each kind in processes of its own."""
    rows, verdicts = [], {}
    for as_view in (False, True):
        row = {"gradient_as_bucket_view": as_view, **peaks(as_view)}
        rows.append(row)
        for what in ("tensors", "resident"):
            ratio = row["ours"][what] / row["torch"][what]
            promise = f"peak {what}, gradient_as_bucket_view={as_view}: {ratio:.3f} of torch's (at most {MEMORY})"
            verdicts[promise] = ratio <= MEMORY
    return rows, verdicts


def peaks(as_view, launches=9):
    """For torch and ours: the smallest peaks of a few launches, in turns.

    What lies above the smallest is chance: when gloo's thread lets go of a bucket, and what malloc keeps of it.
    """
    found = {"torch": [], "ours": []}
    for turn in range(launches):
        for kind in sorted(found, reverse=bool(turn % 2)):
            found[kind].append(on_cpu(peak_bytes, kind, as_view, world_size=2))
    return {
        kind: {what: min(row[what] for row in rows) for what in ("tensors", "resident")} for kind, rows in found.items()
    }


def peak_bytes(kind, as_view):
    """On each rank: train with Adam; the peaks over model, gradients, buckets, optimizer and activations."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])
        parallel = WRAPPERS[kind](model, gradient_as_bucket_view=as_view)
        optimizer = torch.optim.Adam(parallel.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            parallel(torch.ones(8, 1024)).square().sum().backward()
            optimizer.step()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return {"tensors": peak, "resident": resident}


# Overlap


def overlap(repeats):
    """Share of the all-reduces' time in which the backward pass was computing, from torch's profiler for both."""
    rows, verdicts = [], {}
    for model in ("MLP, 4 M", "GPT, 10 M"):
        row = {"model": model, **on_cpu(hidden_shares, model, repeats, world_size=2)}
        rows.append(row)
        promise = f"overlap, {model}: {row['ours']:.2f} of communication hidden (torch {row['torch']:.2f})"
        verdicts[promise] = row["ours"] >= row["torch"] - 0.02  # two medians of the same share differ by that much
    return rows, verdicts


def hidden_shares(model, repeats):
    """On each rank: the median over steps that take turns."""
    steps = {kind: training_step(partial(WRAPPERS[kind], bucket_cap_mb=4), model) for kind in ("torch", "ours")}
    shares = {kind: [] for kind in steps}
    for turn in range(repeats + 3):
        for kind in sorted(steps, reverse=bool(turn % 2)):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                steps[kind]()
            if turn >= 3:
                shares[kind].append(hidden_share(profiler.profiler.kineto_results.events()))
    return {kind: statistics.median(values) for kind, values in shares.items()}


def hidden_share(events):
    """Share of the time of gloo's all-reduces that lies before the last gradient was computed."""
    spans = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events]
    computed = max(end for name, _, end in spans if name.startswith("autograd::engine::evaluate_function"))
    sums = [(start, end) for name, start, end in spans if name == "gloo:all_reduce"]
    total = sum(end - start for start, end in sums)
    return sum(max(0, min(end, computed) - start) for start, end in sums) / total


# A slow link


def slow_link(repeats):
    """A link on which the all-reduce takes as long as the backward pass: torch's defaults, and ours on "auto"."""
    world_size, model = 2, SLOW
    seconds = on_cpu(backward_seconds, model, world_size=world_size)
    name, options, _ = MODELS[model]
    gradient_bits = 32 * sum(parameter.numel() for parameter in problems.make(name, **options).model().parameters())
    bandwidth = 2 * (world_size - 1) / world_size * gradient_bits / seconds
    link = virtual_hosts(f"{bandwidth / 1e6:.0f}Mbit", world_size)
    if link is None:
        return None, {}
    row = {"model": model, "world_size": world_size, "bandwidth_bits_s": bandwidth, "backward": seconds}
    row |= on_cpu(take_turns_on_auto, model, repeats, world_size=world_size, link=link)
    ratio = row["ours, auto"] / row["torch"]
    print(f"{bandwidth / 1e6:.0f} Mbit/s: torch {row['torch'] * 1e3:.0f} ms, ours {row['ours, auto'] * 1e3:.0f} ms")
    return row, {f"slow link: {ratio:.3f} of torch's step (at most {SLOW_LINK})": ratio <= SLOW_LINK}


def backward_seconds(model):
    """On each rank: median seconds of a backward pass without communication, all ranks at work."""
    name, options, samples = MODELS[model]
    problem = problems.make(name, **options)
    inputs, targets = next(problem.batches(samples, 1))
    module = problem.model()

    def backward():
        loss = cross_entropy(module(inputs), targets)
        began = time.perf_counter()
        loss.backward()
        return time.perf_counter() - began

    return medians({"backward": backward}, 10)["backward"]


def take_turns_on_auto(model, repeats):
    """On each rank: median seconds of a step with torch's defaults, and with our ring and automatic buckets."""
    automatic = partial(DistributedDataParallel, bucket_cap_mb="auto", **RING)
    wrappers = {"torch": TorchDDP, "ours": DistributedDataParallel, "ours, auto": automatic}
    steps = {name: training_step(wrapper, model) for name, wrapper in wrappers.items()}
    return medians(steps, repeats, warm_up=4)
