"""Command lines in notebooks: shown as they would be typed, run with this kernel's own Python."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile

from ..running.files import course_folder

PROGRAMS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "ddp-course": ["-m", "ddp_course.cli"],
    "python": [],
}
NOISE = (
    "W1",
    "I1",
    "E1",
    "W0",
    "I0",
    "E0",
    "*****",
    "Setting OMP",
    "[Gloo]",
    "[W",
    "[I",
    "[E",
)  # torchrun logs these.


def command(*lines: str, timeout: float = 120) -> list[int]:
    """Run command lines at the same time, print each and the last lines of what it prints; returns
    their exit codes.

    Each begins with torchrun, python or ddp-course; FOLDER stands for a temporary folder, CLINIC
    for exercises/clinic. Raises ValueError for other programs, and subprocess.TimeoutExpired, with
    all of them ended, after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_course_", ignore_cleanup_errors=True) as folder:
        running = [_start(line, folder) for line in lines]  # torchrun leaves its logs in `folder`.
        try:
            for line, process in zip(lines, running, strict=True):
                output, _ = process.communicate(timeout=timeout)
                said = [
                    text
                    for text in output.splitlines()
                    if text.strip() and not text.startswith(NOISE)
                ]
                print(f"$ {line}", *said[-12:], sep="\n")
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its ranks.
                    process.wait()
    return [process.returncode for process in running]


def _start(line, folder):
    clinic = str(course_folder("exercises") / "clinic")
    program, *arguments = shlex.split(line.replace("FOLDER", folder).replace("CLINIC", clinic))
    if program not in PROGRAMS:
        raise ValueError(f'"{program}" is not one of {", ".join(PROGRAMS)}')
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    environ["TMPDIR"] = folder
    return subprocess.Popen(
        [sys.executable, *PROGRAMS[program], *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
    )
