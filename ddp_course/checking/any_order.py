"""Once an answer was right: would it be, if its messages travelled in another order?

`every_order` tries it in virtual time, where nothing depends on how busy the machine is. What could
not be tried to its end is no fault of the answer. It also knows why an answer hangs that forgets a
send: the message is lost with the object that nobody keeps.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from ..errors import CourseError
from ..orders import every
from ..orders.verdict import judge
from .attempt import Attempt, load, prepare, probed
from .checks import find
from .diagnosis import Verdict, nothing
from .evidence import STILL_RUNNING, TOO_LATE

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
    seconds = 30.0 if hung else 300.0
    try:
        events, _ = every.run([None], task.ranks, probe_once, (attempt, enter), {}, timeout=seconds)
    except CourseError:
        return verdict
    outcome = judge(events, [], 1, "")
    if outcome.ok:
        return verdict
    text = LINE.sub(r"line \1 of your cell", outcome.proof)
    fault = f"{text}. Mend it: {ADVICE[outcome.kind]}"
    if hung:
        return nothing(task, f"it never comes to its end: {fault}")
    message = f"right here, but not in every order: {fault}"
    return replace(verdict, parts=verdict.parts | {task.every_order: message})


def probe_once(attempt: Attempt, enter: Callable | None) -> None:
    """On each rank: put an answer to its task's probe. The evidence is known already."""
    task = find(attempt.number)
    prepare()
    if enter:
        enter()
    probed(task, load(task, attempt.answers), attempt.inputs)
