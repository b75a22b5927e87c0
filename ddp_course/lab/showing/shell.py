"""Command lines in notebooks: shown as they would be typed, run with this kernel's own Python."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

from tqdm.auto import tqdm

from manyranks.launching.bar import vanish

from ..folders import course_folder

PROGRAMS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "ddp-course": ["-m", "ddp_course.lab.cli"],
    "python": [],
}
NOISE = r"[WIE][01]|\[[WIE]|\[Gloo\]|\*\*\*\*\*|Setting OMP"  # Lines of torchrun's log begin so.


class progress(tqdm):
    """A bar around a loop, as lessons call it: it ends full, or goes when the loop ends early.

    tqdm's own would stay in a notebook, in red, also where nothing failed.
    """

    total: float | None

    def close(self) -> None:
        """End the bar."""
        if not self.disable and self.total and self.n < self.total:
            vanish(self)  # It closes the bar, which is then full.
        super().close()


def command(*lines: str, timeout: float = 120) -> list[int]:
    """Run command lines at the same time; return their exit codes.

    Each is printed, with the last lines of what it prints.

    Each begins with torchrun, python or ddp-course; FOLDER stands for a temporary folder, CLINIC
    for exercises/clinic. Raises ValueError for other programs, and subprocess.TimeoutExpired, with
    all of them ended, after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_course_", ignore_cleanup_errors=True) as folder:
        # torchrun leaves its logs in `folder`.
        processes = [_start(line, folder) for line in lines]
        try:
            for line, process in zip(lines, processes, strict=True):
                printed = []
                for text in _output(process, timeout).splitlines():
                    if text.strip() and not re.match(NOISE, text):
                        printed.append(text)
                print(f"$ {line}", *printed[-20:], sep="\n")
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its ranks.
                    process.wait()
    return [process.returncode for process in processes]


def _output(process, timeout):
    """What the process prints, at its end; until then a bar counts the seconds that it may take."""
    for _ in progress(range(int(timeout)), desc="at most", unit="s", leave=False):
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1)[0]
    raise subprocess.TimeoutExpired(process.args, timeout)


def _start(line, folder):
    """Start a command line, in a process group of its own that can be ended as one."""
    clinic = str(course_folder("exercises") / "clinic")
    program, *arguments = shlex.split(line.replace("FOLDER", folder).replace("CLINIC", clinic))
    if program not in PROGRAMS:
        raise ValueError(f'"{program}" is not one of {", ".join(PROGRAMS)}')
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
        "TMPDIR": folder,
    }
    return subprocess.Popen(
        [sys.executable, *PROGRAMS[program], *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
    )
