"""The table that all ranks of a launch share: threads' clocks, links, and what is under way between
ranks.

It is a file without a name, which forked ranks and new processes inherit as an open file. It is
laid out as in C, in whole numbers; all moments are picoseconds.

A thread's `floor` is written without the lock: no moment before it can come from that thread any
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
from ctypes import Structure, c_char, c_int64
from typing import Any

import numpy as np

from ..files import open_memory

FOREVER = 1 << 62  # this moment never comes
FREE, RUNNING, BLOCKED = range(3)  # the states of a thread
# The stages of a message or a collective; 0 is that of an entry that is free.
OPEN, READY, BOOKED = range(1, 4)
# NumPy reads these fields of all places, and these of all entries, each as a row of `Table.threads`
# or `Table.rows`; their numbers are those in `Place` and `Entry`.
FLOOR, STATE, NEEDED, TIMER, AWAITS = range(1, 6)
KEY, STAGE, MOMENT, KIND, SECOND, GROUP, TAG = range(7)
MOST_GROUPS = 1024
LINE = 240
LOOK_AGAIN_S = 0.2  # a thread that waits looks at the table this often
POLL_S = 0.0005  # where no other process can wake a thread, it looks this often

real_sleep = time.sleep
real_clock = time.perf_counter
plain_lock = threading.Lock


def numbers(*names: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure of whole numbers."""
    return [(name, c_int64) for name in names]


class Head(Structure):
    """What there is once."""

    _fields_ = numbers("threshold", "deadlock", "failed", "groups", "pending", "latest")


class Place(Structure):
    """What all ranks know of a thread; it `awaits` the entry with that key."""

    _fields_ = numbers(
        "woken",  # the kernel lets the thread sleep until this is 1
        "floor",
        "state",
        "needed",
        "timer",
        "awaits",
        "clock",
        "sends",  # of the entry that it awaits, it waits for the departure
        "number",
    )


class Entry(Structure):
    """A message or a collective between ranks."""

    _fields_ = numbers(
        "key",  # all its sides compute the same key; 0 is an entry that is free
        "stage",
        "moment",  # when the last side so far has come
        "kind",
        "second",  # the rank that receives
        "group",
        "tag",
        "first",  # the rank that sends, or the first member of a collective
        "count",  # its number among those on the same way, or in the same group
        "size",  # the bytes of a message, or the duration of a collective
        "present",  # so many sides have come
        "departs",
        "arrives",
        "readers",  # so many sides have still to read when it ends
    )


class Ways(Structure):
    """The moments from which on a host's ways out and in are free."""

    _fields_ = numbers("out", "into")


class Table:
    """The memory; `hosts` has the host of each rank. Ranks of one host reach each other without
    links.
    """

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
        # The table does not know yet that this process has read these entries.
        self.dropped: list[Entry] = []
        if descriptor is None:
            self.clear()

    def lay_out(self) -> None:
        """Map the memory. `threads` has a column for each of the `places`, `rows` for each of the
        `entries`.
        """

        class Memory(Structure):
            _fields_ = [
                ("head", Head),
                ("places", Place * (self.ranks * self.threads_per_rank)),
                ("entries", Entry * (1024 + 64 * self.ranks)),
                ("ways", Ways * (max(self.hosts) + 1)),
                ("anyone", c_int64 * self.ranks),
                ("members", c_int64 * self.ranks * MOST_GROUPS),
                ("lines", c_char * LINE * self.ranks),
            ]

        self.file.truncate(ctypes.sizeof(Memory))
        memory = Memory.from_buffer(mmap.mmap(self.file.fileno(), 0))
        self.head = memory.head
        self.places = list(memory.places)
        self.threads = as_rows(memory.places)
        self.entries = list(memory.entries)
        self.rows = as_rows(memory.entries)
        self.ways = list(memory.ways)
        self.anyone = memory.anyone
        self.members = memory.members
        self.lines = np.frombuffer(memory.lines, f"S{LINE}")

    def clear(self) -> None:
        """Let the main threads of all ranks run from 0 on."""
        self.head.threshold = FOREVER
        self.head.groups = 1
        self.threads[FLOOR] = self.threads[TIMER] = FOREVER
        for main in self.places[:: self.threads_per_rank]:
            main.floor = 0
            main.state = RUNNING
            main.needed = 1
        self.members[0][:] = [1] * self.ranks

    def __reduce__(self):
        return type(self), (self.hosts, self.bits_per_second, self.latency_s, self.file.fileno())

    def bytes_take(self, nbytes: float) -> int:
        """Return the picoseconds of `nbytes` on a link."""
        return round(nbytes * self.byte)

    def own_threads(self) -> range:
        """Return the numbers of this rank's places."""
        first = self.rank * self.threads_per_rank
        return range(first, first + self.threads_per_rank)

    def waiting(self) -> Any:
        """Return the numbers of the places whose threads are needed and blocked."""
        return ((self.threads[STATE] == BLOCKED) & (self.threads[NEEDED] > 0)).nonzero()[0]

    def wake(self, place: Place) -> None:
        """Wake the thread that waits in `sleep_until_woken`."""
        place.woken = 1
        if libc is not None:
            libc.syscall(FUTEX, ctypes.byref(place), 1, 1, None, None, 0)

    def sleep_until_woken(self, place: Place) -> None:
        """Sleep, without the lock, until `wake` was called for this thread, or for a moment."""
        if libc is None:
            real_sleep(POLL_S)  # macOS has no wait of this kind between processes
        else:
            libc.syscall(FUTEX, ctypes.byref(place), 0, 0, LOOK_AGAIN, None, 0)


def as_rows(structures: Any) -> Any:
    """Return the memory of structures as an array with a row for each field."""
    return np.frombuffer(structures, np.int64).reshape(len(structures), -1).T


def where(items: list, mask: Any) -> list:
    """Return those items where the array `mask` is true."""
    return [items[number] for number in mask.nonzero()[0].tolist()]


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
