"""Run a function in processes that cannot outlive it, and cannot take more than their share.

    grader ── warden ── first ── whatever it starts

Where Linux allows it, `first` is process 1 of a process namespace of its own: when it ends, by itself or by the
warden's hand, the kernel ends every process in it, however it was started. In a mount namespace everything but the
work folder is read-only. Where namespaces are forbidden, the warden adopts orphans and kills its descendants until
none is left, and Landlock, which no system forbids that has it, keeps writes and signals inside.
Sources: user_namespaces(7), pid_namespaces(7), mount_setattr(2), landlock(7).
"""

import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from .family import Family

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWIPC = 0x00020000, 0x10000000, 0x20000000, 0x08000000
CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8914, 1
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
AT_RECURSIVE, MOUNT_SETATTR, MOUNT_ATTR_RDONLY = 0x8000, 442, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
CAPABILITY_VERSION_3 = 0x20080522
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, the same on all processors
WRITE_FILE, REMOVE_AND_MAKE, REFER, TRUNCATE = 1 << 1, 0x1FF0, 1 << 13, 1 << 14
READ_FILE, READ_DIR = 1 << 2, 1 << 3
BIND_AND_CONNECT = 0b11  # TCP
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNAL = 1 << 0, 1 << 1
LOOK_EVERY_SECONDS = 0.05
PACKAGE = Path(__file__).resolve().parents[1]
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc", "/opt", "/proc", "/sys", "/dev")
WORK_FOLDERS = ("home", "tmpdir", "ipythondir", "mplconfigdir", "runtime")


@dataclass
class Limits:
    """What one submission may take: seconds of wall time, bytes of memory in all, processes, bytes of a file."""

    seconds: float = 120.0
    memory: int = 3 << 30
    address_space: int = 24 << 30
    processes: int = 96
    file_size: int = 256 << 20


def confine(
    function: Callable[[], object], folder: str, limits: Limits, visible: Sequence[str] | None = None, drop: bool = True
) -> str:
    """Fork twice and call `function` in the innermost process; return how it went.

    Called in a process of its own with one thread (the warden). "ok", or "time", "processes" or "memory" for the limit
    that was exceeded, or "ended" when the function did not return. The function sees the paths `visible` of the file
    system and its `folder`, or everything; unless it is to `drop` its rights, it can shut others in.
    """
    os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    go_first()
    isolated = namespaces_allowed() and separate()
    first = os.fork()
    if first == 0:
        be_first(function, folder, limits, isolated, visible, drop)
    try:
        return watch(first, limits)
    finally:
        end_all()


def go_first() -> None:
    """Let the warden run before all others: the kernel sets root no limit on processes, so a fork bomb is a race.

    Its children do not inherit this. Ordinary users may not ask for it, and need not: RLIMIT_NPROC holds for them.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (AttributeError, OSError):
        return


def be_first(
    function: Callable[[], object],
    folder: str,
    limits: Limits,
    isolated: bool,
    visible: Sequence[str] | None,
    drop: bool,
) -> None:
    """In the innermost process: limits, a read-only world, the function. Never returns."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        set_limits(limits, isolated)
        if isolated:
            protect_files(folder)
            if visible:
                see_only(visible, folder, keep=True)
        else:
            fence(folder, visible)
        if drop:
            drop_privileges()
        else:
            prctl(PR_SET_DUMPABLE, 0)  # those that it shuts in may not look into it
        os.chdir(folder)
        function()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def watch(first: int, limits: Limits) -> str:
    """Wait for the first process; stop it if it and its descendants take more than their share."""
    deadline, family = time.monotonic() + limits.seconds, Family()
    gone = os.pidfd_open(first) if hasattr(os, "pidfd_open") else None
    while True:
        if gone is not None:
            select.select([gone], [], [], LOOK_EVERY_SECONDS)
        else:
            time.sleep(LOOK_EVERY_SECONDS)
        pid, status = os.waitpid(first, os.WNOHANG)
        if pid:
            return "ok" if status == 0 else "ended"
        excess = "time" if time.monotonic() > deadline else over(limits, family)
        if excess:
            os.kill(first, signal.SIGKILL)
            return excess


