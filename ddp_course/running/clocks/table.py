"""The table that all ranks of a launch share: threads' clocks, links, and what is under way between
ranks.

It is a file without a name, which forked ranks and new processes inherit as an open file. All
moments are whole picoseconds. A row of `threads` or `rows` is one property of all threads, or of
all messages and collectives.

A thread's `FLOOR` is written without the lock: no moment before it can come from that thread any
more. Another rank that still reads the value before (ARM may deliver late) only books later, never
in another order; whoever waits looks again after a moment.
"""

import ctypes
import fcntl
import math
import mmap
import os
import random
import sys
import threading
import time
from typing import Any

import numpy as np

from ..files import open_memory

FOREVER = 1 << 62  # this moment never comes
FREE, RUNNING, BLOCKED = range(3)  # the states of a thread
FLOOR, CLOCK, STATE, NEEDED, TIMER, AWAITS, SIDE, NUMBER = range(8)  # the properties of a thread
# The states of a message or a collective; 0 is a row that is free.
OPEN, READY, BOOKED = range(1, 4)
# The properties of a message or a collective.
(
    KEY,  # all its sides compute the same key
    STAGE,
    MOMENT,  # when the last side so far has come
    KIND,
    FIRST,  # the rank that sends, or the first member of a collective
    SECOND,  # the rank that receives
    GROUP,
    TAG,
    COUNT,  # its number among those on the same way, or in the same group
    SIZE,  # the bytes of a message, or the duration of a collective
    PRESENT,  # so many sides have come
    DEPARTS,
    ARRIVES,
    READERS,  # so many sides have still to read when it ends
) = range(14)
THRESHOLD, DEADLOCK, FAILED, GROUPS, PENDING, LATEST = range(6)  # the numbers of the table's head
HEAD = 8
THREAD_FIELDS = 8
ROW_FIELDS = 14
MOST_GROUPS = 1024
LINE = 240
LOOK_AGAIN_S = 0.2  # a thread that waits looks at the table this often
POLL_S = 0.0005  # where no other process can wake a thread, it looks this often

real_sleep = time.sleep
real_clock = time.perf_counter
plain_lock = threading.Lock


class Table:
    """The memory; `hosts` has the host of each rank. Ranks of one host reach each other without
    links.
    """

    head: Any  # these are views of the memory; `__init__` sets them by their names
    threads: Any
    rows: Any
    links: Any
    members: Any
    anyone: Any
    words: Any

    def __init__(
        self,
        hosts: list[int],
        bits_per_second: float = math.inf,
        latency: float = 0.0,
        descriptor: int | None = None,
    ):
        self.hosts = hosts
        self.bits_per_second = bits_per_second
        self.latency_s = latency
        self.latency = round(latency * 1e12)
        self.byte = 8e12 / bits_per_second
        self.ranks = len(hosts)
        self.threads_per_rank = max(16, 256 // self.ranks)
        self.file = open_memory("clocks") if descriptor is None else os.fdopen(descriptor, "r+b")
        os.set_inheritable(self.file.fileno(), True)
        self.lay_out()
        self.lock = Lock(self.file)
        self.rank = 0
        self.idents: dict[int, int] = {}  # the threads of this process, by their places
        # The table does not know yet that this process has read these rows.
        self.dropped: list[int] = []
        if descriptor is None:
            self.clear()

    def lay_out(self) -> None:
        """Map the memory: arrays of whole numbers, one after the other, and for each rank a line of
        text. The attributes are for single numbers, `arrays` has the same for NumPy.
        """
        slots = self.ranks * self.threads_per_rank
        shapes = {
            "head": (HEAD,),
            "threads": (THREAD_FIELDS, slots),
            "rows": (ROW_FIELDS, 1024 + 64 * self.ranks),
            "links": (2, max(self.hosts) + 1),
            "members": (MOST_GROUPS, self.ranks),
            "anyone": (self.ranks,),
            "words": (slots,),
        }
        numbers = sum(math.prod(shape) for shape in shapes.values())
        self.file.truncate(8 * numbers + self.ranks * LINE)
        memory = mmap.mmap(self.file.fileno(), 0)
        self.arrays: dict[str, Any] = {}
        at = 0
        for name, shape in shapes.items():
            end = at + 8 * math.prod(shape)
            view = memoryview(memory)[at:end].cast("q", shape)
            setattr(self, name, view)
            self.arrays[name] = np.asarray(view)
            at = end
        self.lines = np.frombuffer(memory, f"S{LINE}", offset=at)
        first = self.arrays["words"].ctypes.data
        self.addresses = [ctypes.c_void_p(first + 8 * slot) for slot in range(slots)]

    def clear(self) -> None:
        """Let the main threads of all ranks run from 0 on."""
        threads = self.arrays["threads"]
        self.head[THRESHOLD] = FOREVER
        self.head[GROUPS] = 1
        threads[FLOOR] = threads[TIMER] = FOREVER
        main = slice(0, None, self.threads_per_rank)
        threads[FLOOR, main] = 0
        threads[STATE, main] = RUNNING
        threads[NEEDED, main] = 1
        self.arrays["members"][0] = 1

    def __reduce__(self):
        return type(self), (self.hosts, self.bits_per_second, self.latency_s, self.file.fileno())

    def bytes_take(self, nbytes: float) -> int:
        """Return the picoseconds of `nbytes` on a link."""
        return round(nbytes * self.byte)

    def own_threads(self) -> range:
        """Return the places of this rank's threads in the table."""
        first = self.rank * self.threads_per_rank
        return range(first, first + self.threads_per_rank)

    def wake(self, slot: int) -> None:
        """Wake the thread that waits in `sleep_until_woken`."""
        self.words[slot] = 1
        if libc is not None:
            libc.syscall(FUTEX, self.addresses[slot], 1, 1, None, None, 0)

    def sleep_until_woken(self, slot: int) -> None:
        """Sleep, without the lock, until `wake` was called for this thread, or for a moment."""
        if libc is None:
            real_sleep(POLL_S)  # macOS has no wait of this kind between processes
        else:
            libc.syscall(FUTEX, self.addresses[slot], 0, 0, LOOK_AGAIN, None, 0)


class Lock:
    """Keeps all other ranks, and other threads of this rank, off the table."""

    def __init__(self, file):
        self.file = file.fileno()
        self.threads = plain_lock()
        self.fuzz_ms = float(os.environ.get("DDP_COURSE_FUZZ") or 0)

    def __enter__(self):
        if self.fuzz_ms:
            real_sleep(fuzz.uniform(0, self.fuzz_ms / 1000))
        self.threads.acquire()
        fcntl.lockf(self.file, fcntl.LOCK_EX)

    def __exit__(self, *exception):
        fcntl.lockf(self.file, fcntl.LOCK_UN)
        self.threads.release()


fuzz = random.SystemRandom()
LOOK_AGAIN = (ctypes.c_long * 2)(0, round(LOOK_AGAIN_S * 1e9))  # seconds and nanoseconds
FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine) if sys.platform == "linux" else None
libc = None if FUTEX is None else ctypes.CDLL(None, use_errno=True)
