"""All-reduces as the messages they consist of: what one rank does, to be played by a `Simulation`.

Each program is a generator for one rank: `program(rank, world_size, nbytes, simulation)`. It is for
collectives that cannot be run and replayed: on thousands of ranks, or of another library.
"""

from collections import deque
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


def gloo_ring(
    rank: int, world_size: int, nbytes: float, simulation: Simulation, segment_s: float
) -> Generator[Any, Any, None]:
    """gloo's `all_reduce`: the ring in segments of at most 1 MiB, two in flight; each takes a
    processor `segment_s`.

    All segments have one size: their number is a multiple of K and at least 2 K, so that each
    rank's chunk has two. Source: gloo's allreduce.cc (pytorch/gloo). Play it on a `Network` with
    `handshake`.
    """
    segments = max(-(-int(nbytes) // 2**20), 2 * world_size)
    segments += -segments % world_size
    size = nbytes / segments
    moved = segments - segments // world_size
    for _ in ("reduce-scatter", "allgather"):
        in_flight = deque()
        for step in range(moved + 2):
            if step >= 2:
                yield in_flight.popleft()
                yield simulation.clock.timeout(segment_s)
            if step < moved:
                received = simulation.receive(rank, (rank - 1) % world_size)
                in_flight.append(received & simulation.send(rank, (rank + 1) % world_size, size))


def nccl_ring(
    rank: int, world_size: int, nbytes: float, simulation: Simulation
) -> Generator[Any, Any, None]:
    """NCCL's ring: two channels, chunks of 2 MiB, passed on in two slices as they come in, without
    a handshake.

    Rounds of K chunks per channel follow one another until all is sent; the last one is smaller if
    need be. Source: NCCL's all_reduce.h, protocol Simple: 8 buffer steps of 512 KiB, four to a
    chunk, two to a slice.
    """
    channels = [
        _nccl_channel(rank, world_size, nbytes / 2, simulation, channel) for channel in range(2)
    ]
    yield simulation.clock.all_of([simulation.clock.process(channel) for channel in channels])


def _nccl_channel(rank, world_size, nbytes, simulation, channel):
    rounds = max(1, -(-int(nbytes) // (2**21 * world_size)))
    slices = 2
    size = nbytes / (rounds * world_size * slices)
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    for _ in range(rounds):
        arriving = deque()
        for place in range(2 * (world_size - 1) * slices):
            if place >= slices:
                yield arriving.popleft()
            arriving.append(simulation.receive(rank, left, channel))
            last = simulation.send(rank, right, size, channel)
        yield simulation.clock.all_of([last, *arriving])


PROGRAMS = {program.__name__: program for program in (ring, halving_doubling)}
