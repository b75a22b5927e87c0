"""An independent replay of programs (see `programs.py`), written from docs/VIRTUAL_TIME.md and
nothing else, in simpy.

simpy's clock counts whole picoseconds. Every thread is a process of simpy; an arbiter books what is
due at a moment once nothing else happens at that moment: messages and collectives first, then one
thread whose turn it is.

A `wrong` rule makes a replay that must differ, to show that programs would notice: "no turns",
"late ways" (a way out is free when the message arrives), "by arrival" (bookings in the order in
which they became ready, not sorted), "early collectives" (ways need not be free), "one way" (in and
out are one), "latency last" (the latency comes after the bytes).
"""

from collections import defaultdict, deque
from typing import Any

import simpy

STEPS = {
    "all_reduce": lambda size: 2 * (size - 1),
    "all_gather": lambda size: size - 1,
    "reduce_scatter": lambda size: size - 1,
    "gather": lambda size: size - 1,
    "scatter": lambda size: size - 1,
    "all_to_all": lambda size: size - 1,
    "broadcast": lambda size: (size - 1).bit_length(),
    "reduce": lambda size: (size - 1).bit_length(),
    "barrier": lambda size: (size - 1).bit_length(),
}


class Message:
    """A message of which at least one side is posted; `ends` are the moments (departs, arrives)
    once it is booked.
    """

    def __init__(self, clock: simpy.Environment, key: tuple, nbytes: int):
        self.key = key
        self.nbytes = nbytes
        self.posts = 0
        self.value = 0  # The message carries this.
        self.booked = clock.event()
        self.ends = None


class Collective:
    """A collective that some members have joined."""

    def __init__(self, clock: simpy.Environment, key: tuple, members: tuple):
        self.key = key
        self.members = members
        self.joined = 0
        self.value = 0  # the sum of what its members bring
        self.duration = 0
        self.has_bytes = False
        self.steps = 0
        self.booked = clock.event()
        self.end = 0


