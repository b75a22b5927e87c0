"""The all-reduces of gloo and NCCL as the messages they consist of, to be played by a `Simulation`:
see `ddp_course.measuring.simulate.algorithms`.
"""

from collections import deque
from collections.abc import Generator
from typing import Any

from ddp_course.measuring.simulate import Simulation


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
