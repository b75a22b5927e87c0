"""Tries answers on the ranks of a launch, and brings their evidence back.

Evidence is plain data, or says how an answer failed. Each rank writes a file per attempt, so after
an answer that ends a launch, another launch goes on with the next attempt.
"""

import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from manyranks.clocks.stalls import who_waits
from manyranks.errors import DeadlockError, LaunchTimeout, ManyranksError, RankError, Wait
from manyranks.launching.launch import launch
from manyranks.links import Link

from .attempt import UNUSABLE, Attempt, Evidence, assemble, make_attempts
from .errors import TooSlow
from .tasks import (
    Task,
    cells_with,
    check_files,
    known_wrong,
    of_exercise,
    solution,
    solved_cells,
)

ONE_HOST = Link(hosts=1)
TOO_LATE = "not finished in time"
STILL_RUNNING = "still running after all of its time"
# An answer that computes is stopped after a task's `seconds` of processor time, and a deadlock is
# known at once. Only an answer that waits for something else is stopped by the clock: in the grader
# at the submission's deadline, in the lab after PATIENCE times a task's seconds, and on a busy
# machine not before SLOWER times the time that the solution took.
PATIENCE = 4.0
SLOWER = 10.0
TOO_LONG = (
    "a message was longer than the tensor it was received into: do both sides mean the same chunk"
    " and dtype?"
)
BOTH_SEND = (
    " Two ranks that both send first wait for ever: wire.exchange sends and receives at once"
)
# These errors are of the answer, even if the traceback shows none of its lines.
LEARNERS_OWN = ("MemoryError", "PermissionError", "RecursionError", "NameError")
# These files are torch's, ours, a check's or Python's.
NOT_LEARNERS = re.compile(
    r"site-packages|dist-packages|[/\\](?:manyranks|ddp_course|ddp_exercises)[/\\]"
    r"|[/\\]checks[/\\]|[/\\]lib[/\\]python|<frozen|<string>"
)
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n {4}(.*))?')


def gather(
    attempts: Sequence[Attempt],
    enter: Callable | None = None,
    on_rank: Callable = make_attempts,
    link: Link = ONE_HOST,
    seconds: float | None = None,
) -> list[Evidence]:
    """Return the evidence of each attempt, which ranks make by `on_rank`.

    `enter` sets a submission's limits on each rank before anything of the submission runs. All
    launches together take at most `seconds` by the clock, and attempts that they do not reach have
    no evidence. Without `seconds` the first attempt must be one that ends: the solution, or an
    answer that does nothing.
    """
    results: list[Evidence] = []
    began = time.monotonic()
    first_took = 0.0  # the seconds that the first attempt took, from its launch on
    while waiting := attempts[len(results) :]:
        planned = PATIENCE * sum(attempt.task.seconds for attempt in waiting)
        patience = max(planned, SLOWER * first_took)
        if seconds is not None:
            patience = began + seconds - time.monotonic()
            if patience <= 0:
                break
        launched = launch_attempts(waiting, enter, on_rank, link, patience)
        results += launched.evidences
        if not launched.failure:
            break
        first_took = first_took or launched.took
        # If the machine is slower than was planned for, the next launch has more time.
        if (
            isinstance(launched.failure, LaunchTimeout)
            and seconds is None
            and patience < SLOWER * first_took
        ):
            continue
        if len(launched.evidences) < len(waiting):
            failed = waiting[len(launched.evidences)]
            results.append(Evidence({}, explain(launched.failure, failed.task)))
    return results


def solution_attempt(task: Task, inputs: dict) -> Attempt:
    """Return the attempt with the course's own solution."""
    return Attempt(task, inputs, solved_cells(task.exercise))


def known_attempts(task: Task, inputs: dict) -> list[Attempt]:
    """Return attempts with an answer that does nothing, and then with the known wrong ones."""
    texts = ["\n".join(f"def {name}(*args, **kwargs): pass" for name in task.names)]
    texts += [answer.source for answer in known_wrong(task.number)]
    return [Attempt(task, inputs, cells_with(task.number, text)) for text in texts]


class Launched(NamedTuple):
    """What a launch has brought: the evidence of attempts that came to their end, and its error.

    The first evidence was there after `took` seconds.
    """

    evidences: list[Evidence]
    failure: ManyranksError | None
    took: float


def launch_attempts(
    attempts: Sequence[Attempt],
    enter: Callable | None,
    on_rank: Callable,
    link: Link,
    patience: float,
) -> Launched:
    """Make attempts in one launch, which takes at most `patience` seconds."""
    ranks = attempts[0].task.ranks
    failure = None
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
        try:
            launch(
                on_rank,
                list(attempts),
                folder,
                enter,
                world_size=ranks,
                device="cpu",
                link=link,
                timeout=patience,
            )
        except ManyranksError as error:
            failure = error
        first_end = time.time()
        evidences = []
        for number, attempt in enumerate(attempts):
            files = [Path(folder, f"{number}-{rank}") for rank in range(ranks)]
            if all(file.exists() for file in files):
                evidences.append(assemble(attempt, [file.read_bytes() for file in files]))
                first_end = min(first_end, files[0].stat().st_mtime)
    took = first_end - began
    return Launched([each._replace(seconds=took) for each in evidences], failure, took)


