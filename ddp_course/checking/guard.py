"""The limits of a process that runs a submission: they stop accidents and lazy cheats.

The limits do not stop somebody who wants to break out: docs/GRADING.md says what a container is
for.
"""

import linecache
import mmap
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..running.files import course_folder

HAND_OVER = (
    "DDP_COURSE_HAND_OVER"  # This environment variable names the folder of a submission's kernel
)
MEMORY_BYTES, STARTS = 3 << 30, 64
LIMITS = {
    resource.RLIMIT_DATA: MEMORY_BYTES,
    resource.RLIMIT_FSIZE: 64 << 20,
    resource.RLIMIT_NOFILE: 512,
    resource.RLIMIT_CORE: 0,
}
PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"}
CHANGES = {
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.symlink",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def enter(folder: str) -> None:
    """From here on this process and its children keep to limits, print nothing, and write below
    `folder` alone.
    """
    limit()
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    exercises = course_folder("exercises")
    hidden = [
        str(path)
        for path in (exercises / "checks", exercises / "answers", course_folder("solutions"))
    ]
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    sys.addaudithook(watch(os.path.realpath(folder), hidden))


def limit() -> None:
    """Limits on memory, on the size of a file, and on open files."""
    for kind, wanted in LIMITS.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(
            kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard),) * 2
        )


def watch(folder: str, hidden: Sequence[str]) -> Callable:
    """The audit hook, which refuses what a submission must not do; it counts the processes that all
    processes fork.
    """
    started = mmap.mmap(-1, 8)

    def hook(event: str, arguments: tuple) -> None:
        """Refuse what an answer must not do."""
        if event == "open" and isinstance(arguments[0], str | bytes):
            path, writes = os.fsdecode(arguments[0]), arguments[2] & WRITING
            if below(path, hidden):
                raise PermissionError(
                    f'your code opens "{Path(path).name}": a solution is no answer'
                )
            if writes and not below(path, [folder, "/dev"]):
                raise PermissionError(
                    f'your code writes to "{path}": an answer writes into its own folder'
                )
        elif event in CHANGES:
            if not all(
                below(path, [folder, "/dev"]) for path in arguments[: 1 + (event == "os.rename")]
            ):
                raise PermissionError(
                    f'your code changes "{arguments[0]}": an answer keeps to its own folder'
                )
        elif event == "os.fork":
            started[:8] = (int.from_bytes(started[:8], "little") + 1).to_bytes(8, "little")
            if int.from_bytes(started[:8], "little") > STARTS:
                raise PermissionError(
                    f"your code starts too many processes: at most {STARTS} are allowed here"
                )
        elif event in PROGRAMS:
            raise PermissionError("your code starts another program: the grader runs none")
        elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
            if not str(arguments[1][0]).startswith(("127.", "::1", "localhost")):
                raise PermissionError(
                    f"your code connects to {arguments[1][0]}: there is no network here"
                )
        elif event == "os.kill" and (arguments[0] <= 1 or arguments[0] == os.getppid()):
            raise PermissionError("your code ends a process that is not its own")

    return hook


def below(path: Any, folders: Sequence[str]) -> bool:
    """Whether a path is one of `folders` or in one; the number of an open file counts as one that
    is.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        return True
    real = os.path.realpath(os.fsdecode(path))
    return any(real == folder or real.startswith(folder + os.sep) for folder in folders)


def hand_over(number: str, answers: tuple) -> None:
    """Write down the answers that a check cell is given in the grader, with the source of the cells
    they come from.
    """
    from ..running.launching.pickling import dumps  # Importing `check` alone does not need it.

    lines = {name: entry[2] for name, entry in list(linecache.cache.items()) if len(entry) == 4}
    sources = {
        name: "".join(of_cell) for name, of_cell in lines.items() if not os.path.exists(name)
    }
    Path(os.environ[HAND_OVER], f"{number}.answers").write_bytes(dumps((answers, sources)))
