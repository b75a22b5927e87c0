"""Emulated links: the ranks of one machine talk as if they were on hosts of their own, with cables in between.

Two ways. "hosts": virtual hosts, over which everything runs unchanged, torch's own collectives too (Linux).
"wire": our own send and receive wait as long as the link would need (anywhere; torch's collectives do not).

    launch(fn, link=Link(bandwidth="200Mbit"))

The launch's agent calls `prepare`, each rank `enter` before it makes any socket.
"""

import json
import math
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ..errors import LinkError
from . import units, virtual_hosts, wire

MODES = {"hosts": "virtual hosts", "wire": "throttled wire"}
SLOWEST = 1e6  # bits a second: below that, the ranks would need minutes to find each other
UNLIMITED = 30e9  # bits a second, more than any processor carries between virtual hosts
LONGEST_LATENCY = 10.0
HEADROOM = 0.6  # of what the processor carries: the rest is for the model, and for keeping time
CAPACITY_TRIES = 3
SMALL = 8  # bytes: a message that takes no longer than the latency
MESSAGE_SECONDS, SHORTEST = 0.1, 1 << 15  # link time and least bytes of the longest message of a calibration
ROUNDS, PAUSE_SECONDS = 10, 0.01  # a pause, so that every message finds rested links


class Link:
    """An emulated link for every host: `bandwidth` in each direction, `latency` one way, as "200Mbit" and "5ms".

    `hosts`: spread the ranks over this many hosts, in blocks (default: every rank on its own); inside a host all
    is fast. `mode`: "hosts", "wire", or "auto" for virtual hosts where they are possible, else the wire.
    Raises LinkError for values that do not parse or cannot be had here; the message says what can.
    """

    def __init__(self, bandwidth="200Mbit", latency="0ms", hosts=None, mode="auto"):
        self.bandwidth, self.latency = parse_bandwidth(bandwidth), parse_latency(latency)
        if hosts is not None and (not isinstance(hosts, int) or hosts < 1):
            raise LinkError(f"hosts is {hosts!r}; it must be a whole number, 1 or more, or None for one a rank")
        self.hosts, self.automatic = hosts, mode == "auto"
        self.mode = choose_mode(mode, self.latency)

    def __repr__(self):
        return f"Link({self})"

    def __str__(self):
        latency = f", {self.latency * 1e3:g} ms" if self.latency else ""
        hosts = f", {self.hosts} hosts" if self.hosts else ""
        return f"{self.bandwidth / 1e6:g} Mbit/s{latency}{hosts}, {MODES[self.mode]}"

    @property
    def carries_torch(self) -> bool:
        """Whether torch's own collectives feel the link, or only our own sends and receives."""
        return self.mode == "hosts"

    def host_of(self, rank, world_size) -> int:
        """The host that `rank` lives on: blocks of neighbouring ranks share one."""
        return rank * self.host_count(world_size) // world_size

    def host_count(self, world_size) -> int:
        """How many hosts there are for this many ranks."""
        return world_size if self.hosts is None else self.hosts

    def check(self, world_size, backend="gloo") -> None:
        """Raise LinkError if a launch of `world_size` ranks cannot have this link. The caller of a launch does."""
        count = self.host_count(world_size)
        if count > world_size:
            raise LinkError(f"{count} hosts for {world_size} ranks; there can be as many hosts as ranks, not more")
        if count > virtual_hosts.MAX_HOSTS:
            raise LinkError(f"{count} hosts; at most {virtual_hosts.MAX_HOSTS} can be emulated")
        if backend == "nccl":
            raise LinkError('NCCL does not go through emulated links; use device="cpu", or link=None')
        if count > 1:
            self.rehearse(count)
            self.check_bandwidth(count)

    def check_bandwidth(self, host_count) -> None:
        """Raise LinkError if the processor cannot keep so many links busy; measures again before it refuses."""
        tries = []
        while len(tries) < CAPACITY_TRIES:
            tries.append(capacity(self.mode, host_count, len(tries)))
            if self.bandwidth <= tries[-1]:
                return
        raise LinkError(
            f"{self.bandwidth / 1e6:g} Mbit/s between {host_count} hosts ({MODES[self.mode]}) is more than this "
            f"machine's processor carries; choose at most {round_down(max(tries)) / 1e6:g}Mbit"
        )

    def rehearse(self, host_count) -> None:
        """Build so many hosts once, by measuring their capacity; in mode "auto", take the wire if that fails."""
        try:
            capacity(self.mode, host_count)
        except LinkError as error:
            if not self.automatic:
                raise
            print(f"{error}. The links are now emulated by a throttled wire.", file=sys.stderr)
            self.mode = "wire"

    def prepare(self, world_size) -> None:
        """In the launch's agent, before the ranks are forked: build the hosts, or the switch of the wire."""
        placed = [self.host_of(rank, world_size) for rank in range(world_size)]
        if self.mode == "wire":
            from .throttle import Switch

            self.switch = Switch(placed, self.bandwidth, self.latency)
            return
        try:
            self.placed = placed
            self.namespaces = virtual_hosts.build(max(placed) + 1, self.bandwidth, self.latency)
        except Exception as error:
            reason = virtual_hosts.explain(error)
            raise LinkError(f"virtual hosts could not be built: {reason}") from error

    def enter(self, rank) -> None:
        """In a rank, before it makes any socket: move to its host, or put the throttle on the wire."""
        if self.mode == "wire":
            from .throttle import Throttle

            wire.throttle = Throttle(self.switch, rank)
        else:
            virtual_hosts.enter(self.namespaces, self.placed[rank])

    def master_address(self) -> str:
        """Where the agent's rendezvous store can be reached from the ranks."""
        return "127.0.0.1" if self.mode == "wire" else virtual_hosts.SWITCH_ADDRESS

    def describe(self) -> dict:
        """Ready for JSON: mode, bandwidth (bits a second), latency (seconds), hosts, and the measured calibration."""
        self.rehearse(2)
        return {
            "mode": self.mode,
            "bandwidth_bits_s": self.bandwidth,
            "latency_s": self.latency,
            "hosts": self.hosts,
            "carries_torch": self.carries_torch,
            "calibration": calibrate(self),
        }


