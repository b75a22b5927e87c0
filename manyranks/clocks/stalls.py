"""What is said when nothing can go on.

A deadlock is an error of all ranks. A thread that holds up all others for seconds is named on
standard error.
"""

import linecache
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import own_code
from ..errors import Awaited, DeadlockError, Wait
from .table import RUNNING, real_clock, real_sleep

# Virtual time may stand still for so long before the watchdog says who holds it up.
PATIENCE_S = 3.0
LOOK_S = 0.5  # The watchdog looks at the table this often.
GATHER_S = 10.0  # All ranks of a deadlock write down their waits in this time, mostly at once.
POLL_S = 0.002  # A rank looks this often whether all have written theirs.
MOST_LETTERS = 160  # A line of a program is cut after so many letters.
PYTHON = os.path.dirname(os.path.abspath(threading.__file__))
PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
LIBRARIES = (PACKAGES, PYTHON, "<frozen", "<string>")  # beginnings of paths


class Line(NamedTuple):
    """A line of a program; `file` is the name of its file, or "cell" in a notebook.

    `in_program` is False for a line of a library.
    """

    file: str
    number: int
    text: str
    in_program: bool = True

    @property
    def place(self) -> str:
        """The line's file and number, such as "train.py line 12"."""
        return f"{self.file} line {self.number}"

    def __str__(self):
        return f"{self.place}: {self.text}"


def deadlock(clock: Any, what: Awaited) -> DeadlockError:
    """Return the error of a thread in a deadlock.

    The error names all ranks, what they wait for, since when, and where.
    """
    table = clock.table
    own_wait = Wait(table.names[table.rank], what, clock.moment / 1e12, *line_of(sys._getframe()))
    # If several threads of a rank wait, the main thread's wait is the one that is told.
    if not table.waits[table.rank] or clock.slot == table.own_threads()[0]:
        # Under the lock, nobody reads a wait that is half written.
        with table.lock:
            table.waits[table.rank] = pickle.dumps(own_wait)
    waiting_ranks = table.waiting() // table.threads_per_rank
    end = real_clock() + GATHER_S
    while not all(table.waits[waiting_ranks]) and real_clock() < end:
        real_sleep(POLL_S)
    # A rank that was told of the deadlock before may have ended by now, but its wait is still here.
    with table.lock:
        written = table.waits.tolist()
    waits = [pickle.loads(text) for text in written if text]
    returned = [name for name, text in zip(table.names, written, strict=True) if not text]
    return DeadlockError(f"deadlock: {who_waits(waits, returned)}", waits, returned)


def line_of_wait(wait: Wait) -> Line:
    """Return the line at which a rank waits."""
    return Line(wait.file, wait.line, wait.text, wait.in_program)


def wait_and_line(wait: Wait, line: Any = None) -> str:
    """Return who waits for what, since when, and where; `line` may stand for the wait's own."""
    return f"{wait} since {wait.since:.6f} s, {line or line_of_wait(wait)}"


def who_waits(
    waits: Sequence[Wait], returned: Sequence[int], say: Callable[[Wait], str] = wait_and_line
) -> str:
    """Return a clause for each rank of a deadlock; `say` returns that of a rank that waits."""
    clauses = [say(wait) for wait in waits]
    clauses += [f"rank {rank} has returned" for rank in returned]
    return "; ".join(clauses)


def line_of(frame: Any) -> Line:
    """Return the innermost line, at or around a frame, that is the program's own.

    Lines of the program's scripts are. Lines of packages in `own_code`, of installed packages and
    of Python are not. If all are of these, the innermost that is not Python's will do, or any.
    """
    # Each message asks for this: `traceback.extract_stack` would read the text of all lines.
    stack = list(traceback.walk_stack(frame))
    libraries = own_code.folders() + LIBRARIES
    nothing = ()  # No path begins with any of no beginnings.
    for left_out in (libraries, PYTHON, nothing):
        for caller, number in stack:
            path = caller.f_code.co_filename
            if path in own_code.scripts or not path.startswith(left_out):
                # A notebook's cell has no file.
                name = os.path.basename(path) if os.path.exists(path) else "cell"
                text = linecache.getline(path, number).strip()[:MOST_LETTERS]
                return Line(name, number, text, in_program=left_out is libraries)
    # A thread without a frame is at no line.
    return Line("", 0, "", in_program=False)


def watch(table: Any) -> None:
    """Say on standard error, once for each line, which line of this rank holds up virtual time."""
    reported: set[str] = set()
    state_before = None
    since = real_clock()
    while True:
        real_sleep(LOOK_S)
        state = (table.head.latest, table.threads["floor"].tolist())
        if state != state_before:
            state_before = state
            since = real_clock()
        elif real_clock() - since > PATIENCE_S and len(table.waiting()):
            for slot in table.own_threads():
                if table.places[slot].state == RUNNING:
                    report(table, slot, reported)


def report(table: Any, slot: int, reported: set[str]) -> None:
    """Say which line the thread at `slot` runs, unless that was `reported` before."""
    thread = table.idents.get(slot)
    frame = sys._current_frames().get(thread)
    line = "" if frame is None else str(line_of(frame))
    if line and line not in reported:
        reported.add(line)
        rank = table.names[table.rank]
        print(
            f"virtual time stands still: rank {rank} holds up all others, {line}",
            file=sys.stderr,
        )
