"""The table that all ranks of a launch share: clocks, links, and what is under way between ranks.

It is a file without a name, which forked ranks and new processes inherit as an open file. It is
laid out as in C, in whole numbers; all moments are picoseconds.

A thread's `floor` is written without the lock. Another rank may still read the value before, as ARM
may deliver late: it then only books later, never in another order, and whoever waits looks again
after a moment.
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

from .. import linux
from ..memory import open_memory

FOREVER = 1 << 62  # this moment never comes
FREE, RUNNING, BLOCKED = range(3)  # the states of a thread
# These are the stages of a message or a collective; the stage 0 is that of a free entry.
# MATCHED is the stage of a receive from any rank whose message is not booked yet.
OPEN, READY, BOOKED, MATCHED = range(1, 5)
# These are the kinds of an entry; the entries of one moment are booked in this order.
# FROM_ANY is a receive from any rank, which has the moment of the message that it gets.
MESSAGE, COLLECTIVE, NEW_GROUP, FROM_ANY = range(4)
ANY = -1  # the sender of a message to a receive from any rank, until one has come
MOST_GROUPS = 1024
# What a rank waits for in a deadlock takes at most so many bytes, and more for each rank it names.
WAIT_BYTES = 2048
RANK_BYTES = 6
LOOK_AGAIN_NS = 200_000_000  # a thread that waits looks at the table this often
POLL_S = 0.0005  # where no other process can wake a thread, it looks this often
FUTEX_WAIT, FUTEX_WAKE = range(2)  # what the system call futex(2) is asked to do

real_sleep = time.sleep
real_clock = time.perf_counter
plain_lock = threading.Lock


def numbers(*names: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure of whole numbers."""
    return [(name, c_int64) for name in names]


class Head(Structure):
    """The fields that the table has once, for all ranks together."""

    _fields_ = numbers(
        "threshold",  # a thread that moves on beyond this moment calls `arbiter.settle`
        "deadlock",  # 1 if nothing can go on
        "failed",  # 1 if a rank has raised an error, for which others may wait in vain
        "groups",  # how many process groups have been made
        "pending",  # how many entries are ready
        "from_any",  # how many receives from any rank have no message yet
        "needed",  # the last moment at which a thread that is no daemon went on, or stopped
        "latest",  # the moment at which something was last booked, or somebody had a turn
    )


class Place(Structure):
    """What all ranks know of one thread."""

    _fields_ = numbers(
        "woken",  # the kernel lets the thread sleep until this is 1: the first field, for `wake`
        "floor",  # the thread does nothing before this moment; FOREVER while it is blocked
        "state",  # FREE, RUNNING or BLOCKED
        "needed",  # 1 unless it is a daemon: there is a deadlock only if a needed thread waits
        "timer",  # a blocked thread goes on at this moment, if nothing lets it go on before
        "awaits",  # the key of the entry whose booking lets it go on; 0 for none
        "sends",  # 1 if it awaits the departure of that message, 0 if the arrival or the end
        "posts",  # 1 if it waits for a turn in which it will post a message or join a collective
        "outside",  # 1 if something outside the launch may let it go on
        "stands",  # 1 if its clock stands still while it waits: a stream waits, and no host
        "clock",  # the thread's own time when it was blocked, or when it is to go on
        "number",  # the threads of a rank are numbered in the order of their starts
    )


class Entry(Structure):
    """A message or a collective between ranks."""

    _fields_ = numbers(
        "key",  # all its sides compute the same key; 0 is an entry that is free
        "stage",  # 0, OPEN, READY, BOOKED or MATCHED
        "moment",  # when the last side so far has come
        "kind",  # MESSAGE, COLLECTIVE, NEW_GROUP or FROM_ANY
        "first",  # the rank that sends a message, or the first member of a new group
        "second",  # the rank that receives a message
        "group",
        "tag",
        "count",  # the number of a message in its channel, or of a collective in its group
        "nbytes",  # of a message
        "sent",  # 1 if a message's sender has come
        "for_any",  # the key of the receive from any rank that gets a message; 0 for none
        "duration",  # of a collective
        "has_bytes",  # 1 if a collective uses the links
        "present",  # how many sides have come
        "departs",  # when a message has left its sender
        "arrives",  # when a message arrives, or a collective ends
        "readers",  # how many sides have still to read when it ends
    )


class Ways(Structure):
    """The moments from which on the ways out and in of a host, or of a rank, are free."""

    _fields_ = numbers("out", "into")


