"""Closed forms for the time of an all-reduce.

By Hockney's model a message of n bytes takes alpha + beta n seconds, where alpha is the latency
(seconds per message) and beta the inverse of the bandwidth (seconds per byte). A rank sends one
message and receives one at the same time (full duplex). For p bytes on each of K ranks:

    parameter_server     2 (K-1) (alpha + p beta)
    whole_gradient_ring  (K-1) (alpha + p beta)
    ring                 2 (K-1) (alpha + p/K beta)
    tree                 2 ceil(log2 K) (alpha + p beta)
    halving_doubling     2 log2 K alpha + 2 (K-1)/K p beta            K a power of two
    hierarchical         reduce-scatter in the host, a ring over the hosts for each shard, allgather
                         in the host

The course's own collectives take the same seconds in virtual time (`timing.time_collective`).

Sources: Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994); Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19
(2005); Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009).
"""

from math import isfinite, log2
from typing import Any, NamedTuple


class Costs(NamedTuple):
    """What a message costs: `alpha` seconds, and `beta` seconds for each byte."""

    alpha: float
    beta: float

    @classmethod
    def of_link(cls, bits_per_second: float, latency: float = 0.0) -> "Costs":
        """Return the costs of a link with this bandwidth (bits per second) and latency (seconds).

        Raises ValueError for a bandwidth of 0 or less.
        """
        if not bits_per_second > 0:
            raise ValueError(
                f"the bandwidth is {bits_per_second} bits per second; it must be more than 0"
            )
        return cls(latency, 8 / bits_per_second)

    def message(self, nbytes: float) -> float:
        """Return the seconds of a message of `nbytes` bytes between two ranks (Hockney 1994)."""
        return self.alpha + nbytes * self.beta


def parameter_server(nbytes: float, world_size: int, costs: Costs) -> float:
    """Return the seconds until K-1 ranks have sent `nbytes` to a server and got the sum back.

    One rank is served after the other, and the two directions take turns: half duplex. Source: Li
    et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, with a
    single server.
    """
    return 2 * (world_size - 1) * costs.message(nbytes)


def whole_gradient_ring(nbytes: float, world_size: int, costs: Costs) -> float:
    """Return the seconds to pass whole gradients around a ring (Thakur et al. 2005: allgather)."""
    return (world_size - 1) * costs.message(nbytes)


def ring(nbytes: float, world_size: int, costs: Costs) -> float:
    """Return the seconds of the chunked ring (Patarasuk and Yuan 2009)."""
    return 2 * (world_size - 1) * costs.message(nbytes / world_size)


def tree(nbytes: float, world_size: int, costs: Costs) -> float:
    """Return the seconds of a binomial reduce and a binomial broadcast (Thakur et al. 2005)."""
    return 2 * (world_size - 1).bit_length() * costs.message(nbytes)


def halving_doubling(nbytes: float, world_size: int, costs: Costs) -> float:
    """Return the seconds of recursive halving and doubling (Thakur et al. 2005).

    With P the largest power of two in K: 2 log2 P alpha + 2 (P-1)/P p beta. Each of the other K-P
    ranks first sends its tensor to a partner and in the end receives the sum: another 2 (alpha + p
    beta).
    """
    power = 2 ** (world_size.bit_length() - 1)
    total = 2 * log2(power) * costs.alpha + 2 * (power - 1) / power * nbytes * costs.beta
    return total + 2 * costs.message(nbytes) if power < world_size else total


def hierarchical(
    nbytes: float, world_size: int, costs: Costs, local: Costs | None = None, per_host: int = 1
) -> float:
    """Return the seconds of rings inside hosts around rings between hosts.

    D = `per_host` ranks on each host have `local` costs, and a host's link has `costs`. There are
    three parts: a reduce-scatter inside the host, (D-1) (alpha' + p/D beta'); a ring over the H
    hosts for each of the D shards; and an allgather inside, as long as the reduce-scatter. The D
    rings take turns on the host's link: with m = p/(DH) bytes per message a step takes max(D m
    beta, alpha + m beta), as a ring's latency hides behind the others; the first message waits
    (D-1) m beta. For large p the middle part is 2 (H-1)/H p beta. Source: Mikami et al., "Massively
    Distributed SGD", 2018 (2D-torus all-reduce).
    """
    hosts = host_count(world_size, per_host)
    shard = nbytes / world_size
    inside = 2 * (per_host - 1) * (local or costs).message(nbytes / per_host)
    if hosts == 1:
        return inside
    alone = costs.message(shard)
    shared = per_host * shard * costs.beta
    return (
        inside + (per_host - 1) * shard * costs.beta + (2 * hosts - 3) * max(shared, alone) + alone
    )


ALL_REDUCE: dict[str, Any] = {
    form.__name__: form
    for form in (
        parameter_server,
        whole_gradient_ring,
        ring,
        tree,
        halving_doubling,
        hierarchical,
    )
}


def seconds(algorithm: str, nbytes: float, world_size: int, costs: Costs, **options: Any) -> float:
    """Return the seconds of `algorithm` for `nbytes` bytes on each of `world_size` ranks.

    The algorithm is a name from the table above. `options` go to its formula: hierarchical has
    `local` and `per_host`. One rank has no partner and takes 0 seconds. Raises ValueError for an
    unknown name, negative bytes, or fewer than one rank.
    """
    if algorithm not in ALL_REDUCE:
        raise ValueError(f'unknown algorithm "{algorithm}"; choose one of {", ".join(ALL_REDUCE)}')
    check_sizes(nbytes, world_size)
    return ALL_REDUCE[algorithm](nbytes, world_size, costs, **options) if world_size > 1 else 0.0


def host_count(world_size: int, per_host: int) -> int:
    """Return how many hosts hold `world_size` ranks, `per_host` on each.

    Raises ValueError if the ranks do not fill the hosts.
    """
    if per_host < 1 or world_size % per_host:
        raise ValueError(
            f"{world_size} ranks do not fill hosts of {per_host} evenly; choose a divisor of"
            f" {world_size}"
        )
    return world_size // per_host


def check_sizes(nbytes: float, world_size: int) -> None:
    """Raise ValueError unless `nbytes` is a number of bytes and `world_size` a number of ranks."""
    if not (isfinite(nbytes) and nbytes >= 0):
        raise ValueError(f"the message is {nbytes} bytes; it must be a number of bytes, 0 or more")
    if int(world_size) != world_size or world_size < 1:
        raise ValueError(
            f"the world size is {world_size}; it must be a whole number of ranks, 1 or more"
        )
