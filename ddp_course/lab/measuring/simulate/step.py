"""Simulates a training step of bucketed DDP: backward fills buckets, which travel in turn.

    compute   | forward | layer 3 | layer 2 | layer 1 |  waits   | update |
    network             | bucket 0 |   bucket 1     | bucket 2 |

All ranks do the same at the same time. So only one rank is simulated, and a bucket takes the
seconds of the closed form: thousands of devices take milliseconds. For the server and the tree the
result is an upper bound, as some ranks are done early and may begin on the next bucket.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from ....job import Profile
from .. import theory
from ..theory import Costs
from ..timeline import Span
from .buckets import full_buckets

KNEE = 0.9  # Scaling ends where the efficiency falls below this.


class Network(NamedTuple):
    """The costs of the `link` between hosts and of the `local` one, and the ranks per host.

    `local` is None if links inside a host are like those between hosts.
    """

    link: Costs
    local: Costs | None = None
    per_host: int = 1


@dataclass(frozen=True)
class Step:
    """A simulated step, with its times in seconds.

    `step_s` is the time of the step, `compute_s` that without communication, and `communication_s`
    the sum of all buckets' times. `buckets` are their bytes, in the order of sending; `spans` are
    those of rank 0, from the beginning of the step.
    """

    world_size: int
    step_s: float
    compute_s: float
    communication_s: float
    buckets: tuple[float, ...]
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def exposed_s(self) -> float:
        """The seconds of communication that the backward pass could not hide."""
        return self.step_s - self.compute_s

    @property
    def efficiency(self) -> float:
        """The throughput as a part (0 to 1) of that of `world_size` independent devices."""
        return self.compute_s / self.step_s


def simulate(
    profile: Profile,
    world_size: int,
    network: Network,
    algorithm: str = "ring",
    bucket_cap_mb: float = 25.0,
    interference: float = 0.0,
) -> Step:
    """Return a simulated step of `world_size` devices, each of which does the work of `profile`.

    `network` has the links and how many ranks share a host. `algorithm` is a name of
    `theory.ALL_REDUCE`. `bucket_cap_mb` is in MiB; infinity stands for one message after the
    backward pass. While a collective runs, computing takes 1 + `interference` times as long, where
    0 stands for a collective with engines of its own. Raises ValueError for impossible sizes or
    names.
    """
    theory.check_sizes(profile.gradient_bytes, world_size)
    buckets = full_buckets(profile, bucket_cap_mb)
    forward_end = sum(layer.forward_s for layer in profile.layers)
    now = forward_end
    link_free = 0.0  # the moment at which the link is free again
    spans = [Span("forward", 0.0, forward_end)]
    for index in reversed(range(len(profile.layers))):
        seconds = profile.layers[index].backward_s
        # What is computed beside a collective that is on its way takes longer.
        busy_s = max(0.0, link_free - now)
        now += seconds + interference * min(seconds, busy_s / (1 + interference))
        if index in buckets:
            start = max(now, link_free)
            link_free = start + on_hosts(algorithm, buckets[index], world_size, network)
            spans.append(Span("communication", start, link_free, "network"))
    wait_end = max(now, link_free)
    end = wait_end + profile.update_s
    spans += [
        Span("backward", forward_end, now),
        Span("wait", now, wait_end),
        Span("update", wait_end, end),
    ]
    spans = sorted((span for span in spans if span.seconds > 0), key=lambda span: span.start)
    return Step(
        world_size=world_size,
        step_s=end,
        compute_s=profile.compute_s,
        communication_s=sum(span.seconds for span in spans if span.lane == "network"),
        buckets=tuple(buckets.values()),
        spans=tuple(spans),
    )


def knee(steps: Iterable[Step]) -> int | None:
    """Return the largest K up to which all steps' efficiencies are at least KNEE, or None."""
    ascending = sorted(steps, key=lambda step: step.world_size)
    efficient = takewhile(lambda step: step.efficiency >= KNEE, ascending)
    return max((step.world_size for step in efficient), default=None)


def on_hosts(algorithm: Any, nbytes: float, world_size: int, network: Network) -> float:
    """Return the seconds of an all-reduce over a `Network` in which ranks share hosts.

    Inside one host the local links count. Across hosts a ring goes at the pace of the slowest link.
    Raises ValueError if ranks do not fill hosts evenly, and for algorithms without a formula.
    """
    link = network.link
    local = network.local or network.link
    per_host = min(network.per_host, world_size)
    hosts = theory.host_count(world_size, per_host)
    if hosts == 1:
        return theory.seconds(algorithm, nbytes, world_size, local)
    if per_host == 1:
        return theory.seconds(algorithm, nbytes, world_size, link)
    if algorithm == "hierarchical":
        return theory.seconds(algorithm, nbytes, world_size, link, local=local, per_host=per_host)
    if algorithm == "ring":
        return max(theory.seconds(algorithm, nbytes, world_size, costs) for costs in (link, local))
    raise ValueError(
        f"no formula for {algorithm} on {hosts} hosts of {per_host}; choose ring or hierarchical"
    )
