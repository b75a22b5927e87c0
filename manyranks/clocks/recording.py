"""What a rank keeps of its work in virtual time, where somebody asks for it.

That is when its device computed, what it sent, and when its optimizers made their steps.
"""

import sys
from dataclasses import dataclass, field

from . import clock, stalls


@dataclass
class Call:
    """A collective, or a message.

    `nbytes` are those that this rank sends (or receives), `ranks` those that take part. All moments
    are picoseconds: this rank came at `joined`; the transfer takes `duration`, and ends at `end`,
    which is None as long as nobody has waited for it.
    """

    name: str
    ranks: tuple
    nbytes: float
    duration: int
    joined: int
    line: stalls.Line
    end: int | None = None


@dataclass
class Recording:
    """All that one rank did.

    `busy` has the spans in which each stream computed, one after the other, and neighbours as one.
    """

    busy: dict[int, list[list[int]]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


current: Recording | None = None  # A process has at most one.


def begin() -> Recording:
    """Record from now on what this process does."""
    global current
    current = Recording()
    return current


def note_operation(stream: int, start: int, end: int) -> None:
    """Note, where there is a recording, that a stream computes from `start` to `end`."""
    if current is None or start == end:
        return
    spans = current.busy.setdefault(stream, [])
    if spans and spans[-1][1] == start:
        spans[-1][1] = end
    else:
        spans.append([start, end])


def note_call(name: str, ranks: tuple, nbytes: float, duration: int) -> Call | None:
    """Return a new entry for a message or a collective, which begins now.

    Return None without a recording.
    """
    if current is None:
        return None
    line = stalls.line_of(sys._getframe())
    call = Call(name, ranks, nbytes, duration, clock.moment(), line)
    current.calls.append(call)
    return call
