"""What came of a run: right in every order, or what breaks which order, at which lines."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..clocks.stalls import Line
from ..errors import Awaited
from ..torch_inside import tree_map_only

MOST_OF_A_RANK = 6  # A text and a figure have so many of a rank's events or messages.


class Event(NamedTuple):
    """Something that a rank has written down: a "post", a "wait", a "doubt" or a fault, whose
    `kind` is that of a Verdict. `moment` is in virtual seconds. In the text of a fault {0}, {1}, …
    are its `lines`; a deadlock has an event for each rank that waits. `what` is what a "post" or a
    "wait" is for.
    """

    moment: float
    rank: int
    kind: str
    text: str
    lines: list
    what: Awaited | None = None


@dataclass
class Verdict:
    """What `every_order` found.

    `runs` is the number of runs, and `proof` says in a sentence what they prove. Where `ok` is
    False, `kind` is "deadlock", "touched too early", "overwritten too early", "not waited for" or
    "unlike results", `ranks` are those that it is about, and `lines` the program's lines. `events`
    are all posts and waits and these faults, in the order of virtual time.
    """

    ok: bool
    runs: int
    proof: str
    kind: str = ""
    ranks: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    events: list = field(default_factory=list)

    def __repr__(self):
        return self.proof if self.ok else f"{self.kind}: {self.proof}"

    def text(self) -> str:
        """The verdict in words, and the last events of its ranks, each on a line of its own."""
        ranks = self.ranks or sorted({event.rank for event in self.events})
        events = [event for event in self.events if event.rank in ranks]
        lines = [repr(self)]
        for moment, rank, kind, text, places, _ in events[-MOST_OF_A_RANK * len(ranks) :]:
            indent = "    " * ranks.index(rank)
            # The text of a fault is long, and stands in the first line.
            happened = f"{kind} {text}" if kind in ("post", "wait") else kind
            place = ""
            if places:
                place = f"  ({places[-1].place})"
            lines.append(f"{1000 * moment:10.3f} ms  {indent}rank {rank}: {happened}{place}")
        return "\n".join(lines)


def faults_in(events: list) -> list:
    """The events that say what is wrong."""
    return [event for event in events if event.kind not in ("post", "wait", "doubt")]


def judge(
    events: list, results: list, runs: int, proof: str, say: Callable[[Line], str] = str
) -> Verdict:
    """The verdict on the events and the results of all runs; `proof` is that of a program without a
    fault, and `say` has the words for a line.
    """
    faults = faults_in(events)
    if faults:
        # A rank that stops at another fault leaves the others in a deadlock, so that comes second.
        causes = [event for event in faults if event.kind != "deadlock"]
        fault = (causes or faults)[0]
        happened = [event for event in events if event.kind in ("post", "wait", fault.kind)]
        parts = [fault]
        if fault.kind == "deadlock":
            parts = sorted(faults, key=lambda event: event.rank)
        ranks = [event.rank for event in parts]
        lines = [say(line) for event in parts for line in event.lines]
        return Verdict(False, runs, fault.text.format(*lines), fault.kind, ranks, lines, happened)
    happened = [event for event in events if event.kind in ("post", "wait")]
    if len(set(map(values_of, results))) < 2:
        return Verdict(True, runs, proof, events=happened)
    doubts = [event for event in events if event.kind == "doubt"]
    ranks = sorted({event.rank for event in doubts})
    lines = sorted({say(line) for event in doubts for line in event.lines})
    text = f"the results of {runs} orders differ, from these lines on: {'; '.join(lines)}"
    return Verdict(False, runs, text, "unlike results", ranks, lines, happened)


def values_of(result: Any) -> str:
    """All values of a result as text, so that two results with NaN at one place are alike."""
    return str(tree_map_only(torch.Tensor, torch.Tensor.tolist, result))
