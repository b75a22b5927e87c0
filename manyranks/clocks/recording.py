"""The recording of a rank's work in virtual time, which is kept where somebody asks for it.

It says when the device computed, and what was sent.
"""

import sys
from dataclasses import dataclass, field

from . import clock, stalls


@dataclass
class Call:
    """A collective or a message, as one rank sees it.

    This rank sends or receives `nbytes`, and `ranks` take part. All moments are picoseconds: this
    rank came at `joined`; the transfer takes `duration`, and ends at `end`, which is None as long
    as nobody has waited for it.
    """

    name: str
    ranks: tuple
    nbytes: float
    duration: int
    joined: int
    line: stalls.Line
    end: int | None = None

    @property
    def span(self) -> tuple[int, int] | None:
        """When the transfer began and ended; None as long as nobody has waited for it."""
        if self.end is None:
            return None
        return max(self.joined, self.end - self.duration), self.end


@dataclass
class Recording:
    """All that one rank did.

    `busy` has the spans (start, end) in which each stream computed; spans that touch are one.
    `calls` has the messages and collectives.
    """

    busy: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


current: Recording | None = None  # Who wants a recording of this process puts one here.


def note_operation(stream: int, start: int, end: int) -> None:
    """Note that a stream computes from `start` to `end`, where there is a recording."""
    if current is None or start == end:
        return
    spans = current.busy.setdefault(stream, [])
    if spans:
        last_start, last_end = spans[-1]
        if last_end == start:
            spans[-1] = (last_start, end)
            return
    spans.append((start, end))


def note_call(name: str, ranks: tuple, nbytes: float, duration: int) -> Call | None:
    """Return a new entry for an operation that begins now; None where nothing is recorded."""
    if current is None:
        return None
    line = stalls.line_of(sys._getframe())
    call = Call(name, ranks, nbytes, duration, clock.moment(), line)
    current.calls.append(call)
    return call
