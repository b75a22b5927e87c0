"""The throttled wire: our own sends and receives take as long as a link of a chosen bandwidth and
latency would.

gloo moves a message as soon as both sides are ready, and so does this model: whichever of sender
and receiver comes second, at time t, books n bytes on the sender's outgoing and on the receiver's
incoming link.

    departs at   max(t, outgoing link free)               + n/b
    arrives at   max(start + latency, incoming link free) + n/b

Each side then waits for its moment on the machine's monotonic clock. The bookings are in memory
that all ranks of a launch share, as a switch between the ranks would know all bookings.

With more ranks than processor cores, the operating system wakes a rank some milliseconds too late,
and over the many steps of a ring that would add up. So if a rank that was woken late sends at once,
its message is booked as if the rank had been woken in time, and the rank waits less for it.
"""

import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist

from .. import wire
from ..launching.channel import LOOPBACK, open_memory

CHANNELS = 4  # the default group has one channel, and all other groups share three, by their names
DEPTH = 512  # at most this many messages between two ranks may be under way at once
NUMBER, DEPARTS, ARRIVES = range(3)
AT_ONCE = (
    0.005  # a rank that sends within this many seconds after it was woken did nothing in between
)


class ThrottledWire:
    """Our own sends and receives wait as long as the link would need; torch's own collectives do
    not.

    All ranks share memory with the times at which each host's two links are free, and a slot for
    every message under way. It is a file without a name, which forked ranks and new processes
    inherit as the open file `descriptor`. `hosts` has the host of every rank; ranks of one host
    share its links, and reach each other without them.
    """

    name, title, carries_torch = "wire", "throttled wire", False
    master_address = LOOPBACK

    def __init__(
        self, hosts: list, bits_per_second: float, latency: float, descriptor: int | None = None
    ):
        self.hosts, self.latency = hosts, latency
        self.seconds_per_byte = 8 / bits_per_second
        ranks, links = len(hosts), 2 * (max(hosts) + 1)
        numbers = links + ranks * ranks * CHANNELS * DEPTH * 3
        self.file = open_memory("switch") if descriptor is None else open(descriptor, "r+b")  # noqa: SIM115
        self.file.truncate(8 * numbers)
        os.set_inheritable(self.file.fileno(), True)
        memory = np.frombuffer(mmap.mmap(self.file.fileno(), 8 * numbers))
        self.free = memory[:links].reshape(
            2, -1
        )  # the rows are for outgoing and incoming links, in monotonic seconds
        self.slots = memory[links:].reshape(ranks, ranks, CHANNELS, DEPTH, 3)
        self.threads = threading.Lock()

    def __reduce__(self):
        return type(self), (self.hosts, 8 / self.seconds_per_byte, self.latency, self.file.fileno())

    @staticmethod
    def obstacle(latency: float) -> str | None:
        """Return None, as the throttled wire works anywhere."""
        return None

    def enter(self, rank: int) -> None:
        """Throttle the wire of this process, which is rank `rank`."""
        self.rank = rank
        self.posted = np.zeros(
            (2, *self.slots.shape[:3]), dtype=int
        )  # the rows count messages sent and received
        self.woken = (
            threading.local()
        )  # each thread knows when its last wait ended, and when that was due
        wire.card = wire.Card(self)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other ranks, and other threads of this rank, off the shared memory during this
        block.
        """
        import fcntl  # Windows does not have this module.

        with self.threads:  # the lock of the file is between processes only
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)

    def book(self, sender: int, receiver: int, nbytes: int, ready: float) -> tuple[float, float]:
        """Book one message, for which both sides are `ready`, on both links; return when it departs
        and arrives.
        """
        outgoing, incoming = self.free
        source, destination, duration = (
            self.hosts[sender],
            self.hosts[receiver],
            nbytes * self.seconds_per_byte,
        )
        start = max(ready, outgoing[source])
        outgoing[source] = start + duration
        incoming[destination] = max(start + self.latency, incoming[destination]) + duration
        return outgoing[source], incoming[destination]

    def post(
        self, kind: str, nbytes: int, peer: int, group: dist.ProcessGroup | None = None
    ) -> Any:
        """Announce a "send" to or a "recv" from global rank `peer`; return a ticket for
        `finish`.
        """
        receiving = int(kind == "recv")
        sender, receiver = (peer, self.rank) if receiving else (self.rank, peer)
        if self.hosts[sender] == self.hosts[receiver]:
            return None
        way, now = (sender, receiver, channel(group)), self.now()
        with self.locked():
            self.posted[receiving][way] += 1
            number = self.posted[receiving][way]
            slot = self.slots[way][number % DEPTH]
            if slot[NUMBER] == number:  # the other side has been ready since the time in the slot
                slot[DEPARTS:] = self.book(sender, receiver, nbytes, max(now, slot[DEPARTS]))
            else:
                slot[:] = number, now, 0.0
        return slot, number, ARRIVES if receiving else DEPARTS

    def finish(self, ticket: Any) -> None:
        """Wait for the moment at which the message has left (sender) or arrived (receiver)."""
        if ticket is None:
            return
        slot, number, moment = ticket
        due = slot[moment]
        if slot[NUMBER] == number and due > self.now():
            time.sleep(max(0.0, due - time.monotonic()))
            self.woken.at, self.woken.due = time.monotonic(), due

    def now(self) -> float:
        """Return this thread's time, which is set back by its last delay if the thread was woken a
        moment ago.
        """
        now, at = time.monotonic(), getattr(self.woken, "at", None)
        return now if at is None or now - at > AT_ONCE else now - max(0.0, at - self.woken.due)


def channel(group: dist.ProcessGroup | None) -> int:
    """Return a group's channel: messages of different groups may overtake each other, so each
    channel has a count.
    """
    if group is None or group is dist.group.WORLD:
        return 0
    return 1 + zlib.crc32(group.group_name.encode()) % (CHANNELS - 1)
