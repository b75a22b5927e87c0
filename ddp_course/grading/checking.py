"""The check cell of an exercise: `check("4.2", reduce_scatter)`."""

import secrets
from typing import Any

from ..errors import Wrong
from .attempt import Attempt
from .checks import Task, cells_with, find, known_wrong, solution
from .diagnosis import verdict
from .evidence import gather

CORRECT = "correct. The grader draws other inputs, some of them harder."
SO_FAR = "right so far: "


def check(number: str, *answers: Any, seed: int | None = None) -> None:
    """Say in one line that the answers to task `number` are right, or raise Wrong with what is wrong.

    The answer runs on ranks of its own, with inputs that are drawn anew each time. A message about a wrong answer
    ends with the seed: the same seed draws the same inputs again.
    """
    task = find(number)
    call = f'check("{number}", {", ".join(task.names)}'
    if len(answers) != len(task.names):
        raise ValueError(f"{call}) is how this check is called")
    seed = secrets.randbelow(100_000) if seed is None else seed
    inputs = task.inputs(seed)
    right, evidence, *others = gather([solved(task, inputs), Attempt(number, inputs, answers), *known(task, inputs)])
    result = verdict(task, evidence, right, lambda: others)
    if not result.right:
        holds = [part.name for part in result.parts if not part.message]
        so_far = f"{SO_FAR}{', '.join(holds)}; " if holds else ""
        raise Wrong(f"Exercise {number}: {result.message} ({so_far}again with the same inputs: {call}, seed={seed}))")
    print(f"Exercise {number}: {CORRECT}")


def solved(task: Task, inputs: dict) -> Attempt:
    """The attempt with the course's own solution."""
    return Attempt(task.number, inputs, cells_with(task.number, solution(task.number)))


def known(task: Task, inputs: dict) -> list[Attempt]:
    """An answer that does nothing, and the known wrong ones, to be tried on the inputs of one that is wrong."""
    idle = "\n".join(f"def {name}(*args, **kwargs): pass" for name in task.names)
    texts = [idle, *(answer.source for answer in known_wrong(task.number))]
    return [Attempt(task.number, inputs, cells_with(task.number, text), if_wrong=True) for text in texts]
