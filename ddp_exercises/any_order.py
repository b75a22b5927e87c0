"""Tries a right answer again, in every order in which its messages may travel.

`every_order` does that in virtual time, where nothing depends on how busy the machine is. An
attempt that could not be tried to its end is no fault of the answer. `every_order` also knows why
an answer hangs that keeps no object of a send: the message is lost with the object.
"""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from manyranks.clocks.stalls import Line
from manyranks.errors import ManyranksError
from manyranks.orders import every
from manyranks.orders.verdict import judge

from .attempt import Attempt, make_attempts
from .diagnosis import Verdict, nothing
from .evidence import STILL_RUNNING, TOO_LATE
from .tasks import check_files

SECONDS = 60.0  # An attempt that takes longer keeps the verdict that it has.
ADVICE = {
    "deadlock": "post the receive before you wait for the send, as wire.exchange does",
    "touched too early": "wait for the receive first",
    "overwritten too early": "wait for the send first",
    "not waited for": "wait for every send and every receive",
}


def confirm(
    verdict: Verdict,
    attempt: Attempt,
    enter: Callable | None = None,
    seconds: float = SECONDS,
) -> Verdict:
    """Return the verdict on an attempt once it was tried in every order of its messages.

    If the attempt was right, but an order breaks it, its task's part `every_order` is wrong; if it
    hung, the new verdict says why. `enter` sets a submission's limits; an attempt that takes longer
    than `seconds` keeps its `verdict`.
    """
    task = attempt.task
    hung = verdict.message.startswith((TOO_LATE, STILL_RUNNING))
    if not task.every_order or (verdict.message and not hung):
        return verdict
    outcome = judge(events_of(attempt, enter, seconds), results=[], runs=1, proof="", say=in_cell)
    if outcome.ok:
        return verdict
    fault = f"{outcome.proof}. Mend it: {ADVICE[outcome.kind]}"
    if hung:
        return nothing(task, f"it never comes to its end: {fault}")
    message = f"right here, but not in every order: {fault}"
    return replace(verdict, parts=verdict.parts | {task.every_order: message})


def in_cell(line: Line) -> str:
    """Return a line in words, as one of the learner's cell unless a check or a library has it."""
    if line.file in check_files() or not line.in_program:
        return str(line)
    return f"line {line.number} of your cell: {line.text}"


def events_of(attempt: Attempt, enter: Callable | None, seconds: float) -> list:
    """Return the events that the ranks of one run of an attempt log.

    There are none if the run ends with an error that no order explains, or does not end in
    `seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder, suppress(ManyranksError):
        undelayed = [None]  # one run, in which no message is held up
        arguments = ([attempt], folder, enter)
        events, _ = every.run(
            undelayed, attempt.task.ranks, make_attempts, arguments, {}, timeout=seconds
        )
        return events
    return []
