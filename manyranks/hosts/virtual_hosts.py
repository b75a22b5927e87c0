"""Virtual hosts: Linux network namespaces, joined by a switch with cables of a chosen bandwidth.

            host 0               host 1               the agent's namespace
            eth0 10.77.0.1       eth0 10.77.0.2       bridge 10.77.255.254
              |  token bucket      |                    (the switch; the rendezvous store listens
                                                        here)
              +---- cable 0 -------|----- token bucket --- port0
                                   +----- token bucket --- port1

Both ends of every cable have a token-bucket filter, so each direction carries the bandwidth and no
more. Real TCP runs over it: gloo, torch's own DDP and torchrun need no change. The namespaces have
no name and no file: only processes and open descriptors hold them, so the kernel removes them when
the last process ends, however it ends. Root unshares them directly; anyone else first becomes root
in a user namespace of their own.

`forbidden_by` says what forbids virtual hosts on this machine. It tries once to build them, in a
small process, as only a process without threads can; so this module imports nothing that takes
long. Sources: network_namespaces(7), user_namespaces(7), tc-tbf(8).
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from typing import Any

from .. import linux, own_code

SWITCH_ADDRESS = "10.77.255.254"
PREFIX = 16  # All addresses begin with 10.77: the first 16 bits are the network's.
FRAME = 1514  # bytes of an Ethernet frame with 1,500 bytes of payload
LARGEST_PIECE = 60_000  # bytes, a little less than the 64 KiB of the largest IP packet
# After a pause bytes pass at full speed for so long, as the kernel's timers allow no less.
BURST_SECONDS = 0.0008
# A port of the switch queues so many seconds of traffic before it drops packets.
QUEUE_SECONDS = 0.2
ATTEMPT_SECONDS = 60
ON_A_HOST = {"GLOO_SOCKET_IFNAME": "eth0"}  # Commands on a host get this variable.


def build(host_count: int, bits_per_second: float) -> list[int]:
    """Move this process into new namespaces and build the network; return a descriptor per host.

    The process must have one thread only. Raises OSError, or pyroute2's NetlinkError, where that is
    not allowed.
    """
    linux.unshare_as_anyone(linux.CLONE_NEWNET | linux.CLONE_NEWNS | linux.CLONE_NEWUTS)
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    hosts = []
    # The open descriptor keeps a network alive.
    for _ in range(host_count):
        linux.call("unshare", linux.CLONE_NEWNET)
        hosts.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
    linux.call("setns", home, 0)
    name_hosts(host_count)
    build_switch(hosts, bits_per_second)
    for number, host in enumerate(hosts):
        linux.call("setns", host, 0)
        plug_in(number, bits_per_second)
    linux.call("setns", home, 0)
    os.close(home)
    return hosts


def enter(hosts: Sequence[int], number: int) -> None:
    """Move this process into host `number` for good.

    `hosts` are the descriptors that `build` returned.
    """
    linux.call("setns", hosts[number], 0)
    for host in hosts:
        os.close(host)
    linux.call("unshare", linux.CLONE_NEWUTS)
    socket.sethostname(f"host{number}")
    os.environ.update(ON_A_HOST)


def address(number: int) -> str:
    """Return the IP address of host `number`."""
    return f"10.77.0.{number + 1}"


def name_hosts(host_count: int) -> None:
    """Put the hosts' names into an /etc/hosts that only these namespaces see.

    The file loses its own name at the end, and lives as long as the mount.
    """
    lines = ["127.0.0.1 localhost", f"{SWITCH_ADDRESS} switch"]
    lines += [f"{address(number)} host{number}" for number in range(host_count)]
    linux.mount("none", "/", linux.MS_REC | linux.MS_PRIVATE)
    with tempfile.NamedTemporaryFile("w", prefix="manyranks_hosts_") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.chmod(file.name, 0o644)
        linux.mount(file.name, "/etc/hosts", linux.MS_BIND)


def build_switch(hosts: Sequence[int], bits_per_second: float) -> None:
    """Make the bridge, and for every host a cable whose far end is that host's eth0."""
    from pyroute2 import IPRoute  # This import takes long, and works on Linux only.

    with IPRoute() as ip:
        ip.link("set", index=1, state="up")  # the loopback
        ip.link("add", ifname="switch", kind="bridge")
        [switch] = ip.link_lookup(ifname="switch")
        ip.link("set", index=switch, state="up")
        ip.addr("add", index=switch, address=SWITCH_ADDRESS, prefixlen=PREFIX)
        for number, host in enumerate(hosts):
            ip.link(
                "add",
                ifname=f"port{number}",
                kind="veth",
                peer={"ifname": "eth0", "net_ns_fd": host},
            )
            [port] = ip.link_lookup(ifname=f"port{number}")
            ip.link("set", index=port, master=switch, state="up")
            limit(ip, port, bits_per_second)


def plug_in(number: int, bits_per_second: float) -> None:
    """Configure a host from inside: loopback, address, and the token bucket of its cable.

    TCP is told to use Reno on this route: BBR, the default of some kernels, probes for bandwidth by
    slowing down now and then, which made single measurements up to 40 % longer.
    """
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("set", index=1, state="up")  # the loopback
        [eth0] = ip.link_lookup(ifname="eth0")
        ip.link("set", index=eth0, state="up", gso_max_size=segment(bits_per_second))
        ip.addr("add", index=eth0, address=address(number), prefixlen=PREFIX)
        ip.route(
            "replace",
            dst=f"10.77.0.0/{PREFIX}",
            oif=eth0,
            scope=253,  # It is reached without a router.
            prefsrc=address(number),
            proto=2,  # The route looks as if the kernel had made it.
            metrics={"cc_algo": "reno"},
        )
        limit(ip, eth0, bits_per_second)


def limit(ip: Any, index: int, bits_per_second: float) -> None:
    """Attach a token-bucket filter to an interface."""
    rate = bits_per_second / 8
    # The bucket has room for a piece with its headers, and a slow link's queue for some buckets.
    burst = int(1.25 * segment(bits_per_second)) + FRAME
    queue = int(rate * QUEUE_SECONDS) + 4 * burst
    ip.tc("add", "tbf", index, handle="1:", rate=int(rate), burst=burst, limit=queue)


def segment(bits_per_second: float) -> int:
    """Return the bytes that TCP hands over in one piece, which the token bucket lets pass whole."""
    in_a_burst = bits_per_second / 8 * BURST_SECONDS
    return int(min(max(in_a_burst, 2 * FRAME), LARGEST_PIECE))


@cache
def forbidden_by() -> str | None:
    """Return one line about what forbids virtual hosts here, or None, from a single attempt."""
    if sys.platform != "linux":
        return "virtual hosts need Linux"
    try:
        subprocess.run(
            [sys.executable, "-m", __name__],
            cwd=own_code.LIBRARY.found_in,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ATTEMPT_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        # A traceback's last line has the error's type, and then what it says.
        reason = error.stderr.decode().rpartition("Error: ")[2].strip()
        return explain(reason or error)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the attempt to build them failed ({error})"
    return None


def explain(error: object) -> str:
    """Return one line about the error that virtual hosts met."""
    return (
        "this system forbids namespaces, as containers and AppArmor often do, or cannot build them"
        f" ({error})"
    )


# `forbidden_by` runs this.
if __name__ == "__main__":
    build(host_count=2, bits_per_second=1e9)
