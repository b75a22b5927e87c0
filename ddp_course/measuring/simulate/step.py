"""One training step of bucketed DDP: backward fills buckets, buckets travel one after another, the update follows.

    compute   | forward | layer 3 | layer 2 | layer 1 |  waits   | update |
    network             | bucket 0 |   bucket 1     | bucket 2 |

Played in full, every rank has a process that computes and one that communicates, and every message is an event.
But all ranks do the same at the same time. So one rank is enough, and a bucket takes the seconds of the closed
form: that is how thousands of devices fit into milliseconds. Both ways give the same step time for the rings and
for halving-doubling; for the server and the tree the short way is an upper bound, as some ranks are done early
and may begin on the next bucket.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

from .. import theory
from ..timeline import Span
from .algorithms import PROGRAMS
from .model import Profile, assign_buckets, checked
from .network import Computing, Network, Pause, Signal, Simulation

KNEE = 0.9  # the efficiency below which we say that scaling has ended


@dataclass(frozen=True)
class Step:
    """A simulated step. Seconds: `step_s` in all, `compute_s` without communication, `communication_s` of all buckets.

    `buckets` are bytes, in the order sent; `spans` are those of rank 0, from the beginning of the step.
    """

    world_size: int
    step_s: float
    compute_s: float
    communication_s: float
    buckets: tuple[float, ...]
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def exposed_s(self) -> float:
        """Seconds by which communication makes the step longer: what the backward pass could not hide."""
        return self.step_s - self.compute_s

    @property
    def efficiency(self) -> float:
        """Throughput over that of `world_size` independent devices, 0 to 1."""
        return self.compute_s / self.step_s if self.step_s else 1.0


def simulate(
    profile: Profile, world_size: int, network: Network, algorithm: Any = "ring", bucket_cap_mb: float = 25.0,
    interference: float = 0.0, cores: int | None = None, overhead_s: float = 0.0,
    every_rank: bool = False,
) -> Step:  # fmt: skip
    """Simulate one step of `world_size` devices that each do the work of `profile`; returns a `Step`.

    `network` has the links and how many ranks share a host. `algorithm` is a name of `theory.ALL_REDUCE`.
    `bucket_cap_mb` is in MiB, infinity for one message after the backward pass. While a collective runs, it takes
    `interference` of a device's computing (0: it has engines of its own). `cores` is for emulated hosts: all
    ranks share that many cores of one machine. `overhead_s` is added to every bucket. `every_rank` plays all ranks
    and messages.
    Raises ValueError for sizes, times or names that cannot be.
    """
    _check(world_size, network, interference, cores, overhead_s)
    buckets = assign_buckets(checked(profile), bucket_cap_mb)
    sizes = tuple(sum(profile.layers[index].gradient_bytes for index in bucket) for bucket in buckets)
    simulation = Simulation(network)
    pace = _Pace(simulation, world_size, interference, cores)
    if every_rank:
        played, program = range(world_size), PROGRAMS[theory.form(algorithm).__name__]
    else:
        played, program = range(1), _closed_form(algorithm)
    spans = {rank: [] for rank in played}
    for rank in played:
        record = _recorder(simulation, spans[rank])
        full = [Signal() for _ in buckets]
        sending = _communicate(rank, sizes, full, partial(program, rank, world_size), pace, overhead_s, record)
        reduced = simulation.start(rank, sending)
        simulation.start(rank, _compute(profile, buckets, full, reduced, simulation, record))
    step_s = simulation.play()
    communication_s = sum(span.seconds for span in spans[0] if span.name == "communication")
    compute_s = profile.compute_s * pace.slowdown(False)
    return Step(world_size, step_s, compute_s, communication_s, sizes, tuple(sorted(spans[0], key=_by_start)))


def play(algorithm: Any, nbytes: float, world_size: int, network: Network, **options: Any) -> float:
    """Seconds of one all-reduce, played message by message; `algorithm` is a name or a program. Options go to it."""
    theory.check_sizes(nbytes, world_size)
    program = algorithm if callable(algorithm) else PROGRAMS[theory.form(algorithm).__name__]
    simulation = Simulation(network)
    for rank in range(world_size):
        simulation.start(rank, program(rank, world_size, nbytes, simulation, **options))
    return simulation.play()


def knee(steps: Iterable[Step]) -> int | None:
    """The largest K up to which every step is at least 90 % efficient, None if the first is not."""
    reached = None
    for step in sorted(steps, key=lambda step: step.world_size):
        if step.efficiency < KNEE:
            break
        reached = step.world_size
    return reached


def on_hosts(algorithm: Any, nbytes: float, world_size: int, network: Network) -> float:
    """Seconds of an all-reduce over a `Network` in which ranks share hosts; by closed form, never rank by rank.

    Inside one host the local links count. Across hosts a ring goes at the pace of the slowest link, and a server adds
    up local and remote messages. ValueError where ranks do not fill hosts evenly, and for other algorithms.
    """
    link, local, per_host = network.link, network.local or network.link, min(network.per_host, world_size)
    theory.form(algorithm)
    hosts = theory.host_count(world_size, per_host)
    if hosts == 1:
        return theory.seconds(algorithm, nbytes, world_size, local._replace(gamma=link.gamma))
    if per_host == 1:
        return theory.seconds(algorithm, nbytes, world_size, link)
    if algorithm == "hierarchical_ring":
        return theory.seconds(algorithm, nbytes, world_size, link, local=local, per_host=per_host)
    local = local._replace(gamma=link.gamma)
    if algorithm in ("ring", "whole_gradient_ring"):
        return max(theory.seconds(algorithm, nbytes, world_size, costs) for costs in (link, local))
    if algorithm == "parameter_server":
        outside = (world_size - per_host) / (world_size - 1)
        costs = [theory.seconds(algorithm, nbytes, world_size, costs) for costs in (link, local)]
        return outside * costs[0] + (1 - outside) * costs[1]
    raise ValueError(f"no formula for {algorithm} on {hosts} hosts of {per_host}; choose ring or hierarchical_ring")


class _Pace:
    """How fast ranks compute: slower while a collective takes its part, and when cores are fewer than ranks."""

    def __init__(self, simulation, world_size, interference, cores):
        self.simulation, self.world_size, self.interference, self.cores = simulation, world_size, interference, cores

    def slowdown(self, communicating: Any) -> Any:
        """Seconds that a second of work takes."""
        demand = 1 + self.interference * communicating
        return demand if self.cores is None else max(1.0, demand * self.world_size / self.cores)

    def communicating(self, rank: int, busy: Any) -> Any:
        """Let `rank` compute at the speed that goes with a collective under way (`busy`), or without."""
        self.simulation.set_speed(rank, 1 / self.slowdown(busy))


def _compute(profile, buckets, full, reduced, simulation, record):
    """What a device does: forward, backward with its full buckets announced, wait, update."""
    last = {bucket[-1]: signal for bucket, signal in zip(buckets, full, strict=True)}
    start = simulation.now
    yield Computing(sum(layer.forward_s for layer in profile.layers))
    record("forward", start)
    start = simulation.now
    for index in reversed(range(len(profile.layers))):
        yield Computing(profile.layers[index].backward_s)
        if index in last:
            simulation.fire(last[index])
    record("backward", start)
    start = simulation.now
    yield reduced
    record("wait", start)
    start = simulation.now
    yield Computing(profile.update_s)
    record("update", start)


def _communicate(rank, sizes, full, collective, pace, overhead_s, record):
    """The communication thread: one bucket after another, in order, each as soon as it is full."""
    pace.communicating(rank, False)
    for nbytes, signal in zip(sizes, full, strict=True):
        yield signal
        pace.communicating(rank, True)
        start = pace.simulation.now
        yield Pause(overhead_s)
        yield from collective(nbytes, pace.simulation)
        record("communication", start, "network")
        pace.communicating(rank, False)


def _closed_form(algorithm):
    """A program of one rank that stands for all: it takes the seconds of the formula."""

    def program(rank, world_size, nbytes, simulation):
        yield Pause(on_hosts(algorithm, nbytes, world_size, simulation.network))

    return program


def _by_start(span):
    return span.start


def _recorder(simulation, spans):
    def record(name, start, lane="compute"):
        if simulation.now > start:
            spans.append(Span(name, start, simulation.now, lane))

    return record


def _check(world_size, network, interference, cores, overhead_s):
    theory.check_sizes(0, world_size)
    for name, costs in (("link", network.link), ("local link", network.local)):
        if costs is not None and not all(isfinite(cost) and cost >= 0 for cost in costs):
            raise ValueError(
                f"the {name} is {costs}: seconds per message, seconds per byte, seconds per byte added, none below 0"
            )
    if not (isfinite(interference) and interference >= 0):
        raise ValueError(f"interference is {interference}; it is a share of the device, 0 or more")
    if cores is not None and not cores > 0:
        raise ValueError(f"{cores} cores cannot compute; give the number that all ranks share")
    if not (isfinite(overhead_s) and overhead_s >= 0):
        raise ValueError(f"the overhead is {overhead_s} seconds per bucket; it must be 0 or more")