class Table:
    """The shared memory of a launch; `hosts` has the host of each rank.

    Ranks of one host reach each other by links inside it, one for each rank, or without links.
    """

    def __init__(
        self,
        hosts: list[int],
        bits_per_second: float = math.inf,
        latency: float = 0.0,
        inside_bits_per_second: float = math.inf,
        descriptor: int | None = None,
    ):
        self.hosts = hosts
        self.links = (bits_per_second, latency, inside_bits_per_second)
        # These are not rounded.
        self.picoseconds_per_byte = 8e12 / bits_per_second
        self.picoseconds_per_byte_inside = 8e12 / inside_bits_per_second
        self.latency = round(latency * 1e12)
        self.ranks = len(hosts)
        # Few ranks may have many threads each: the arbiter looks at all places.
        self.threads_per_rank = max(16, 256 // self.ranks)
        self.file = open_memory("clocks") if descriptor is None else os.fdopen(descriptor, "r+b")
        os.set_inheritable(self.file.fileno(), True)
        self.lay_out()
        self.lock = Lock(self.file)
        self.rank = 0  # until `clocks.enter` says which one this process is
        self.names = list(range(self.ranks))  # the numbers by which messages name the ranks
        self.idents: dict[int, int] = {}  # Python's numbers of this process's threads, by slot
        # This process has read these entries; the table learns that in `arbiter.find`.
        self.dropped: list[Entry] = []
        if descriptor is None:
            self.clear()

    def lay_out(self) -> None:
        """Map the memory, and name its parts.

        `threads["floor"]` is the field `floor` of all `places`, as an array, and `rows["stage"]` is
        the field `stage` of all `entries`.
        """

        wait_bytes = WAIT_BYTES + RANK_BYTES * self.ranks

        class Memory(Structure):
            _fields_ = [
                ("head", Head),
                ("places", Place * (self.ranks * self.threads_per_rank)),
                ("entries", Entry * (1024 + 64 * self.ranks)),  # more than programs need at once
                ("ways", Ways * (max(self.hosts) + 1)),
                ("ways_inside", Ways * self.ranks),
                ("members", c_int64 * self.ranks * MOST_GROUPS),
                ("waits", c_char * wait_bytes * self.ranks),
            ]

        self.file.truncate(ctypes.sizeof(Memory))
        memory = Memory.from_buffer(mmap.mmap(self.file.fileno(), 0))
        self.head = memory.head
        self.places = list(memory.places)
        self.threads = np.frombuffer(memory.places, Place)
        self.entries = list(memory.entries)
        self.rows = np.frombuffer(memory.entries, Entry)
        self.ways = list(memory.ways)
        self.ways_inside = list(memory.ways_inside)
        self.members = memory.members
        self.waits = np.frombuffer(memory.waits, f"S{wait_bytes}")

    def clear(self) -> None:
        """Begin at the moment 0, with the main threads of all ranks running."""
        self.head.threshold = FOREVER
        self.head.groups = 1  # the whole job, whose number is 0
        self.threads["floor"] = FOREVER
        self.threads["timer"] = FOREVER
        for main_thread in self.places[:: self.threads_per_rank]:
            main_thread.floor = 0
            main_thread.state = RUNNING
            main_thread.needed = 1
        self.members[0][:] = [1] * self.ranks

    def __reduce__(self):
        return type(self), (self.hosts, *self.links, self.file.fileno())

    def on_one_host(self, ranks: Any) -> bool:
        """Return whether these ranks share a host."""
        return len({self.hosts[rank] for rank in ranks}) == 1

    def step_takes(self, nbytes: float, ranks: Any) -> int:
        """Return the picoseconds of a message of `nbytes` between these ranks, alone on its way."""
        if self.on_one_host(ranks):
            return round(nbytes * self.picoseconds_per_byte_inside)
        return self.latency + round(nbytes * self.picoseconds_per_byte)

    def own_threads(self) -> range:
        """Return the slots of this rank's places, which are indices in `places`."""
        first = self.rank * self.threads_per_rank
        return range(first, first + self.threads_per_rank)

    def waiting(self) -> Any:
        """Return the slots of the threads that are needed and blocked, as an array."""
        blocked = self.threads["state"] == BLOCKED
        return (blocked & (self.threads["needed"] > 0)).nonzero()[0]

    def wake(self, place: Place) -> None:
        """Wake the thread that waits in `sleep_until_woken`."""
        place.woken = 1
        if libc is not None:
            # At most one thread waits there.
            libc.syscall(SYS_FUTEX, ctypes.byref(place), FUTEX_WAKE, 1, None, None, 0)

    def sleep_until_woken(self, place: Place) -> None:
        """Sleep, without the lock, until `wake` was called for this thread, or for a moment."""
        if libc is None:
            # macOS has no wait of this kind between processes.
            real_sleep(POLL_S)
        else:
            # These are seconds and nanoseconds.
            timeout = (ctypes.c_long * 2)(0, LOOK_AGAIN_NS)
            # The kernel lets the thread sleep only if it finds 0 in `woken`.
            libc.syscall(SYS_FUTEX, ctypes.byref(place), FUTEX_WAIT, 0, timeout, None, 0)


def where(items: list, mask: Any) -> list:
    """Return those items where the array `mask` is true."""
    return [items[index] for index in mask.nonzero()[0].tolist()]


def least(values: Any) -> int:
    """Return the smallest number in an array that other threads may change meanwhile."""
    # Each number is read once: a second look at the place of the smallest may find a later moment.
    return int(values.min())


class Lock:
    """The lock that keeps all other ranks, and other threads of this rank, off the table."""

    def __init__(self, file):
        self.file = file.fileno()
        self.thread_lock = plain_lock()
        self.fuzz_ms = float(os.environ.get("MANYRANKS_FUZZ") or 0)

    def __enter__(self):
        if self.fuzz_ms:
            real_sleep(random.SystemRandom().uniform(0, self.fuzz_ms / 1000))
        self.thread_lock.acquire()
        fcntl.lockf(self.file, fcntl.LOCK_EX)

    def __exit__(self, *exception):
        fcntl.lockf(self.file, fcntl.LOCK_UN)
        self.thread_lock.release()


# Linux numbers its system calls by the processor; elsewhere threads poll.
FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
SYS_FUTEX = FUTEX_NUMBERS.get(os.uname().machine) if sys.platform == "linux" else None
libc = None if SYS_FUTEX is None else linux.libc()
