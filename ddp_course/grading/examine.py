"""Put answers to work on ranks of their own, and judge the plain data that comes back.

The examiner (the kernel of a learner who checks, or the grader's own process for it, `examiner.py`) draws inputs and
judges; answers run on ranks (`probing.py`). Here ranks are those of a launch. Each writes its evidence to a file, a
line of JSON an item, so that one bad answer costs the others nothing: the launch is repeated from the next item on.
"""

import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import CourseError, LaunchTimeout, RankError
from ..running.launching.launch import launch
from .plain import pack, unpack
from .probing import PATIENCE_SECONDS, TOO_LONG, load, own_share, patience_seconds, run_probe
from .tasks import CANNOT, RANKS, Task, Wrong, find

GAVE_UP = re.compile("timed out waiting|timeout|connection closed by peer|connection reset by peer", re.IGNORECASE)
FIRST_ITEM_SECONDS, NEXT_ITEM_SECONDS = 12.0, 5.0
NOT_OURS = re.compile(r"site-packages|dist-packages|[/\\]ddp_course[/\\]|[/\\]lib[/\\]python|<frozen|<string>|<task>")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n {4}(.*))?')
TAMPERED = re.compile("your code replaces |is not for this task|ended the process|nothing that can be read came back")
CELL = re.compile(r"answer-(\d+)-(\d+)$")


@dataclass
class Item:
    """One answer to one task: functions, or `cells` as [(name, source)], with the inputs for it."""

    number: str
    inputs: dict
    answers: tuple = ()
    cells: tuple = ()


def draw(number: str, seed: int, hidden: bool = False) -> dict[str, Any]:
    """The inputs of a task for a seed."""
    return find(number).draw(random.Random(f"{seed} {number}"), hidden)


def examine(items: Sequence[Item], patience: float = PATIENCE_SECONDS) -> list[dict[str, Any]]:
    """Run all `items`; return for each its evidence, packed, or how it failed.

    Evidence is {"evidence": [of rank 0, of rank 1, …]}; a failure is {"failure": message for the learner}.
    """
    results: list[dict[str, Any]] = []
    waiting = list(items)
    while waiting:
        with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
            timeout = FIRST_ITEM_SECONDS + NEXT_ITEM_SECONDS * (len(waiting) - 1)
            try:
                launch(run_items, waiting, folder, patience, world_size=RANKS, device="cpu", timeout=timeout)
                failure = None
            except CourseError as error:
                failure = error
            done = read_evidence(folder)
        results += [{"evidence": evidence} for evidence in done[: len(waiting)]]
        waiting = waiting[len(done) :]
        if failure and waiting:
            results.append({"failure": explain(failure, find(waiting.pop(0).number))})
    return results


def read_evidence(folder: str) -> list[list]:
    """What all ranks have written down, by item; items that some rank did not finish are left out."""
    by_rank = []
    for rank in range(RANKS):
        path = Path(folder) / f"rank{rank}"
        text = path.read_text() if path.exists() else ""
        by_rank.append([json.loads(line) for line in text.splitlines(True) if line.endswith("\n")])
    return [list(of_item) for of_item in zip(*by_rank)]  # noqa: B905 (the shortest counts)


def run_items(items: Sequence[Item], folder: str, patience: float) -> None:
    """One rank's part: run every item and write the evidence down, a line each."""
    rank = dist.get_rank()
    patience_seconds.set(patience)
    torch.manual_seed(rank)
    tasks = [find(item.number) for item in items]
    dist.barrier()  # nobody waits in an answer for a rank that is still loading
    with python_alone_prints(), open(Path(folder) / f"rank{rank}", "w") as file:
        for task, item in zip(tasks, items, strict=True):
            evidence = run_item(task, item, rank) if rank < task.ranks else None
            file.write(json.dumps(pack(evidence)) + "\n")
            file.flush()
            if task.ranks > 1:
                dist.barrier()


@contextmanager
def python_alone_prints() -> Iterator[None]:
    """Keep gloo's last words, as it ends a process ("terminate called …"), from a learner, who gets a message."""
    kept, silent, stderr = os.dup(2), os.open(os.devnull, os.O_WRONLY), sys.stderr
    os.dup2(silent, 2)
    with os.fdopen(kept, "w", buffering=1, encoding="utf-8", errors="backslashreplace") as sys.stderr:
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(silent)
            sys.stderr = stderr


def run_item(task: Task, item: Item, rank: int) -> Any:
    """One answer's evidence on one rank."""

    def answers() -> Any:
        return load(task.number, task.names, item.cells) if item.cells else item.answers

    return run_probe(task.probe, answers, own_share(item.inputs, task.private, rank), task.forbidden, task.prepare)


@dataclass(frozen=True)
class Verdict:
    """`right` only if all the task's judges said so, from evidence; a `message` for all else; `parts` by property.

    `suspicious` are remarks for a person's eye about what was measured and not read in a source.
    """

    right: bool
    message: str = ""
    parts: tuple = ()
    suspicious: tuple = ()


