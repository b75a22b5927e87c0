"""Calls of Linux that Python's own library lacks: ends of processes, namespaces, limits.

At its top this module imports the standard library only, so that the preloaded server and other
small processes can load it. The functions about processes do nothing on other systems; those about
namespaces raise OSError there. Sources: prctl(2), namespaces(7), user_namespaces(7), netdevice(7),
proc_net_tcp(5), cgroups(7).
"""

import ctypes
import errno
import math
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# These names and numbers are those of the kernel's headers.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
MADV_COLLAPSE = 25
# /proc/net/tcp writes the state of a socket that takes connections in this way.
LISTENING = "0A"
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
PROCESS_LIMIT = (
    "this user may have no more processes and threads, see `ulimit -u`: launch fewer ranks"
)


@cache
def libc() -> Any:
    """Return the C library.

    Python has no prctl and mount of its own, and has unshare and setns only since 3.12.
    """
    return ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library; raises OSError if it fails."""
    if getattr(libc(), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    """Call prctl(2) on Linux; a refusal, as in a sandbox, is ignored."""
    if sys.platform == "linux":
        libc().prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends.

    If the process `parent` is not the parent any more, exit at once. Linux forgets this when a
    process changes its credentials, as by entering a user namespace: call this again then.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Have descendants become children of this process when their own parents end."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def use_huge_pages() -> None:
    """Move this process's memory into pages of 2 MiB, of which a fork copies fewer.

    Linux before 6.1 refuses, which is ignored. Source: madvise(2).
    """
    for line in read(Path("/proc/self/maps")).splitlines():
        area, rights, *_ = line.split()
        if rights == "rw-p":
            first, end = (int(address, 16) for address in area.split("-"))
            libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_COLLAPSE)


def unshare_as_anyone(flags: int) -> None:
    """Move this process into new namespaces.

    Users without that right first enter a user namespace, where they have it. The process keeps its
    user and group there. It must have one thread only. Raises OSError where that is forbidden.
    """
    try:
        call("unshare", flags)
    except PermissionError:
        user = os.geteuid()
        group = os.getegid()
        call("unshare", flags | CLONE_NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path("/proc/self", name).write_text(text)


def mount(source: str, target: str, flags: int) -> None:
    """Mount the file or folder `source` at `target`, as mount(2) says."""
    call("mount", source.encode(), target.encode(), None, ctypes.c_ulong(flags), None)


def raise_loopback() -> None:
    """Bring up the loopback of a new network namespace, where it is down at first."""
    import fcntl  # Windows does not have this module.

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        # This is a struct ifreq: the card's name, its flags, and a rest that is not read.
        request = struct.pack("16sH14x", b"lo", IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)


def enter_own_network() -> None:
    """Move this process into a network in which there is nothing but a loopback.

    The process must have one thread only. Raises OSError where that is forbidden, and leaves the
    process as it was.

    A child tries first: some systems let an ordinary user into a user namespace, and then forbid
    everything in it (AppArmor in Ubuntu 24.04).
    """
    try:
        call("unshare", CLONE_NEWNET)
    except PermissionError:
        child = os.fork()
        if child == 0:
            code = errno.EPERM
            with suppress(OSError):
                unshare_as_anyone(CLONE_NEWNET)
                code = 0
            os._exit(code)
        _, status = os.waitpid(child, 0)
        if code := os.waitstatus_to_exitcode(status):
            raise OSError(code, os.strerror(code)) from None
        unshare_as_anyone(CLONE_NEWNET)
    raise_loopback()


def alone_in_network() -> bool:
    """Return whether this process's network has a loopback and no other card."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def loopback() -> str:
    """Return the address at which this machine reaches itself: ::1 where there is IPv6 only."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


def listen_on(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at an address; port 0 is any free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def users_connected() -> set[int]:
    """Return the numbers of other users who are connected to a socket of this process.

    Only listening sockets count; -1 stands for a far end that this machine does not know.
    """
    own_inodes = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # Another thread may just have closed it.
            own_inodes.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    listening = set()
    connections = []
    user_of = {}
    for table in ("tcp", "tcp6"):
        for line in read(Path("/proc/self/net", table)).splitlines()[1:]:
            # Not read are the number of the line, two queues and a timer, retries, and a timeout.
            _, near, far, state, _, _, _, user, _, inode, *_ = line.split()
            if inode != "0":  # A socket without an inode belongs to no process any more.
                user_of[near, far] = int(user)
            if inode in own_inodes and state == LISTENING:
                listening.add(near)
            elif inode in own_inodes:
                connections.append((near, far))
    # The table also has the sockets at the far ends, if these are on this machine.
    far_ends = [(far, near) for near, far in connections if near in listening]
    return {user_of.get(ends, -1) for ends in far_ends} - {os.getuid()}


def usable_cores() -> int:
    """Return how many cores this process may keep busy, by its affinity and its containers."""
    return max(1, math.floor(processor_share()))


def processor_share() -> float:
    """Return the usable cores, which may be a fraction: a container may be given half a core."""
    cores: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for folder in cgroup_folders("cpu"):
        # In each period of so many microseconds the group gets its quota; "max" or -1: no limit.
        quota, _, period = read(folder / "cpu.max").partition(" ")
        if not quota:  # Version 1 has a file for each.
            quota = read(folder / "cpu.cfs_quota_us")
            period = read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


def free_memory() -> int:
    """Return the bytes that new processes may use: what is free, or less if a container says so."""
    free = available_memory()
    for folder in cgroup_folders("memory"):
        limit = read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")
        used = read(folder / "memory.current") or read(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit():
            details = dict(line.split() for line in read(folder / "memory.stat").splitlines())
            # The kernel gives up cached files first; version 1 has their total under another name.
            reclaimable = details.get("total_inactive_file") or details.get("inactive_file", "0")
            free = min(free, int(limit) - int(used) + int(reclaimable))
    return max(0, free)


def available_memory() -> int:
    """Return the bytes that the machine has free, or would free at once for a process that asks."""
    try:
        import psutil  # Most processes that load this module do not need psutil.

        return psutil.virtual_memory().available
    except (ImportError, OSError):
        # A borrowed machine may not have the package, and a container no /proc.
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's control group and of all groups around it.

    Each group may set a limit. `controller` is "memory" or "cpu". In version 1 every controller has
    a tree of its own, in version 2 all share one.
    """
    folders = []
    for line in read(OWN_CGROUPS).splitlines():
        number, controllers, path = line.split(":", 2)
        is_version_2 = number == "0"
        if is_version_2 or controller in controllers.split(","):
            top = CGROUPS
            if not is_version_2:
                top /= controller
            own = top / path.lstrip("/")
            folders += [
                folder
                for folder in (own, *own.parents)
                if folder.is_relative_to(top) and folder.is_dir()
            ]
    return folders


def read(path: Path) -> str:
    """Return the text of a file of the kernel, or "" if there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
