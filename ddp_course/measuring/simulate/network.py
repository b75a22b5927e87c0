"""Discrete events: processes that send and receive, and links that carry one message at a time.

A process is a generator. It yields the activities it wants to wait for, together:

    yield Send(right, nbytes), Receive(left)      both at once, go on when both are done
    yield Pause(0.001)                            a millisecond later
    yield other_process()                         a generator is an activity too: it runs beside this one

`simulation.post(rank, activity)` begins an activity without waiting; yield it later.

A message starts when sender and receiver are both there and the links are free: the sender's way out and the
receiver's way in. It occupies them for beta n seconds and arrives alpha seconds later; the latency occupies
nothing. The message that has waited longest goes first. Ranks of one host talk over local links, one each; all traffic
of a host to others shares that host's one link, both ways at once.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from ..theory import Costs


class Network(NamedTuple):
    """`link` between hosts, `local` inside a host (None: the same), `per_host` ranks on each host.

    With `handshake` a sender learns a latency later that its receiver is ready, as with gloo: a message of a few
    bytes, which slips in between the packets of others and so waits for no link.
    """

    link: Costs
    local: Costs | None = None
    per_host: int = 1
    handshake: bool = False

    def path(self, source: int, target: int) -> tuple[Costs, tuple]:
        """The costs of the way from rank `source` to `target`, and the names of the links that it takes."""
        if source // self.per_host == target // self.per_host:
            return self.local or self.link, (("out", source), ("in", target))
        return self.link, (("host out", source // self.per_host), ("host in", target // self.per_host))


@dataclass(eq=False)
class Activity:
    """Something that takes time. `done` when finished; until then `waiting` holds what to call."""

    done: bool = field(default=False, init=False)
    posted: bool = field(default=False, init=False)
    waiting: list = field(default_factory=list, init=False, repr=False)


@dataclass(eq=False)
class Send(Activity):
    """A message of `nbytes` to rank `target`; done when it has arrived. Equal tags meet in order."""

    target: int
    nbytes: float
    tag: int = 0


@dataclass(eq=False)
class Receive(Activity):
    """The next message with this tag from rank `source`."""

    source: int
    tag: int = 0


@dataclass(eq=False)
class Pause(Activity):
    """Time of a processor, or of whatever else is no link."""

    seconds: float


class Delivery(NamedTuple):
    """A message that both sides are ready for."""

    links: tuple
    seconds: float
    latency: float
    arrived: Callable


class Simulation:
    """The clock, the links and all that is under way. `play()` goes on until nothing is left to do."""

    def __init__(self, network):
        self.network, self.now = network, 0.0
        self.agenda, self.order = [], count()
        self.busy, self.queue = set(), deque()
        self.sends, self.receives = defaultdict(deque), defaultdict(deque)
        self.unfinished = {}

    def start(self, rank: int, process: Iterator[Any]) -> Activity:
        """Let the generator `process` of `rank` begin now; returns an activity that is done when it ends."""
        ended = Activity()
        ended.posted = True
        self.unfinished[ended] = rank
        self._resume(rank, process, ended)
        return ended

    def play(self) -> float:
        """Play all events; returns the time of the last. RuntimeError if processes wait for each other for ever."""
        while self.agenda:
            self.now, _, call = heapq.heappop(self.agenda)
            call()
        if self.unfinished:
            ranks = sorted(set(self.unfinished.values()))
            raise RuntimeError(f"deadlock after {self.now:.6g} s: ranks {ranks} wait for messages that nobody sends")
        return self.now

    def post(self, rank: int, activity: Activity) -> Activity:
        """Begin `activity` on behalf of `rank`; returns it."""
        if not isinstance(activity, Activity):
            return self.start(rank, activity)
        if activity.posted:
            return activity
        activity.posted = True
        if isinstance(activity, Pause):
            self._at(self.now + activity.seconds, lambda: self.fire(activity))
        elif isinstance(activity, Send):
            self.sends[rank, activity.target, activity.tag].append(activity)
            self._match(rank, activity.target, activity.tag)
        elif isinstance(activity, Receive):
            self._announce(activity.source, rank, activity)
        return activity

    def fire(self, activity: Activity) -> None:
        """Mark `activity` as done and wake the processes that wait for it."""
        activity.posted = activity.done = True
        for wake in activity.waiting:
            self._at(self.now, wake)
        activity.waiting.clear()

    def _at(self, time, call):
        heapq.heappush(self.agenda, (time, next(self.order), call))

    def _resume(self, rank, process, ended):
        """Run `process` up to its next wait."""
        wanted = next(process, None)
        if wanted is None:
            del self.unfinished[ended]
            self.fire(ended)
            return
        activities = [self.post(rank, each) for each in (wanted if isinstance(wanted, tuple) else (wanted,))]
        missing = [activity for activity in activities if not activity.done]
        left = [len(missing)]

        def one_done():
            left[0] -= 1
            if not left[0]:
                self._resume(rank, process, ended)

        for activity in missing:
            activity.waiting.append(one_done)
        if not missing:
            self._at(self.now, lambda: self._resume(rank, process, ended))

    def _announce(self, source, target, activity):
        """Make a posted receive known to the sender: at once, or after a ready message's latency."""

        def ready():
            self.receives[source, target, activity.tag].append(activity)
            self._match(source, target, activity.tag)

        if self.network.handshake:
            self._at(self.now + self.network.path(target, source)[0].alpha, ready)
        else:
            ready()

    def _match(self, source, target, tag):
        sends, receives = self.sends[source, target, tag], self.receives[source, target, tag]
        if sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            self._transfer(source, target, send.nbytes, lambda: (self.fire(send), self.fire(receive)))

    def _transfer(self, source, target, nbytes, arrived):
        costs, links = self.network.path(source, target)
        self.queue.append(Delivery(links, nbytes * costs.beta, costs.alpha, arrived))
        self._start_transfers()

    def _start_transfers(self):
        """Start every queued message whose links are free, the longest waiting first."""
        still_waiting = deque()
        for message in self.queue:
            if self.busy.isdisjoint(message.links):
                self.busy.update(message.links)
                self._at(self.now + message.seconds, lambda message=message: self._left(message))
            else:
                still_waiting.append(message)
        self.queue = still_waiting

    def _left(self, message):
        """The last byte is on its way: the links are free, the message arrives a latency later."""
        self.busy.difference_update(message.links)
        self._at(self.now + message.latency, message.arrived)
        self._start_transfers()
