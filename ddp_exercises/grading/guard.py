"""Limits a process that runs a submission, against accidents and lazy cheats.

The limits do not stop somebody who wants to break out: docs/GRADING.md says what a container is
for.
"""

import builtins
import ctypes
import getpass
import mmap
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ddp_course.lab.folders import course_folder
from manyranks import linux

from .landlock import fence

MEMORY_BYTES = 3 << 30
STARTS = 64  # A submission may start so many processes.
THREADS_BYTES = 4 << 30  # Threads reserve so much address space, and use little of it.
LIMITS = {
    resource.RLIMIT_DATA: MEMORY_BYTES,
    resource.RLIMIT_FSIZE: 64 << 20,
    resource.RLIMIT_NOFILE: 512,
    resource.RLIMIT_CORE: 0,
}
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"}
# A file that is opened with any of these flags may be written.
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
SHARED_MEMORY = "/dev/shm"  # The C library makes semaphores and shared tensors of workers here.
SHARED_BYTES = 128 << 20
SECRETS = ("solutions", "authoring", "exercises/checks", "exercises/answers")


def enter(folder: str, *other_folders: str) -> None:
    """Keep this process and its children to limits from now on.

    They print nothing, work in `folder`, write only below the given folders, and read no solution.
    """
    limit()
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    os.chdir(folder)
    sys.path.insert(0, folder)
    silence()
    builtins.input = getpass.getpass = refuse_input
    course = course_folder("exercises").parent
    secrets = [os.path.realpath(course / name) for name in SECRETS]
    folders = [os.path.realpath(path) for path in (folder, *other_folders)]
    fence([*folders, *own_view(secrets), *DEVICES])
    shared_byte = mmap.mmap(-1, 1)
    sys.addaudithook(partial(refuse, folders, secrets, shared_byte))


def refuse_input(*_: Any, **__: Any) -> str:
    """Raise EOFError with a message for the learner, as there is nobody who could type."""
    raise EOFError("your code asks for input(), and nobody types here: write the value itself")


def silence() -> None:
    """Let nothing that this process or its children write reach a terminal.

    This holds for all numbers of an open file, as the pipes of a rank's prints have several.
    """
    null = os.open(os.devnull, os.O_RDWR)
    outputs = [os.fstat(1), os.fstat(2)]
    for number in map(int, os.listdir("/dev/fd")):
        # One number was that of the folder while it was listed.
        with suppress(OSError):
            if any(os.path.samestat(os.fstat(number), output) for output in outputs):
                os.dup2(null, number)
    sys.stdout = sys.stderr = open(os.devnull, "w", errors="replace")  # noqa: SIM115 (until the process ends)


def own_view(secrets: Sequence[str]) -> list[str]:
    """Show this process and its children empty folders in place of `secrets`.

    They get a small folder of their own for named shared memory. Return the folders in which they
    may write: none if the kernel forbids all that, and then only the audit hook hides secrets.
    """
    options = f"size={SHARED_BYTES}".encode()
    try:
        linux.unshare_as_anyone(linux.CLONE_NEWNS)
        linux.mount("none", "/", linux.MS_REC | linux.MS_PRIVATE)
        for folder in filter(os.path.isdir, [*secrets, SHARED_MEMORY]):
            path = os.fsencode(folder)
            linux.call("mount", b"tmpfs", path, b"tmpfs", ctypes.c_ulong(0), options)
    except OSError:
        return []
    return [SHARED_MEMORY]


def limit() -> None:
    """Limit memory, also shared memory, the size of a file, and the number of open files."""
    address_space = psutil.Process().memory_info().vms + MEMORY_BYTES + THREADS_BYTES
    for kind, wanted in {**LIMITS, resource.RLIMIT_AS: address_space}.items():
        _, hard = resource.getrlimit(kind)
        lowest = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (lowest, lowest))


def refuse(
    folders: Sequence[str], secrets: Sequence[str], started: mmap.mmap, event: str, arguments: tuple
) -> None:
    """Raise PermissionError for what a submission must not do, as an audit hook.

    The hook also works without Landlock, except for removed and renamed files. `started`, a byte
    that all processes share, counts those that were forked.
    """
    if event == "open" and isinstance(arguments[0], str | bytes):
        path = os.fsdecode(arguments[0])
        if below(path, secrets):
            name = Path(path).name
            raise PermissionError(f'your code opens "{name}": a solution is no answer')
        if arguments[2] & WRITING and not below(path, [*folders, *DEVICES]):
            raise PermissionError(
                f'your code writes to "{path}": an answer writes into its own folder'
            )
    elif event == "os.fork":
        # A byte would overflow at 256.
        started[0] = min(started[0] + 1, STARTS + 1)
        if started[0] > STARTS:
            raise PermissionError(
                f"your code starts too many processes: at most {STARTS} are allowed here"
            )
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        address = str(arguments[1][0])
        if not address.startswith(("127.", "::1", "localhost")):
            raise PermissionError(f"your code connects to {address}: there is no network here")
    elif event in ("os.kill", "os.killpg") and not is_own(arguments[0]):
        raise PermissionError("your code ends a process that is not its own")
    elif event in PROGRAMS:
        raise PermissionError("your code starts another program: the grader runs none")


def is_own(process: int) -> bool:
    """Return whether a process, or a group by its first process, is this one or its descendant."""
    if process == 0:
        return os.getpgrp() == os.getpid()
    this = psutil.Process()
    return process in [each.pid for each in (this, *this.children(recursive=True))]


def below(path: str, folders: Sequence[str]) -> bool:
    """Return whether a path is one of `folders` or in one."""
    real = Path(path).resolve()
    return any(real.is_relative_to(folder) for folder in folders)
