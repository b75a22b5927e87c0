"""Once an answer was right: would it be, if its messages travelled in another order?

`every_order` tries it in virtual time, where nothing depends on how busy the machine is. What could
not be tried to its end is no fault of the answer. It also knows why an answer hangs that keeps no
object of a send to wait for: the message is lost with the object.
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
from .tasks import check_files, find

SECONDS = 60.0  # What takes longer keeps the verdict that it has.
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
    """The `verdict` on an attempt, tried in every order.

    If it was right, but an order breaks it, its task's part `every_order` is wrong; if it hung, the
    verdict says why. `enter` sets a submission's limits; an attempt that takes longer than
    `seconds` keeps its verdict.
    """
    task = find(attempt.number)
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
    """A line of the answer's in words; those of exercises/checks and of libraries keep theirs."""
    if line.file in check_files() or not line.in_program:
        return str(line)
    return f"line {line.number} of your cell: {line.text}"


def events_of(attempt: Attempt, enter: Callable | None, seconds: float) -> list:
    """What the ranks of one run of an attempt write down.

    It is nothing if the run ends with an error that no order explains, or not in `seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder, suppress(ManyranksError):
        undelayed = [None]  # This makes one run, in which no message is held up.
        ranks = find(attempt.number).ranks
        arguments = ([attempt], folder, enter)
        events, _ = every.run(undelayed, ranks, make_attempts, arguments, {}, timeout=seconds)
        return events
    return []
