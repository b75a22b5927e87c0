"""Who descends from this process, asked again and again at little cost.

psutil asks every process of the machine for its parent each time. A parent is forgotten when it ends, but a child of
ours stays in the family: whoever is left behind becomes the child of one of us (`PR_SET_CHILD_SUBREAPER`, or process 1
of a namespace). So each process need be asked once, when it is first seen.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil


class Family:
    """The descendants of the process that made this, which must be alone in its thread."""

    def __init__(self) -> None:
        self.me = os.getpid()
        self.ours: set[int] = set()
        self.strangers: set[int] = {0}

    def look(self) -> set[int]:
        """The ids of all descendants that live now, or are waited for."""
        now = set(psutil.pids())
        self.ours &= now
        self.strangers &= {0, *now}
        parents = {pid: parent_of(pid) for pid in now - self.ours - self.strangers - {self.me}}
        while self.sort(parents):
            pass
        return set(self.ours)

    def sort(self, parents: dict[int, int]) -> bool:
        """Move from {process: its parent} those of whose parent it is known where it belongs; whether there were any.

        A parent that came after the list was made is known at the next look.
        """
        ours = {pid for pid, parent in parents.items() if parent == self.me or parent in self.ours}
        strangers = {pid for pid, parent in parents.items() if parent in self.strangers} - ours
        self.ours |= ours
        self.strangers |= strangers
        for pid in ours | strangers:
            del parents[pid]
        return bool(ours or strangers)


def children() -> list[int]:
    """The ids of this process's own children."""
    return [pid for pid in psutil.pids() if parent_of(pid) == os.getpid()]


def parent_of(pid: int) -> int:
    """The parent of a process, -1 if that has gone."""
    with suppress(OSError, psutil.Error):
        if sys.platform != "linux":
            return psutil.Process(pid).ppid()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return int(stat[stat.rfind(b")") + 2 :].split(None, 2)[1])
    return -1
