"""Messages between ranks, over links that carry one at a time, played by simpy, a library for
discrete events.

What a rank does is a generator that yields the events it waits for:

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
from typing import Any, NamedTuple

from ..theory import Costs


class Network(NamedTuple):
    """`link` between hosts, `local` inside a host (None: the same), `per_host` ranks on each host.

    With `handshake` a sender learns a latency later that its receiver is ready, as with gloo. That
    message has a few bytes and passes between the packets of others, so it waits for no link.
    """

    link: Costs
    local: Costs | None = None
    per_host: int = 1
    handshake: bool = False

    def path(self, source: int, target: int) -> tuple[Costs, tuple]:
        """The costs of the way from rank `source` to `target`, and the names of the links that it
        takes.
        """
        if source // self.per_host == target // self.per_host:
            return self.local or self.link, (("out", source), ("in", target))
        return self.link, (
            ("host out", source // self.per_host),
            ("host in", target // self.per_host),
        )


class Simulation:
    """simpy's `clock`, the links of a `Network`, and the messages under way."""

    def __init__(self, network):
        import simpy  # A machine without simpy can still use the closed forms.

        self.network = network
        self.clock = simpy.Environment()
        self.busy = set()
        self.queue = []
        self.senders = defaultdict(deque)
        self.receivers = defaultdict(deque)

    def play(self, ranks: Iterable[Generator]) -> float:
        """Play what each rank does; returns the seconds. RuntimeError if ranks wait for each other
        for ever.
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
        """Begin a message of `rank` to `target`; returns the event of its arrival. Equal tags
        arrive in order.
        """
        arrival = self.clock.event()
        self.senders[rank, target, tag].append((arrival, nbytes))
        self._match(rank, target, tag)
        return arrival

    def receive(self, rank: int, source: int, tag: int = 0) -> Any:
        """Let `rank` wait for the next message with this tag from `source`; returns the event of
        its arrival.
        """
        arrival = self.clock.event()
        ready = self.clock.timeout(
            self.network.path(rank, source)[0].alpha if self.network.handshake else 0
        )
        ready.callbacks.append(lambda _: self.receivers[source, rank, tag].append(arrival))
        ready.callbacks.append(lambda _: self._match(source, rank, tag))
        return arrival

    def _match(self, source: int, target: int, tag: int) -> None:
        senders = self.senders[source, target, tag]
        receivers = self.receivers[source, target, tag]
        if senders and receivers:
            sent, nbytes = senders.popleft()
            self.clock.process(self._message(source, target, nbytes, [sent, receivers.popleft()]))

    def _message(
        self, source: int, target: int, nbytes: float, arrivals: list
    ) -> Generator[Any, Any, None]:
        costs, links = self.network.path(source, target)
        self.queue.append((links, turn := self.clock.event()))
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
