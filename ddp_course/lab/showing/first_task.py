"""Tries the first thing that a learner writes: two lines of a ring, in lesson 00."""

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
from .plots import STAGE_COLOURS, Picture, bars

Ring = Callable[[torch.Tensor], Any]
RANKS = 4
# The digits of a wrong sum say how often it has the rank's own number, its left neighbour's, ….
REASONS = {
    "1000": "Nothing was added to `tensor`. Add what came in to it in place, with +=: `tensor = …`"
    " only gives a new tensor its name, which the caller does not see.",
    "1100": "Only the left neighbour's number came in. Both lines belong in the loop: indent them"
    " as far as the line above them.",
    "1300": "The left neighbour's number came in three times: each round sent the same. What is"
    " sent next must be what just came in.",
    "1331": "The whole sum was sent on, and so were numbers that the next rank has already. What is"
    " sent next must be what just came in, alone.",
}


def first_ring(ring: Ring) -> Picture | None:
    """Try a ring on four ranks; say what is wrong, or draw its time beside a server's.

    `ring(tensor)` makes `tensor` the sum of all ranks' tensors, in place.
    """
    sums = launch(sum_of_powers, ring, world_size=RANKS)
    print("each rank's sum, of 1, 10, 100 and 1000:", *(f"{number:.0f}" for number in sums))
    counts = {counts_from_the_left(rank, number) for rank, number in enumerate(sums)}
    if counts != {"1111"}:
        print(what_is_wrong(ring, counts))
        return None
    ms = {}
    ways = {"server": lambda tensor: average_on_server([tensor]), "my ring": ring}
    for name, average in ways.items():
        ms[name] = 1000 * time_collective(average, 2**20, RANKS, Link("200Mbit"))
    return bars(
        ms,
        "time for 1 MiB (ms)",
        f"My ring: {ms['my ring']:.0f} ms, the server: {ms['server']:.0f} ms",
        colours={"server": STAGE_COLOURS["3"], "my ring": STAGE_COLOURS["4w"]},
        kind="virtual time",
    )


def sum_of_powers(ring: Ring) -> float:
    """Return what the ring makes of 10 to the power of this rank."""
    tensor = torch.tensor([10.0 ** dist.get_rank()])
    ring(tensor)
    return tensor.item()


def counts_from_the_left(rank: int, number: float) -> str:
    """Return how often a sum has this rank's number, its left neighbour's, …, as digits."""
    # The first digit is that of the last rank.
    digits = f"{number:04.0f}"
    own = RANKS - 1 - rank
    return digits[own:] + digits[:own]


def what_is_wrong(ring: Ring, counts: set[str]) -> str:
    """Return a sentence for the person who wrote this ring."""
    # A function of a script that is gone has no source.
    with suppress(OSError, TypeError):
        if "        ...  #" in inspect.getsource(ring):
            return "The two lines are not written yet: put them in place of the three dots."
    reason = (
        "Each number has to come by once, as it is: send on what just came in, and add it to"
        " `tensor`."
    )
    if len(counts) == 1:
        reason = REASONS.get(counts.pop(), reason)
    return f"Not the sum yet: it is 1111. {reason}"
