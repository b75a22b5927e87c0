"""All-reduces as the messages they consist of: what one rank does, to be played by a `Simulation`.

Each program is a generator for one rank: `program(rank, world_size, nbytes, simulation)`. It serves where a collective
cannot be run and replayed: on thousands of ranks, or when it is a library's own.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from .network import Pause, Receive, Send, Simulation


def ring(rank: int, world_size: int, nbytes: float, simulation: Simulation) -> Iterator[Any]:
    """Reduce-scatter, then allgather, one chunk of K a step."""
    for _ in range(2 * (world_size - 1)):
        yield Send((rank + 1) % world_size, nbytes / world_size), Receive((rank - 1) % world_size)


def halving_doubling(rank: int, world_size: int, nbytes: float, simulation: Simulation) -> Iterator[Any]:
    """Exchange halves with the neighbour, quarters at distance two, …; then all the way back.

    Of each pair among the first 2 (K-P) ranks, P the largest power of two in K, the odd one only hands over.
    """
    power = 2 ** (world_size.bit_length() - 1)
    paired = 2 * (world_size - power)
    if rank < paired and rank % 2:
        yield Send(rank - 1, nbytes)
        yield Receive(rank - 1)
        return
    if rank < paired:
        yield Receive(rank + 1)
    place = rank // 2 if rank < paired else rank - paired // 2
    steps = [(2**k, nbytes / 2 ** (k + 1)) for k in range(power.bit_length() - 1)]
    for distance, size in [*steps, *reversed(steps)]:
        yield _swap(place ^ distance, paired, size)
    if rank < paired:
        yield Send(rank + 1, nbytes)


def gloo_ring(
    rank: int,
    world_size: int,
    nbytes: float,
    simulation: Simulation,
    segment_bytes: int = 2**20,
    segment_s: float = 0.0,
) -> Iterator[Any]:
    """gloo's `all_reduce`: the ring in segments of at most 1 MiB, two in flight; each needs `segment_s` of processor.

    The segments are made alike: their number is a multiple of K and at least 2 K, so that each rank's chunk has two.
    Source: gloo's allreduce.cc (pytorch/gloo). Play it on a `Network` with `handshake`.
    """
    segments = max(-(-int(nbytes) // segment_bytes), 2 * world_size)
    segments += -segments % world_size
    size, moved = nbytes / segments, segments - segments // world_size
    for _ in ("reduce-scatter", "allgather"):
        in_flight = deque()
        for step in range(moved + 2):
            if step >= 2:
                yield in_flight.popleft()
                yield Pause(segment_s)
            if step < moved:
                receive = simulation.post(rank, Receive((rank - 1) % world_size))
                in_flight.append((receive, simulation.post(rank, Send((rank + 1) % world_size, size))))


def nccl_ring(
    rank: int,
    world_size: int,
    nbytes: float,
    simulation: Simulation,
    channels: int = 2,
    chunk_bytes: float = 2**21,
    slices: int = 2,
) -> Iterator[Any]:
    """NCCL's ring: chunks of 2 MiB a channel, passed on slice by slice as they come in, without asking first.

    Rounds of K chunks per channel follow one another until all is sent; the last one is smaller if need be. Source:
    NCCL's all_reduce.h, protocol Simple: 8 buffer steps of 512 KiB, four to a chunk, two to a slice.
    """
    yield tuple(
        _nccl_channel(rank, world_size, nbytes / channels, simulation, channel, chunk_bytes, slices)
        for channel in range(channels)
    )


def _nccl_channel(rank, world_size, nbytes, simulation, channel, chunk_bytes, slices):
    rounds = max(1, -(-int(nbytes) // (chunk_bytes * world_size)))
    size, right, left = nbytes / (rounds * world_size * slices), (rank + 1) % world_size, (rank - 1) % world_size
    for _ in range(rounds):
        arriving = []
        for step in range(2 * (world_size - 1)):
            for _slice in range(slices):
                if step:
                    yield arriving.pop(0)
                arriving.append(simulation.post(rank, Receive(left, channel)))
                last = simulation.post(rank, Send(right, size, channel))
        yield last, *arriving


def _swap(place, paired, nbytes):
    """Exchange with the rank that stands at `place` once the pairs have been folded together."""
    peer = 2 * place if 2 * place < paired else place + paired // 2
    return Send(peer, nbytes), Receive(peer)


PROGRAMS = {program.__name__: program for program in (ring, halving_doubling)}
