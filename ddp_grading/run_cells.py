"""Run a notebook under nbval, in a process of its own, which ends with the notebook's kernel.

The kernel is a fork of this process, which has loaded torch: loading it anew would take longer than
all else.
"""

import asyncio
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.provisioning import local_provisioner

from ddp_course.checking.guard import HAND_OVER, enter, limit
from ddp_course.running import linux

FORK: Any = multiprocessing.get_context("fork")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
RESULTS = "results"
OPTIONS = (
    "--nbval-lax --nbval-current-env --noconftest -p nbval.plugin -p no:cacheprovider -q"
    " --nbval-cell-timeout"
)


class Reporter:
    """A pytest plugin: writes down how each cell went, as soon as it is known."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_makereport(self, call: Any) -> None:
        """One line of JSON for each cell that has run: the end of the kernel's traceback, nbval's
        message, or "".
        """
        if call.when == "call" or call.excinfo:
            error = call.excinfo.value if call.excinfo else ""
            inner = ANSI.sub("", getattr(error, "inner_traceback", None) or "").strip()
            words = last_error(inner) if inner and "KeyboardInterrupt" not in inner else str(error)
            with self.file.open("a") as file:
                file.write(json.dumps(words[:2000]) + "\n")


def last_error(traceback: str) -> str:
    """The error at the end of a kernel's traceback, with all its lines; a SyntaxError gets the
    number of its line.
    """
    starts = [
        match.start() for match in re.finditer(r"^[A-Za-z_][\w.]*(: |$)", traceback, re.MULTILINE)
    ]
    words = traceback[starts[-1] :] if starts else traceback.splitlines()[-1]
    lines = re.findall(r"\bline (\d+)", traceback)
    return (
        f"{words} (line {lines[-1]} of the cell)"
        if words.startswith("SyntaxError") and lines
        else words
    )


def start_kernel(command: list[str], env: dict, **_: Any) -> Any:
    """Stand in for Jupyter's `launch_kernel`: return a fork with what Jupyter uses of
    `subprocess.Popen`.
    """
    kernel = FORK.Process(
        target=be_kernel, args=(command[-1], env)
    )  # The last word names the file with the ports.
    kernel.start()
    kernel.stdin = kernel.stdout = kernel.stderr = None
    kernel.poll, kernel.wait = lambda: kernel.exitcode, kernel.join
    kernel.send_signal = lambda number: os.kill(kernel.pid, number)
    with suppress(OSError, AttributeError):
        os.setpgid(kernel.pid, kernel.pid)  # Jupyter interrupts the kernel's process group.
    threading.Thread(target=end_with, args=(kernel,), daemon=True).start()
    return kernel


def end_with(kernel: Any) -> None:
    """End this process when the kernel ends: nbval would notice only after the cell's whole
    time.
    """
    kernel.join()
    end_children(True)


def be_kernel(file: str, environment: dict) -> None:
    """Be the notebook's kernel, under a submission's limits before anything of the learner's
    runs.
    """
    import torch
    from ipykernel.kernelapp import IPKernelApp

    linux.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    torch.set_num_threads(1)
    asyncio.set_event_loop(asyncio.new_event_loop())  # The loop that came with the fork is busy.
    app = IPKernelApp.instance()
    app.initialize(["-f", file])
    enter(environment[HAND_OVER])
    app.start()


def run_cells(notebook: Path, seconds: float) -> None:
    """Run a notebook, each cell for at most `seconds`, and write a line of JSON for each."""
    os.setsid()
    folder = str(notebook.parent)
    homes = ("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "JUPYTER_RUNTIME_DIR", HAND_OVER)
    modules = os.pathsep.join(entry for entry in sys.path if entry and Path(entry).is_absolute())
    os.environ.update(dict.fromkeys(homes, folder), OMP_NUM_THREADS="1", PYTHONPATH=modules)
    os.environ.update({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""})
    os.chdir(folder)
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    linux.adopt_orphans()  # Processes that a submission starts stay below this one.
    signal.signal(signal.SIGTERM, end_children)
    limit()
    local_provisioner.launch_kernel = start_kernel  # type: ignore[assignment]
    options = [*OPTIONS.split(), str(seconds), "-c", os.devnull, "--rootdir", folder]
    pytest.main([*options, str(notebook)], plugins=[Reporter(notebook.with_name(RESULTS))])
    end_children()


def end_children(*signalled: Any) -> None:
    """Kill all that this process has started, whatever group or session it is in; after a signal,
    end it as well.
    """
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=0.2)
    if signalled:
        os._exit(0)