def default_link(bandwidth="200Mbit", latency="0ms", mode=None) -> Link:
    """The link of a comparison without GPUs: virtual hosts if this machine allows them, else the wire."""
    return Link(bandwidth, latency, mode=mode or "auto")


def parse_bandwidth(text) -> float:
    """Bits a second of "200Mbit", "1Gbit" and the like; LinkError for what does not parse, is 0 or less."""
    try:
        value = units.bits_per_second(text)
    except ValueError as error:
        raise LinkError(str(error)) from None
    if value < SLOWEST or not math.isfinite(value):
        raise LinkError(f'the bandwidth "{text}" is out of range; choose 1Mbit or more')
    return value


def parse_latency(text) -> float:
    """Seconds of "5ms", "100us" and the like, "0ms" for none; LinkError for what does not parse or is below 0."""
    try:
        value = units.seconds(text)
    except ValueError as error:
        raise LinkError(str(error)) from None
    if value > LONGEST_LATENCY:
        raise LinkError(f'the latency "{text}" is out of range; choose {LONGEST_LATENCY:g}s or less')
    return value


def available() -> dict:
    """For each way of emulating links: None where this machine allows it, or one line about why not."""
    tried = try_hosts()
    without_latency = tried["reason"] or (
        None if tried["latency"] else "this kernel has no netem; the wire has latency"
    )
    return {"hosts": tried["reason"], "hosts with latency": without_latency, "wire": None}


