"""Try answers on the ranks of a launch, and bring their evidence back: plain data, or how an answer failed.

Each rank writes its evidence to a file, a line of JSON an attempt, so that one bad answer costs the others nothing: the
launch is repeated from the next attempt on.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import CourseError, LaunchTimeout, RankError
from ..running.launching.launch import launch
from .attempt import attempt, load, make_groups
from .checks import Task, find, of_exercise
from .guard import enter
from .plain import pack, unpack

PATIENCE_SECONDS = 5.0  # a receive that waits longer waits for ever
START_SECONDS = 7.0
TOO_LONG = "a message was longer than the tensor it was received into: do both sides mean the same chunk and dtype?"
BOTH_SEND = " Two ranks that both send first wait for ever: wire.exchange sends and receives at once"
GAVE_UP = re.compile("timed out waiting|timeout|connection closed by peer|connection reset by peer", re.IGNORECASE)
NOT_OURS = re.compile(r"site-packages|dist-packages|[/\\]ddp_course[/\\]|[/\\]checks[/\\]|[/\\]lib[/\\]python|<frozen")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n {4}(.*))?')


@dataclass
class Attempt:
    """One answer to one task, and the inputs for it; `answers` is what `attempt.load` takes."""

    number: str
    inputs: dict
    answers: Any


class Evidence(NamedTuple):
    """What an attempt left: `found` is {part: {case: value}}, or a `failure` says why there is none."""

    found: dict | None
    failure: str = ""


def gather(attempts: Sequence[Attempt], patience: float = PATIENCE_SECONDS, work: str = "") -> list[Evidence]:
    """Make all attempts, on as many ranks as the first one's task wants; the evidence of each.

    With a folder for their `work` the ranks keep to a submission's limits.
    """
    results: list[Evidence] = []
    waiting = list(attempts)
    while waiting:
        with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
            task = find(waiting[0].number)
            ranks, timeout = task.ranks, START_SECONDS + task.seconds * len(waiting)
            failure: CourseError | None = None
            try:
                launch(make_attempts, waiting, folder, patience, work, world_size=ranks, device="cpu", timeout=timeout)
            except CourseError as error:
                failure = error
            done = read_evidence(folder, ranks)[: len(waiting)]
        results += [assembled(one, evidence) for one, evidence in zip(waiting, done, strict=False)]
        waiting = waiting[len(done) :]
        if failure and waiting:
            results.append(Evidence(None, explain(failure, find(waiting.pop(0).number))))
    return results


def read_evidence(folder: str, ranks: int) -> list[list]:
    """What all ranks have written down, by attempt; attempts that some rank did not finish are left out."""
    by_rank = []
    for rank in range(ranks):
        path = Path(folder) / f"rank{rank}"
        text = path.read_text() if path.exists() else ""
        by_rank.append([line for line in text.splitlines(True) if line.endswith("\n")])
    return [list(lines) for lines in zip(*by_rank)]  # noqa: B905 (the shortest counts)


def assembled(one: Attempt, lines: Sequence[str]) -> Evidence:
    """The evidence of all ranks as {part: {case: value}}: with several ranks, a value is {rank: value}."""
    task = find(one.number)
    try:
        by_rank = [unpack(json.loads(line)) for line in lines]
        if task.together:
            return Evidence(task.together(by_rank, **one.inputs))
        return Evidence(by_rank[0] if task.ranks == 1 else by_case(by_rank))
    except Exception as error:  # only what the answer returned can be odd here
        return Evidence(None, f"your answer returned something that cannot be compared ({str(error)[:300]})")


def by_case(by_rank: Sequence[dict]) -> dict:
    """{part: {case: {rank: value}}} of {part: {case: value}} by rank; ranks that a case is without are left out."""
    found: dict = {}
    for rank, parts in enumerate(by_rank):
        for part, cases in parts.items():
            for case, value in cases.items():
                found.setdefault(part, {}).setdefault(case, {})[rank] = value
    return found


def make_attempts(attempts: Sequence[Attempt], folder: str, patience: float, work: str) -> None:
    """One rank's part: make every attempt and write the evidence down, a line each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    tasks = [find(one.number) for one in attempts]
    if ranks > 1:
        make_groups(range(1, ranks + 1), timedelta(seconds=patience))
    with python_alone_prints(), open(Path(folder) / f"rank{rank}", "w") as file:
        if work:
            enter(work)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (a submission's floods, until the rank ends)
        for task, one in zip(tasks, attempts, strict=True):
            answers = load(task, one.answers)
            if ranks > 1:
                dist.barrier()  # nobody waits in an answer for a rank that is still loading
            file.write(json.dumps(pack(attempt(task, answers, one.inputs))) + "\n")
            file.flush()


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


def explain(error: CourseError, task: Task) -> str:
    """What became of a launch that failed, in words for the learner."""
    if isinstance(error, LaunchTimeout):
        return f"not finished in time: {task.hang if task.ranks > 1 else 'is there a loop that never ends?'}"
    if not isinstance(error, RankError):
        return f"the ranks could not be run: {error}"
    where, frame = place(error.traceback, task), own_frame(error.traceback, task)
    if error.type_name == "Wrong" and error.message:
        return error.message + where
    if error.type_name == "NotImplementedError":
        other = frame and frame.task != task.number
        needs = f"it uses {frame.function} of {frame.task}, which does not run yet" if frame else ""
        return f"{needs}: mend {frame.task} first" if frame and other else f"not solved yet ({error.message})"
    if GAVE_UP.search(error.message):
        alone = BOTH_SEND if frame and re.search(r"\bsend\(|\bleaving\.wait|\brecv\(", frame.text) else ""
        return f"the ranks wait for each other for ever{where}: {task.hang}{alone}"
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


def place(traceback: str, task: Task) -> str:
    """The last line of the learner's own in a traceback, in brackets; of another task's answer, with its number."""
    found = own_frame(traceback, task)
    if not found:
        return ""
    if found.task != task.number:
        return f" (line {found.line} of {found.task}, {found.function}: {found.text}; mend {found.task} first)"
    return f" (line {found.line} of your cell: {found.text})"


class Frame(NamedTuple):
    """A line of a learner's: the task whose answer it is in, its number there, its function, and its text."""

    task: str
    line: str
    function: str
    text: str


def own_frame(traceback: str, task: Task) -> Frame | None:
    """The last line of the learner's own in a traceback of a task, if there is one.

    It belongs to the innermost function that a task of the exercise asks for.
    """
    own = [found for found in FRAME.findall(traceback) if not NOT_OURS.search(found[0])]
    if not own:
        return None
    owners = {name: one.number for one in of_exercise(task.exercise) for name in one.names}
    number = next((owners[function] for _, _, function, _ in reversed(own) if function in owners), task.number)
    _, line, function, text = own[-1]
    return Frame(number, line, function, text.strip())
