"""The limits of a process that runs a submission: they stop accidents and lazy cheats.

The limits do not stop somebody who wants to break out: docs/GRADING.md says what a container is
for.
"""

import mmap
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ddp_course.running.files import course_folder

from .landlock import fence

HAND_OVER = (
    "DDP_COURSE_HAND_OVER"  # This environment variable names a folder for a kernel's answers.
)
MEMORY_BYTES = 3 << 30
STARTS = 64
THREADS_BYTES = 4 << 30  # Threads reserve this much address space, and use little of it.
LIMITS = {
    resource.RLIMIT_DATA: MEMORY_BYTES,
    resource.RLIMIT_FSIZE: 64 << 20,
    resource.RLIMIT_NOFILE: 512,
    resource.RLIMIT_CORE: 0,
}
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"}
CHANGES: dict[str, list] = {  # {event: places of a path and of its open folder in the arguments}
    "os.remove": [(0, 1)],
    "os.rename": [(0, 2), (1, 3)],
    "os.rmdir": [(0, 1)],
    "os.mkdir": [(0, 2)],
    "os.truncate": [(0, None)],
    "os.chmod": [(0, 2)],
    "os.chown": [(0, 3)],
    "os.symlink": [(1, 2)],
    "os.link": [(0, 2), (1, 3)],
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")]
SHARED_MEMORY = "/dev/shm"  # The C library makes semaphores and shared tensors of workers here.
SECRETS = ("solutions", "authoring", "exercises/checks", "exercises/answers")


def enter(folder: str, *also: str) -> None:
    """From here on this process and its children keep to limits, print nothing, work in `folder`,
    and write below `folder` and `also` alone.
    """
    limit()
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    course = course_folder("exercises").parent
    secrets = [os.path.realpath(course / name) for name in SECRETS]
    folders = [os.path.realpath(path) for path in (folder, *also)]
    fence([*folders, SHARED_MEMORY], DEVICES)
    sys.addaudithook(watch(folders, secrets))


def limit() -> None:
    """Limits on memory, shared memory among it, on the size of a file, and on open files."""
    address_space = psutil.Process().memory_info().vms + MEMORY_BYTES + THREADS_BYTES
    for kind, wanted in {**LIMITS, resource.RLIMIT_AS: address_space}.items():
        hard = resource.getrlimit(kind)[1]
        least = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (least, least))


def watch(folders: Sequence[str], secrets: Sequence[str]) -> Callable:
    """The audit hook, which says what a submission must not do, and refuses it where there is no
    Landlock; it counts the processes that all processes fork.
    """
    started = mmap.mmap(-1, 8)

    def hook(event: str, arguments: tuple) -> None:
        """Refuse what an answer must not do."""
        if event == "open" and isinstance(arguments[0], str | bytes):
            refuse_file(arguments[0], bool(arguments[2] & WRITING), folders, secrets)
        elif event in CHANGES:
            refuse_change(event, arguments, folders)
        elif event == "os.fork":
            count_process(started)
        elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
            refuse_address(str(arguments[1][0]))
        elif event in ("os.kill", "os.killpg") and not is_own(arguments[0]):
            raise PermissionError("your code ends a process that is not its own")
        elif event in PROGRAMS:
            raise PermissionError("your code starts another program: the grader runs none")

    return hook


def refuse_change(event: str, arguments: tuple, folders: Sequence[str]) -> None:
    """PermissionError if what is removed, made or renamed does not lie in an answer's folders."""
    for place, start in CHANGES[event]:
        path = full_path(arguments[place], -1 if start is None else arguments[start])
        if not below(path, folders):
            raise PermissionError(f'your code changes "{path}": an answer keeps to its own folder')


def count_process(started: mmap.mmap) -> None:
    """PermissionError if a submission has started too many processes."""
    count = int.from_bytes(started[:8], "little") + 1
    started[:8] = count.to_bytes(8, "little")
    if count > STARTS:
        raise PermissionError(
            f"your code starts too many processes: at most {STARTS} are allowed here"
        )


def refuse_address(address: str) -> None:
    """PermissionError if an address is another machine's."""
    if not address.startswith(("127.", "::1", "localhost")):
        raise PermissionError(f"your code connects to {address}: there is no network here")


def refuse_file(
    name: str | bytes, writes: bool, folders: Sequence[str], secrets: Sequence[str]
) -> None:
    """PermissionError if an answer must not open a file."""
    path = os.fsdecode(name)
    if below(path, secrets):
        raise PermissionError(f'your code opens "{Path(path).name}": a solution is no answer')
    if writes and not below(path, [*folders, *DEVICES]):
        raise PermissionError(f'your code writes to "{path}": an answer writes into its own folder')


def full_path(path: Any, start: int) -> Any:
    """A path that begins in the open folder `start`, or in the current one if that is -1."""
    if start == -1 or not isinstance(path, str | bytes | os.PathLike):
        return path
    return os.path.join(os.path.realpath(f"/proc/self/fd/{start}"), os.fsdecode(path))


def is_own(process: int) -> bool:
    """Whether a process, or a group by its first process, is this one or was started by it."""
    if process == 0:
        return os.getpgrp() == os.getpid()
    started = psutil.Process().children(recursive=True)
    return process in [os.getpid(), *(child.pid for child in started)]


def below(path: Any, folders: Sequence[str]) -> bool:
    """Whether a path is one of `folders` or in one; the number of an open file counts as one that
    is.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        return True
    real = os.path.realpath(os.fsdecode(path))
    return any(real == folder or real.startswith(folder + os.sep) for folder in folders)