def verdict(task: Task, result: dict[str, Any], inputs: dict[str, Any], sent: Sequence = ()) -> Verdict:
    """The `Verdict` on one answer, from what `examine` brought back. Runs no code of the learner's.

    `sent[a][b]`, where it was counted outside, are the bytes from rank a to rank b in all.
    """
    try:
        if "evidence" not in result:
            raise Wrong(str(result.get("failure") or "the answer failed, and nothing says why"))
        evidence = [unpack(packed) for packed in result["evidence"]]
    except Exception as error:
        said = str(error) if isinstance(error, Wrong) else f"nothing that can be read came back: {str(error)[:300]}"
        return nothing(task, said, (said,) if TAMPERED.search(said) else ())
    odd = re.search(r"odd': '([^']*)", str(result))
    what = f"an object of type {odd[1]}" if odd else "something"
    parts = task.judged(evidence[0] if task.ranks == 1 else evidence, **inputs)
    parts = tuple(replace(part, message=part.message.replace(CANNOT, CANNOT.format(what))) for part in parts)
    wrong = [part.message for part in parts if part.message]
    if said := unlike(evidence, sent):
        return nothing(task, said, (said,))
    return Verdict(not wrong, wrong[0] if wrong else "", parts, past_the_wire(evidence, sent))


def nothing(task: Task, said: str, suspicious: tuple = ()) -> Verdict:
    """The `Verdict` on an answer that has no property."""
    return Verdict(False, said, task.lost(said), suspicious)


def unlike(evidence: Sequence, sent: Sequence[Sequence[int]]) -> str:
    """Where the bytes that a rank's wire told of are not those that were counted outside of it, or "".

    If no wire was told of anything, nobody said what is not so: the bytes alone are wrong, and a judge says so.
    """
    if not any(one["bytes"] for found in evidence for one in told_of(found)):
        return ""
    for rank, (found, counted) in enumerate(zip(evidence, sent, strict=False)):
        told, by_peer = list(told_of(found)), Counter[int]()
        for one in told:
            by_peer.update(one.get("to", {}))
        total = sum(one["bytes"] for one in told)
        if told and sum(counted) != total:
            rest = f"and its wire was told of {total}: all that travels goes through wire's functions"
            return f"rank {rank} sent {sum(counted)} bytes, {rest}"
        for peer in (peer for peer, count in by_peer.items() if count != counted[peer]):
            return f"rank {rank} sent {counted[peer]} bytes to rank {peer}, and its wire was told of {by_peer[peer]}"
    return ""


def past_the_wire(evidence: Sequence, sent: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """A remark about the first rank that sent more than its wire was told of; none for a task that counts nothing."""
    for rank, (found, counted) in enumerate(zip(evidence, sent, strict=False)):
        told = [one["bytes"] for one in told_of(found)]
        if told and sum(counted) > sum(told):
            return (f"rank {rank} sent {sum(counted) - sum(told)} bytes past the wire's functions",)
    return ()


def told_of(evidence: Any) -> Iterator[dict]:
    """All that `traffic_of` made, anywhere in a rank's evidence."""
    if isinstance(evidence, dict) and isinstance(evidence.get("traffic"), dict):
        yield evidence["traffic"]
    for item in evidence.values() if isinstance(evidence, dict) else evidence if isinstance(evidence, list) else ():
        yield from told_of(item)


def explain(error: CourseError, task: Task) -> str:
    """What became of a launch that failed, in words for the learner."""
    if isinstance(error, LaunchTimeout):
        return f"not finished in time: {task.hang if task.ranks > 1 else 'is there a loop that never ends?'}"
    if not isinstance(error, RankError):
        return f"the ranks could not be run: {error}"
    where = place(error.traceback, task.number)
    if error.type_name == "Wrong" and error.message:
        return error.message + where
    if error.type_name == "NotImplementedError":
        found = own_frame(error.traceback, task.number)
        needs = (
            found and found.task != task.number and f"it uses {found.function} of {found.task}, which does not run yet"
        )
        return f"{needs}: mend {found.task} first" if needs else f"not solved yet ({error.message})"
    if GAVE_UP.search(error.message):
        return f"the ranks wait for each other for ever{where}: {task.hang}"
    if error.type_name == "killed" and "SIGABRT" in error.message and task.ranks > 1:
        return TOO_LONG
    if "Pair is not connected" in error.message:
        return f"a rank sends to itself, or receives from itself{where}: the others are meant"
    if "modified by an inplace operation" in error.message:
        return f"weights changed between the forward and the backward pass{where}: step() comes after backward()"
    if error.type_name in ("killed", "exited", "ended"):
        return f"your code ended the process of rank {error.rank} ({error.type_name} {error.message})"
    unknown = "; is it spelt right, and defined or imported in a cell?" if error.type_name == "NameError" else ""
    return f"your code raised {error.type_name}: {error.message[:300]}{where}{unknown}"


def place(traceback: str, number: str) -> str:
    """The last line of the learner's own in a traceback, in brackets; of another task's answer, with its number."""
    found = own_frame(traceback, number)
    if not found:
        return ""
    if found.task != number:
        return f" (line {found.line} of {found.task}, {found.function}: {found.text}; mend {found.task} first)"
    return f" (line {found.line} of your cell: {found.text})"


class Frame(NamedTuple):
    """A line of a learner's: the task whose answer it is in, its number there, its function, and its text."""

    task: str
    line: str
    function: str
    text: str


def own_frame(traceback: str, number: str) -> Frame | None:
    """The last line of the learner's own in a traceback of task `number`, if there is one."""
    own = [found for found in FRAME.findall(traceback) if not NOT_OURS.search(found[0])]
    if not own:
        return None
    file, line, function, text = own[-1]
    cell = CELL.match(file)
    return Frame(f"{cell[1]}.{cell[2]}" if cell else number, line, function, text.strip())
