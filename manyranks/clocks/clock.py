"""The clock of one thread: it moves on, takes turns, and stops while the thread waits."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..errors import Awaited, DeadlockError
from . import arbiter, stalls
from .table import BLOCKED, FOREVER, FREE, RUNNING, Place, Table, real_clock

QUESTION_S = 10e-6  # A question that is answered with "no" takes so long.
TURN = Awaited("turn")
FILES = Awaited("files")

process: Any = SimpleNamespace(
    table=None,  # the launch's table; None where time is real
    started=0,  # how many threads with a clock have been started, beside the main one
    threads=0,  # how many threads with a clock run
    needed=0,  # how many of the running threads are no daemons
    daemons=set(),  # the slots of the daemons that have computed
    asking=[],  # each clock that waits for files, with a function that says whether one is ready
    calls=Counter(),  # how many messages were posted by channel and side, and collectives by group
)


class Local(threading.local):
    """What each thread has of its own."""

    clock: "Clock | None" = None
    stream: Any = None  # the stream that the thread has chosen, where the device has streams


local = Local()


@dataclass(eq=False)
class Clock:
    """The clock of the thread at place `slot` of the table; `moment` is in picoseconds."""

    table: Table
    slot: int
    moment: int
    deadlock: DeadlockError | None = None

    def __post_init__(self):
        self.place: Place = self.table.places[self.slot]

    def advance(self, moment: int) -> None:
        """Set the clock to `moment`, unless it is later already."""
        if moment <= self.moment:
            return
        if process.asking:
            with self.table.lock:
                self.tell_who_asks()
        self.moment = moment
        self.place.floor = moment
        if self.table.head.threshold < moment:
            with self.table.lock:
                arbiter.settle(self.table)

    def take_turn(self, to_post: bool = False) -> None:
        """Wait for this thread's turn at this moment, if the rank has other threads.

        So threads touch what they share in the order of virtual time. Turns `to_post` come before
        the bookings of this moment, so that all that is posted now is booked together.
        """
        if process.threads > 1:
            self.place.posts = to_post
            self.sleep_until(self.moment, TURN)
            self.place.posts = 0

    def sleep_until(self, moment: int, what: Awaited) -> None:
        """Wait until the arbiter comes to `moment`, when all that was due before has been done."""
        with self.table.lock:
            self.stop(moment)
        self.stand(what)

    def stop(self, timer: int = FOREVER, ticket: Any = None) -> None:
        """Stop this clock, under the lock, until something lets it go on.

        It goes on when another thread releases it, at the moment `timer`, or at the booking of what
        the `ticket` is for.
        """
        place = self.place
        self.tell_who_asks()
        place.clock = self.moment
        place.timer = timer
        place.awaits = 0
        if ticket is not None:
            place.awaits = ticket.entry.key
            place.sends = ticket.sends
        place.woken = 0
        if place.needed:
            self.table.head.needed = max(self.table.head.needed, self.moment)
        place.state = BLOCKED
        place.floor = FOREVER
        arbiter.settle(self.table)

    def tell_who_asks(self) -> None:
        """Let threads of this rank go on whose files have become ready.

        This is called, under the lock, once this thread has done all that it does at this moment.
        """
        for clock, is_ready in process.asking:
            if is_ready():
                arbiter.release(self.table, clock.place, self.moment)

    def ask_for_files(self, is_ready: Callable, until: int) -> Any:
        """Wait until files are ready, or `until` has come; return what is ready.

        Another thread of this rank, or the world outside, makes them ready.
        """
        asks = (self, is_ready)
        while not (ready := is_ready()) and self.moment < until:
            with self.table.lock:
                process.asking.append(asks)
                self.place.outside = 1
                self.stop(until)
            self.stand(FILES, is_ready)
            self.place.outside = 0
            process.asking.remove(asks)
        return ready

    def stand(self, what: Awaited, is_ready: Callable = bool) -> None:
        """Sleep, without the lock, until this clock is released, or until `is_ready()` is true.

        Raises DeadlockError, which says `what` the thread waits for, if nothing can release it.
        """
        table = self.table
        place = self.place
        while place.state == BLOCKED:
            if table.head.deadlock and place.needed:
                # On its way out a thread lets go of locks, and would wait again: it raises again.
                if self.deadlock is None:
                    self.deadlock = stalls.deadlock(self, what)
                raise self.deadlock
            table.sleep_until_woken(place)
            if place.state == BLOCKED and not place.woken:
                # Floors are written without the lock, so the last call may have read an old one.
                with table.lock:
                    if is_ready():
                        arbiter.release(table, place, self.moment)
                    arbiter.settle(table)
        self.moment = place.clock

    def end(self) -> None:
        """Free this clock's place: its thread has ended, or goes on without a clock."""
        local.clock = None
        with self.table.lock:
            self.tell_who_asks()
            place = self.place
            process.threads -= 1
            process.needed -= place.needed
            place.state = FREE
            place.needed = 0
            place.floor = FOREVER
            place.timer = FOREVER
            arbiter.settle(self.table)


def own() -> Clock | None:
    """Return this thread's clock, or None if it has none."""
    return local.clock


def in_real_time(run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return `run(…)`, during which this thread has no clock: virtual time stands still."""
    clock = local.clock
    local.clock = None
    try:
        return run(*args, **kwargs)
    finally:
        local.clock = clock


def virtual() -> bool:
    """Return whether this process's time is virtual."""
    return process.table is not None


def moment() -> int:
    """Return this thread's time in picoseconds; without a clock of its own, the real time."""
    clock = own()
    return round(real_clock() * 1e12) if clock is None else clock.moment


def now() -> float:
    """Return this thread's time in seconds; `time.perf_counter()` where it has no clock."""
    clock = own()
    return real_clock() if clock is None else clock.moment / 1e12


def advance(seconds: float) -> None:
    """Let time pass on this thread's clock, if it has one."""
    clock = own()
    if clock is not None:
        clock.advance(clock.moment + round(seconds * 1e12))


def take_turn(to_post: bool = False) -> None:
    """Have this thread wait for its turn, if it has a clock."""
    clock = own()
    if clock is not None:
        clock.take_turn(to_post)


def ask(answer: bool) -> bool:
    """Return the `answer` to a question, and let time pass on this thread's clock if it is "no".

    So a loop of questions comes to an end.
    """
    if not answer:
        advance(QUESTION_S)
    return answer


def new_clock(parent: Clock, needed: bool) -> Clock:
    """Return a clock for a thread that `parent`'s thread is about to start.

    The clock is `needed` if the thread is no daemon. Raises RuntimeError if the rank has as many
    threads as it may have.
    """
    table = parent.table
    with table.lock:
        free = [slot for slot in table.own_threads() if table.places[slot].state == FREE]
        if not free:
            most = table.threads_per_rank
            raise RuntimeError(f"a rank may have {most} threads where time is virtual; end some")
        process.started += 1
        table.places[free[0]].number = process.started
        return begin(table, free[0], parent.moment, needed)


def begin(table: Table, slot: int, moment: int, needed: bool) -> Clock:
    """Return the clock of a thread that runs at place `slot` from now on."""
    process.threads += 1
    process.needed += needed
    clock = Clock(table, slot, moment)
    clock.place.floor = moment
    clock.place.needed = needed
    clock.place.state = RUNNING
    return clock


def several_compute() -> bool:
    """Return whether another thread of this rank may compute, too.

    Every thread that is no daemon may; a daemon counts once it has computed.
    """
    clock = own()
    if clock is None:
        return False
    if not clock.place.needed:
        process.daemons.add(clock.slot)
    return process.needed + len(process.daemons) > 1
