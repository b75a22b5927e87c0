"""Locks by which Python's threads meet in virtual time.

All that threads share is built on locks, so locks with clocks are enough: Python's own conditions,
events, semaphores, barriers, queues, futures and executors run on the locks of this module. To take
a lock a thread waits for its turn, so whoever comes first in virtual time gets it first. To give it
back hands it over, and its next owner goes on at this moment.

So no item leaves a queue before it was put there: the lock of the queue is taken in the order of
virtual time. Threads without a clock may use the same locks; they wait in real time.
"""

# mypy: disable-error-code="assignment, method-assign, attr-defined, misc, union-attr, name-defined"

import _queue
import concurrent.futures.process
import multiprocessing.connection
import multiprocessing.pool
import os
import queue
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import isabstract
from typing import Any

from ..errors import Awaited
from ..torch_inside import around
from . import arbiter, clock
from .clock import Clock, ask, own
from .table import FOREVER, real_sleep

OTHERS_LEAVE_S = 0.0005  # A lock that a thread without a clock holds is asked for this often.
TAKEN, REFUSED, AGAIN, WAITS = range(4)  # These are the outcomes of an attempt to get a lock.
SELECTORS = [
    each
    for each in vars(selectors).values()
    if isinstance(each, type) and "select" in vars(each) and not isabstract(each)
]
plain_lock = threading._allocate_lock
plain_start = threading.Thread.start
plain_join = threading.Thread.join
plain_is_set = threading.Event.is_set
plain_done = concurrent.futures.Future.done
plain_is_alive = threading.Thread.is_alive


class Lock:
    """A lock that threads get in the order in which they come for it in virtual time."""

    takes_turns = True

    def __init__(self):
        self.real = plain_lock()
        self.guard = plain_lock()
        self.waiting: deque[Clock] = deque()
        # This is None also while a thread without a clock has the lock.
        self.owner: Clock | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, as `threading.Lock.acquire` does."""
        own_clock = own()
        if own_clock is None:
            return self.real.acquire(blocking, timeout)
        if self.takes_turns:
            own_clock.take_turn()
        outcome = self.take_or_queue(own_clock, blocking, timeout)
        while outcome == AGAIN:
            real_sleep(OTHERS_LEAVE_S)
            outcome = self.take_or_queue(own_clock, blocking, timeout)
        if outcome == TAKEN:
            return True
        if outcome == REFUSED:
            return ask(False)
        try:
            own_clock.stand(Awaited("thread"))
        except BaseException:
            self.give_up(own_clock)
            raise
        return not self.give_up(own_clock)

    def take_or_queue(self, own_clock: Clock, blocking: bool, timeout: float) -> int:
        """Take the lock, or wait in line for it; return which of the four outcomes it was.

        A thread without a clock lets go in real time: try AGAIN while such a thread has the lock.
        """
        with self.guard:
            if self.real.acquire(False):
                self.owner = own_clock
                return TAKEN
            if not blocking:
                return REFUSED
            if self.owner is None:
                return AGAIN
            until = FOREVER
            if timeout >= 0:
                until = own_clock.moment + max(1, round(timeout * 1e12))
            self.waiting.append(own_clock)
            with own_clock.table.lock:
                own_clock.stop(until)
            return WAITS

    def give_up(self, own_clock: Clock) -> bool:
        """Stop waiting for the lock; return False if it has been handed over already."""
        with self.guard:
            if own_clock in self.waiting:
                self.waiting.remove(own_clock)
                return True
        return False

    def release(self) -> None:
        """Give the lock back, or to the thread that has waited longest."""
        own_clock = own()
        if self.takes_turns and own_clock is not None:
            own_clock.take_turn()  # Whoever comes before this moment must find the lock taken.
        with self.guard:
            if not self.waiting:
                self.owner = None
                self.real.release()
                return
            next_clock = self.waiting.popleft()
            self.owner = next_clock
            with next_clock.table.lock:
                # A thread without a clock lets the next one go on at that one's own time.
                moment = 0 if own_clock is None else own_clock.moment
                arbiter.release(next_clock.table, next_clock.place, moment)

    def locked(self) -> bool:
        """Return whether the lock is taken."""
        return self.real.locked()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *exception):
        self.release()

    # Without `_is_owned` a condition would try to take the lock, and such a question costs time.
    _is_owned = locked

    def _at_fork_reinit(self):
        self.__init__()


class Waiter(Lock):
    """The lock on which one thread waits for a condition.

    It takes no turns: the condition's own lock has put the threads in order already.
    """

    takes_turns = False


class RLock(threading._RLock):
    """A lock that its owner may take again: Python's own class, on a lock of this module."""

    def __init__(self):
        super().__init__()
        self._block = Lock()


