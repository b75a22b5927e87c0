"""`python -m benchmarks ddp`: stage 6 beside torch's own class, on gloo and the CPU.

Both train copies of the same model in the same processes and take turns step by step, so that
whatever disturbs the machine disturbs both. Other parts measure what the Python hooks cost per
parameter, memory and overlap.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

from ddp_course.stage6_ddp import DistributedDataParallel
from manyranks.errors import EmulationError
from manyranks.launching.launch import launch
from manyranks.links import Link

from .harness import Benchmark, Part, Promise, Row, medians, promises_of_ratios, take_turns, timed
from .pipelined_ring import pipelined_ring_all_reduce
from .training import model_and_batch, step

WORLD_SIZES = (2, 4)
# These are upper limits, as multiples of torch's value; that of a hook is in microseconds.
EACH = 1.05
GEOMETRIC_MEAN = 1.00
RING_EACH = 1.10
MEMORY = 1.05
HOOK_MICROSECONDS = 15
MODELS = {  # A problem, its options, and samples per rank.
    "MLP, 4 M": ("synthetic", {"parameters": 2**22, "width": 1024}, 64),
    "GPT, 1 M": ("bytes", {"parameters": 1_000_000}, 8),
    "GPT, 10 M": ("bytes", {"parameters": 10_000_000}, 4),
    "encoder, 48 small parameters": ("encoder", {}, 16),
}
# One has few large parameters, the other many small ones.
VIEWS = ("MLP, 4 M", "encoder, 48 small parameters")
WRAPPERS: dict[str, Callable[..., Any]] = {
    "torch": TorchDDP,
    "ours": DistributedDataParallel,
    "ours, ring": partial(DistributedDataParallel, all_reduce=pipelined_ring_all_reduce),
}
ORDERS = list(permutations(WRAPPERS))  # The last order is the first one reversed.
MEMORY_LAUNCHES = 9
VIEW_LAUNCHES = 5
HOSTS_BANDWIDTH = "1Gbit"


def on_cpu(function: Callable, *args: Any, world_size: int, **settings: Any) -> Any:
    """Return rank 0's result of a launch on the CPU.

    A busy machine must not cost all rows, so the time limit is an hour.
    """
    return launch(function, *args, world_size=world_size, device="cpu", timeout=3600, **settings)[0]


def step_times(args: argparse.Namespace) -> Part:
    """Time a step with each wrapper, for each network, model and K.

    Where a model happens to lie in memory shifts its times by some percent. So the wrappers are
    made in several orders, each in a launch of its own; a row has the geometric means of the
    launches' medians.
    """
    rows = []
    for (network, link), model, world_size in product(networks().items(), MODELS, WORLD_SIZES):
        orders = ORDERS
        if link:
            orders = [ORDERS[0], ORDERS[-1]]  # Over links times vary less: two orders will do.
        train = partial(
            on_cpu, wrappers_in_turn, model, args.repeats, world_size=world_size, link=link
        )
        print(f"measuring over {network}: {model}, K={world_size}", flush=True)
        seconds = means([train(order) for order in orders])
        rows.append({"network": network, "model": model, "world_size": world_size, **seconds})
    return Part(rows, promised_steps(rows), [ratios(row) for row in rows])


def means(launches: list[dict[str, float]]) -> dict[str, float]:
    """Return {wrapper: the geometric mean of its seconds} over several launches."""
    seconds = {}
    for name in launches[0]:
        seconds[name] = statistics.geometric_mean([launched[name] for launched in launches])
    return seconds


def ratios(row: Row) -> Row:
    """Return a row of step times with ratios, as it is printed."""
    printed: Row = {name: row[name] for name in ("network", "model", "world_size") if name in row}
    printed["torch, ms"] = 1e3 * row["torch"]
    for name in row:
        if name.startswith("ours"):
            printed[f"{name}, times that"] = row[name] / row["torch"]
    return printed


def networks() -> dict[str, Link | None]:
    """Return {name: link}: the loopback, and virtual hosts if this machine can have them.

    It must allow them, and be able to carry their links.
    """
    link = virtual_hosts(HOSTS_BANDWIDTH, max(WORLD_SIZES))
    if link is None:
        return {"loopback": None}
    return {"loopback": None, "virtual hosts": link}


def virtual_hosts(bandwidth: str, world_size: int) -> Link | None:
    """Return links between virtual hosts, which torch's collectives feel too.

    Where there are none, print why, and return None.
    """
    try:
        link = Link(bandwidth, mode="hosts")
        link.check(world_size)
    except EmulationError as error:
        print(f"not measured over virtual hosts: {error}", flush=True)
        return None
    return link


def promised_steps(rows: list[Row]) -> list[Promise]:
    """Return what is promised of the ratios to torch's step time, over all rows."""
    with_gloo = [row["ours"] / row["torch"] for row in rows]
    with_ring = [row["ours, ring"] / row["torch"] for row in rows]
    promises = promises_of_ratios("step time, times torch's", with_gloo, GEOMETRIC_MEAN, EACH)
    words = "step time with our ring, times torch's, slowest"
    return [*promises, Promise(words, max(with_ring), RING_EACH)]


