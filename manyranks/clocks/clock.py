"""The clock of one thread: it moves on, takes turns, and stops while the thread waits."""

import threading
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..errors import Awaited, DeadlockError
from . import arbiter, stalls
from .table import BLOCKED, FOREVER, FREE, RUNNING, Place, Table, real_clock

QUESTION_S = 10e-6  # a question that is answered with "no" takes so long
TURN = Awaited("turn")

process: Any = SimpleNamespace(
    table=None,  # a process without one has real time
    started=0,  # so many threads with a clock have been started, beside the main one
    threads=0,  # so many of them run
    needed=0,  # so many of these are no daemons
    daemons=set(),  # the slots of the daemons that have computed
    calls=Counter(),  # the messages posted by channel and side, and the collectives by group
)


class Local(threading.local):
    """What each thread has of its own."""

    clock: "Clock | None" = None


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
        self.moment = moment
        self.place.floor = moment
        if self.table.head.threshold < moment:
            with self.table.lock:
                arbiter.settle(self.table)

    def take_turn(self) -> None:
        """Wait for this thread's turn at this moment, if the rank has other threads: all touch what
        they share in the order of virtual time.
        """
        if process.threads > 1:
            self.sleep_until(self.moment, TURN)

    def sleep_until(self, moment: int, what: Awaited) -> None:
        """Wait until the arbiter comes to `moment`: then all that is due before has been done."""
        with self.table.lock:
            self.stop(moment)
        self.stand(what)

    def stop(self, timer: int = FOREVER, ticket: Any = None) -> None:
        """Stop this clock, under the lock, until another thread releases it, or the moment `timer`
        has come, or what the `ticket` is for is booked.
        """
        place = self.place
        place.clock = self.moment
        place.timer = timer
        place.awaits = 0
        if ticket is not None:
            place.awaits = ticket.entry.key
            place.sends = ticket.sends
        place.woken = 0
        place.state = BLOCKED
        place.floor = FOREVER
        arbiter.settle(self.table)

    def stand(self, what: Awaited) -> None:
        """Sleep, without the lock, until this clock has been released; raises DeadlockError, which
        says `what` the thread waits for, if it never can be.
        """
        table = self.table
        place = self.place
        while place.state == BLOCKED:
            if table.head.deadlock and place.needed:
                # On its way out a thread lets go of locks, and would wait again.
                if self.deadlock is None:
                    self.deadlock = stalls.deadlock(self, what)
                raise self.deadlock
            table.sleep_until_woken(place)
            if place.state == BLOCKED and not place.woken:
                # Floors are written without the lock: the last call may have read an old one.
                with table.lock:
                    arbiter.settle(table)
        self.moment = place.clock

    def end(self) -> None:
        """The thread has ended, or goes on without a clock."""
        local.clock = None
        with self.table.lock:
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


def virtual() -> bool:
    """Return whether this process's time is virtual."""
    return process.table is not None


def moment() -> int:
    """Return this thread's time in picoseconds; that of the real clock for a thread that has no
    clock.
    """
    clock = own()
    return round(real_clock() * 1e12) if clock is None else clock.moment


def now() -> float:
    """Return this thread's time in seconds; that of `time.perf_counter` for a thread that has no
    clock.
    """
    clock = own()
    return real_clock() if clock is None else clock.moment / 1e12


def advance(seconds: float) -> None:
    """Let time pass on this thread's clock, if it has one."""
    clock = own()
    if clock is not None:
        clock.advance(clock.moment + round(seconds * 1e12))


def take_turn() -> None:
    """Have this thread wait for its turn, if it has a clock."""
    clock = own()
    if clock is not None:
        clock.take_turn()


def ask(answer: bool) -> bool:
    """Return the answer to a question; a "no" takes some time, if this thread has a clock, so that
    a loop of questions comes to an end.
    """
    if not answer:
        advance(QUESTION_S)
    return answer


def new_clock(parent: Clock, needed: bool) -> Clock:
    """Return a clock for a thread that `parent`'s thread is about to start, and that is `needed` if
    it is no daemon. Raises RuntimeError if the rank has as many threads as it may have.
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
    """Return whether another thread of this rank may compute, too. A thread that is no daemon may;
    of a daemon that is known once it has computed.
    """
    clock = own()
    if clock is None:
        return False
    if not clock.place.needed:
        process.daemons.add(clock.slot)
    return process.needed + len(process.daemons) > 1
