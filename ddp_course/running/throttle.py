"""The throttled wire: our own sends and receives take as long as a link of a chosen bandwidth and latency would.

gloo moves a message as soon as both sides are ready, and so does this model: whichever of sender and receiver
comes second, at time t, books n bytes on the sender's outgoing and on the receiver's incoming link.

    departs at   max(t, outgoing link free)               + n/b
    arrives at   max(start + latency, incoming link free) + n/b

Each side then waits for its moment on the machine's monotonic clock. The bookings lie in memory that all ranks
of a launch share, as a switch between them would know them.
"""

import mmap
import multiprocessing
import time
import zlib

import numpy as np
import torch.distributed as dist

CHANNELS = 4  # the default group, and three for all others, by their names
DEPTH = 512  # messages between two ranks that may be under way at once
NUMBER, DEPARTS, ARRIVES = range(3)


class Switch:
    """What all ranks share: when each host's two links are free, and a slot for every message under way.

    `hosts` is the host of every rank; ranks of one host share its links, and reach each other without them.
    """

    def __init__(self, hosts: list, bits_per_second: float, latency: float):
        self.hosts, self.latency = hosts, latency
        self.seconds_per_byte = 8 / bits_per_second
        self.lock = multiprocessing.get_context("fork").Lock()
        self.free = shared(2, max(hosts) + 1)  # outgoing and incoming, monotonic seconds
        self.slots = shared(len(hosts), len(hosts), CHANNELS, DEPTH, 3)

    def book(self, sender, receiver, nbytes):
        """Take the time of one message from both links; returns when it departs and when it arrives."""
        outgoing, incoming = self.free
        source, destination, duration = self.hosts[sender], self.hosts[receiver], nbytes * self.seconds_per_byte
        start = max(time.monotonic(), outgoing[source])
        outgoing[source] = start + duration
        incoming[destination] = max(start + self.latency, incoming[destination]) + duration
        return outgoing[source], incoming[destination]


class Throttle:
    """One rank's connection to the switch."""

    def __init__(self, switch: Switch, rank: int):
        self.switch, self.rank = switch, rank
        self.posted = np.zeros((2, *switch.slots.shape[:3]), dtype=int)  # messages so far, as sender and as receiver

    def post(self, kind, nbytes, peer, group=None):
        """Announce a "send" to or a "recv" from global rank `peer`; returns a ticket for `finish`."""
        receiving = int(kind == "recv")
        sender, receiver = (peer, self.rank) if receiving else (self.rank, peer)
        if self.switch.hosts[sender] == self.switch.hosts[receiver]:
            return None
        way = sender, receiver, channel(group)
        with self.switch.lock:
            self.posted[receiving][way] += 1
            number = self.posted[receiving][way]
            slot = self.switch.slots[way][number % DEPTH]
            if slot[NUMBER] == number:  # the other side is there already
                slot[DEPARTS:] = self.switch.book(sender, receiver, nbytes)
            else:
                slot[:] = number, 0.0, 0.0
        return slot, number, ARRIVES if receiving else DEPARTS

    def finish(self, ticket):
        """Wait for the moment at which the message has left (sender) or arrived (receiver)."""
        if ticket is not None:
            slot, number, moment = ticket
            remaining = slot[moment] - time.monotonic()
            if slot[NUMBER] == number and remaining > 0:
                time.sleep(remaining)


def shared(*shape):
    """Zeros of float64 in memory that forked processes have in common."""
    return np.frombuffer(mmap.mmap(-1, 8 * int(np.prod(shape))), dtype=np.float64).reshape(shape)


def channel(group):
    """Messages of different groups may overtake each other: each group counts its own."""
    if group is None or group is dist.group.WORLD:
        return 0
    return 1 + zlib.crc32(group.group_name.encode()) % (CHANNELS - 1)
