"""nbval, the course's checker of notebooks, and all that must be known about it, in one place.

What is worked around: nbval notices that a kernel has died only when the cell's whole timeout is over; it keeps
everything that a cell prints; after a timeout it marks the following cells as expected failures, which may "pass";
and it starts a new Python for every kernel, where we fork one that is ready.
"""

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from .sandbox import WORK_FOLDERS

MOST_PRINTED = 1 << 20  # characters a notebook
LOOK_EVERY_SECONDS = 0.2
ANSI = re.compile(r"\x1b\[[0-9;]*m")
INI = "[pytest]\naddopts =\n"


def run_notebook(order: dict[str, Any], answer: Any, peer: Any = None) -> None:
    """The job of a sandbox: run `order["notebook"]` under `pytest --nbval-lax`, send one line of JSON a cell."""
    prepare_environment(order["folder"])
    kernel = WarmKernel(close=[answer.fileno()])
    from jupyter_client.provisioning import local_provisioner
    from nbval.kernel import RunningKernel

    local_provisioner.launch_kernel = kernel.launch  # type: ignore[assignment]
    RunningKernel.get_message = get_message
    ini = Path(order["folder"]) / "nbval.ini"
    ini.write_text(INI)
    arguments = ["--nbval-lax", "--nbval-current-env", "--noconftest", "-c", str(ini), "--rootdir", order["folder"]]
    arguments += ["-p", "nbval.plugin", "-p", "no:cacheprovider", "-q", "--color=no"]
    arguments += ["--nbval-cell-timeout", str(order["cell_seconds"]), order["notebook"]]
    pytest.main(arguments, plugins=[Reporter(answer)])


def prepare_environment(folder: str) -> None:
    """Homes and temporary files in the work folder, nothing of the submission on the path, no plugins but nbval."""
    names = ("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR")
    inside = {name: str(Path(folder) / name.lower()) for name in names}
    inside["JUPYTER_RUNTIME_DIR"] = str(Path(folder) / "runtime")
    for name in WORK_FOLDERS:
        os.makedirs(Path(folder) / name, exist_ok=True)
    os.environ.update(inside)
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", OMP_NUM_THREADS="1", JUPYTER_PLATFORM_DIRS="1")
    for name in ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTHONSTARTUP", "JPY_PARENT_PID"):
        os.environ.pop(name, None)
    tempfile.tempdir = None
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).is_absolute()]


class Reporter:
    """A pytest plugin: how each cell went, as soon as it is known."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.trouble = answer, {}

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
            passed = report.passed and not hasattr(report, "wasxfail")
            message = self.trouble.get(cell, "an earlier cell did not finish" if not passed else "")
            line = {"cell": cell, "passed": passed, "message": message}
            self.answer.sendall(json.dumps(line).encode() + b"\n")


def last_error(traceback: str) -> str:
    """The error at the end of a kernel's traceback, with all its lines."""
    starts = [match.start() for match in re.finditer(r"^[A-Za-z_][\w.]*(: |$)", traceback, re.MULTILINE)]
    return traceback[starts[-1] :] if starts else traceback.splitlines()[-1]


def get_message(self: Any, stream: str, timeout: float | None = None) -> Any:
    """In place of nbval's `RunningKernel.get_message`: looks after the kernel, and at how much it prints."""
    waiting = self.__dict__.setdefault("waiting", deque())
    deadline = time.monotonic() + (1e9 if timeout is None else timeout)
    while True:
        if stream == "iopub" and waiting:
            return waiting.popleft()
        try:
            if stream == "shell":
                take_outputs(self, waiting)
            receive = self.kc.get_shell_msg if stream == "shell" else self.kc.get_iopub_msg
            message = receive(timeout=max(0.0, min(LOOK_EVERY_SECONDS, deadline - time.monotonic())))
            if stream == "iopub":
                count_printed(self, message)
            return message
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel died: the code ended its own process, or ran out of memory") from None
            if time.monotonic() > deadline:
                raise


def take_outputs(self: Any, waiting: deque) -> None:
    """Collect what the kernel has printed so far, while its reply is still awaited."""
    while True:
        try:
            message = self.kc.get_iopub_msg(timeout=0)
        except Empty:
            return
        count_printed(self, message)
        waiting.append(message)


def count_printed(self: Any, message: Any) -> None:
    """Stop a kernel that prints without end."""
    if message["msg_type"] in ("stream", "display_data", "execute_result", "error"):
        self.printed = getattr(self, "printed", 0) + sum(len(str(value)) for value in message["content"].values())
        if self.printed > MOST_PRINTED:
            self.km.provisioner.process.kill()
            raise RuntimeError(f"the notebook printed more than {MOST_PRINTED >> 20} MiB")


class WarmKernel:
    """A kernel process that is forked before it is needed; looks like a Popen."""

    stdin = stdout = stderr = None

    def __init__(self, close: Sequence[int] = ()) -> None:
        reading, self.orders = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in [*close, self.orders]:
                os.close(descriptor)
            be_kernel(reading)
        os.close(reading)

    def launch(self, command: list[str], **settings: Any) -> "WarmKernel":
        """In place of jupyter_client's `launch_kernel`: tell the waiting process its connection file."""
        os.write(self.orders, json.dumps([command, settings.get("env") or {}, settings.get("cwd")]).encode())
        os.close(self.orders)
        return self

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end; return the exit code."""
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def be_kernel(orders: int) -> None:
    """In the forked process: wait for the order, become the kernel. Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        with os.fdopen(orders) as file:
            command, environment, folder = json.loads(file.read())
        os.environ.update(environment)
        os.environ.pop("JPY_PARENT_PID", None)
        os.chdir(folder or ".")
        from ipykernel.kernelapp import IPKernelApp

        sys.modules["__main__"].__dict__.pop("__file__", None)
        sys.argv = ["kernel"]
        IPKernelApp.launch_instance(argv=command[command.index("-f") :])
        code = 0
    except SystemExit:
        code = 0
    finally:
        os._exit(code)
