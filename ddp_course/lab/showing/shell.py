"""Runs command lines in notebooks: shown as typed, run with this kernel's own Python."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

from manyranks.launching.drawn_bar import DrawnBar as progress

from ..folders import course_folder

PROGRAMS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "ddp-course": ["-m", "ddp_course.lab.cli"],
    "python": [],
}
# Lines of torchrun's log begin like this.
NOISE = r"[WIE][01]|\[[WIE]|\[Gloo\]|\*\*\*\*\*|Setting OMP"


def command(*lines: str, timeout: float = 120) -> list[int]:
    """Run command lines at the same time, print them with their outputs; return their exit codes.

    Each begins with torchrun, python or ddp-course. FOLDER stands for a temporary folder, LESSONS
    for notebooks, CLINIC for exercises/clinic. Only the last lines of each output are printed.
    Raises ValueError for other programs, and subprocess.TimeoutExpired, with all of them ended,
    after `timeout` seconds.
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
                    # torchrun then ends its ranks.
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait()
    return [process.returncode for process in processes]


def _output(process, timeout):
    """Return what the process prints, once it ends; until then a bar counts its seconds."""
    for _ in progress(range(int(timeout)), desc="at most", unit="s", leave=False):
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1)[0]
    raise subprocess.TimeoutExpired(process.args, timeout)


def _start(line, folder):
    """Start a command line in a process group of its own, which can be ended as a whole."""
    lessons = str(course_folder("notebooks"))
    clinic = str(course_folder("exercises") / "clinic")
    words = line.replace("FOLDER", folder).replace("LESSONS", lessons).replace("CLINIC", clinic)
    program, *arguments = shlex.split(words)
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
