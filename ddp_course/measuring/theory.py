"""How long an all-reduce takes, in closed form.

Hockney's model: a message of n bytes takes alpha + beta n seconds, alpha being the latency (seconds per message)
and beta the inverse of the bandwidth (seconds per byte). Adding up costs gamma seconds per byte. A rank sends and
receives at the same time (full duplex), one message each. For p bytes on each of K ranks:

    parameter_server     2 (K-1) (alpha + p beta) + (K-1) p gamma
    duplex_server        (K-1) [S (alpha + p/S (beta + gamma)) + alpha + p/S beta]      S pieces
    whole_gradient_ring  (K-1) (alpha + p beta + p gamma)
    ring                 2 (K-1) (alpha + p/K beta) + (K-1) p/K gamma
    tree                 2 ceil(log2 K) (alpha + p beta) + ceil(log2 K) p gamma
    halving_doubling     2 log2 K alpha + 2 (K-1)/K p beta + (K-1)/K p gamma            K a power of two
    hierarchical_ring    reduce-scatter in the host, a ring over the hosts for each shard, allgather in the host

`ddp_course.measuring.simulate` plays the same algorithms message by message and arrives at the same seconds.

Sources: Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994); Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19 (2005); Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf, isfinite, log2
from typing import Any, NamedTuple

import numpy as np

PIECES = 16  # of a message in the full-duplex server: enough to come within 1/16 of (K-1) p beta


class Costs(NamedTuple):
    """`alpha` in seconds per message, `beta` in seconds per byte sent, `gamma` in seconds per byte added up."""

    alpha: float
    beta: float
    gamma: float = 0.0

    @classmethod
    def of_link(cls, bits_per_second: float, latency: float = 0.0, gamma: float = 0.0) -> "Costs":
        """The costs of a link with this bandwidth (bits per second) and latency (seconds)."""
        if not bits_per_second > 0:
            raise ValueError(f"the bandwidth is {bits_per_second} bits per second; it must be more than 0")
        return cls(latency, 8 / bits_per_second, gamma)


class Measurement(NamedTuple):
    """One timing: the `algorithm` ("message" for a single send) took `seconds` for `nbytes` bytes on each rank."""

    algorithm: str
    nbytes: float
    world_size: int
    seconds: float


class Fit(NamedTuple):
    """The result of `fit`: alpha (s per message), beta (s per byte), gamma (s per byte added), and standard errors."""

    alpha: float
    beta: float
    gamma: float
    alpha_error: float
    beta_error: float
    gamma_error: float

    @property
    def costs(self) -> Costs:
        """The fitted `Costs`, with a latency that came out negative (lost in the noise) taken as zero."""
        return Costs(max(0.0, self.alpha), self.beta, max(0.0, self.gamma))

    @property
    def bits_per_second(self) -> float:
        """The bandwidth that beta stands for."""
        return 8 / self.beta


def message(nbytes: float, world_size: int, costs: Costs) -> float:
    """Seconds for one message of `nbytes` bytes from one rank to another: alpha + p beta (Hockney 1994)."""
    return costs.alpha + nbytes * costs.beta


def parameter_server(nbytes: float, world_size: int, costs: Costs) -> float:
    """Seconds until K-1 ranks have sent `nbytes` to the server, one by one, and got the sum back, one by one.

    2 (K-1) (alpha + p beta) + (K-1) p gamma. Both directions take turns: half duplex. Source: Li et al.,
    "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, with a single server.
    """
    others = world_size - 1
    return 2 * others * (costs.alpha + nbytes * costs.beta) + others * nbytes * costs.gamma


def duplex_server(nbytes: float, world_size: int, costs: Costs, pieces: int = PIECES) -> float:
    """Seconds of a server that sends one piece of the sum back while the next `pieces` still come in: full duplex.

    (K-1) [S (alpha + p/S (beta + gamma)) + alpha + p/S beta] with S pieces; towards (K-1) p beta for many.
    The pipeline of one stage in, one stage out follows Thakur et al. 2005, section 4 (pipelined broadcast).
    """
    piece = nbytes / pieces
    incoming = pieces * (costs.alpha + piece * (costs.beta + costs.gamma))
    return (world_size - 1) * (incoming + costs.alpha + piece * costs.beta)


def whole_gradient_ring(nbytes: float, world_size: int, costs: Costs) -> float:
    """Seconds to pass complete gradients around the ring: (K-1) (alpha + p beta + p gamma).

    It is the ring allgather of Thakur et al. 2005, each rank adding up all K gradients.
    """
    return (world_size - 1) * (costs.alpha + nbytes * (costs.beta + costs.gamma))


def ring(nbytes: float, world_size: int, costs: Costs) -> float:
    """Seconds of the chunked ring: 2 (K-1) (alpha + p/K beta) + (K-1) p/K gamma (Patarasuk and Yuan 2009)."""
    chunk = nbytes / world_size
    return 2 * (world_size - 1) * (costs.alpha + chunk * costs.beta) + (world_size - 1) * chunk * costs.gamma


def tree(nbytes: float, world_size: int, costs: Costs) -> float:
    """Seconds of a binomial reduce followed by a binomial broadcast (Thakur et al. 2005).

    2 ceil(log2 K) (alpha + p beta) + ceil(log2 K) p gamma.
    """
    rounds = _rounds(world_size)
    return 2 * rounds * (costs.alpha + nbytes * costs.beta) + rounds * nbytes * costs.gamma


def halving_doubling(nbytes: float, world_size: int, costs: Costs) -> float:
    """Seconds of recursive halving and doubling (Rabenseifner 2004; Thakur et al. 2005).

    With P the largest power of two in K: 2 log2 P alpha + 2 (P-1)/P p beta + (P-1)/P p gamma. The K-P ranks
    left over hand all to a partner first and get all back last: another 2 (alpha + p beta) + p gamma.
    """
    power = 2 ** (world_size.bit_length() - 1)
    moved = (power - 1) / power * nbytes
    total = 2 * log2(power) * costs.alpha + moved * (2 * costs.beta + costs.gamma)
    if power < world_size:
        total += 2 * (costs.alpha + nbytes * costs.beta) + nbytes * costs.gamma
    return total


def hierarchical_ring(
    nbytes: float, world_size: int, costs: Costs, local: Costs | None = None, per_host: int = 1
) -> float:
    """Seconds of the two-level ring: D = `per_host` ranks per host with `local` costs, `costs` for the host's link.

    Reduce-scatter inside the host, (D-1) (alpha' + p/D (beta' + gamma)); a ring over the H hosts for each of the D
    shards; allgather inside, (D-1) (alpha' + p/D beta'). The D rings take turns on the host's link: with messages
    of m = p/(DH) bytes a step takes max(D m beta, alpha + m (beta + gamma)), in the allgather without gamma, as
    the latency of one ring hides behind the others; the first message waits (D-1) m beta. For large p the middle
    part is 2 (H-1)/H p beta. Source: Mikami et al., "Massively Distributed SGD", 2018 (2D-torus all-reduce).
    """
    local, hosts = local or costs, host_count(world_size, per_host)
    shard, message = nbytes / per_host, nbytes / world_size
    inside = 2 * (per_host - 1) * (local.alpha + shard * local.beta) + (per_host - 1) * shard * costs.gamma
    if hosts == 1:
        return inside
    alone, shared = costs.alpha + message * costs.beta, per_host * message * costs.beta
    reduce_step, gather_step = max(shared, alone + message * costs.gamma), max(shared, alone)
    waiting = (per_host - 1) * message * costs.beta
    return inside + waiting + (hosts - 1) * reduce_step + (hosts - 2) * gather_step + alone


ALL_REDUCE = {
    form.__name__: form
    for form in (
        parameter_server,
        duplex_server,
        whole_gradient_ring,
        ring,
        tree,
        halving_doubling,
        hierarchical_ring,
    )
}
FORMS = {"message": message, **ALL_REDUCE}


def seconds(algorithm: str, nbytes: float, world_size: int, costs: Costs, **options: Any) -> float:
    """Seconds that `algorithm` (a name from the table above) takes for `nbytes` bytes on each of `world_size` ranks.

    Options go to the formula: `pieces` for duplex_server, `local` and `per_host` for hierarchical_ring. One rank
    has no partner: 0. Raises ValueError for an unknown name, negative bytes, or fewer than one rank.
    """
    formula = form(algorithm)
    check_sizes(nbytes, world_size)
    return formula(nbytes, world_size, costs, **options) if world_size > 1 else 0.0


def fit(measurements: Iterable[Measurement], gamma: float | str | None = None) -> Fit:
    """Find alpha and beta from timings, by least squares of the relative errors; returns a `Fit`.

    `measurements` are `Measurement`s or tuples (algorithm, bytes, world size, seconds), of any mix of algorithms:
    each formula is linear in alpha, beta and gamma. `gamma` (s per byte) is taken as given, 0 when None; "fit" finds
    it too. Standard errors need more timings than unknowns and are infinite otherwise. Raises ValueError if the
    timings cannot tell the unknowns apart, or if time does not grow with size.
    """
    rows = [Measurement(*row) for row in measurements]
    for row in rows:
        form(row.algorithm)
        check_sizes(row.nbytes, row.world_size, least=2)
        if not (isfinite(row.seconds) and row.seconds > 0):
            raise ValueError(f"a timing of {row.seconds} seconds cannot be fitted; it must be more than 0")
    unknowns = 3 if gamma == "fit" else 2
    units = np.eye(3)
    design = np.array([[FORMS[r.algorithm](r.nbytes, r.world_size, Costs(*unit)) for unit in units] for r in rows])
    known = design[:, 2:] @ np.array([0.0 if gamma in (None, "fit") else gamma]) if rows else 0
    taken = np.array([row.seconds for row in rows])
    estimate, errors = _least_squares(design[:, :unknowns] if rows else np.zeros((0, 2)), taken - known, taken)
    if estimate[1] <= 0:
        raise ValueError("the timings do not grow with the bytes: measure larger messages, or more often")
    padded = [*estimate, 0.0 if gamma in (None, "fit") else gamma][:3]
    return Fit(*padded, *([*errors, 0.0][:3]))


def best(
    nbytes: float,
    world_size: int,
    costs: Costs,
    algorithms: Sequence[str] = ("parameter_server", "ring", "tree", "halving_doubling"),
) -> str:
    """The name of the algorithm among `algorithms` that takes the fewest seconds."""
    return min(algorithms, key=lambda name: seconds(name, nbytes, world_size, costs))


def host_count(world_size: int, per_host: int) -> int:
    """How many hosts hold `world_size` ranks, `per_host` on each; ValueError unless they come out even."""
    if per_host < 1 or world_size % per_host:
        raise ValueError(f"{world_size} ranks do not fill hosts of {per_host} evenly; choose a divisor of {world_size}")
    return world_size // per_host


def check_sizes(nbytes: float, world_size: int, least: int = 1) -> None:
    """Raise ValueError unless `nbytes` is a number of bytes and `world_size` at least `least` ranks."""
    if not (isfinite(nbytes) and nbytes >= 0):
        raise ValueError(f"the message is {nbytes} bytes; it must be a number of bytes, 0 or more")
    if int(world_size) != world_size or world_size < least:
        raise ValueError(f"the world size is {world_size}; it must be a whole number of ranks, {least} or more")


def form(algorithm: str) -> Callable[..., float]:
    """The formula called `algorithm`; ValueError, with the names there are, for any other."""
    if algorithm not in FORMS:
        raise ValueError(f'unknown algorithm "{algorithm}"; choose one of {", ".join(ALL_REDUCE)}')
    return FORMS[algorithm]


def _rounds(world_size):
    return (world_size - 1).bit_length()


def _least_squares(design, values, scale):
    """Solve design @ x = values with errors proportional to `scale`; return x and its standard errors."""
    unknowns = design.shape[1]
    weighted, target = design / scale[:, None], values / scale
    size = np.linalg.norm(weighted, axis=0)
    if len(values) < unknowns or not size.all() or np.linalg.matrix_rank(weighted / size) < unknowns:
        raise ValueError(f"{len(values)} timings cannot tell {unknowns} unknowns apart: vary the bytes of the message")
    inverse = np.linalg.inv((weighted / size).T @ (weighted / size))
    estimate = inverse @ (weighted / size).T @ target
    residual = target - weighted / size @ estimate
    spare = len(values) - unknowns
    variance = residual @ residual / spare if spare else inf
    with np.errstate(invalid="ignore"):
        return estimate / size, np.sqrt(variance * np.diag(inverse)) / size