def views_into_buckets(args: argparse.Namespace) -> Part:
    """Time a step with `gradient_as_bucket_view=True`, in both orders of making the wrappers.

    As in `step_times`, a row has the geometric means of several launches' medians.
    """
    rows: list[Row] = []
    for model, world_size, order in product(VIEWS, WORLD_SIZES, permutations(("torch", "ours"))):
        as_view = True
        train = partial(
            on_cpu, wrappers_in_turn, model, args.repeats, order, as_view, world_size=world_size
        )
        seconds = means([train() for _ in range(VIEW_LAUNCHES)])
        rows.append({"model": model, "world_size": world_size, "made first": order[0], **seconds})
    promises = promises_of_ratios(
        "step time with views, times torch's",
        [row["ours"] / row["torch"] for row in rows],
        GEOMETRIC_MEAN,
        EACH,
    )
    return Part(rows, promises, [{"made first": row["made first"], **ratios(row)} for row in rows])


def wrappers_in_turn(
    model: str, repeats: int, order: tuple[str, ...], as_view: bool = False
) -> dict[str, float]:
    """On each rank, return the median seconds of a step for each wrapper in `order`.

    Each wrapper has a model of its own.
    """
    ways = {}
    for name in order:
        wrapper = partial(WRAPPERS[name], gradient_as_bucket_view=as_view)
        ways[name] = training_step(wrapper, model)
    return medians(ways, repeats, warm_up=4)


def training_step(wrapper: Callable, model: str) -> Callable[[], float]:
    """Return a function that trains one step on this rank's fixed batch and returns its seconds."""
    make_model, inputs, targets = model_and_batch(*MODELS[model])
    parallel = wrapper(make_model())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    return timed(step, parallel, optimizer, inputs, targets)


def hook_costs(args: argparse.Namespace) -> Part:
    """Measure the microseconds per parameter that a wrapper adds to a step that sends nothing."""
    cost = on_cpu(cost_without_communication, 5 * args.repeats, world_size=1)
    promise = Promise("Python hooks, microseconds a parameter", cost["ours"], HOOK_MICROSECONDS)
    return Part([cost], [promise], [{f"{name}, us per parameter": us for name, us in cost.items()}])


def cost_without_communication(repeats: int) -> dict[str, float]:
    """On each rank, return each wrapper's microseconds per parameter above the bare model's.

    The parameters are small, and a hook sends nothing.
    """

    def send_nothing(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    layers = 200
    parameters = 2 * layers  # A layer has a weight and a bias.
    ways = {}
    inputs = torch.randn(4, 8)
    for name in ("bare", "torch", "ours"):
        module: Any = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(layers)])
        if name != "bare":
            module = WRAPPERS[name](module)
            module.register_comm_hook(None, send_nothing)
        ways[name] = partial(forward_and_backward, module, inputs)
    seconds = medians(ways, repeats)
    return {
        name: (seconds[name] - seconds["bare"]) / parameters * 1e6 for name in ("torch", "ours")
    }


