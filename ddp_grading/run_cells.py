"""Run a submission's cells in a kernel of its own, in a process that ends with all that it started.

The kernel is ipykernel's in-process kernel in a fork of this process, which has loaded torch:
loading it anew would take longer than all else.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from ddp_course.checking.handing_over import HAND_OVER
from ddp_course.running import linux

from .guard import enter

FORK: Any = multiprocessing.get_context("fork")
CELL_SECONDS, INTERRUPT_SECONDS = 20.0, 3.0
FIRST_SHARE, SLOW_SHARE = 0.5, 0.05  # These are parts of a submission's time.
DIED = "the code in it ended its own process, took too much memory, or could not be stopped"
LEFT_OUT = "it was left out after {:.0f} s: the submission's time was running out"
NEVER_RUN = "the submission's time was over before this cell could run"
HOMES = ("HOME", "MPLCONFIGDIR")
LEARNERS = ("own-", "answer-")  # So the ids of a learner's cells begin, and no others.


class Stopped(BaseException):
    """Raised in a cell whose time is over; `except Exception` does not catch it."""


def run_cells(cells: Mapping[str, str], folder: str, seconds: float, answers: Connection) -> None:
    """Run cells, {id: source}, for at most `seconds` in all; send {id: its error, or ""}.

    If one ends the kernel, the rest runs again without it; if half of the time is over, without all
    that were slow. Checks write answers to `folder`/answers; cells work in `folder`/work.
    """
    os.setsid()
    linux.adopt_orphans()  # Processes that a submission starts stay below this one.
    signal.signal(signal.SIGTERM, end_children)
    os.environ.update(dict.fromkeys(HOMES, f"{folder}/work"), OMP_NUM_THREADS="1")
    os.environ.update({"IPYTHONDIR": f"{folder}/ipython", HAND_OVER: f"{folder}/answers"})
    errors: dict[str, str] = {}
    left_out: dict[str, str] = {}
    start = time.monotonic()
    end, most = start + FIRST_SHARE * seconds, min(CELL_SECONDS, FIRST_SHARE * seconds)
    while time.monotonic() < start + seconds:
        waiting = {name: source for name, source in cells.items() if name not in left_out}
        bad, errors = run_once(waiting, folder, most, end)
        left_out |= bad
        if not bad:
            break
        if time.monotonic() > end:  # From now on no cell may be slow.
            end, most = start + seconds, min(most, SLOW_SHARE * seconds)
    answers.send({name: (errors | left_out).get(name, NEVER_RUN) for name in cells})


def run_once(
    cells: Mapping[str, str], folder: str, most: float, end: float
) -> tuple[dict[str, str], dict[str, str]]:
    """Run cells in a new kernel until `end`, a learner's for at most `most` seconds: {id: why it
    must be left out}, and {id: its error} of the others.
    """
    kernel = Kernel(folder)
    errors: dict[str, str] = {}
    took: dict[str, float] = {}
    bad: dict[str, str] = {}
    for name, source in cells.items():
        start = time.monotonic()
        left = end - start
        allowed = min(most, left) if name.startswith(LEARNERS) else left
        error = kernel.run(source, max(0.1, allowed))
        took[name] = time.monotonic() - start
        if error is None:
            bad = {name: DIED}
            break
        if time.monotonic() > end:
            learners = [other for other in took if other.startswith(LEARNERS)]
            slow = [other for other in learners if took[other] > SLOW_SHARE * most] or [name]
            bad = {other: LEFT_OUT.format(took[other]) for other in slow}
            break
        errors[name] = error
    end_children()
    return bad, errors


class Kernel:
    """A process in which cells run, one after the other."""

    def __init__(self, folder: str) -> None:
        self.connection, other = multiprocessing.Pipe()
        self.process = FORK.Process(target=be_kernel, args=(folder, other))
        self.process.start()
        other.close()

    def run(self, source: str, seconds: float) -> str | None:
        """Run a cell; return its error, "" if there is none, or None if the kernel has ended."""
        try:
            self.connection.send(source)
            if not self.connection.poll(seconds):
                os.kill(self.process.pid, signal.SIGALRM)
                if not self.connection.poll(INTERRUPT_SECONDS):
                    return None
            return self.connection.recv()
        except (EOFError, OSError):
            return None


def be_kernel(folder: str, connection: Connection) -> None:
    """Be the kernel, under a submission's limits before anything of the learner's runs."""
    import torch
    from ipykernel.inprocess.ipkernel import InProcessKernel

    os.setpgid(0, 0)
    linux.die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, stop)
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    torch.set_num_threads(1)
    shell = InProcessKernel().shell
    enter(f"{folder}/work", f"{folder}/answers", f"{folder}/ipython")
    own = os.getpid()
    while True:
        source = connection.recv()
        error = error_of(shell.run_cell(source, store_history=True), source)
        if os.getpid() != own:
            os._exit(0)  # This is a process that the cell has forked.
        connection.send(error)


def stop(*_: Any) -> None:
    """Raise Stopped, as the handler of a signal."""
    raise Stopped


def error_of(result: Any, source: str) -> str:
    """The error that a cell has raised, in words; "" if there is none."""
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return ""
    if isinstance(error, Stopped):
        return f"it was stopped: {running_line(error, source)} was still running"
    words = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}"
    if isinstance(error, SyntaxError):
        return f"{words} (line {error.lineno} of the cell)"
    return words[:2000]


def running_line(error: BaseException, source: str) -> str:
    """The line of a cell that was running when it was stopped."""
    lines = source.splitlines()
    trace, place = error.__traceback__, "it"
    while trace is not None:
        file, number = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if "ipykernel_" in file and number <= len(lines):
            place = f"line {number} ({lines[number - 1].strip()})"
        trace = trace.tb_next
    return place


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
