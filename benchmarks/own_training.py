"""The simulator held against our own training over virtual hosts, calibrated with two ranks only.

At K = 2 are measured: the all-reduce of a few sizes (alpha and beta, `theory.fit`), the layer times of each model
(`profile`, on both ranks at once), and the step times, which give the three numbers that cannot be seen directly:
how much longer computing takes in training than when profiled, the share of a core that a running collective takes,
and the seconds that a bucket costs besides. Then K = 3 and 4 are predicted. All virtual hosts share this machine's
cores, so there a rank computes more slowly: by K over the number of cores.

Whatever else runs on the machine only ever makes a step longer, so the lower quartile of the steps counts; how much
of the processor others took meanwhile is part of the result.
"""

from collections.abc import Sequence
from statistics import mean, median, quantiles
from time import perf_counter, process_time
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from scipy.optimize import least_squares
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ddp_course import problems
from ddp_course.measuring import theory
from ddp_course.measuring.simulate import Layer, Network, Profile, profile, simulate
from ddp_course.measuring.theory import Costs
from ddp_course.running.devices import usable_cores
from ddp_course.running.launching.launch import launch
from ddp_course.running.links import Link
from ddp_course.stage4_ring import ring_all_reduce
from ddp_course.stage5_bucketed import BucketedDDP

MODELS = {
    "synthetic": ({"parameters": 2**20}, 256),  # options of the problem, samples a rank: sending takes longer
    "bytes": ({"parameters": 400_000}, 12),  # computing takes longer
}
CAPS_MB = (0.25, 1.0, 24.0)  # with 25, its default, stage 5 has a small first bucket where torch has none
IMPLEMENTATIONS = ("stage 5", "torch's DDP")
ALL_REDUCE_BYTES = (2**15, 2**18, 2**20, 2**21)
WARMUP, STEPS, ROUNDS = 2, 6, 2
CALM, TRIES = 0.1, 2  # of the processor, others' share that is borne; how often a disturbed measurement is made
PAUSE_S = 0.1  # before each profiled step: about as long as a rank waits in these trainings


class Unseen(NamedTuple):
    """What is found from step times: computing in training over profiled, share of a core, seconds a bucket."""

    pace: float
    interference: float
    bucket_s: float


def compare(bandwidth: str = "200Mbit", world_sizes: Sequence[int] = (2, 3, 4)) -> dict[str, Any]:
    """Measure and predict; returns a dict: link, cores, calibration, "compared" (one row a setting), and errors.

    Needs virtual hosts (LinkError without), and about two minutes of a machine that does nothing else.
    """
    link, cores = Link(bandwidth, mode="hosts"), usable_cores()
    costs = dict(zip(IMPLEMENTATIONS, all_reduce_costs(link), strict=True))
    profiles = {name: profile_together(name, link) for name in MODELS}
    measured = [calmest(name, K, link) for name in MODELS for K in world_sizes]
    rows = [row for times, _ in measured for row in times]
    others = {"processor_share_of_others": max(share for _, share in measured)}
    return (
        predict_rows(rows, profiles, costs, cores)
        | {"link": {"bandwidth_bits_s": link.bandwidth, "mode": link.mode}}
        | others
    )


def predict_rows(
    rows: list[dict[str, Any]], profiles: dict[str, Profile], costs: dict[str, Costs], cores: int
) -> dict[str, Any]:
    """Calibrate with the `rows` of K = 2, predict all of them, and sum up the errors of the others."""
    unseen = fit_unseen(rows, profiles, costs, cores)
    compared = []
    for row in rows:
        kind = row["implementation"]
        predicted = 1e3 * predict(row, profiles, costs[kind], cores, unseen[kind])
        error = predicted / row["measured_ms"] - 1
        compared.append(row | {"predicted_ms": predicted, "error": error, "held_out": row["K"] != 2})
    held_out = sorted(abs(row["error"]) for row in compared if row["held_out"])
    return {
        "cores": cores,
        "calibration": {kind: costs[kind]._asdict() | unseen[kind]._asdict() for kind in IMPLEMENTATIONS},
        "computing_ms": {name: 1e3 * each.compute_s for name, each in profiles.items()},
        "compared": compared,
        "held_out_error": {"median": median(held_out), "largest": held_out[-1]},
    }


def predict(row: dict[str, Any], profiles: dict[str, Profile], costs: Costs, cores: int, unseen: Unseen) -> float:
    """Simulated seconds of one row's step."""
    cap = row["bucket_cap_mb"]
    step = simulate(
        profiles[row["model"]].scaled(unseen.pace),
        row["K"],
        Network(costs),
        bucket_cap_mb=cap,
        interference=unseen.interference,
        cores=cores,
        overhead_s=unseen.bucket_s,
    )
    return step.step_s


def fit_unseen(
    rows: list[dict[str, Any]], profiles: dict[str, Profile], costs: dict[str, Costs], cores: int
) -> dict[str, Unseen]:
    """{implementation: the `Unseen` that explains its step times at K = 2 best}; other rows are not looked at.

    Both implementations compute the same, so they share the pace.
    """
    known = [row for row in rows if row["K"] == 2]

    def unseen(unknowns):
        pace, shares, milliseconds = unknowns[0], unknowns[1:3], unknowns[3:5]
        triples = [(float(pace), float(x), float(ms) / 1e3) for x, ms in zip(shares, milliseconds, strict=True)]
        return {kind: Unseen(*triple) for kind, triple in zip(IMPLEMENTATIONS, triples, strict=True)}

    def errors(unknowns):
        guess = unseen(unknowns)
        kinds = [row["implementation"] for row in known]
        times = [predict(row, profiles, costs[k], cores, guess[k]) for k, row in zip(kinds, known, strict=True)]
        return [1e3 * seconds / row["measured_ms"] - 1 for seconds, row in zip(times, known, strict=True)]

    bounds = ([0.5, 0, 0, 0, 0], [4, 2, 2, 20, 20])
    return unseen(least_squares(errors, [1.2, 0.1, 0.1, 0.5, 0.5], bounds=bounds, diff_step=1e-2).x)


