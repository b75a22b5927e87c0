"""Command lines in notebooks: shown as they would be typed, run with this kernel's own Python."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ..running.files import course_folder

_FRAME = re.compile(r"\(.+:\d+\)$")  # such as "main (train.py:33)"
_LIBRARY = re.compile(r"site-packages|torch/|<frozen|lib/python")
PROGRAMS = {"torchrun": ["-m", "torch.distributed.run"], "ddp-course": ["-m", "ddp_course.cli"], "python": []}


def command(*lines: str, timeout: float = 120) -> list[int]:
    """Run command lines at the same time, print each and what it prints; returns their exit codes.

    Each begins with torchrun, python or ddp-course; FOLDER stands for a folder that is gone afterwards. Raises
    ValueError for other programs, and subprocess.TimeoutExpired, with all of them ended, after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_course_", ignore_cleanup_errors=True) as folder:
        running = [_start(line, folder) for line in lines]  # torchrun leaves folders for its logs there.
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


def stacks(line: str, timeout: float = 90) -> None:
    """Run a command line with torchrun until its ranks stand still, and print where each of them stands, by py-spy.

    CLINIC stands for the folder exercises/clinic. Of each rank the innermost line outside of torch and Python's library
    is shown. Where the system forbids a look into another process (ptrace) py-spy says so; then put
    `faulthandler.dump_traceback_later(seconds)` into the script.
    """
    before, now, end = {}, {}, time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="ddp_course_", ignore_cleanup_errors=True) as folder:
        process = _start(line, folder)
        try:
            while (
                time.monotonic() < end and process.poll() is None and not (now and now == before and all(now.values()))
            ):
                time.sleep(4)
                before, now = now, {rank: _innermost(pid) for rank, pid in _ranks_below(process.pid)}
        finally:
            with contextlib.suppress(ProcessLookupError):  # It has ended by itself.
                os.killpg(process.pid, signal.SIGTERM)
            output, _ = process.communicate()
    print(f"$ {line}\n$ py-spy dump --pid …, for each rank, when they stand still")
    if not now:
        print("all ranks had ended:", _without_noise(output), sep="\n")
    for rank, place in sorted(now.items()):
        print(f"rank {rank}: {place}")


def _innermost(pid):
    """The innermost line of a process outside of torch and Python's library; what py-spy says if it cannot look."""
    spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    plain = {name: value for name, value in os.environ.items() if "COLOR" not in name}  # Jupyter asks for colours
    dump = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=60, env=plain)
    lines = [text.strip() for text in dump.stdout.splitlines() if _FRAME.search(text)]
    own = [text for text in lines if not _LIBRARY.search(text)]
    return own[0] if own else dump.stderr.strip()[:200]


def _ranks_below(pid):
    """(rank, process number) of all processes below `pid` that torchrun has given a rank."""
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (rank := child.environ().get("RANK")) is not None:
                yield int(rank), child.pid


def _start(line, folder):
    clinic = str(course_folder("exercises") / "clinic")
    program, *arguments = shlex.split(line.replace("FOLDER", folder).replace("CLINIC", clinic))
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
