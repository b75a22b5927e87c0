"""What a process that runs a submission may take and touch: accidents end here, and lazy cheats.

It is no wall against somebody who wants out: docs/GRADING.md says what a container is for.
"""

import json
import linecache
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..running import linux
from ..running.files import course_folder

HAND_OVER = "DDP_COURSE_HAND_OVER"  # this environment variable names the folder of a submission's kernel
HIDDEN = "DDP_COURSE_GRADING_HIDDEN"  # this one names what no submission reads
MEMORY_BYTES, FILE_BYTES, OPEN_FILES, WRITTEN_FILES, STARTS = 3 << 30, 64 << 20, 512, 256, 64
MOST_PRINTED = 1 << 20  # characters
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"}
CHANGED = ("remove", "rename", "rmdir", "mkdir", "truncate", "chmod", "chown", "symlink", "link")
CHANGES = {f"os.{name}" for name in CHANGED}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
LOCAL = ("127.", "::1", "localhost")


def enter(folder: str) -> None:
    """From here on this process and its children keep to limits, write below `folder` alone, and read no solution."""
    limit()
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    exercises, solutions = course_folder("exercises"), course_folder("solutions")
    hidden = [str(path) for path in (exercises / "checks", exercises / "answers", solutions)]
    sys.addaudithook(watch(os.path.realpath(folder), [*hidden, *json.loads(os.environ.get(HIDDEN, "[]"))]))


def leave_network() -> bool:
    """Move this process, which has one thread, to a network with a loopback alone, if the system allows it.

    Where it does not, the audit hook of `enter` keeps Python from the network.
    """
    try:
        linux.unshare_as_anyone(linux.CLONE_NEWNET)
        linux.raise_loopback()
    except (OSError, AttributeError):  # other systems have no such call
        return False
    return True


def limit() -> None:
    """Limits on memory, on the size of a file, and on open files; Windows has none."""
    try:
        import resource
    except ImportError:
        return
    wanted = {"RLIMIT_DATA": MEMORY_BYTES, "RLIMIT_FSIZE": FILE_BYTES, "RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_CORE": 0}
    for name, most in wanted.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard),) * 2)


def watch(folder: str, hidden: Sequence[str]) -> Callable:
    """The audit hook: raises for what a submission has no business with. Processes are counted over all that fork."""
    started, written = mmap.mmap(-1, 8), mmap.mmap(-1, 8)

    def count(counter: mmap.mmap, most: int, what: str) -> None:
        number = int.from_bytes(counter[:8], "little") + 1
        counter[:8] = number.to_bytes(8, "little")
        if number > most:
            raise PermissionError(f"your code {what}: at most {most} are allowed here")

    def hook(event: str, arguments: tuple) -> None:
        """Refuse what an answer has no business to do."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes):
                if below(path, hidden):
                    raise PermissionError(f'your code opens "{Path(os.fsdecode(path)).name}": a solution is no answer')
                if flags & WRITING and not below(path, [folder, "/dev"]):
                    path = os.fsdecode(path)
                    raise PermissionError(f'your code writes to "{path}": an answer writes into its own folder')
                if flags & WRITING:
                    count(written, WRITTEN_FILES, "writes too many files")
        elif event in CHANGES:
            if not all(below(path, [folder, "/dev"]) for path in arguments[: 1 + (event == "os.rename")]):
                raise PermissionError(f'your code changes "{arguments[0]}": an answer keeps to its own folder')
        elif event == "os.fork":
            count(started, STARTS, "starts too many processes")
        elif event in PROGRAMS:
            raise PermissionError("your code starts another program: the grader runs none")
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            if not str(arguments[1][0]).startswith(LOCAL):
                raise PermissionError(f"your code connects to {arguments[1][0]}: there is no network here")
        elif event == "os.kill" and (arguments[0] <= 1 or arguments[0] == os.getppid()):
            raise PermissionError("your code ends a process that is not its own")

    return hook


def below(path: Any, folders: Sequence[str]) -> bool:
    """Whether a path is one of some folders or in it; an open file's number is."""
    if not isinstance(path, str | bytes | os.PathLike):
        return True
    real = os.path.realpath(os.fsdecode(path))
    return any(real == folder or real.startswith(folder + os.sep) for folder in folders)


def begin(folder: str) -> None:
    """In the notebook's kernel, before anything of the learner's runs: keep to limits, and print no floods."""
    enter(folder)
    for stream in (sys.stdout, sys.stderr):
        stream.write = print_at_most(stream.write)  # type: ignore[method-assign]


def print_at_most(write: Callable) -> Callable:
    """`write`, which writes nothing any more after so many characters."""
    printed = 0

    def counted(text: str) -> int:
        nonlocal printed
        printed += len(text)
        return write(text) if printed <= MOST_PRINTED else len(text)

    return counted


def hand_over(number: str, answers: tuple) -> None:
    """The check cell in the grader: write down what it is given, with the source of the cells that it comes from."""
    from ..running.launching.pickling import dumps  # here: who only imports `check` needs none

    lines = {name: entry[2] for name, entry in list(linecache.cache.items()) if len(entry) == 4}
    sources = {name: "".join(of_cell) for name, of_cell in lines.items() if not os.path.exists(name)}
    Path(os.environ[HAND_OVER], f"{number}.answers").write_bytes(dumps((answers, sources)))
