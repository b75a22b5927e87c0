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
from .table import FLOOR, RUNNING, real_clock, real_sleep

# Virtual time may stand still for so long before the watchdog says who holds it up.
PATIENCE_S = 3.0
LOOK_S = 0.5
GATHER_S = 10.0  # all ranks of a deadlock write their lines in this time, mostly at once
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PYTHON = os.path.dirname(os.path.abspath(threading.__file__))
PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
LIBRARIES = (OWN_FOLDER, PACKAGES, PYTHON, "<frozen", "<string>")


def deadlock(clock: Any, why: str) -> DeadlockError:
    """Return the error of a thread in a deadlock: it names all ranks, what they wait for, since
    when, and where.
    """
    table = clock.table
    since = f"{clock.moment / 1e12:.6f} s"
    line = f"rank {table.rank} waits {why} since {since}, {line_of(sys._getframe())}"
    if not table.lines[table.rank] or clock.slot == table.own_threads()[0]:
        table.lines[table.rank] = line.encode()
    ranks = sorted(set((table.waiting() // table.threads_per_rank).tolist()))
    end = real_clock() + GATHER_S
    while not all(table.lines[ranks]) and real_clock() < end:
        real_sleep(0.002)
    # A rank that was told of the deadlock before may have ended: it has left its line.
    texts = [line.decode("utf-8", "replace") for line in table.lines.tolist()]
    lines = [text for text in texts if text]
    lines += [f"rank {rank} has returned" for rank, text in enumerate(texts) if not text]
    return DeadlockError("deadlock: " + "; ".join(lines))


def line_of(frame: Any) -> str:
    """Return the innermost line at a frame that is neither ours nor torch's nor Python's; a
    notebook's cell has no file.
    """
    stack = list(traceback.walk_stack(frame))  # Each message asks: `extract_stack` reads all lines.
    for others in (LIBRARIES, PYTHON, ()):
        for each, number in stack:
            path = each.f_code.co_filename
            if not path.startswith(others):
                name = os.path.basename(path) if os.path.exists(path) else "cell"
                return f"{name} line {number}: {linecache.getline(path, number).strip()}"
    return ""


def watch(table: Any) -> None:
    """Say, on standard error, which line of this rank holds up virtual time, once for each such
    line.
    """
    said: set[str] = set()
    before = None
    since = real_clock()
    while True:
        real_sleep(LOOK_S)
        state = (table.head.latest, tuple(table.threads[FLOOR].tolist()))
        if state != before:
            before = state
            since = real_clock()
            continue
        if real_clock() - since > PATIENCE_S and len(table.waiting()):
            for slot in table.own_threads():
                if table.places[slot].state == RUNNING:
                    report(table, slot, said)


def report(table: Any, slot: int, said: set[str]) -> None:
    """Name the line of the thread at `slot`."""
    thread = table.idents.get(slot)
    frame = sys._current_frames().get(thread)
    line = "" if frame is None else line_of(frame)
    if line and line not in said:
        said.add(line)
        print(
            f"virtual time stands still: rank {table.rank} holds up all others, {line}",
            file=sys.stderr,
        )