def over(limits: Limits, family: Family) -> str | None:
    """The limit that this process's descendants exceed together, or None."""
    descendants = family.look()
    if len(descendants) > limits.processes:
        return "processes"
    return "memory" if sum(map(own_memory, descendants)) > limits.memory else None


def own_memory(pid: int) -> int:
    """Bytes that a process does not share with others, to a good approximation; 0 if it has gone."""
    try:
        if sys.platform != "linux":
            return psutil.Process(pid).memory_info().rss
        fields = Path(f"/proc/{pid}/statm").read_bytes().split()
        return (int(fields[1]) - int(fields[2])) * resource.getpagesize()
    except (psutil.Error, OSError):
        return 0


def end_all() -> None:
    """Kill every descendant, again and again until none is left; orphans become ours, so none can hide."""
    family = Family()
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in family.look():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


@cache
def namespaces_allowed() -> bool:
    """Whether sandboxes can have namespaces of their own: tried out, since some systems let you in but bind your hands.

    Forks; call it before there are threads.
    """
    if sys.platform != "linux":
        return False
    with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
        trial = os.fork()
        if trial == 0:
            try:
                os._exit(try_namespaces(folder))
            finally:
                os._exit(1)
        return os.waitpid(trial, 0)[1] == 0


def try_namespaces(folder: str) -> int:
    """In a process of its own: enter namespaces and protect files as for a submission; 0 if all of it worked."""
    if not separate():
        return 1
    first = os.fork()
    if first == 0:
        os._exit(0 if protect_files(folder) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def separate() -> bool:
    """Enter new namespaces, with a network that has nobody else in it; False where that is not allowed."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET):
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    return True


def protect_files(folder: str) -> bool:
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


def shut_in(folder: str) -> None:
    """From here on, this process sees Python, its libraries and an empty `folder`; nothing of the course. No rights.

    It has no network either: what it says to other ranks, it says to their switch. Where no namespaces are to be had,
    Landlock denies the same; where there is neither, all is open.
    """
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET) == 0:
            see_only(libraries(), folder)
        else:
            fence(folder, without(libraries(), PACKAGE), alone=True)
    drop_privileges()
    os.chdir(folder)


@cache
def libraries() -> list[str]:
    """The paths that Python and its libraries need; the course itself may lie below one of them."""
    import torch  # here: the limits alone do without

    prefixes = {sys.prefix, sys.base_prefix, str(Path(torch.__file__).parents[1]), *SYSTEM}
    prefixes |= {path for path in sys.path if os.path.isabs(path) and not Path(path, PACKAGE.name, "grading").is_dir()}
    return sorted(path for path in prefixes if os.path.exists(path) and not beneath(path, prefixes - {path}))


def beneath(path: str, others: Iterable[str]) -> bool:
    """Whether a path lies in one of the others."""
    return any(Path(path).is_relative_to(other) for other in others)


def without(paths: Iterable[str], hidden: Path) -> list[str]:
    """Paths that cover what `paths` cover, but for one: its neighbours are named one by one."""
    covering = []
    for path in map(Path, paths):
        if path == hidden:
            continue
        if hidden.is_relative_to(path):
            covering += without(map(str, path.iterdir()), hidden)
        else:
            covering.append(str(path))
    return covering


def see_only(visible: Sequence[str], folder: str, keep: bool = False) -> None:
    """Make `visible` and `folder`, as it is (`keep`) or empty, the whole file system; needs a mount namespace.

    The course's own package disappears too, unless it is named itself.
    """
    libc, folder = ctypes.CDLL(None, use_errno=True), str(folder)
    before = os.open(folder, os.O_PATH)
    libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
    refused = libc.mount(b"view", folder.encode(), b"tmpfs", 0, b"size=256m,mode=755")
    for path in visible:
        refused |= put_in_place(libc, path, folder + path)
    if str(PACKAGE) not in visible and os.path.isdir(folder + str(PACKAGE)):
        refused |= libc.mount(b"hidden", (folder + str(PACKAGE)).encode(), b"tmpfs", 1, b"size=4k")  # read-only
    os.makedirs(folder + folder, exist_ok=True)
    if keep:
        refused |= libc.mount(f"/proc/self/fd/{before}".encode(), (folder + folder).encode(), None, MS_BIND, None)
    if os.path.isdir(folder + "/dev/shm"):
        refused |= libc.mount(b"shm", (folder + "/dev/shm").encode(), b"tmpfs", 0, b"size=256m")
    os.close(before)
    if refused:
        raise OSError("the file system could not be made smaller")
    os.chroot(folder)
    for name in WORK_FOLDERS:
        os.makedirs(f"{folder}/{name}", exist_ok=True)


def put_in_place(libc: Any, path: str, target: str) -> int:
    """Bind a path to a place in the new file system; a link stays a link."""
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return 0
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    return libc.mount(path.encode(), target.encode(), None, MS_BIND | MS_REC, None)


def landlock_version() -> int:
    """The version of Landlock that this kernel speaks; 0 if none."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1))


def fence(folder: str, visible: Sequence[str] | None = None, alone: bool = False) -> bool:
    """With Landlock: from now on write only below `folder` and /dev, and (version 6) signal only what is inside.

    Read only what is below `visible` and `folder`, if given. If `alone`, also use no TCP (version 4), no shared memory,
    and no abstract sockets but one's own (6). False where the kernel has no Landlock: then the account's rights are
    all that protects files.
    """
    version = landlock_version()
    if not version:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    writing = WRITE_FILE | REMOVE_AND_MAKE | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    reading = READ_FILE | READ_DIR if visible else 0
    network = BIND_AND_CONNECT if alone and version >= 4 else 0
    scopes = SCOPE_SIGNAL | (SCOPE_ABSTRACT_SOCKETS if alone else 0)
    ruleset = (ctypes.c_uint64 * 3)(writing | reading, network, scopes if version >= 6 else 0)
    known = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(ruleset), known, 0)
    shared = [] if alone else [("/dev/shm", writing | reading)]
    places = [(folder, writing | reading), *shared, ("/dev", writing & (WRITE_FILE | TRUNCATE))]
    for path, rights in [*places, *((path, reading) for path in visible or ())]:
        if os.path.exists(path):
            root = os.open(path, os.O_PATH)
            rights &= ~0 if os.path.isdir(path) else READ_FILE
            rule = rights.to_bytes(8, sys.byteorder) + root.to_bytes(4, sys.byteorder)
            libc.syscall(ADD_RULE, rules, 1, rule, 0)
            os.close(root)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    fenced = libc.syscall(RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return fenced


def drop_privileges() -> None:
    """Give up, for this process and all that it starts, every capability; hide from debuggers."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # there are no more
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc.capset(header, nothing)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)


def set_read_only(libc: Any, path: bytes, read_only: bool) -> int:
    """mount_setattr(2): change the read-only flag of a mount and of all below it."""
    attributes = (ctypes.c_uint64 * 4)(*((MOUNT_ATTR_RDONLY, 0) if read_only else (0, MOUNT_ATTR_RDONLY)), 0, 0)
    return libc.syscall(MOUNT_SETATTR, -100, path, AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))


def set_limits(limits: Limits, isolated: bool) -> None:
    """The kernel's own limits; outside of a namespace the count of processes is that of the whole account."""
    others = 0 if isolated else threads_of_account()
    for which, value in (
        (resource.RLIMIT_AS, limits.address_space),
        (resource.RLIMIT_FSIZE, limits.file_size),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, others + 8 * limits.processes),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        if sys.platform == "linux" or which != resource.RLIMIT_AS:
            resource.setrlimit(which, (value, value))


def threads_of_account() -> int:
    """Threads that this account runs, which the kernel counts as processes."""
    user, count = os.getuid(), 0
    for process in psutil.process_iter():
        try:
            count += process.num_threads() if process.uids().real == user else 0
        except psutil.Error:
            continue
    return count


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl(2); other systems do without."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