def explain(error: ManyranksError, task: Task) -> str:
    """Return why a launch failed, in words for the learner."""
    if isinstance(error, LaunchTimeout):
        return f"{TOO_LATE}: {still_running(error, task)}"
    if not isinstance(error, (RankError, DeadlockError)):
        return f"the ranks could not be run: {error}"
    culprit = error.failures[0]
    kind = culprit.type_name
    message = culprit.message
    shortened = message[:300]
    frame = own_frame(culprit.traceback, task)
    where = place(frame, task)
    if kind == "Wrong" and message:
        return message + where
    # A lock may have made another error of it.
    if TooSlow.__name__ in culprit.traceback:
        return f"{STILL_RUNNING}{where}: is there a loop that never ends?"
    if kind == "NotImplementedError":
        if frame and frame.task != task.number:
            used = f"it uses {frame.function} of {frame.task}, which does not run yet"
            return f"{used}: mend {frame.task} first"
        return f"not solved yet ({message})"
    if isinstance(error, DeadlockError):
        return explain_deadlock(error, task)
    if culprit.exit_code == -signal.SIGABRT and task.ranks > 1:
        return TOO_LONG
    if "Pair is not connected" in message:
        return f"a rank sends to itself, or receives from itself{where}: the others are meant"
    if "modified by an inplace operation" in message:
        return (
            f"weights changed between the forward and the backward pass{where}: step() comes after"
            " backward()"
        )
    if kind in ("killed", "exited"):
        return f"your code ended the process of rank {culprit.rank} ({kind} {message})"
    if not frame and kind not in LEARNERS_OWN:
        return f"{UNUSABLE} ({kind}: {shortened})"
    return f"your code raised {kind}: {shortened}{where}{advice_on(kind, message)}"


def advice_on(kind: str, message: str) -> str:
    """Return what to do about an error that beginners meet, after a semicolon; else ""."""
    if kind == "NameError":
        return "; is it spelt right, and defined or imported in a cell above?"
    if "Boolean value of Tensor" in message:
        return (
            "; == and `in` compare tensors number by number: torch.equal says whether all numbers"
            " are equal, and `is` or a set whether it is this very tensor"
        )
    return ""


def explain_deadlock(error: DeadlockError, task: Task) -> str:
    """Return who waits for whom, in words for the learner, and what to look for."""
    advice = task.hang
    all_send = all(wait.what.kind == "send" for wait in error.waits)
    if all_send and "wire.exchange" in solution(task.number):
        advice += BOTH_SEND
    frames = {failure.rank: own_frame(failure.traceback, task) for failure in error.failures}
    waits = who_waits(error.waits, error.returned, partial(in_answer, frames))
    return f"the ranks wait for each other for ever: {waits}; {advice}"


def in_answer(frames: dict, wait: Wait) -> str:
    """Return for what a rank waits, and in which line of the answer.

    The line that waits may be a check's, as in an all-reduce that is given; then the rank's
    traceback, of which `frames` has the last line, is still in the answer, or the answer has ended.
    """
    if wait.in_program and wait.file not in check_files():
        return f"{wait} (line {wait.line})"
    if frame := frames.get(wait.rank):
        return f"{wait} (line {frame.line})"
    return f"rank {wait.rank} has ended"


def still_running(error: LaunchTimeout, task: Task) -> str:
    """Return the learner's line that was running when time ran out, or else the task's hint."""
    hint = task.hang if task.ranks > 1 else "does it ever end?"
    for state in error.states:
        if frame := own_frame(state.stack, task):
            return f"still running on rank {state.rank}{place(frame, task)}: {hint}"
    return hint


class Frame(NamedTuple):
    """A line of the learner's: the task whose answer has it, its number, function and text."""

    task: str
    line: str
    function: str
    text: str


def own_frame(traceback: str, task: Task) -> Frame | None:
    """Return the last line of the learner's own in a traceback, if there is one.

    It belongs to the task that asks for the innermost function.
    """
    own = [frame for frame in FRAME.findall(traceback) if not NOT_LEARNERS.search(frame[0])]
    if not own:
        return None
    task_of = {name: other.number for other in of_exercise(task.exercise) for name in other.names}
    owner = task.number
    for _, _, function, _ in own:
        owner = task_of.get(function, owner)
    _, line, function, text = own[-1]
    return Frame(owner, line, function, text.strip())


def place(frame: Frame | None, task: Task) -> str:
    """Return the learner's line in brackets, with the number of its task if that is another one."""
    if not frame:
        return ""
    text = f": {frame.text}" if frame.text else ""
    if frame.task != task.number:
        return (
            f" (line {frame.line} of {frame.task}, {frame.function}{text}; mend {frame.task} first)"
        )
    return f" (line {frame.line} of your cell{text})"
