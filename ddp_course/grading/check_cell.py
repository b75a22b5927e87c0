"""The check cell of an exercise: `check("4.2", reduce_scatter)`."""

import secrets
from typing import Any

from .examine import Item, draw, examine, verdict
from .tasks import SO_FAR, Wrong, find

CORRECT = "correct. The grader draws other inputs, some of them harder."


def check(number: str, *answers: Any, seed: int | None = None) -> None:
    """Say in one line that the answers to task `number` are right, or raise Wrong with what is wrong.

    The answer runs on ranks of its own, with inputs that are drawn anew each time. A message about a wrong answer
    ends with the seed: the same seed draws the same inputs again.
    """
    task = find(number)
    if len(answers) != len(task.names):
        raise ValueError(f'check("{number}", {", ".join(task.names)}) is how this check is called')
    seed = secrets.randbelow(100_000) if seed is None else seed
    inputs = draw(number, seed)
    said = verdict(task, examine([Item(number, inputs, answers=answers)])[0], inputs)
    if not said.right:
        holds = [part.name for part in said.parts if not part.message]
        so_far = f"{SO_FAR}{', '.join(holds)}; " if holds else ""
        raise Wrong(f"Exercise {number}: {said.message} ({so_far}inputs of seed={seed})")
    print(f"Exercise {number}: {CORRECT}")
