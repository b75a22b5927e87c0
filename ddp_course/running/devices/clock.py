"""The clock of an emulated device, and the clock of the thread that feeds it.

    device   | conv 1 | conv 2 |                     | conv 3 |
    thread   | queues, sleeps  | waits for a message | queues, sleeps

An operation begins when the thread has come to it and the device is free. The thread's own clock stands still
while the processor does the real arithmetic, or runs another thread: the thread makes up for that by sleeping less, as
an accelerator's queue would hide it. It goes on while the thread waits for a message or a lock, and while Python
works for longer than a queue would hide. The system tells them apart: it counts every thread's seconds of computing,
and those in line for a processor.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

SCHEDSTAT = "/proc/thread-self/schedstat"  # Linux tells the nanoseconds computed and those in line for a processor
SHORT = 0.002  # seconds: a longer wait is a wait for another rank, and sets this thread's clock to the wall's
HIDDEN = 0.003  # seconds: a queue of operations hides so much Python between two of them


class Clock:
    """When an emulated device is free (seconds of `time.perf_counter`), and for how many seconds it has worked."""

    def __init__(self):
        self.free = self.busy = 0.0

    def book(self, ready: float, seconds: float) -> float:
        """Let the device work for `seconds`, from the moment `ready` or when it is free; returns when it is done."""
        self.free = max(ready, self.free) + seconds
        self.busy += seconds
        return self.free


class ThreadClock(threading.local):
    """The time `now` at which a thread would be if it always had a processor of its own; each thread has its own.

    One that does not `sleep` only counts the device's time.
    """

    def __init__(self, sleep: bool = True):
        self.sleep = sleep
        self.line = open(SCHEDSTAT, "rb", buffering=0) if os.path.exists(SCHEDSTAT) else None  # noqa: SIM115
        self.now, self.total = time.perf_counter(), 0.0  # `total` is seconds of real arithmetic
        self.look()

    def look(self) -> None:
        """Count seconds from here on."""
        self.wall, self.computed, self.queued = time.perf_counter(), time.thread_time(), self.in_line()
        self.arithmetic = 0.0

    def in_line(self) -> float:
        """Seconds that this thread has stood in line for a processor so far; 0 where the system does not tell."""
        return int(os.pread(self.line.fileno(), 64, 0).split()[1]) * 1e-9 if self.line else 0.0

    def real(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Call a function that does real arithmetic, whose time is the processor's and not the device's."""
        before = time.thread_time()
        result = function(*args, **kwargs)
        seconds = time.thread_time() - before
        self.arithmetic += seconds
        self.total += seconds
        return result

    def catch_up(self) -> None:
        """Let pass what this thread has waited since it was here last, and what Python took beyond what is hidden."""
        if not self.sleep:
            return
        wall, computed, queued, arithmetic = self.wall, self.computed, self.queued, self.arithmetic
        self.look()
        computed, queued = self.computed - computed, self.queued - queued
        hidden = (arithmetic + min(computed - arithmetic, HIDDEN)) / computed if computed else 1.0  # this is a share
        waited = max(0.0, self.wall - wall - hidden * (computed + queued))
        self.now = self.wall if waited > SHORT else self.now + waited

    def reach(self, moment: float) -> None:
        """Sleep until `moment`, unless it has passed in the meantime, and count from there."""
        self.now = moment
        early = moment - time.perf_counter()
        if self.sleep and early > 0:
            time.sleep(early)
            self.look()

    @property
    def behind(self) -> float:
        """Seconds by which this thread lags behind where it should be: what the processor could not keep up with."""
        return time.perf_counter() - self.now if self.sleep else 0.0
