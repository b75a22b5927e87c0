"""The verdict on a run: right in every order, or what breaks some order, at which lines."""

import ctypes
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..clocks.stalls import Line
from ..errors import Awaited

MOST_OF_A_RANK = 6  # A text or a figure shows at most so many events or messages of a rank.
MOST_NAMES = 3  # A text names at most so many parts of results.
UNSTABLE = "they differ from run to run in one order, or have no values"
NO_VALUE = "no value"
# Two values of these types are equal if their texts are.
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    range,
    enum.Enum,
    np.generic,
    torch.dtype,
    torch.device,
    torch.Size,
)


class Event(NamedTuple):
    """Something that a rank has written down: a "post", a "wait", a "doubt" or a fault.

    The `kind` of a fault is that of a Verdict. `moment` is in virtual seconds. In the text of a
    fault {0}, {1}, … stand for its `lines`; a deadlock has an event for each rank that waits.
    `what` says for what a "post" or a "wait" is.
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
    "unlike results", `ranks` are the ranks concerned, and `lines` the program's lines. `events` are
    all posts and waits and the faults of that kind, in the order of virtual time.
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
        """Return the verdict in words, and the last events of its ranks, each on a line."""
        ranks = self.ranks or sorted({event.rank for event in self.events})
        events = [event for event in self.events if event.rank in ranks]
        lines = [repr(self)]
        for event in events[-MOST_OF_A_RANK * len(ranks) :]:
            moment = f"{1000 * event.moment:10.3f} ms"
            indent = "    " * ranks.index(event.rank)
            happened = event.kind
            # The text of a fault is long, and stands in the first line.
            if event.kind in ("post", "wait"):
                happened += f" {event.text}"
            if event.lines:
                *_, last_line = event.lines
                happened += f"  ({last_line.place})"
            lines.append(f"{moment}  {indent}rank {event.rank}: {happened}")
        return "\n".join(lines)


def faults_in(events: list) -> list:
    """Return the events that say what is wrong."""
    return [event for event in events if event.kind not in ("post", "wait", "doubt")]


def judge(
    events: list,
    results: list,
    runs: int,
    proof: str,
    say: Callable[[Line], str] = str,
    alike: int = 1,
) -> Verdict:
    """Return the verdict on the events and the results of all runs.

    The first `alike` runs had one order. `proof` is the sentence for a program without a fault, and
    `say` returns the words for a line.
    """
    faults = faults_in(events)
    if faults:
        # A rank that stops at another fault leaves the others in a deadlock, so that comes second.
        causes = [event for event in faults if event.kind != "deadlock"]
        fault, *_ = causes or faults
        happened = [event for event in events if event.kind in ("post", "wait", fault.kind)]
        parts = [fault]
        if fault.kind == "deadlock":
            parts = sorted(faults, key=lambda event: event.rank)
        ranks = [event.rank for event in parts]
        lines = [say(line) for event in parts for line in event.lines]
        text = fault.text.format(*lines)
        return Verdict(False, runs, text, fault.kind, ranks=ranks, lines=lines, events=happened)
    happened = [event for event in events if event.kind in ("post", "wait")]
    differing, not_comparable = unlike(results, alike)
    if not_comparable:
        proof += f"; not comparable, as {UNSTABLE}: {some_of(not_comparable)}"
    if not differing:
        return Verdict(True, runs, proof, events=happened)
    doubts = [event for event in events if event.kind == "doubt"]
    ranks = sorted({event.rank for event in doubts})
    lines = sorted({say(line) for event in doubts for line in event.lines})
    text = (
        f"the results of {runs} orders differ ({some_of(differing)}),"
        f" from these lines on: {'; '.join(lines)}"
    )
    return Verdict(False, runs, text, "unlike results", ranks=ranks, lines=lines, events=happened)


def unlike(results: list, alike: int) -> tuple[list[str], list[str]]:
    """Return which parts of the results differ between orders, and which cannot be compared.

    A part cannot be compared if it differs among the first `alike` runs, which had one order, or if
    it has no value.
    """
    values = [dict(values_in(result, "")) for result in results]
    names = list(dict.fromkeys(name for of_run in values for name in of_run))
    differing = []
    not_comparable = []
    for name in names:
        of_runs = [of_run.get(name) for of_run in values]
        if NO_VALUE in of_runs or len(set(of_runs[:alike])) > 1:
            not_comparable.append(name)
        elif len(set(of_runs)) > 1:
            differing.append(name)
    return differing, not_comparable


def some_of(names: list[str]) -> str:
    """Return the first names, in words."""
    shown = [f"result{name}" for name in names[:MOST_NAMES]]
    if len(names) > MOST_NAMES:
        shown.append(f"{len(names) - MOST_NAMES} more")
    return ", ".join(shown)


def values_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all values in a result, exactly, each with its place in the result.

    NaN is equal to NaN here.
    """
    exact = exactly(value)
    parts = [] if exact else inside(value)
    if parts is None:
        yield name, NO_VALUE
        return
    yield name, exact or (type(value).__name__, len(parts))
    for place, part in parts:
        yield from values_in(part, f"{name}{place}")


def exactly(value: Any) -> tuple | None:
    """Return what is compared of a value; None for a value that has others inside."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bytes_of(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, PLAIN):
        return type(value).__name__, repr(value)
    return None


def inside(value: Any) -> list | None:
    """Return the values inside a value, with their places; None for an object without any."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple, np.ndarray)):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    fields = getattr(value, "__dict__", None)
    return [(f".{field}", part) for field, part in fields.items()] if fields else None


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in order."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