def feeds_a_process(thread: threading.Thread) -> bool:
    """Return whether a thread writes what multiprocessing's queues send to another process.

    The other process, such as a worker of a DataLoader, has no clock. Whoever waits for it does so
    in a native call, during which virtual time stands still: the writing thread must not wait for
    its turn meanwhile.
    """
    target = getattr(thread, "_target", None)
    return getattr(target, "__module__", None) == "multiprocessing.queues"


def start(thread: threading.Thread) -> None:
    """Start a thread, whose clock begins at the moment of the thread that starts it."""
    parent = own()
    if parent is not None and not feeds_a_process(thread):
        give_clock(thread, parent)
    # `Thread.start` waits for the new thread's first sign of life. That is a wait in real time: by
    # the clocks nobody could end it while the new thread has none yet, or never gets one.
    clock.in_real_time(plain_start, thread)


def give_clock(thread: threading.Thread, parent: Clock) -> None:
    """Have a thread run by a clock of its own."""
    parent.take_turn()
    thread.clock = clock.new_clock(parent, needed=not thread.daemon)
    thread.ending = Waiter()
    thread.ending.real.acquire()
    thread.ending.owner = thread.clock
    thread.run = partial(run_with_clock, thread, thread.run)


def run_with_clock(thread: threading.Thread, run: Callable[[], None]) -> None:
    """Run a new thread's function by the thread's clock.

    Whoever joins the thread goes on at the moment of its end.
    """
    own_clock = thread.clock
    own_clock.table.idents[own_clock.slot] = threading.get_ident()
    clock.local.clock = own_clock
    try:
        run()
    finally:
        own_clock.take_turn()
        thread.ending.release()
        own_clock.end()


def join(thread: threading.Thread, timeout: float | None = None) -> None:
    """Wait until a thread has ended, as `threading.Thread.join` does."""
    if own() is None or not hasattr(thread, "ending") or thread is threading.current_thread():
        plain_join(thread, timeout)
        return
    own().take_turn()
    if thread.ending.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
        thread.ending.release()
        plain_join(thread)


def is_alive(thread: threading.Thread) -> bool:
    """Return whether a thread still runs; a "yes" takes a moment, so that a loop ends."""
    if own() is None or not hasattr(thread, "ending"):
        return plain_is_alive(thread)
    clock.take_turn()
    return not ask(not thread.ending.locked())


def run_timer(timer: threading.Timer) -> None:
    """Call a timer's function at its time.

    Python's own asks once more before, and a question takes 10 microseconds.
    """
    if not timer.finished.wait(timer.interval):
        timer.function(*timer.args, **timer.kwargs)
    timer.finished.set()


def is_set(event: threading.Event) -> bool:
    """Return whether an event is set by now."""
    clock.take_turn()
    return ask(plain_is_set(event))


def done(future: concurrent.futures.Future) -> bool:
    """Return whether a future has its result by now."""
    return ask(plain_done(future))


