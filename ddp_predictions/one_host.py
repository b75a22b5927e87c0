"""NCCL's all-reduce inside one host, predicted for more GPUs than it was measured on, from how they
are wired.

A100s are joined by switches: every pair has the whole bandwidth, whatever K is. V100s have six
wires each, to fixed partners. Their rings exist only along wires, several rings share the message,
and how many fit depends on which GPUs take part: one for two GPUs, two for three, four for four. So
more GPUs can be *faster*.

    A100   c + 2(K-1) a + p (2(K-1)/K / b + d)      d: reading and writing the message once,
                                                    whatever K is
    V100   c + 2(K-1) a + 2(K-1)/K p / (rings b)    b: a single wire

The four numbers c, a, b, d are fitted to K = 2, 3 and 4 (least squares of relative errors); 5 to 8
are predicted. Wires of the V100 host (DGX-1, as `nvidia-smi topo -m` prints it): NVIDIA, "NVIDIA
DGX-1 With Tesla V100 System Architecture", 2017, figure 4.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, permutations, product

import numpy as np
from scipy.optimize import LinearConstraint, milp

from ddp_course.measuring import facts

from .published import Row, fit_within

MIB = 2**20
GPUS = ("A100", "V100")
V100_WIRES = {
    (0, 1): 1,
    (0, 2): 1,
    (0, 3): 2,
    (0, 4): 2,
    (1, 2): 2,
    (1, 3): 1,
    (1, 5): 2,
    (2, 3): 2,
    (2, 6): 1,
    (3, 7): 1,
    (4, 5): 1,
    (4, 6): 1,
    (4, 7): 2,
    (5, 6): 2,
    (5, 7): 1,
    (6, 7): 2,
}


@cache
def rings(gpus: int) -> int:
    """How many rings over the first `gpus` V100s fit on the wires at once, each wire used once in
    each direction.

    Where no ring exists along wires, a step may pass through a GPU in between and take two wires.
    """
    free = {
        way: count for (a, b), count in V100_WIRES.items() if b < gpus for way in ((a, b), (b, a))
    }
    ways = list(free)
    around = list(cycles(gpus, free, through=False)) or list(cycles(gpus, free, through=True))
    used = np.array(
        [[ring.count(way) for way in ways] for ring in {tuple(sorted(ring)) for ring in around}]
    ).T
    limit = LinearConstraint(used, ub=[free[way] for way in ways])
    packed = milp(-np.ones(used.shape[1]), constraints=limit, integrality=np.ones(used.shape[1]))
    return round(-packed.fun)


def cycles(gpus: int, free: dict, through: bool) -> Iterator[list[tuple[int, int]]]:
    """Each way around all GPUs as a list of (from, to); `through` allows one GPU in between at
    every step.
    """

    def steps(a, b):
        direct = [((a, b),)] if (a, b) in free else []
        middle = [((a, m), (m, b)) for m in range(gpus) if (a, m) in free and (m, b) in free]
        return direct or (middle if through else [])

    for order in permutations(range(1, gpus)):
        for chosen in product(*(steps(a, b) for a, b in pairwise((0, *order, 0)))):
            yield [way for step in chosen for way in step]


def all_reduce_us(row: Row, numbers: Sequence[float]) -> float:
    """Microseconds of a row with gpu, K and message_mib; `numbers` are c, a (µs), 1/b and d (µs per
    MiB).
    """
    start, step, wire, once = numbers
    gpus, mib = int(row["K"]), row["message_mib"]
    moved = 2 * (gpus - 1) / gpus * mib * wire
    return (
        start
        + 2 * (gpus - 1) * step
        + (moved / rings(gpus) if row["gpu"] == "V100" else moved + mib * once)
    )


def fit_host(gpu: str) -> tuple[float, ...]:
    """The four numbers that explain the published times of "A100" or "V100" at K = 2, 3 and 4
    best.
    """
    known = [row for row in facts.rows("nccl_all_reduce_in_one_host") if row["gpu"] == gpu]
    return fit_within(all_reduce_us, known, "microseconds", (30.0, 3.0, 5.0, 1.0), (0, 1e4))
