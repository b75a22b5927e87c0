"""Runs a submission's cells in a kernel of its own, below a rank that watches the kernel.

The kernel is ipykernel's in-process kernel in a fork of the rank, which has loaded torch: to load
torch again would take longer than all else.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ddp_exercises.attempt import too_slow
from ddp_exercises.errors import TooSlow
from ddp_exercises.handing_over import HAND_OVER
from manyranks import linux
from manyranks.joining.join import ALONE

from .guard import enter, silence
from .old_imports import WithoutOldImports

FORK: Any = multiprocessing.get_context("fork")
CELL_SECONDS = 20.0  # A learner's cell is interrupted after so many seconds.
INTERRUPT_SECONDS = 3.0  # A cell that was interrupted may take so long to end.
LOOK_SECONDS = 0.5  # The kernel's use of time is looked up this often.
RESERVE = 0.25  # This part of a submission's time is for the course's own cells.
MOST_LETTERS = 2000  # An error may have so many letters.
MOST_BYTES = 1 << 16  # The kernel's answer may have so many bytes.
DIED = "the code in it ended its own process, took too much memory, or could not be stopped"
NEVER_RUN = "the submission's time was over before this cell could run"
LEARNERS = "own-"  # The ids of a learner's cells begin with this, and no others do.


def run_cells(
    cells: Mapping[str, str], folder: str, seconds: float
) -> tuple[dict[str, str], float]:
    """Run cells, {id: source}, on the only rank of a launch, for at most `seconds` in all.

    Return their errors, {id: the error, or ""}, and the seconds that are left. A learner's cell may
    take CELL_SECONDS, and never more than half of the time that is left. If a cell ends the kernel,
    the others run again without it. Checks write answers to `folder`/answers; cells work in
    `folder`/work.
    """
    # In a learner's own kernel cells find neither a process group nor a rank's variables.
    dist.destroy_process_group()
    for variable in ALONE:
        os.environ.pop(variable, None)
    # Processes that a submission starts stay below this one.
    linux.adopt_orphans()
    os.environ |= {
        HAND_OVER: f"{folder}/answers",
        "OMP_NUM_THREADS": "1",
        # Libraries write into their users' homes.
        "HOME": f"{folder}/work",
        "MPLCONFIGDIR": f"{folder}/work",
        "IPYTHONDIR": f"{folder}/ipython",
    }
    errors = dict.fromkeys(cells, NEVER_RUN)
    waiting = dict(cells)
    used = 0.0
    while True:
        kernel = Kernel(folder, used)
        deadly_cell = run_in(kernel, waiting, seconds, errors)
        used = kernel.used
        end_children()
        if deadly_cell is None:
            return errors, seconds - used
        errors[deadly_cell] = DIED
        del waiting[deadly_cell]


def run_in(
    kernel: "Kernel", cells: Mapping[str, str], seconds: float, errors: dict[str, str]
) -> str | None:
    """Run cells in a kernel until `seconds` are used, and note their errors in `errors`.

    Return the id of the cell that ended the kernel; None if none has.
    """
    for name, source in cells.items():
        left = seconds - kernel.used
        if left <= 0:
            return None
        longest = left
        if name.startswith(LEARNERS):
            longest = min(CELL_SECONDS, max(LOOK_SECONDS, (left - RESERVE * seconds) / 2))
        error = kernel.run(source, longest)
        if error is None:
            return name
        errors[name] = error
    return None


class Kernel:
    """A process in which cells run, one after the other.

    `used` are the seconds that the submission has used so far: of processor time, and of the clock
    while it waits for something. So a busy machine takes nothing from it.
    """

    def __init__(self, folder: str, used: float) -> None:
        self.connection, kernels_end = multiprocessing.Pipe()
        self.process = FORK.Process(target=be_kernel, args=(folder, kernels_end))
        self.process.start()
        kernels_end.close()
        self.used = used
        self.computed = 0.0

    def run(self, source: str, seconds: float) -> str | None:
        """Run a cell; return its error, or "" without one, or None if the kernel has ended."""
        end = self.used + seconds
        try:
            self.connection.send_bytes(source.encode())
            if not self.answers_before(end):
                os.kill(self.process.pid, signal.SIGALRM)
                if not self.answers_before(end + INTERRUPT_SECONDS):
                    return None
            return self.connection.recv_bytes(MOST_BYTES).decode()
        except (EOFError, OSError, UnicodeDecodeError):
            return None

    def answers_before(self, end: float) -> bool:
        """Return whether the kernel answers, or ends, before it has used `end` seconds."""
        while self.used < end:
            if self.connection.poll(LOOK_SECONDS):
                return True
            self.add_what_was_used()
        return False

    def add_what_was_used(self) -> None:
        """Add what the kernel and its descendants have used in LOOK_SECONDS.

        That is the time that they have computed, or the clock's time if none of them computes.
        """
        computed = 0.0
        computes = False
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = process.cpu_times()
                computed += times.user + times.system
                computes |= process.status() == psutil.STATUS_RUNNING
        more = max(0.0, computed - self.computed)
        self.used += min(LOOK_SECONDS, more) if computes else LOOK_SECONDS
        self.computed = computed


def be_kernel(folder: str, connection: Connection) -> None:
    """Be the kernel, under a submission's limits before anything of the learner's runs.

    The grader's open files are closed, as a cell could write to each.
    """
    # Progress bars would take a process that has loaded this for a notebook.
    from ipykernel.inprocess.ipkernel import InProcessKernel

    own_end = connection.fileno()
    os.closerange(3, own_end)
    os.closerange(own_end + 1, os.sysconf("SC_OPEN_MAX"))
    os.setpgid(0, 0)
    # This must come while there is only one thread; `enter` mounts folders in the namespace.
    with suppress(OSError):
        linux.unshare_as_anyone(linux.CLONE_NEWNS)
    linux.die_with_parent()
    signal.signal(signal.SIGALRM, too_slow)
    torch.set_num_threads(1)
    # The kernel would print warnings of its own.
    silence()
    shell = InProcessKernel().shell
    shell.ast_transformers.append(WithoutOldImports())
    left_out: list[str] = []  # a cell's shell commands, such as "!pip install", which do not run
    shell.system = shell.getoutput = left_out.append
    # IPython's own function fails for an error that has half an emoji.
    shell._showtraceback = lambda *_: None
    enter(f"{folder}/work", f"{folder}/answers", f"{folder}/ipython")
    kernel = os.getpid()
    while True:
        source = connection.recv_bytes().decode()
        left_out.clear()
        error = error_of(shell.run_cell(source, store_history=True), source)
        if error and left_out:
            error += f" (the grader runs no other programs: !{left_out[0]} did nothing)"
        # This may be a process that the cell has forked.
        if os.getpid() != kernel:
            os._exit(0)
        connection.send_bytes(error.encode(errors="replace"))


def error_of(result: Any, source: str) -> str:
    """Return the error that a cell has raised, in words; "" if there is none."""
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return ""
    if isinstance(error, TooSlow):
        return f"it was stopped: {running_line(error, source)} was still running"
    words = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}"
    if isinstance(error, SyntaxError):
        return f"{words} (line {error.lineno} of the cell)" if error.lineno else words
    return words[:MOST_LETTERS]


def running_line(error: BaseException, source: str) -> str:
    """Return the line of a cell that was running when the cell was stopped."""
    lines = source.splitlines()
    place = "it"
    # The innermost line comes last.
    for frame, number in traceback.walk_tb(error.__traceback__):
        if "ipykernel_" in frame.f_code.co_filename and number <= len(lines):
            place = f"line {number} ({lines[number - 1].strip()})"
    return place


def end_children() -> None:
    """Kill all descendants of this process, whatever group or session they are in."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=0.2)
