"""The all-reduces of gloo and NCCL as the messages they consist of, played by simpy.

simpy is a library for discrete events. What a rank does is a generator that yields the events it
waits for:

    yield simulation.send(0, 1, nbytes) & simulation.receive(0, 3)  both at once, go on when both
                                                                    are done
    yield simulation.clock.timeout(0.001)                               a millisecond later
    yield simulation.clock.process(another_generator())                 a process beside this one

A message starts when sender and receiver are both there and the links are free: the sender's way
out and the receiver's way in. It occupies them for beta n seconds and arrives alpha seconds later;
the latency occupies nothing. The message that has waited longest goes first. Ranks of one host send
over local links, one each; all traffic of a host to others shares that host's one link, both ways
at once.
"""

from collections import defaultdict, deque
from collections.abc import Generator, Iterable
from math import ceil
from typing import Any

import simpy

from ddp_course.lab.measuring.simulate import Network
from ddp_course.lab.measuring.theory import Costs


class Simulation:
    """simpy's `clock`, the links of a `Network`, and the messages under way.

    With `handshake` a sender learns a latency later that its receiver is ready, as with gloo. That
    message has a few bytes and passes between the packets of others, so it waits for no link.
    """

    def __init__(self, network: Network, handshake: bool = False):
        self.network = network
        self.handshake = handshake
        self.clock = simpy.Environment()
        self.busy = set()  # Names of links.
        self.queue = []  # (links, event of its turn) of each message that waits for its links.
        # {(source, target, tag): those that wait for the other side}
        self.senders = defaultdict(deque)
        self.receivers = defaultdict(deque)

    def path(self, source: int, target: int) -> tuple[Costs, tuple]:
        """Return the costs of the way from rank `source` to `target`, and the links' names."""
        home = source // self.network.per_host
        away = target // self.network.per_host
        if home == away:
            return self.network.local or self.network.link, (("out", source), ("in", target))
        return self.network.link, (("host out", home), ("host in", away))

    def play(self, ranks: Iterable[Generator]) -> float:
        """Play what each rank does; returns the seconds.

        RuntimeError if ranks wait for each other for ever.
        """
        processes = [self.clock.process(rank) for rank in ranks]
        self.clock.run()
        waiting = [rank for rank, process in enumerate(processes) if process.is_alive]
        if waiting:
            raise RuntimeError(
                f"deadlock after {self.clock.now:.6g} s: ranks {waiting} wait for messages that"
                " nobody sends"
            )
        return self.clock.now

    def send(self, rank: int, target: int, nbytes: float, tag: int = 0) -> Any:
        """Begin a message of `rank` to `target`; returns the event of its arrival.

        Equal tags arrive in order.
        """
        arrival = self.clock.event()
        self.senders[rank, target, tag].append((arrival, nbytes))
        self._match(rank, target, tag)
        return arrival

    def receive(self, rank: int, source: int, tag: int = 0) -> Any:
        """Let `rank` wait for the next message with this tag; return the event of its arrival.

        The message comes from the rank `source`.
        """
        arrival = self.clock.event()
        costs, _ = self.path(rank, source)
        ready = self.clock.timeout(costs.alpha if self.handshake else 0)
        ready.callbacks.append(lambda _: self.receivers[source, rank, tag].append(arrival))
        ready.callbacks.append(lambda _: self._match(source, rank, tag))
        return arrival

    def _match(self, source: int, target: int, tag: int) -> None:
        """Begin a message if its sender and its receiver are both there."""
        senders = self.senders[source, target, tag]
        receivers = self.receivers[source, target, tag]
        if senders and receivers:
            sent, nbytes = senders.popleft()
            received = receivers.popleft()
            self.clock.process(self._message(source, target, nbytes, [sent, received]))

    def _message(
        self, source: int, target: int, nbytes: float, arrivals: list
    ) -> Generator[Any, Any, None]:
        """Play a message: it waits for its links, occupies them, and arrives."""
        costs, links = self.path(source, target)
        turn = self.clock.event()
        self.queue.append((links, turn))
        self._start_messages()
        yield turn
        yield self.clock.timeout(nbytes * costs.beta)
        self.busy.difference_update(links)
        self._start_messages()
        yield self.clock.timeout(costs.alpha)
        for arrival in arrivals:
            arrival.succeed()

    def _start_messages(self) -> None:
        """Give every waiting message whose links are free its turn, the longest waiting first."""
        for waiting in list(self.queue):
            links, turn = waiting
            if self.busy.isdisjoint(links):
                self.queue.remove(waiting)
                self.busy.update(links)
                turn.succeed()


def gloo_ring(
    rank: int, world_size: int, nbytes: float, simulation: Simulation, segment_s: float
) -> Generator[Any, Any, None]:
    """gloo's `all_reduce`: the ring in segments of at most 1 MiB, two in flight.

    Each takes a processor `segment_s`. All segments have one size: their number is a multiple of K
    and at least 2 K, so that each rank's chunk has two. Source: gloo's allreduce.cc (pytorch/gloo).
    Play it with `handshake`.
    """
    segments = max(ceil(int(nbytes) / 2**20), 2 * world_size)
    segments += -segments % world_size  # Up to the next multiple of K.
    size = nbytes / segments
    moved = segments - segments // world_size
    for _ in range(2):  # First the reduce-scatter, then the allgather.
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
    """NCCL's ring: two channels, chunks of 2 MiB, passed on in two slices as they come in.

    There is no handshake. Rounds of K chunks per channel follow one another until all is sent; the
    last one is smaller if need be. Source: NCCL's all_reduce.h, protocol Simple: 8 buffer steps of
    512 KiB, four to a chunk, two to a slice.
    """
    channels = [
        _nccl_channel(rank, world_size, nbytes / 2, simulation, channel) for channel in range(2)
    ]
    yield simulation.clock.all_of([simulation.clock.process(channel) for channel in channels])


def _nccl_channel(rank, world_size, nbytes, simulation, channel):
    """Play one channel of `nccl_ring`, whose messages have its number as their tag."""
    rounds = max(1, ceil(int(nbytes) / (2**21 * world_size)))
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
            last_sent = simulation.send(rank, right, size, channel)
        yield simulation.clock.all_of([last_sent, *arriving])
