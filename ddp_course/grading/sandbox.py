"""Run a function in processes that cannot outlive it, and cannot take more than their share.

    grader ── warden ── first ── whatever it starts

Where Linux allows it, `first` is process 1 of a process namespace of its own: when it ends, by itself or by the
warden's hand, the kernel ends every process in it, however it was started. In a mount namespace everything but the
work folder is read-only. Elsewhere the warden adopts orphans and kills its descendants until none is left.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWIPC = 0x00020000, 0x10000000, 0x20000000, 0x08000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
AT_RECURSIVE, MOUNT_SETATTR, MOUNT_ATTR_RDONLY = 0x8000, 442, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
CAPABILITY_VERSION_3 = 0x20080522
LOOK_EVERY_SECONDS = 0.05


@dataclass
class Limits:
    """What one submission may take: seconds of wall time, bytes of memory in all, processes, bytes of a file."""

    seconds: float = 120.0
    memory: int = 8 << 30
    address_space: int = 24 << 30
    processes: int = 96
    file_size: int = 256 << 20


def confine(function, folder, limits):
    """Fork twice and call `function` in the innermost process; return how it went.

    Called in a process of its own with one thread (the warden). "ok", or "time", "processes" or "memory" for the limit
    that was exceeded, or "ended" when the function did not return.
    """
    os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    go_first()
    isolated = separate()
    first = os.fork()
    if first == 0:
        be_first(function, folder, limits, isolated)
    try:
        return watch(first, limits)
    finally:
        end_all()


def go_first():
    """Let the warden run before all others: the kernel sets root no limit on processes, so a fork bomb is a race.

    Its children do not inherit this. Ordinary users may not ask for it, and need not: RLIMIT_NPROC holds for them.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (AttributeError, OSError):
        return


def be_first(function, folder, limits, isolated):
    """In the innermost process: limits, a read-only world, the function. Never returns."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if isolated:
            protect_files(folder)
            drop_privileges()
        set_limits(limits, isolated)
        os.chdir(folder)
        function()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def watch(first, limits):
    """Wait for the first process; stop it if it and its descendants take more than their share."""
    deadline = time.monotonic() + limits.seconds
    gone = os.pidfd_open(first) if hasattr(os, "pidfd_open") else None
    while True:
        if gone is not None:
            select.select([gone], [], [], LOOK_EVERY_SECONDS)
        else:
            time.sleep(LOOK_EVERY_SECONDS)
        pid, status = os.waitpid(first, os.WNOHANG)
        if pid:
            return "ok" if status == 0 else "ended"
        excess = "time" if time.monotonic() > deadline else over(limits)
        if excess:
            os.kill(first, signal.SIGKILL)
            return excess


def over(limits):
    """The limit that this process's descendants exceed together, or None."""
    descendants = psutil.Process().children(recursive=True)
    if len(descendants) > limits.processes:
        return "processes"
    return "memory" if sum(map(own_memory, descendants)) > limits.memory else None


def own_memory(process):
    """Bytes that a process does not share with others, to a good approximation; 0 if it has gone."""
    try:
        if sys.platform != "linux":
            return process.memory_info().rss
        fields = Path(f"/proc/{process.pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * resource.getpagesize()
    except (psutil.Error, OSError):
        return 0


def end_all():
    """Kill every descendant, again and again until none is left; orphans become ours, so none can hide."""
    while True:
        for process in psutil.Process().children(recursive=True):
            try:
                process.kill()
            except psutil.Error:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)
        except ChildProcessError:
            return


def separate():
    """Enter new user and process namespaces; False where that is not allowed."""
    if sys.platform != "linux":
        return False
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWIPC):
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def protect_files(folder):
    """Make the whole file system read-only for this namespace, but `folder`, devices and a fresh /dev/shm."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = str(folder).encode()
    libc.unshare(CLONE_NEWNS)  # here, not in the warden, which keeps the /proc that it knows
    libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
    libc.mount(b"proc", b"/proc", b"proc", 0, None)  # refused inside most containers: then the old one stays
    steps = [
        libc.mount(here, here, None, MS_BIND, None),
        set_read_only(libc, b"/", True),
        set_read_only(libc, here, False),
        libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, b"size=256m") if os.path.isdir("/dev/shm") else 0,
    ]
    return not any(steps)


def drop_privileges():
    """Give up, for this process and all that it starts, the rights over the new namespaces; hide from debuggers."""
    for capability in range(64):
        prctl(PR_CAPBSET_DROP, capability)
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(header, nothing)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)


def set_read_only(libc, path, read_only):
    """mount_setattr(2): change the read-only flag of a mount and of all below it."""
    attributes = (ctypes.c_uint64 * 4)(*((MOUNT_ATTR_RDONLY, 0) if read_only else (0, MOUNT_ATTR_RDONLY)), 0, 0)
    return libc.syscall(MOUNT_SETATTR, -100, path, AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))


def set_limits(limits, isolated):
    """The kernel's own limits; the count of processes only where it counts this submission's alone."""
    for which, value in (
        (resource.RLIMIT_AS, limits.address_space),
        (resource.RLIMIT_FSIZE, limits.file_size),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, 8 * limits.processes)] if isolated else []),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if sys.platform == "linux" or which != resource.RLIMIT_AS:
            resource.setrlimit(which, (value, value))


def prctl(option, value):
    """Call Linux's prctl(2); other systems do without."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