@cache
def try_hosts() -> dict:
    """Build two virtual hosts in a small process of their own, once: namespaces need one without threads."""
    if sys.platform != "linux":
        return {"reason": "virtual hosts need Linux", "latency": False}
    try:
        tried = subprocess.run(
            [sys.executable, str(Path(virtual_hosts.__file__))],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return json.loads(tried.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"reason": f"the attempt to build them failed ({error})", "latency": False}


def choose_mode(mode, latency) -> str:
    """Settle "auto", and refuse what this machine cannot do."""
    if mode not in ("auto", *MODES):
        raise LinkError(f"unknown mode {mode!r}; choose auto, hosts or wire")
    if mode == "wire":
        return mode
    reason = available()["hosts with latency" if latency else "hosts"]
    if mode == "hosts" and reason:
        raise LinkError(f'virtual hosts cannot be had here: {reason}; use mode="wire"')
    return "wire" if reason else "hosts"


def calibrate(link, world_size=2) -> dict:
    """Measure the link by a ping-pong between two hosts: what it really carries, headers and all.

    Returns bandwidth_bits_s, latency_s (half a round trip of 8 bytes), and the points: bytes and seconds one way, the
    fastest of several, as whatever else the machine does only makes it slower. `world_size` ranks are up, the first
    two play. Measured once in a process for each setting.
    """
    return dict(_calibrate(link.mode, link.bandwidth, link.latency, world_size))


@cache
def _calibrate(mode, bandwidth, latency, world_size):
    from .launch import launch

    link = Link(f"{bandwidth}bit", f"{latency}s", mode=mode)
    largest = max(int(MESSAGE_SECONDS * bandwidth / 8), SHORTEST)
    sizes = [SMALL, *(largest * quarter // 32 * 8 for quarter in (1, 2, 4))]
    points = launch(ping_pong, sizes, world_size=world_size, device="cpu", link=link)[0]
    slope, _ = np.polyfit(sizes[1:], points[1:], 1, w=1 / np.array(points[1:]))
    return {"bandwidth_bits_s": float(8 / slope), "latency_s": points[0], "bytes": sizes, "seconds": points}


def ping_pong(sizes) -> list:
    """Send messages of these sizes (bytes) to and fro between ranks 0 and 1; returns the fewest seconds one way."""
    rank, times = dist.get_rank(), {size: [] for size in sizes}
    for _ in range(ROUNDS if rank < 2 else 0):
        for size in sizes:
            message = torch.zeros(size, dtype=torch.uint8)
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            for turn in (0, 1):
                (wire.send if rank == turn else wire.recv)(message, 1 - rank)
            times[size].append((time.perf_counter() - start) / 2)
    dist.barrier()
    return [min(taken) for taken in times.values()] if rank < 2 else []


@cache
def capacity(mode, host_count, attempt=0) -> float:
    """The highest bandwidth (bits a second) at which this processor keeps all hosts' links busy at once.

    Every `attempt` is measured once: a processor that is busy with something else may do better next time.
    """
    from .launch import launch

    return HEADROOM * 8 * min(launch(full_speed, world_size=host_count, device="cpu", link=Unlimited(mode)))


class Unlimited(Link):
    """A link that is as fast as the processor, to find out how fast that is."""

    def __init__(self, mode):
        super().__init__(f"{UNLIMITED}bit", mode=mode)

    def check(self, world_size, backend="gloo") -> None:
        """There is nothing to compare with yet."""


def full_speed(message_bytes=1 << 20, seconds=0.2) -> float:
    """Everyone sends to the right and receives from the left; returns bytes a second, in each direction."""
    _, _, left, right = wire.neighbours()
    outgoing, incoming = torch.zeros(2, message_bytes, dtype=torch.uint8)
    wire.exchange(outgoing, right, incoming, left)
    start, sent = time.perf_counter(), 0
    going_on = torch.ones(1)
    while going_on.item():
        for _ in range(4):
            wire.exchange(outgoing, right, incoming, left)
            sent += message_bytes
        going_on.fill_(float(time.perf_counter() - start < seconds))
        dist.all_reduce(going_on, op=dist.ReduceOp.MIN)
    return sent / (time.perf_counter() - start)


def round_down(bits_per_second) -> float:
    """Two leading digits, rounded down: a bandwidth to type."""
    digit = 10 ** (math.floor(math.log10(bits_per_second)) - 1)
    return math.floor(bits_per_second / digit) * digit