def forward_and_backward(module: torch.nn.Module, inputs: torch.Tensor) -> float:
    """Return the processor seconds of a forward and backward pass in this thread.

    Other processes cannot lengthen them.
    """
    began = time.thread_time()
    module.zero_grad()
    module(inputs).sum().backward()
    return time.thread_time() - began


def memory(args: argparse.Namespace) -> Part:
    """Measure peak bytes of tensors and peak resident bytes, each kind in processes of its own.

    The smallest of `MEMORY_LAUNCHES` counts. A larger peak is due to chance: when gloo's thread
    frees a bucket, and how much of it malloc keeps.
    """
    rows = []
    promises = []
    for as_view in (False, True):
        kinds = {
            kind: partial(on_cpu, peak_bytes, kind, as_view, world_size=2)
            for kind in ("torch", "ours")
        }
        peaks = take_turns(kinds, MEMORY_LAUNCHES)
        for counted in ("tensors", "resident"):
            least = {}
            for kind in kinds:
                least[kind] = min(peak[counted] for peak in peaks[kind])
            rows.append({"gradient_as_bucket_view": as_view, "bytes": counted, **least})
            words = f"peak {counted}, gradient_as_bucket_view={as_view}, times torch's"
            promises.append(Promise(words, least["ours"] / least["torch"], MEMORY))
    return Part(rows, promises)


def peak_bytes(kind: str, as_view: bool) -> dict[str, int]:
    """On each rank, train with Adam; return the peaks of memory.

    They are those over model, gradients, buckets, optimizer and activations.
    """
    before = peak_resident()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])
        parallel = WRAPPERS[kind](model, gradient_as_bucket_view=as_view)
        optimizer = torch.optim.Adam(parallel.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            parallel(torch.ones(8, 1024)).square().sum().backward()
            optimizer.step()
        resident = peak_resident() - before
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return {"tensors": peak, "resident": resident}


def peak_resident() -> int:
    """Return the most bytes of this process that were in memory at once, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux says KiB.


def overlap(args: argparse.Namespace) -> Part:
    """Measure during which share of the all-reduces' time the backward pass was computing.

    torch's profiler says it.
    """
    rows = []
    promises = []
    for model in ("MLP, 4 M", "GPT, 10 M"):
        row = {"model": model, **on_cpu(hidden_shares, model, args.repeats, world_size=2)}
        rows.append(row)
        least = row["torch"] - 0.02  # Two medians of the same share differ by 0.02.
        words = f"overlap, {model}, share of communication hidden"
        promises.append(Promise(words, row["ours"], at_least=least))
    return Part(rows, promises)


def hidden_shares(model: str, repeats: int) -> dict[str, float]:
    """On each rank, return the median `hidden_share` of each wrapper's steps, which take turns."""

    def profiled(train):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            train()
        return hidden_share(profiler.profiler.kineto_results.events())

    ways = {}
    for kind in ("torch", "ours"):
        train = training_step(partial(WRAPPERS[kind], bucket_cap_mb=4), model)
        ways[kind] = partial(profiled, train)
    shares_of_kinds = take_turns(ways, repeats, warm_up=3)
    return {kind: statistics.median(shares) for kind, shares in shares_of_kinds.items()}


def hidden_share(events: list[Any]) -> float:
    """Return the share of the time of gloo's all-reduces that has passed at the last gradient."""
    computed = 0
    sums = []
    for event in events:
        start = event.start_ns()
        end = start + event.duration_ns()
        if event.name().startswith("autograd::engine::evaluate_function"):
            computed = max(computed, end)
        elif event.name() == "gloo:all_reduce":
            sums.append((start, end))
    total = sum(end - start for start, end in sums)
    hidden = sum(max(0, min(end, computed) - start) for start, end in sums)
    return hidden / total


PARTS = {
    "steps": step_times,
    "views": views_into_buckets,
    "hooks": hook_costs,
    "memory": memory,
    "overlap": overlap,
}
BENCHMARK = Benchmark("ddp", "stage 6 over torch's DistributedDataParallel", PARTS, repeats=20)
