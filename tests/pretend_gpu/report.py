"""Findings: written down at once, as ranks may end without farewell, and read when all is over."""

import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

# The log's file descriptor: forked processes share it, and each write is appended whole.
_open = {}


def note(kind, what):
    """Append a finding: process, kind, and one line of text."""
    path = os.environ.get("PRETEND_LOG")
    if path:
        if path not in _open:
            _open[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(_open[path], f"{os.getpid()}\t{kind}\t{what}\n".encode())


@dataclass
class Findings:
    """What a log says.

    - races: lines of text. foreign: contexts that a rank opened beside the one on its own
      GPU, as text.
    - late: communicators that a rank made while it received, as text: to make one, NCCL may
      wait for the GPU.
    - syncs: how often the host waited, by reason and line of code.
    - communicators: how many NCCL made, over all processes. launches: groups of ranks that
      have used NCCL.
    - peaks: the most bytes that a process had on each GPU. farewells: processes that have
      destroyed their group.
    """

    races: list = field(default_factory=list)
    foreign: list = field(default_factory=list)
    late: list = field(default_factory=list)
    syncs: Counter = field(default_factory=Counter)
    communicators: int = 0
    launches: int = 0
    farewells: int = 0
    peaks: dict = field(default_factory=dict)


def read(path):
    """Return the findings in a log; one that is not there has none."""
    found = Findings()
    own = {}
    contexts = defaultdict(list)
    lines = Path(path).read_text(encoding="utf-8").splitlines() if os.path.exists(path) else []
    by_kind = defaultdict(list)
    for line in lines:
        process, kind, what = line.split("\t", 2)
        by_kind[kind].append(what)
        if kind == "own":
            own.setdefault(process, what)
        elif kind == "context":
            contexts[process].append(what.split("\t"))
        elif kind == "peak":
            gpu, size = what.split("\t")
            found.peaks[int(gpu)] = max(found.peaks.get(int(gpu), 0), int(size))
    found.races = by_kind["race"]
    found.late = by_kind["late"]
    found.syncs = Counter(by_kind["sync"])
    found.farewells = len(by_kind["farewell"])
    found.communicators = len(by_kind["communicator"])
    found.launches = len(set(by_kind["communicator"]))
    for process, gpu in own.items():
        found.foreign += [
            f"a rank whose GPU is {gpu} opened a context on GPU {other}: {where}"
            for other, where in contexts[process]
            if other != gpu
        ]
    return found