def all_reduce_costs(link: Link) -> tuple[Costs, Costs]:
    """(our ring's `Costs`, gloo's `Costs`) from timings of both over `link` at K = 2."""
    timed = launch(time_all_reduces, ALL_REDUCE_BYTES, world_size=2, device="cpu", link=link)
    slowest = [[max(pair) for pair in zip(*kinds, strict=True)] for kinds in zip(*timed, strict=True)]
    ours, gloo = (
        [theory.Measurement("ring", size, 2, seconds) for size, seconds in zip(ALL_REDUCE_BYTES, each, strict=True)]
        for each in slowest
    )
    return theory.fit(ours).costs, theory.fit(gloo).costs


def time_all_reduces(sizes: Sequence[int], repeats: int = 9) -> Any:
    """On each rank: seconds (lower quartile) of our ring and of gloo's all_reduce for each size in bytes."""
    typical = [[], []]
    for size in sizes:
        tensor, times = torch.zeros(size // 4), ([], [])
        for _ in range(repeats):
            for kind, all_reduce in enumerate((ring_all_reduce, dist.all_reduce)):
                dist.barrier()
                start = perf_counter()
                all_reduce(tensor)
                times[kind].append(perf_counter() - start)
        for kind in (0, 1):
            typical[kind].append(lower_quartile(times[kind][1:]))
    return typical


def profile_together(name: str, link: Link) -> Profile:
    """The `Profile` of a model while two ranks compute at once: the mean of both."""
    first, second = launch(profile_rank, name, world_size=2, device="cpu", link=link)
    layers = [
        Layer(a.name, mean((a.forward_s, b.forward_s)), mean((a.backward_s, b.backward_s)), a.gradient_bytes)
        for a, b in zip(first.layers, second.layers, strict=True)
    ]
    return Profile(tuple(layers), mean((first.update_s, second.update_s)))


def profile_rank(name: str) -> Profile:
    """On each rank: the `Profile` of model `name`."""
    model, batch = model_and_batch(name)
    dist.barrier()
    return profile(model, *batch, repeats=9, warmup=3, pause_s=PAUSE_S)


def calmest(name: str, world_size: int, link: Link) -> tuple[list[dict[str, Any]], float]:
    """`step_times`, measured again if others took more than a tenth of the processor; the calmer of the two."""
    tries = []
    while len(tries) < TRIES and not any(share <= CALM for _, share in tries):
        tries.append(step_times(name, world_size, link))
    return min(tries, key=lambda pair: pair[1])


def step_times(name: str, world_size: int, link: Link) -> tuple[list[dict[str, Any]], float]:
    """(rows, share): a row for each implementation and cap, with the milliseconds of a step on the slowest rank.

    `share` is the part of the processor, 0 to 1, that was busy with something else while the steps were timed.
    """
    timed = launch(time_steps, name, world_size=world_size, device="cpu", link=link)
    times, own, busy = zip(*timed, strict=True)
    slowest = {setting: 1e3 * max(lower_quartile(rank[setting]) for rank in times) for setting in times[0]}
    rows = [
        {"model": name, "implementation": kind, "K": world_size, "bucket_cap_mb": cap, "measured_ms": milliseconds}
        for (kind, cap), milliseconds in slowest.items()
    ]
    return rows, max(0.0, (busy[0][0] - sum(own)) / (usable_cores() * busy[0][1]))


def lower_quartile(values: Sequence[float]) -> float:
    """The value that a quarter of `values` lies below."""
    return quantiles(values, n=4, method="inclusive")[0]


def time_steps(name: str) -> Any:
    """On each rank: seconds of the steps by setting, own processor seconds, (all processor seconds, wall seconds).

    Two rounds, the second in reverse order.
    """
    settings = [(kind, cap) for kind in IMPLEMENTATIONS for cap in CAPS_MB]
    times = {setting: [] for setting in settings}
    dist.barrier()
    own, busy, start = process_time(), busy_seconds(), perf_counter()
    for turn in range(ROUNDS):
        for setting in settings[:: -1 if turn else 1]:
            times[setting] += time_setting(name, *setting)
    dist.barrier()
    return times, process_time() - own, (busy_seconds() - busy, perf_counter() - start)


def busy_seconds() -> float:
    """Processor seconds that programs of this machine have used so far, of all its cores together."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def time_setting(name: str, kind: str, cap: float) -> list[float]:
    """On each rank: seconds of the steps of model `name` with one implementation and one cap, in MiB."""
    model, (inputs, targets) = model_and_batch(name)
    wrapper = BucketedDDP if kind == "stage 5" else DistributedDataParallel
    parallel = wrapper(model, bucket_cap_mb=cap)
    optimizer, seconds = SGD(model.parameters(), lr=0.01), []
    dist.barrier()
    for _ in range(WARMUP + STEPS):
        start = perf_counter()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(perf_counter() - start)
    return seconds[WARMUP:]


def model_and_batch(name: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The model called `name` in MODELS and a batch for one rank."""
    options, samples = MODELS[name]
    problem = problems.make(name, **options)
    return problem.model(), next(problem.batches(samples, 1, seed=1))
