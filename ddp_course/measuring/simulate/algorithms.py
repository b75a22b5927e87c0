"""All-reduces as the messages they consist of: what one rank does, to be played by a `Simulation`.

Each program is a generator for one rank: `program(rank, world_size, nbytes, simulation)`. It is for
collectives that cannot be run in virtual time, as on thousands of ranks.
"""

from collections.abc import Generator
from typing import Any

from .network import Simulation


def ring(
    rank: int, world_size: int, nbytes: float, simulation: Simulation
) -> Generator[Any, Any, None]:
    """Reduce-scatter, then allgather, one chunk of K a step."""
    for _ in range(2 * (world_size - 1)):
        sent = simulation.send(rank, (rank + 1) % world_size, nbytes / world_size)
        yield sent & simulation.receive(rank, (rank - 1) % world_size)


def halving_doubling(
    rank: int, world_size: int, nbytes: float, simulation: Simulation
) -> Generator[Any, Any, None]:
    """Exchange halves with the neighbour, quarters at distance two, …; then all the way back.

    Of each pair among the first 2 (K-P) ranks, P the largest power of two in K, the odd one only
    sends and receives.
    """
    power = 2 ** (world_size.bit_length() - 1)
    paired = 2 * (world_size - power)
    if rank < paired and rank % 2:
        yield simulation.send(rank, rank - 1, nbytes)
        yield simulation.receive(rank, rank - 1)
        return
    if rank < paired:
        yield simulation.receive(rank, rank + 1)
    ranks = [*range(0, paired, 2), *range(paired, world_size)]
    steps = [(2**k, nbytes / 2 ** (k + 1)) for k in range(power.bit_length() - 1)]
    for distance, size in [*steps, *reversed(steps)]:
        peer = ranks[ranks.index(rank) ^ distance]
        yield simulation.send(rank, peer, size) & simulation.receive(rank, peer)
    if rank < paired:
        yield simulation.send(rank, rank + 1, nbytes)


PROGRAMS = {program.__name__: program for program in (ring, halving_doubling)}
