"""Run a notebook under nbval, in a process of its own.

The kernel is a fork of this process, which has loaded torch: to load it anew took longer than all else. What is worked
around: nbval notices that a kernel has died only when the cell's whole timeout is over.
"""

import asyncio
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
import pytest
from jupyter_client.provisioning import local_provisioner
from nbval.kernel import RunningKernel

from ..running import linux
from .guard import HAND_OVER, HIDDEN, begin, leave_network, limit

FORK: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")

LOOK_EVERY_SECONDS = 0.2
ANSI = re.compile(r"\x1b\[[0-9;]*m")
DIED = "the code in it ended its own process, or took too much memory"
RESULTS = "results"
OPTIONS = "--nbval-lax --nbval-current-env --noconftest -p nbval.plugin -p no:cacheprovider -q --nbval-cell-timeout"


class Reporter:
    """A pytest plugin: writes down how each cell went, as soon as it is known."""

    def __init__(self, file: Path) -> None:
        self.file, self.trouble = file, {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        """Keep the error's own words: the end of the kernel's traceback, or nbval's message."""
        if call.excinfo is not None:
            error = call.excinfo.value
            inner = ANSI.sub("", getattr(error, "inner_traceback", None) or "").strip()
            words = last_error(inner) if inner and "KeyboardInterrupt" not in inner else str(error)
            self.trouble[getattr(item, "cell_num", None)] = words[:2000]
        return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One line of JSON for each cell that has run, or could not start."""
        if report.when == "call" or report.failed:
            cell = int(report.nodeid.rpartition("Cell ")[2])
            with self.file.open("a") as file:
                file.write(json.dumps({"cell": cell, "message": self.trouble.get(cell, "")}) + "\n")


def last_error(traceback: str) -> str:
    """The error at the end of a kernel's traceback, with all its lines; of a line that is no Python, its number."""
    starts = [match.start() for match in re.finditer(r"^[A-Za-z_][\w.]*(: |$)", traceback, re.MULTILINE)]
    words = traceback[starts[-1] :] if starts else traceback.splitlines()[-1]
    lines = re.findall(r"\bline (\d+)", traceback)
    return f"{words} (line {lines[-1]} of the cell)" if words.startswith("SyntaxError") and lines else words


def get_message(self: Any, stream: str, timeout: float | None = None) -> Any:
    """In place of nbval's `RunningKernel.get_message`: asks now and then whether the kernel still lives."""
    deadline = time.monotonic() + (1e9 if timeout is None else timeout)
    receive = self.kc.get_shell_msg if stream == "shell" else self.kc.get_iopub_msg
    while True:
        try:
            return receive(timeout=max(0.0, min(LOOK_EVERY_SECONDS, deadline - time.monotonic())))
        except Empty:
            if not self.is_alive():
                raise RuntimeError(DIED) from None
            if time.monotonic() > deadline:
                raise


def start_kernel(command: list[str], env: dict, **_: Any) -> Any:
    """In place of Jupyter's `launch_kernel`: the last word of the command is the file that names the ports.

    What Jupyter calls are methods of `subprocess.Popen`.
    """
    kernel = FORK.Process(target=be_kernel, args=(command[-1], env))
    kernel.start()
    kernel.stdin = kernel.stdout = kernel.stderr = None
    kernel.poll, kernel.wait = lambda: kernel.exitcode, kernel.join
    kernel.send_signal = lambda number: os.kill(kernel.pid, number)
    with suppress(OSError, AttributeError):
        os.setpgid(kernel.pid, kernel.pid)  # an interrupt is for its group
    return kernel


def be_kernel(file: str, environment: dict) -> None:
    """Be the notebook's kernel, under a submission's limits before anything of the learner's runs."""
    import torch
    from ipykernel.kernelapp import IPKernelApp

    linux.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    torch.set_num_threads(1)
    asyncio.set_event_loop(asyncio.new_event_loop())  # the one that came with the fork is busy
    app = IPKernelApp.instance()
    app.initialize(["-f", file])
    begin(environment[HAND_OVER])
    app.start()


def run_cells(notebook: Path, seconds: float, hidden: str) -> None:
    """Run a notebook, each cell for so many seconds, and write a line of JSON for each; `hidden` files are not read."""
    if hasattr(os, "setsid"):
        os.setsid()
    folder = str(notebook.parent)
    homes = ("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "JUPYTER_RUNTIME_DIR", HAND_OVER)
    modules = os.pathsep.join(entry for entry in sys.path if entry and Path(entry).is_absolute())
    os.environ.update(dict.fromkeys(homes, folder), OMP_NUM_THREADS="1", PYTHONPATH=modules)
    os.environ.update({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", HIDDEN: hidden})
    os.chdir(folder)
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    linux.adopt_orphans()  # what a submission starts stays below this process
    signal.signal(signal.SIGTERM, end_children)
    limit()
    leave_network()
    RunningKernel.get_message = get_message
    local_provisioner.launch_kernel = start_kernel  # type: ignore[assignment]
    options = [*OPTIONS.split(), str(seconds), "-c", os.devnull, "--rootdir", folder]
    pytest.main([*options, str(notebook)], plugins=[Reporter(notebook.with_name(RESULTS))])
    end_children()


def end_children(*signalled: Any) -> None:
    """Kill all that this process has started, whatever group or session it went to; a signal ends it as well."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=0.2)
    if signalled:
        os._exit(1)
