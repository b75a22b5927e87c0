"""The two ways of emulating links, which have four parts in common.

obstacle(latency)       returns what prevents this mode on this machine, in one line, or None
Mode(hosts, …)          builds the network in the launch's agent, before the ranks start; `hosts`
                        has the number of each rank's host
master_address          is the address at which ranks reach the agent's rendezvous store
enter(rank)             moves a rank onto the network, before the rank makes any socket

Each mode also has a `title` for messages; MODES has the name by which a Link chooses it.
"""

import math

from .. import linux
from ..clocks import Table
from ..errors import EmulationError
from ..hosts import virtual_hosts
from ..launching.setting import start_method

USE_VIRTUAL = 'use mode="virtual"'


class VirtualHosts:
    """Every host is a network namespace, whose cable carries real TCP of any program."""

    title = "virtual hosts"
    master_address = virtual_hosts.SWITCH_ADDRESS
    table = None

    def __init__(self, hosts: list[int], bits_per_second: float, latency: float):
        self.hosts = hosts
        try:
            self.namespaces = virtual_hosts.build(max(hosts) + 1, bits_per_second)
        except Exception as error:
            reason = virtual_hosts.explain(error)
            raise EmulationError(
                f"virtual hosts could not be built: {reason}; {USE_VIRTUAL}"
            ) from error

    def enter(self, rank: int) -> None:
        """Move this rank to its host."""
        virtual_hosts.enter(self.namespaces, self.hosts[rank])

    @staticmethod
    def obstacle(latency: float) -> str | None:
        """Return what prevents virtual hosts with this latency, or None."""
        if start_method() == "spawn":
            return "ranks are not forked here, and a new process cannot enter them"
        reason = virtual_hosts.forbidden_by()
        if reason is None and latency:
            return "they have no latency; virtual time has"
        return reason


class VirtualTime:
    """A message is booked on a model of its hosts' links, and nobody waits for it in real time."""

    title = "virtual time"

    def __init__(
        self, hosts: list[int], bits_per_second: float, latency: float, inside: float = math.inf
    ):
        self.table = Table(hosts, bits_per_second, latency, inside)
        self.master_address = linux.loopback()

    def enter(self, rank: int) -> None:
        """Leave this rank where it is, as virtual time needs no place of its own."""

    @staticmethod
    def obstacle(latency: float) -> str | None:
        """Return None, as virtual time works anywhere."""
        return None


Mode = type[VirtualHosts] | type[VirtualTime]
# The default comes first.
MODES: dict[str, Mode] = {"virtual": VirtualTime, "hosts": VirtualHosts}


def choose(name: str, latency: float) -> Mode:
    """Return the mode `name`; raises EmulationError if it is unknown or forbidden here."""
    if name not in MODES:
        raise EmulationError(f"unknown mode {name!r}; choose {' or '.join(MODES)}")
    mode = MODES[name]
    if obstacle := mode.obstacle(latency):
        raise EmulationError(f"{mode.title} cannot be had here: {obstacle}; {USE_VIRTUAL}")
    return mode


def available() -> dict[str, str | None]:
    """Return, for each mode, None where this machine allows it, or one line about why not."""
    return {name: mode.obstacle(0.0) for name, mode in MODES.items()}
