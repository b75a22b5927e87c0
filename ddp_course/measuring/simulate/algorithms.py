"""Every all-reduce as the messages it consists of: what one rank does, to be played by a `Simulation`.

Each program is a generator for one rank: `program(rank, world_size, nbytes, simulation)`. Adding up n bytes takes
gamma n seconds of that rank. Played to the end they take exactly the seconds of `ddp_course.measuring.theory`.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from ..theory import PIECES, host_count
from .network import Pause, Receive, Send, Signal, Simulation


def parameter_server(rank: int, world_size: int, nbytes: float, simulation: Simulation) -> Iterator[Any]:
    """Rank 0 receives from all others, one by one, then sends to all, one by one."""
    if rank:
        yield Send(0, nbytes)
        yield Receive(0)
        return
    for peer in range(1, world_size):
        yield Receive(peer)
        yield Pause(nbytes * _gamma(simulation))
    for peer in range(1, world_size):
        yield Send(peer, nbytes)


def duplex_server(
    rank: int, world_size: int, nbytes: float, simulation: Simulation, pieces: int = PIECES
) -> Iterator[Any]:
    """Rank 0 sends a finished piece of the sum back while the next pieces still come in."""
    piece, finished = nbytes / pieces, [Signal() for _ in range(pieces)]

    def collect():
        for done in finished:
            for peer in range(1, world_size):
                yield Receive(peer)
                yield Pause(piece * _gamma(simulation))
            simulation.fire(done)

    def send_back():
        for done in finished:
            yield done
            for peer in range(1, world_size):
                yield Send(peer, piece)

    def stream(activity):
        for _ in range(pieces):
            yield activity()

    if rank == 0:
        yield collect(), send_back()
    else:
        yield stream(lambda: Send(0, piece)), stream(lambda: Receive(0))


def whole_gradient_ring(rank: int, world_size: int, nbytes: float, simulation: Simulation) -> Iterator[Any]:
    """Pass on what came in, K-1 times, and add it up."""
    for _ in range(world_size - 1):
        yield Send((rank + 1) % world_size, nbytes), Receive((rank - 1) % world_size)
        yield Pause(nbytes * _gamma(simulation))


def ring(rank: int, world_size: int, nbytes: float, simulation: Simulation) -> Iterator[Any]:
    """Reduce-scatter, then allgather, one chunk of K a step."""
    members = range(world_size)
    yield from _reduce_scatter(rank, members, nbytes, simulation)
    yield from _allgather(rank, members, nbytes)


def tree(rank: int, world_size: int, nbytes: float, simulation: Simulation) -> Iterator[Any]:
    """Binomial reduce to rank 0, then binomial broadcast, the largest branch first."""
    distance, children = 1, []
    while distance < world_size and not rank & distance:
        if rank + distance < world_size:
            children.append(rank + distance)
            yield Receive(rank + distance)
            yield Pause(nbytes * _gamma(simulation))
        distance *= 2
    if rank:
        yield Send(rank - distance, nbytes)
        yield Receive(rank - distance)
    for child in reversed(children):
        yield Send(child, nbytes)


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
        yield Pause(nbytes * _gamma(simulation))
    place = rank // 2 if rank < paired else rank - paired // 2
    steps = [(2**k, nbytes / 2 ** (k + 1)) for k in range(power.bit_length() - 1)]
    for distance, size in steps:
        yield _swap(place ^ distance, paired, size)
        yield Pause(size * _gamma(simulation))
    for distance, size in reversed(steps):
        yield _swap(place ^ distance, paired, size)
    if rank < paired:
        yield Send(rank + 1, nbytes)


def hierarchical_ring(rank: int, world_size: int, nbytes: float, simulation: Simulation) -> Iterator[Any]:
    """Reduce-scatter in the host, a ring over the hosts for each shard, allgather in the host."""
    per_host = min(simulation.network.per_host, world_size)
    host_count(world_size, per_host)
    place = rank % per_host
    inside = range(rank - place, rank - place + per_host)
    across = range(place, world_size, per_host)
    yield from _reduce_scatter(rank, inside, nbytes, simulation)
    yield from _reduce_scatter(rank, across, nbytes / per_host, simulation)
    yield from _allgather(rank, across, nbytes / per_host)
    yield from _allgather(rank, inside, nbytes)


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
    for gamma in (_gamma(simulation), 0.0):  # reduce-scatter, then allgather
        in_flight = deque()
        for step in range(moved + 2):
            if step >= 2:
                yield in_flight.popleft()
                yield Pause(segment_s + size * gamma)
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
                    yield Pause(size * _gamma(simulation) if step < world_size else 0.0)
                arriving.append(simulation.post(rank, Receive(left, channel)))
                last = simulation.post(rank, Send(right, size, channel))
        yield last, *arriving


def _reduce_scatter(rank, members, nbytes, simulation):
    chunk = nbytes / len(members)
    for _ in range(len(members) - 1):
        yield _pass_on(rank, members, chunk)
        yield Pause(chunk * _gamma(simulation))


def _allgather(rank, members, nbytes):
    for _ in range(len(members) - 1):
        yield _pass_on(rank, members, nbytes / len(members))


def _pass_on(rank, members, nbytes):
    place = members.index(rank)
    return Send(members[(place + 1) % len(members)], nbytes), Receive(members[place - 1])


def _swap(place, paired, nbytes):
    """Exchange with the rank that stands at `place` once the pairs have been folded together."""
    peer = 2 * place if 2 * place < paired else place + paired // 2
    return Send(peer, nbytes), Receive(peer)


def _gamma(simulation):
    return simulation.network.link.gamma


PROGRAMS = {
    program.__name__: program
    for program in (
        parameter_server,
        duplex_server,
        whole_gradient_ring,
        ring,
        tree,
        halving_doubling,
        hierarchical_ring,
    )
}
