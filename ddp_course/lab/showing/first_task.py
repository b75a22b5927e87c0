"""The first thing that a learner writes: two lines of a ring, in lesson 00."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from manyranks.launching.launch import launch
from manyranks.links import Link

from ...stage3_paramserver import average_on_server
from ..measuring.timing import time_collective
from .plots import Picture, bars

RANKS = 4
NBYTES = 2**20
# How often a rank has the gradients of the ranks 0, 1, 2 and 3 to its left in its sum, and why.
RIGHT = (1, 1, 1, 1)
REASONS = {
    (1, 0, 0, 0): "Nothing was added to `tensor`. Add what came in to it in place, with +=:"
    " `tensor = …` only gives a new tensor its name, which the caller does not see.",
    (1, 3, 0, 0): "The left neighbour's number came in three times: each round sent the same."
    " What is sent next must be what just came in.",
    (1, 3, 3, 1): "The whole sum was sent on, and so were numbers that the next rank has already."
    " What is sent next must be what just came in, alone.",
    (0, 0, 0, 1): "Each number replaced the one before it. Add what came in to `tensor`.",
}


def first_ring(ring: Callable[[torch.Tensor], Any]) -> Picture | None:
    """Try a ring on four ranks: say what is wrong, or draw its time beside a server's.

    `ring(tensor)` makes `tensor` the sum of all ranks' tensors, in place.
    """
    sums = launch(sum_of_powers, ring, world_size=RANKS)
    print("each rank's sum, of 1, 10, 100 and 1000:", *(f"{number:.0f}" for number in sums))
    counts = {counts_from_the_left(rank, number) for rank, number in enumerate(sums)}
    if counts != {RIGHT}:
        print(what_is_wrong(ring, counts))
        return None
    print("right: each digit counts how often one rank's number was added, and all are 1")
    ms = {}
    for name, average in {"server": server, "my ring": ring}.items():
        ms[name] = 1000 * time_collective(average, NBYTES, RANKS, Link("200Mbit"))
    title = f"My ring: {ms['my ring']:.0f} ms, the server: {ms['server']:.0f} ms"
    return bars(ms, "time to average 1 MiB (ms)", title, kind="virtual time")


def server(tensor: torch.Tensor) -> None:
    """Average one tensor on rank 0, as lesson 03 does."""
    average_on_server([tensor])


def sum_of_powers(ring: Callable[[torch.Tensor], Any]) -> float:
    """On each rank: what the ring makes of 10 to the power of the rank."""
    tensor = torch.full((3,), 10.0 ** dist.get_rank(), dtype=torch.float64)
    ring(tensor)
    return tensor[0].item()


def counts_from_the_left(rank: int, number: float) -> tuple[int, ...]:
    """The digits of a sum: how often it has this rank's number, its left neighbour's, and so on."""
    digits = f"{number:04.0f}"[::-1]
    if not digits.isdigit() or len(digits) > RANKS:
        return ()
    return tuple(int(digits[(rank - distance) % RANKS]) for distance in range(RANKS))


def what_is_wrong(ring: Callable[[torch.Tensor], Any], counts: set[tuple[int, ...]]) -> str:
    """A sentence for whoever wrote this ring."""
    with suppress(OSError, TypeError):  # A function of a script that is gone has no source.
        if "        ...  #" in inspect.getsource(ring):
            return "The two lines are not written yet: put them in place of the three dots."
    reason = "Each number has to come by once: send on what just came in, and add it to `tensor`."
    if len(counts) == 1:
        reason = REASONS.get(next(iter(counts)), reason)
    return f"Not the sum yet: it is 1111. {reason}"
