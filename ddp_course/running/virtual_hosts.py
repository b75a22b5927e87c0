"""Virtual hosts: Linux network namespaces, joined by a switch with cables of a chosen bandwidth.

            host 0               host 1               the agent's namespace
            eth0 10.77.0.1       eth0 10.77.0.2       bridge 10.77.255.254
              |  token bucket      |                    (the switch; the rendezvous store listens here)
              +---- cable 0 -------|----- token bucket --- port0
                                   +----- token bucket --- port1

Both ends of every cable have a token-bucket filter, so each direction carries the bandwidth and no more. Real
TCP runs over it: gloo, torch's own DDP and torchrun need no change. The namespaces have no name and no file:
only processes and open descriptors hold them, so the kernel removes them when the last process ends, however
it ends. Root unshares them directly; anyone else first becomes root in a user namespace of their own.

`allowed` says whether this machine permits that. It is tried once, in a small process, because namespaces want one
without threads; so this module imports nothing that takes long.
Sources: network_namespaces(7), user_namespaces(7), tc-tbf(8).
"""

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from . import linux

SWITCH_ADDRESS, PREFIX = "10.77.255.254", 16
MAX_HOSTS = 250
HEADER = 1514  # an Ethernet frame with 1,500 bytes of payload
BURST_SECONDS = 0.0008  # what may pass at full speed after a pause: as little as the timers allow
QUEUE_SECONDS = 0.2  # how much a switch port holds back before it drops
TIMEOUT_SECONDS, ATTEMPT_SECONDS, TRIAL_LATENCY = 10, 60, 0.02


def build(host_count: int, bits_per_second: float, latency_seconds: float = 0.0) -> list[int]:
    """Move this process into new namespaces and build the network; return one descriptor for each host.

    The process must have one thread only. Raises OSError, or pyroute2's NetlinkError, where it is not allowed.
    """
    linux.unshare_as_anyone(linux.CLONE_NEWNET | linux.CLONE_NEWNS | linux.CLONE_NEWUTS)
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    hosts = []
    for _ in range(host_count):  # an open descriptor keeps a network alive
        linux.unshare(linux.CLONE_NEWNET)
        hosts.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
    linux.setns(home)
    name_hosts(host_count)
    build_switch(hosts, bits_per_second, latency_seconds)
    for number, host in enumerate(hosts):
        linux.setns(host)
        plug_in(number, bits_per_second)
    linux.setns(home)
    os.close(home)
    return hosts


