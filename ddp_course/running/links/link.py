"""The bandwidth and latency of a link, how ranks spread over its hosts, and which links are refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import LinkError
from .. import units, virtual_hosts
from . import capacity, modes
from .presets import LINKS

SLOWEST = 1e6  # bits per second: below that, the ranks would need minutes to find each other
LONGEST_LATENCY = 10.0


class Link:
    """An emulated link for every host: `bandwidth` in each direction, `latency` one way, as "200Mbit" and "5ms".

    `hosts`: spread the ranks over this many hosts, in blocks (default: every rank on its own); inside a host all
    is fast. `mode`: "hosts", "wire", or "auto" for virtual hosts where they are possible, else the wire.
    Raises LinkError for values that do not parse or cannot be had here; the message says what can.
    """

    def __init__(self, bandwidth="200Mbit", latency="0ms", hosts=None, mode="auto"):
        self.bandwidth, self.latency = parse_bandwidth(bandwidth), parsed(units.seconds, latency)
        if self.latency > LONGEST_LATENCY:
            raise LinkError(f'the latency "{latency}" is out of range; choose {LONGEST_LATENCY:g}s or less')
        if hosts is not None and (not isinstance(hosts, int) or hosts < 1):
            raise LinkError(f"hosts is {hosts!r}; it must be a whole number, 1 or more, or None for one per rank")
        self.hosts = hosts
        self.kind = modes.choose(mode, self.latency)

    @classmethod
    def like(
        cls, name: str, slowed: float = 1.0, scale: float = 1.0, hosts: int | None = None, mode: str | None = "auto"
    ) -> "Link":
        """The link called `name` in LINKS in slow motion: a message takes `slowed` times as long.

        With `scale` it stands for one that carries a model so many times larger: its bandwidth shrinks along with the
        model, its latency does not. The same two numbers as in `Device.like`.
        """
        if name not in LINKS:
            raise LinkError(f'unknown link "{name}"; choose one of {", ".join(LINKS)}')
        for what, value in (("slowed", slowed), ("scale", scale)):
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 1):
                raise LinkError(f"{what} is {value!r}; it must be a number, 1 or more")
        known = LINKS[name]
        return cls(f"{known.bandwidth / (slowed * scale)}bit", f"{known.latency * slowed}s", hosts, mode)

    def __repr__(self):
        return f"Link({self})"

    def __str__(self):
        latency = f", {self.latency * 1e3:g} ms" if self.latency else ""
        hosts = f", {self.hosts} hosts" if self.hosts else ""
        return f"{self.bandwidth / 1e6:g} Mbit/s{latency}{hosts}, {self.kind.title}"

    @property
    def mode(self) -> str:
        """ "hosts" or "wire"."""
        return self.kind.name

    @property
    def carries_torch(self) -> bool:
        """Whether torch's own collectives feel the link, or only our own sends and receives."""
        return self.kind.carries_torch

    def host_of(self, rank: int, world_size: int) -> int:
        """The host that `rank` lives on: blocks of neighbouring ranks share one."""
        return rank * self.host_count(world_size) // world_size

    def host_count(self, world_size: int) -> int:
        """How many hosts there are for this many ranks."""
        return world_size if self.hosts is None else self.hosts

    def check(self, world_size: int, backend: str = "gloo") -> None:
        """Raise LinkError if a launch of `world_size` ranks cannot have this link, as far as one can say beforehand."""
        count = self.host_count(world_size)
        if count > world_size:
            raise LinkError(f"{count} hosts for {world_size} ranks; there can be as many hosts as ranks, not more")
        if count > virtual_hosts.MAX_HOSTS:
            raise LinkError(f"{count} hosts; at most {virtual_hosts.MAX_HOSTS} can be emulated")
        if "nccl" in backend:
            raise LinkError(
                'emulated links are for ranks on the CPU, NCCL has wires of its own: choose device="cpu" '
                "(--device cpu), or no link (--link none)"
            )

    def rehearse(self, world_size: int) -> None:
        """Launch so many hosts once, to see whether they work and whether the processor keeps their links busy.

        Raises LinkError if not, with the bandwidth that it can. The caller of a launch does this; once in a process for
        each number of hosts.
        """
        self.check(world_size)
        capacity.rehearse(self, Link, self.host_count(world_size))

    def prepare(self, world_size: int, folder: str | Path | None = None) -> None:
        """In the launch's agent, before the ranks are forked: build the hosts, or the switch of the wire.

        Ranks that are not forked find their part of it in `folder`.
        """
        hosts = [self.host_of(rank, world_size) for rank in range(world_size)]
        self.network = self.kind(hosts, self.bandwidth, self.latency, folder)

    def enter(self, rank: int) -> None:
        """In a rank, before it makes any socket: move to its host, or put the throttle on the wire."""
        self.network.enter(rank)

    def master_address(self) -> str:
        """Where the agent's rendezvous store can be reached from the ranks."""
        return self.kind.master_address

    def describe(self) -> dict:
        """Ready for JSON: mode, bandwidth (bits per second), latency (seconds), hosts, whether torch feels it."""
        return {
            "mode": self.mode,
            "bandwidth_bits_s": self.bandwidth,
            "latency_s": self.latency,
            "hosts": self.hosts,
            "carries_torch": self.carries_torch,
        }


def parse_bandwidth(text: Any) -> float:
    """Bits per second of "200Mbit", "1Gbit" and the like; LinkError for what does not parse, is 0 or less."""
    value = parsed(units.bits_per_second, text)
    if value < SLOWEST or not math.isfinite(value):
        raise LinkError(f'the bandwidth "{text}" is out of range; choose 1Mbit or more')
    return value


def parsed(parse: Callable, text: Any) -> float:
    """What `parse` makes of `text`; a LinkError in place of its ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise LinkError(str(error)) from None
