"""Command lines in notebooks: shown as they would be typed, run with this kernel's own Python."""

import os
import shlex
import subprocess
import sys
import tempfile

PROGRAMS = {"torchrun": ["-m", "torch.distributed.run"], "ddp-course": ["-m", "ddp_course.cli"], "python": []}


def command(*lines: str, timeout: float = 120) -> list[int]:
    """Run command lines at the same time, print each and what it prints; returns their exit codes.

    Each begins with torchrun, python or ddp-course; FOLDER stands for a folder that is gone afterwards. Raises
    ValueError for other programs, and subprocess.TimeoutExpired, with all of them ended, after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_course_", ignore_cleanup_errors=True) as folder:
        running = [_start(line, folder) for line in lines]  # torchrun leaves folders for its logs
        try:
            for line, process in zip(lines, running, strict=True):
                output, _ = process.communicate(timeout=timeout)
                print(f"$ {line}\n{_without_noise(output)}")
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return [process.returncode for process in running]


def _start(line, folder):
    program, *arguments = shlex.split(line.replace("FOLDER", folder))
    if program not in PROGRAMS:
        raise ValueError(f'"{program}" is not one of {", ".join(PROGRAMS)}')
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    environ["TMPDIR"] = folder
    return subprocess.Popen(
        [sys.executable, *PROGRAMS[program], *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True,
    )  # fmt: skip


def _without_noise(output):
    """The last lines of a program, without the launcher's own logging."""
    noise = ("W1", "I1", "E1", "W0", "I0", "E0", "*****", "Setting OMP", "[Gloo]", "[W", "[I", "[E")
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith(noise)]
    return "\n".join(lines[-12:])