def enter(hosts: Sequence[int], number: int) -> None:
    """Move this process into host `number` of the descriptors that `build` returned, for good."""
    linux.setns(hosts[number])
    for host in hosts:
        os.close(host)
    linux.unshare(linux.CLONE_NEWUTS)
    socket.sethostname(f"host{number}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def address(number: int) -> str:
    """The IP address of host `number`."""
    return f"10.77.0.{number + 1}"


def name_hosts(host_count: int) -> None:
    """Put the hosts' names into an /etc/hosts that only these namespaces see, and that is on no disk."""
    lines = ["127.0.0.1 localhost", f"{SWITCH_ADDRESS} switch"]
    lines += [f"{address(number)} host{number}" for number in range(host_count)]
    folder = tempfile.gettempdir()
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", folder, "tmpfs", 0)
    names = os.path.join(folder, "hosts")
    with open(names, "w") as file:
        file.write("\n".join(lines) + "\n")
    linux.mount(names, "/etc/hosts", None, linux.MS_BIND)
    linux.unmount(folder)


def build_switch(hosts: Sequence[int], bits_per_second: float, latency_seconds: float) -> None:
    """Make the bridge, and for every host a cable whose far end is that host's eth0."""
    with netlink() as ip:
        ip.link("set", index=1, state="up")
        ip.link("add", ifname="switch", kind="bridge")
        switch = index_of(ip, "switch")
        ip.link("set", index=switch, state="up")
        ip.addr("add", index=switch, address=SWITCH_ADDRESS, prefixlen=PREFIX)
        for number, host in enumerate(hosts):
            ip.link("add", ifname=f"port{number}", kind="veth", peer={"ifname": "eth0", "net_ns_fd": host})
            port = index_of(ip, f"port{number}")
            ip.link("set", index=port, master=switch, state="up")
            limit(ip, port, bits_per_second)
            if latency_seconds:  # netem holds every packet back, before its turn in the token bucket
                ip.tc("add", "netem", port, parent="1:1", handle="10:", delay=int(latency_seconds * 1e6), limit=100_000)


def plug_in(number: int, bits_per_second: float) -> None:
    """Configure a host from inside: loopback, address, and the token bucket of what it sends.

    TCP is told to use Reno on this route: BBR, the default of some kernels, probes for bandwidth by slowing down
    now and then, which made single measurements up to 40 % longer.
    """
    with netlink() as ip:
        ip.link("set", index=1, state="up")
        eth0 = index_of(ip, "eth0")
        ip.link("set", index=eth0, state="up", gso_max_size=segment(bits_per_second))
        ip.addr("add", index=eth0, address=address(number), prefixlen=PREFIX)
        network = {"dst": f"10.77.0.0/{PREFIX}", "oif": eth0, "scope": 253, "prefsrc": address(number), "proto": 2}
        ip.route("replace", **network, metrics={"cc_algo": "reno"})
        limit(ip, eth0, bits_per_second)


def limit(ip: Any, index: int, bits_per_second: float) -> None:
    """Attach a token-bucket filter to an interface."""
    rate = bits_per_second / 8
    burst = int(1.25 * segment(bits_per_second)) + HEADER
    ip.tc("add", "tbf", index, handle="1:", rate=int(rate), burst=burst, limit=int(rate * QUEUE_SECONDS) + 4 * burst)


def segment(bits_per_second: float) -> int:
    """Bytes that TCP hands over in one piece: the token bucket lets a piece pass whole, and then waits."""
    return int(min(max(bits_per_second / 8 * BURST_SECONDS, 2 * HEADER), 60_000))


def netlink() -> Any:
    """A connection to the kernel's network configuration, in the namespace that this process is in."""
    from pyroute2 import IPRoute

    return IPRoute()


def index_of(ip: Any, name: str) -> int:
    """The number of the interface called `name`."""
    return ip.link_lookup(ifname=name)[0]


@cache
def allowed() -> dict[str, Any]:
    """The result of `attempt`, made once: {"reason": None or one line about what forbids hosts, "latency": bool}."""
    if sys.platform != "linux":
        return {"reason": "virtual hosts need Linux", "latency": False}
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command, environ = [sys.executable, "-m", __name__], {**os.environ, "PYTHONPATH": path}
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": ATTEMPT_SECONDS}
    try:
        return json.loads(subprocess.run(command, env=environ, check=False, **quiet).stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"reason": f"the attempt to build them failed ({error})", "latency": False}


def attempt() -> dict[str, Any]:
    """Build two hosts and send a byte from one to the other; returns {"reason": None or text, "latency": bool}."""
    reason = ""
    for latency in (TRIAL_LATENCY, 0.0):  # the kernel may have no netem
        try:
            seconds = crossing(latency)
            return {"reason": None, "latency": 0 < 3 * latency <= seconds}
        except Exception as error:  # a person reads the reason, whatever it is
            reason = explain(error)
    return {"reason": reason, "latency": False}


def crossing(latency_seconds: float) -> float:
    """Seconds until a byte from host 1 of a new network is at host 0: three times the latency, with the handshake."""
    hosts = build(2, 1e9, latency_seconds)
    switch = os.open("/proc/self/ns/net", os.O_RDONLY)  # keeps it alive while this process is in a host
    linux.setns(hosts[0])
    listener = socket.create_server((address(0), 0))
    listener.settimeout(TIMEOUT_SECONDS)
    linux.setns(hosts[1])
    start = time.monotonic()
    with socket.create_connection(listener.getsockname(), TIMEOUT_SECONDS) as connection:
        connection.sendall(b"!")
        arrived, _ = listener.accept()
        arrived.settimeout(TIMEOUT_SECONDS)
        if arrived.recv(1) != b"!":
            raise OSError("virtual hosts do not reach each other")
    os.close(switch)
    return time.monotonic() - start


def explain(error: BaseException) -> str:
    """One line about what stood in the way."""
    if isinstance(error, ImportError):
        return "the package pyroute2 is missing"
    text = str(error) or type(error).__name__
    if isinstance(error, PermissionError) or "not permitted" in text or "denied" in text:
        return f"this system forbids namespaces ({text}), as containers and AppArmor often do"
    if getattr(error, "errno", None) == errno.ENOSPC:
        return f"this system's limit on namespaces is reached ({text})"
    return f"this kernel cannot build them ({text})"


if __name__ == "__main__":
    json.dump(attempt(), sys.stdout)
