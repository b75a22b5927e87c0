"""Once an answer was right: would it be, if its messages travelled in another order?

`every_order` tries it in virtual time, where nothing depends on how busy the machine is. What could
not be tried to its end is no fault of the answer. It also knows why an answer hangs that forgets a
send: the message is lost with the object that nobody keeps.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import CourseError
from ..orders import every
from ..orders.verdict import judge
from .attempt import Attempt, load, prepare, probed
from .checks import find
from .diagnosis import Verdict, nothing
from .evidence import STILL_RUNNING, TOO_LATE

SECONDS = 60.0  # Nothing is said of what takes longer.
ADVICE = {
    "deadlock": "post the receive before you wait for the send, as wire.exchange does",
    "touched too early": "wait for the receive first",
    "overwritten too early": "wait for the send first",
    "not waited for": "wait for every send and every receive",
}
# The files in exercises/checks, such as 04.py and shared.py, keep their names.
LINE = re.compile(r"(?<![\w.-])(?!\d\d\.py|shared\.py)[\w.-]+ line (\d+)")


def confirmed(verdict: Verdict, attempt: Attempt, enter: Callable | None = None) -> Verdict:
    """The verdict on an attempt; if it was right, its task's part `every_order` is wrong where an
    order breaks it. If it hung, the verdict says why. `enter()` sets a submission's limits.
    """
    task = find(attempt.number)
    hung = verdict.message.startswith((TOO_LATE, STILL_RUNNING))
    if not task.every_order or (verdict.message and not hung):
        return verdict
    events = events_of([attempt], enter)
    outcome = judge(events or [], [], 1, "")
    if outcome.ok:
        return verdict
    text = LINE.sub(r"line \1 of your cell", outcome.proof)
    fault = f"{text}. Mend it: {ADVICE[outcome.kind]}"
    if hung:
        return nothing(task, f"it never comes to its end: {fault}")
    message = f"right here, but not in every order: {fault}"
    return replace(verdict, parts=verdict.parts | {task.every_order: message})


def events_of(attempts: Sequence[Attempt], enter: Callable | None) -> list | None:
    """What ranks write down that make attempts one after the other; None if they come to no end."""
    ranks = find(attempts[0].number).ranks
    try:
        return every.run([None], ranks, probe_each, (attempts, enter), {}, timeout=SECONDS)[0]
    except CourseError:
        return None


def probe_each(attempts: Sequence[Attempt], enter: Callable | None) -> None:
    """On each rank: put answers to their tasks' probes. The evidence is known already."""
    find(attempts[0].number)  # Once the limits are entered, the file of these tasks is hidden.
    prepare()
    if enter:
        enter()
    for number, inputs, answers in attempts:
        task = find(number)
        probed(task, load(task, answers), inputs)
