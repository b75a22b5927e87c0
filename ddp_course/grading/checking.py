"""The check cell of an exercise: `check("4.2", reduce_scatter)`."""

import secrets
from collections.abc import Sequence
from functools import cache
from typing import Any

from ..errors import Wrong
from .attempt import Cells
from .checks import Task, cells_with, find, known_answers, solution
from .diagnosis import Book, Verdict, verdict
from .evidence import Attempt, Evidence, gather

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
    right, tried = gather([solved(task, inputs), Attempt(number, inputs, answers)])
    said = verdict(task, tried, book_of(task, inputs, right), inputs)
    if not said.right:
        raise Wrong(
            f"Exercise {number}: {said.message} ({so_far(said)}again with the same inputs: {call}, seed={seed}))"
        )
    print(f"Exercise {number}: {CORRECT}")


def so_far(said: Verdict) -> str:
    """The parts that hold, if some do."""
    holds = [part.name for part in said.parts if not part.message]
    return f"{SO_FAR}{', '.join(holds)}; " if holds else ""


def solved(task: Task, inputs: dict) -> Attempt:
    """The attempt with the course's own solution."""
    return Attempt(task.number, inputs, source(task, solution(task.number)))


def source(task: Task, text: str) -> Cells:
    """An answer as its source, with what the solved exercise has beside it."""
    return Cells(list(cells_with(task.number, text)))


def book_of(task: Task, inputs: dict, right: Evidence) -> Book:
    """What evidence on these inputs is held against; known wrong answers are tried, in one launch, if asked for."""

    @cache
    def tried() -> tuple[Evidence, Sequence[tuple[str, Evidence]]]:
        wrong = [one for one in known_answers(task.exercise) if one.task == task.number and one.kind == "wrong"]
        idle = "\n".join(f"def {name}(*args, **kwargs): pass" for name in task.names)
        sources = [idle, *(one.source for one in wrong)]
        still, *found = gather([Attempt(task.number, inputs, source(task, text)) for text in sources])
        return still, list(zip((one.said for one in wrong), found, strict=True))

    return Book(right, lambda: tried()[1], lambda: tried()[0])
