"""The clock of an emulated device, and the clock of the thread that feeds it.

    device   | conv 1 | conv 2 |                     | conv 3 |
    thread   | queues, sleeps  | waits for a message | queues, sleeps

An operation begins when the thread has come to it and the device is free. The thread's own clock
stands still while the processor does the real arithmetic, or runs another thread: the thread makes
up for that by sleeping less, as an accelerator's queue would hide it. The clock goes on while the
thread waits for a message or a lock, and while Python works for longer than a queue would hide. To
tell the cases apart, the clock reads the thread's seconds of computing, and those in line for a
processor.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

SCHEDSTAT = (
    "/proc/thread-self/schedstat"  # Linux writes the nanoseconds of computing and of queueing here
)
# a wait of more seconds is a wait for another rank, and sets this thread's clock to the wall's
SHORT = 0.002
HIDDEN = 0.003  # a queue of operations hides this many seconds of Python between two of them


class Clock:
    """Knows when an emulated device is free (seconds of `time.perf_counter`), and how many seconds
    it has worked.
    """

    def __init__(self):
        self.free = self.busy = 0.0

    def book(self, ready: float, seconds: float) -> float:
        """Let the device work for `seconds`, from `ready` on or once it is free; return the moment
        when it is done.
        """
        self.free = max(ready, self.free) + seconds
        self.busy += seconds
        return self.free


class ThreadClock(threading.local):
    """`now` is the time at which a thread would be if it always had its own processor; each thread
    has its own `now`.

    A clock that does not `sleep` only counts the device's time.
    """

    def __init__(self, sleep: bool = True):
        self.sleep = sleep
        self.line = open(SCHEDSTAT, "rb", buffering=0) if os.path.exists(SCHEDSTAT) else None  # noqa: SIM115
        self.now, self.total = time.perf_counter(), 0.0  # `total` is seconds of real arithmetic
        self.look()

    def look(self) -> None:
        """Count seconds from here on."""
        self.wall, self.computed, self.queued = (
            time.perf_counter(),
            time.thread_time(),
            self.in_line(),
        )
        self.arithmetic = 0.0

    def in_line(self) -> float:
        """Return the seconds that this thread has stood in line for a processor so far; 0 if that
        is unknown.
        """
        return int(os.pread(self.line.fileno(), 64, 0).split()[1]) * 1e-9 if self.line else 0.0

    def real(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Call a function that does real arithmetic, whose time is the processor's and not the
        device's.
        """
        before = time.thread_time()
        result = function(*args, **kwargs)
        seconds = time.thread_time() - before
        self.arithmetic += seconds
        self.total += seconds
        return result

    def catch_up(self) -> None:
        """Advance `now` by this thread's waiting since the last call, and by the Python time that
        no queue hides.
        """
        if not self.sleep:
            return
        wall, computed, queued, arithmetic = self.wall, self.computed, self.queued, self.arithmetic
        self.look()
        computed, queued = self.computed - computed, self.queued - queued
        hidden = (
            (arithmetic + min(computed - arithmetic, HIDDEN)) / computed if computed else 1.0
        )  # this is a share
        waited = max(0.0, self.wall - wall - hidden * (computed + queued))
        self.now = self.wall if waited > SHORT else self.now + waited

    def reach(self, moment: float) -> None:
        """Sleep until `moment`, unless that has passed already, and count from there."""
        self.now = moment
        early = moment - time.perf_counter()
        if self.sleep and early > 0:
            time.sleep(early)
            self.look()

    @property
    def behind(self) -> float:
        """Seconds by which this thread is late, because the processor could not keep up with the
        device.
        """
        return time.perf_counter() - self.now if self.sleep else 0.0
