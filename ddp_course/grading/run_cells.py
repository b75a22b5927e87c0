"""Run a notebook under nbval, in a process of its own.

What is worked around: nbval notices that a kernel has died only when the cell's whole timeout is over.
"""

import json
import os
import re
import time
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from nbval.kernel import RunningKernel

from .guard import HAND_OVER, limit

LOOK_EVERY_SECONDS = 0.2
ANSI = re.compile(r"\x1b\[[0-9;]*m")
DIED = "the code in it ended its own process, or took too much memory"
RESULTS = "results"


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
            line = {"cell": cell, "message": self.trouble.get(cell, "")}
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def last_error(traceback: str) -> str:
    """The error at the end of a kernel's traceback, with all its lines; of a line that is no Python, its number."""
    starts = [match.start() for match in re.finditer(r"^[A-Za-z_][\w.]*(: |$)", traceback, re.MULTILINE)]
    said = traceback[starts[-1] :] if starts else traceback.splitlines()[-1]
    lines = re.findall(r"\bline (\d+)", traceback)
    return f"{said} (line {lines[-1]} of the cell)" if said.startswith("SyntaxError") and lines else said


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


def run_cells(notebook: Path, seconds: float, environment: dict[str, str]) -> None:
    """Run a notebook, each cell for so many seconds; its results are lines of JSON in a file beside it."""
    if hasattr(os, "setsid"):
        os.setsid()
    os.environ.update(environment, **{HAND_OVER: str(notebook.parent)})
    os.chdir(notebook.parent)
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    limit()
    RunningKernel.get_message = get_message
    ini = notebook.with_name("nbval.ini")
    ini.write_text("[pytest]\naddopts =\n")
    arguments = [
        "--nbval-lax",
        "--nbval-current-env",
        "--noconftest",
        "-c",
        str(ini),
        "--rootdir",
        str(notebook.parent),
    ]
    arguments += [
        "-p",
        "nbval.plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        "--nbval-cell-timeout",
        str(seconds),
        str(notebook),
    ]
    pytest.main(arguments, plugins=[Reporter(notebook.with_name(RESULTS))])
