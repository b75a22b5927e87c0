"""What is said when nothing can go on: a deadlock is an error of all ranks, a thread that holds up
all is named.
"""

import linecache
import os
import sys
import threading
import traceback
from typing import Any

import torch

from ...errors import DeadlockError
from .. import own_code
from .table import RUNNING, real_clock, real_sleep

# Virtual time may stand still for so long before the watchdog says who holds it up.
PATIENCE_S = 3.0
LOOK_S = 0.5  # the watchdog looks at the table this often
GATHER_S = 10.0  # all ranks of a deadlock write their lines in this time, mostly at once
POLL_S = 0.002  # a rank looks this often whether all have written theirs
PYTHON = os.path.dirname(os.path.abspath(threading.__file__))
PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
LIBRARIES = (PACKAGES, PYTHON, "<frozen", "<string>")  # beginnings of paths


def deadlock(clock: Any, why: str) -> DeadlockError:
    """Return the error of a thread in a deadlock: it names all ranks, what they wait for, since
    when, and where.
    """
    table = clock.table
    since = f"{clock.moment / 1e12:.6f} s"
    own_line = f"rank {table.rank} waits {why} since {since}, {line_of(sys._getframe())}"
    # Of a rank with several threads the main one says what it waits for.
    if not table.lines[table.rank] or clock.slot == table.own_threads()[0]:
        table.lines[table.rank] = own_line.encode()
    waiting_ranks = table.waiting() // table.threads_per_rank
    end = real_clock() + GATHER_S
    while not all(table.lines[waiting_ranks]) and real_clock() < end:
        real_sleep(POLL_S)
    # A rank that was told of the deadlock before may have ended: it has left its line.
    lines = [line.decode("utf-8", "replace") for line in table.lines.tolist()]
    written = [line for line in lines if line]
    silent = [f"rank {rank} has returned" for rank, line in enumerate(lines) if not line]
    return DeadlockError("deadlock: " + "; ".join(written + silent))


def line_of(frame: Any) -> str:
    """Return "FILE line N: TEXT" of the innermost line, at or around a frame, that is neither of a
    package in `own_code`, nor an installed one's, nor Python's. If there is none, one that is not
    Python's will do, or else any.
    """
    # Each message asks for this: `traceback.extract_stack` would read the text of all lines.
    stack = list(traceback.walk_stack(frame))
    libraries = own_code.folders() + LIBRARIES
    nothing = ()  # No path begins with one of these.
    for left_out in (libraries, PYTHON, nothing):
        for caller, number in stack:
            path = caller.f_code.co_filename
            if not path.startswith(left_out):
                # A notebook's cell has no file.
                name = os.path.basename(path) if os.path.exists(path) else "cell"
                return f"{name} line {number}: {linecache.getline(path, number).strip()}"
    return ""


def watch(table: Any) -> None:
    """Say, on standard error, which line of this rank holds up virtual time, once for each such
    line.
    """
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
    line = "" if frame is None else line_of(frame)
    if line and line not in reported:
        reported.add(line)
        print(
            f"virtual time stands still: rank {table.rank} holds up all others, {line}",
            file=sys.stderr,
        )