class Replay:
    """One program on its way."""

    def __init__(self, setting: Any, steps: dict, wrong: str = ""):
        self.setting = setting
        self.steps = steps
        self.wrong = wrong
        self.clock = simpy.Environment(initial_time=0)
        self.moments: dict = {thread: [] for thread in steps}
        self.values: dict = {thread: [] for thread in steps}  # These values arrived.
        self.alive = {thread for thread in steps if thread[1] == 0}
        self.way_out: dict = defaultdict(int)
        self.way_in: dict = self.way_out if wrong == "one way" else defaultdict(int)
        self.device: dict = defaultdict(int)
        self.messages: dict = {}
        self.collectives: dict = {}
        self.posted: dict = defaultdict(int)
        self.due: list = []  # These messages and collectives are ready and not booked.
        self.turns: dict = {}  # Threads wait for their turn by these events.
        self.posting: dict = {}  # The threads of these events will post.
        self.works: dict = {}
        self.processes: dict = {}
        self.shared: dict = {}  # locks of queues and events, by rank and name

    def run(self) -> dict:
        """Play the program; return, by (rank, thread), the moments after all steps, and then the
        values that it received.
        """
        for thread in sorted(self.alive):
            self.processes[thread] = self.clock.process(self.thread(thread))
        self.clock.process(self.arbiter())
        self.clock.run()
        stuck = [thread for thread, process in self.processes.items() if process.is_alive]
        assert not stuck, f"deadlock: {stuck}"
        return {thread: self.moments[thread] + self.values[thread] for thread in self.steps}

    # The arbiter

    def arbiter(self) -> Any:
        """Book what is due at a moment, once nothing else happens at that moment."""
        while True:
            while self.clock.peek() == self.clock.now:
                yield self.clock.timeout(0)
            if self.posting:
                self.posting.pop(min(self.posting)).succeed()
            elif self.due:
                round_, self.due = self.due, []
                if self.wrong != "by arrival":
                    round_.sort(key=order)
                for booking in round_:
                    self.book(booking)
            elif self.turns:
                self.turns.pop(min(self.turns)).succeed()
            elif self.clock.peek() == float("inf"):
                return
            else:
                yield self.clock.timeout(self.clock.peek() - self.clock.now)

    def book(self, booking: Any) -> None:
        """Reserve the links for a message or a collective that is ready now."""
        if isinstance(booking, Message):
            booking.ends = self.book_message(booking)
        else:
            booking.end = self.book_collective(booking)
        booking.booked.succeed()

    def book_message(self, message: Message) -> tuple:
        source, target = (self.setting.host(rank) for rank in message.key[:2])
        now = self.clock.now
        if source == target:
            return now, now
        duration = self.bytes_take(message.nbytes)
        latency = self.latency
        start = max(now, self.way_out[source])
        departs = self.way_out[source] = start + duration
        arrives = max(start + latency, self.way_in[target]) + duration
        self.way_in[target] = arrives
        if self.wrong == "late ways":
            self.way_out[source] = arrives
        if self.wrong == "latency last":
            arrives = self.way_in[target] = max(start, self.way_in[target]) + duration
            arrives += latency
        return departs, arrives

    def book_collective(self, collective: Collective) -> int:
        now = self.clock.now
        hosts = {self.setting.host(rank) for rank in collective.members}
        if len(hosts) == 1:
            return now
        if not collective.has_bytes:
            return now + collective.steps * self.latency
        ways = [*(self.way_out[host] for host in hosts), *(self.way_in[host] for host in hosts)]
        start = now if self.wrong == "early collectives" else max(now, *ways)
        end = start + collective.duration
        for host in hosts:
            self.way_out[host] = self.way_in[host] = end
        return end

    @property
    def latency(self) -> int:
        return round(self.setting.latency_s * 1e12)

    def bytes_take(self, nbytes: float) -> int:
        return round(nbytes * (8e12 / self.setting.bandwidth))

    # Threads

    def thread(self, thread: tuple) -> Any:
        """Carry out the steps of one thread, as a process of simpy."""
        for kind, *details in self.steps[thread]:
            yield from getattr(self, f"do_{kind}")(thread, *details)
            self.moments[thread].append(self.clock.now)
        yield from self.turn(thread)
        self.alive.discard(thread)

    def turn(self, thread: tuple, to_post: bool = False) -> Any:
        """Wait for this thread's turn, if its rank has several threads."""
        if self.wrong == "no turns" or (thread[0], 1 - thread[1]) not in self.alive:
            return
        turns = self.posting if to_post and self.wrong != "late posts" else self.turns
        turns[thread] = event = self.clock.event()
        yield event

    def until(self, moment: int) -> Any:
        """Wait for a moment, if it is still to come."""
        if moment > self.clock.now:
            yield self.clock.timeout(moment - self.clock.now)

    def do_compute(self, thread: tuple, rows: int) -> Any:
        yield from self.turn(thread)
        start = max(self.clock.now, self.device[thread[0]])
        self.device[thread[0]] = end = start + round(128 * rows / self.setting.rate * 1e12)
        yield from self.until(end)

    def do_sleep(self, thread: tuple, nanoseconds: int) -> Any:
        yield from self.until(self.clock.now + round(nanoseconds * 1e-9 * 1e12))

    # Messages and collectives

    def do_send(self, thread: tuple, *message: int) -> Any:
        booking = yield from self.post(thread, True, *message)
        yield from self.finish(thread, 0, booking)

    def do_recv(self, thread: tuple, *message: int) -> Any:
        booking = yield from self.post(thread, False, *message)
        yield from self.finish_and_note(thread, 1, booking)

    def do_isend(self, thread: tuple, key: int, *message: int) -> Any:
        self.works[thread, key] = 0, (yield from self.post(thread, True, *message))

    def do_irecv(self, thread: tuple, key: int, *message: int) -> Any:
        self.works[thread, key] = 1, (yield from self.post(thread, False, *message))

    def do_wait(self, thread: tuple, key: int) -> Any:
        yield from self.finish_and_note(thread, *self.works.pop((thread, key)))

    def do_collective(self, thread: tuple, *what: Any) -> Any:
        booking = yield from self.join(thread, *what)
        yield from self.finish_and_note(thread, None, booking)

    def do_icollective(self, thread: tuple, key: int, *what: Any) -> Any:
        self.works[thread, key] = None, (yield from self.join(thread, *what))

    def post(
        self,
        thread: tuple,
        sending: bool,
        peer: int,
        count: int,
        tag: int,
        group: int,
        value: int = 0,
    ) -> Any:
        """Post one side of a message, in this thread's turn; the second side makes it due."""
        yield from self.turn(thread, to_post=True)
        source, target = (thread[0], peer) if sending else (peer, thread[0])
        way = source, target, group, tag
        self.posted[way, sending] += 1
        key = *way, self.posted[way, sending]
        message = self.messages.setdefault(key, Message(self.clock, key, 4 * count))
        message.posts += 1
        message.value += value * sending
        if message.posts == 2:
            at_once = self.setting.host(source) == self.setting.host(target)
            self.make_due(message, at_once)
        return message

    def join(self, thread: tuple, name: str, count: int, group: int, value: int = 0) -> Any:
        """Join a collective, in this thread's turn; the last member makes it due."""
        yield from self.turn(thread, to_post=True)
        members = self.setting.groups[group]
        size = len(members)
        self.posted[thread[0], group] += 1
        key = group, self.posted[thread[0], group]
        collective = self.collectives.setdefault(key, Collective(self.clock, key, members))
        steps = STEPS[name](size)
        nbytes: float = 0 if name == "barrier" else 4 * count
        if name == "all_reduce":
            nbytes /= size
        duration = steps * (self.latency + self.bytes_take(nbytes))
        collective.duration = max(collective.duration, duration)
        collective.has_bytes = nbytes > 0
        collective.steps = steps
        collective.value += value
        collective.joined += 1
        if collective.joined == size:
            hosts = {self.setting.host(rank) for rank in members}
            self.make_due(collective, len(hosts) == 1 or collective.duration == 0)
        return collective

    def make_due(self, booking: Any, at_once: bool) -> None:
        """Leave a booking to the arbiter, unless it needs no link and takes no time."""
        if at_once:
            self.book(booking)
        else:
            self.due.append(booking)

    def finish(self, thread: tuple, side: int | None, booking: Any) -> Any:
        """Wait until a message has left (side 0) or arrived (side 1), or a collective is over.

        What follows comes in this thread's turn.
        """
        if not booking.booked.triggered:
            yield booking.booked
        yield from self.until(booking.end if side is None else booking.ends[side])
        yield from self.turn(thread, to_post=True)

    def finish_and_note(self, thread: tuple, side: int | None, booking: Any) -> Any:
        """Wait for the end, and note the value that has come."""
        yield from self.finish(thread, side, booking)
        if side == 1 or (side is None and booking.value):
            self.values[thread].append(booking.value)

    # What threads of a rank share

    def do_start(self, thread: tuple, number: int) -> Any:
        yield from self.turn(thread)
        other = thread[0], number
        self.alive.add(other)
        self.processes[other] = self.clock.process(self.thread(other))

    def do_join(self, thread: tuple, number: int) -> Any:
        yield from self.turn(thread)
        process = self.processes[thread[0], number]
        if process.is_alive:
            yield process

    def do_lock(self, thread: tuple, name: str) -> Any:
        yield from self.take(thread, self.lock(thread, name))

    def do_unlock(self, thread: tuple, name: str) -> Any:
        yield from self.give(thread, self.lock(thread, name))

    def do_put(self, thread: tuple, name: str) -> Any:
        lock = self.lock(thread, name)
        yield from self.take(thread, lock)
        lock.items += 1
        lock.notify(1)
        yield from self.give(thread, lock)

    def do_get(self, thread: tuple, name: str) -> Any:
        lock = self.lock(thread, name)
        yield from self.take(thread, lock)
        while not lock.items:
            yield from self.wait_notified(thread, lock)
        lock.items -= 1
        yield from self.give(thread, lock)

    def do_set(self, thread: tuple, name: str) -> Any:
        lock = self.lock(thread, name)
        yield from self.take(thread, lock)
        lock.items = 1
        lock.notify(len(lock.sleepers))
        yield from self.give(thread, lock)

    def do_await(self, thread: tuple, name: str) -> Any:
        lock = self.lock(thread, name)
        yield from self.take(thread, lock)
        if not lock.items:
            yield from self.wait_notified(thread, lock)
        yield from self.give(thread, lock)

    def lock(self, thread: tuple, name: str) -> "Lock":
        """Return the lock of this name that the threads of a rank share."""
        return self.shared.setdefault((thread[0], name), Lock())

    def take(self, thread: tuple, lock: "Lock") -> Any:
        """Take a lock, in this thread's turn."""
        yield from self.turn(thread)
        if lock.taken:
            handed_over = self.clock.event()
            lock.queue.append(handed_over)
            yield handed_over
        lock.taken = True

    def give(self, thread: tuple, lock: "Lock") -> Any:
        """Give a lock back, in this thread's turn, or to the one that came first for it."""
        yield from self.turn(thread)
        if lock.queue:
            lock.queue.popleft().succeed()
        else:
            lock.taken = False

    def wait_notified(self, thread: tuple, lock: "Lock") -> Any:
        """Give a lock back until another thread has notified this one."""
        notified = self.clock.event()
        lock.sleepers.append(notified)
        yield from self.give(thread, lock)
        yield notified
        yield from self.take(thread, lock)


class Lock:
    """A lock, and what a queue or an event keeps under it: `items` in the queue, or 1 once the
    event is set.
    """

    def __init__(self):
        self.taken = False
        self.queue: deque = deque()
        self.sleepers: deque = deque()
        self.items = 0

    def notify(self, count: int) -> None:
        """Wake up to `count` threads that wait for a change."""
        for _ in range(min(count, len(self.sleepers))):
            self.sleepers.popleft().succeed()


def order(booking: Any) -> tuple:
    """Return the order of bookings within a round: messages by their keys, then collectives by
    theirs.
    """
    return isinstance(booking, Collective), booking.key


def replay(setting: Any, steps: dict, wrong: str = "") -> dict:
    """Return what each (rank, thread) of a program sees: the moments after all its steps, in
    picoseconds, and then the values that it received.
    """
    return Replay(setting, steps, wrong).run()
