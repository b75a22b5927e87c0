"""What came of a run: right in every order, or what breaks which order, at which lines."""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..running.torch_inside import tree_leaves

DEADLOCK = "deadlock"
WAITS = re.compile(r"rank (\d+) waits .+? since [\d.]+ s, (.+?)(?=; rank \d+ |$)")
NO_FAULT = ("post", "wait", "doubt")  # All other kinds of events are faults.
SHOWN = 6  # So many events of each rank, the last ones, are in the timeline.


class Event(NamedTuple):
    """Something that a rank has written down; `moment` is in virtual seconds."""

    moment: float
    rank: int
    kind: str
    text: str
    lines: list


@dataclass
class Verdict:
    """What `every_order` found.

    `runs` is the number of runs, and `proof` says in a sentence what they prove. Where `ok` is
    False, `kind` is "deadlock", "touched too early", "overwritten too early", "not waited for" or
    "unlike results", `ranks` are those that it is about, and `lines` the program's lines. `events`
    are all posts and waits, in the order of virtual time.
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

    def show(self) -> None:
        """Print the last events of the ranks that it is about, as a small timeline."""
        print(self)
        about = self.ranks or sorted({event.rank for event in self.events})
        rows: list = []
        for rank in about:
            rows += [event for event in self.events if event.rank == rank][-SHOWN:]
        for moment, rank, kind, text, lines in sorted(rows):
            column = "    " * about.index(rank)
            place = lines[0].partition(":")[0]
            print(f"{1000 * moment:10.3f} ms  {column}rank {rank}: {kind} {text}  ({place})")


def faults_in(events: list) -> list:
    """The events that say what is wrong."""
    return [event for event in events if event.kind not in NO_FAULT]


def judge(events: list, results: list, runs: int, proof: str) -> Verdict:
    """The verdict on the events and the results of all runs; `proof` is that of a program without a
    fault.
    """
    shown = [event for event in events if event.kind in ("post", "wait")]
    faults = faults_in(events)
    if faults:  # What a rank has touched is the cause of a deadlock of the others.
        _, rank, kind, text, lines = min(faults, key=lambda event: event.kind == DEADLOCK)
        waits = WAITS.findall(text)
        if not waits:
            return Verdict(False, runs, f"rank {rank}: {text}", kind, [rank], lines, shown)
        words = (
            f"if the network buffers nothing, all wait for ever: {text.removeprefix('deadlock: ')}"
        )
        ranks = [int(waiting) for waiting, _ in waits]
        return Verdict(False, runs, words, kind, ranks, [line for _, line in waits], shown)
    if any(differ(results[0], other) for other in results[1:]):
        text = f"the results depend on the order of messages; {proof}"
        return Verdict(False, runs, text, "unlike results", events=shown)
    return Verdict(True, runs, proof, events=shown)


def differ(one: Any, other: Any) -> bool:
    """Whether two results have different values anywhere."""
    ours = tree_leaves(one)
    theirs = tree_leaves(other)
    return len(ours) != len(theirs) or not all(map(alike, ours, theirs))


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same, tensors bit by bit but for NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and (one == other or one != one)