class SimpleQueue(queue._PySimpleQueue):
    """Python's own simple queue, not that in C, on the locks of this module."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the oldest item, as `queue.SimpleQueue.get` does."""
        try:
            return super().get(block, timeout)
        except queue.Empty:
            if not block:
                ask(False)
            raise

    def empty(self) -> bool:
        """Return whether the queue has no item by now."""
        clock.take_turn()
        return not ask(not super().empty())


def sleep(seconds: float) -> None:
    """Let time pass, as `time.sleep` does. Raises ValueError for a negative time."""
    if own() is None:
        real_sleep(seconds)
    elif seconds < 0:
        raise ValueError("sleep length must be non-negative")
    else:
        clock.advance(seconds)


def select(run: Callable, selector: Any, timeout: float | None = None) -> list:
    """Wait for a selector's files by this thread's clock, around the selector's own `run`.

    Threads of this rank and time-outs end the wait by the clock; what comes from outside, such as a
    child's words, ends it in real time.
    """
    own_clock = own()
    if own_clock is None:
        return run(selector, timeout)
    until = FOREVER
    if timeout is not None:
        until = own_clock.moment + max(0, round(timeout * 1e12))
    if clock.process.threads > 1 or only_its_own_pipe(selector):
        return own_clock.ask_for_files(partial(run, selector, 0), until)
    ready = clock.in_real_time(run, selector, timeout)
    if not ready:
        own_clock.advance(until)
    return ready


def only_its_own_pipe(selector: Any) -> bool:
    """Return whether a selector waits only for an event loop's own pipe, which threads write."""
    handles = [key.data[0] for key in selector.get_map().values() if isinstance(key.data, tuple)]
    callbacks = [getattr(handle, "_callback", None) for handle in handles]
    return [getattr(each, "__name__", "") for each in callbacks] == ["_read_from_self"]


def refuse(run: Callable, pool: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse to start a pool of processes: raises RuntimeError in a thread with a clock.

    A pool's threads wait for processes, which have no clock, and for each other.
    """
    if own() is not None:
        # Python reads this attribute when it drops the pool.
        pool._state = None
        raise RuntimeError(
            f"{type(pool).__name__} cannot be used where time is virtual: use threads, subprocess"
            " or a DataLoader's workers, or launch without a device and a link"
        )
    run(pool, *args, **kwargs)


AROUND: list = [(selector, "select", select) for selector in SELECTORS]
AROUND += [
    # Whoever waits for a process does so in real time: its work takes no virtual time.
    (multiprocessing.connection, "wait", clock.in_real_time),
    (subprocess.Popen, "wait", clock.in_real_time),
    (subprocess.Popen, "communicate", clock.in_real_time),
    (multiprocessing.pool.Pool, "__init__", refuse),
    (concurrent.futures.process.ProcessPoolExecutor, "__init__", refuse),
]
hooks = ExitStack()  # The hooks stay in place as long as the process lives.


def nanoseconds() -> int:
    """Return this thread's time in nanoseconds."""
    return clock.moment() // 1000


def patch() -> None:
    """Have this process's threads use the locks and clocks of this module."""
    os.register_at_fork(after_in_child=leave_virtual_time)
    threading.Lock = Lock
    threading.RLock = RLock
    threading._allocate_lock = Waiter
    threading.Thread.start = start
    threading.Thread.join = join
    threading.Thread.is_alive = is_alive
    threading.Event.is_set = is_set
    threading.Timer.run = run_timer
    concurrent.futures.Future.done = done
    queue.SimpleQueue = _queue.SimpleQueue = SimpleQueue
    threading._time = queue.time = time.monotonic = time.perf_counter = clock.now
    time.monotonic_ns = time.perf_counter_ns = nanoseconds
    time.sleep = sleep
    for owner, name, hook in AROUND:
        hooks.enter_context(around(owner, name, hook))


def leave_virtual_time() -> None:
    """Have a forked child, such as a worker of a DataLoader, live in real time."""
    clock.local.clock = None
    clock.process.table = None
