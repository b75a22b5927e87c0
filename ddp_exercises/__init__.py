"""Exercises, checked while they are solved: `check` says whether an answer is right, `hint` helps.

`evidence` tries an answer on ranks (`attempt`), as `exercises/checks/NN.py` says (`tasks`), and
returns plain data (`plain`). `diagnosis` compares that data with the solution's and with that of
known wrong answers, and `any_order` tries a right answer in every order of its messages.
`ddp_exercises.grading` grades whole folders in the same way.
"""

import os
import secrets
from collections.abc import Callable
from typing import Any

from ddp_course.lab.learners_copy import keep
from manyranks import own_code

from .errors import Wrong
from .handing_over import HAND_OVER, hand_over
from .hints import hint

own_code.register(__name__, __path__[0], ["attempt", "diagnosis"])

__all__ = ["check", "fill_in", "hint", "task"]
UNSOLVED = "not solved yet"
CORRECT = "correct. The grader draws other inputs."
SO_FAR = "right so far: "


def check(number: str, *answers: Any, seed: int | None = None) -> None:
    """Print that the answers to task `number` are right, or raise Wrong, which says what is not.

    The answer runs on ranks of its own, with inputs that are drawn again each time. A message about
    a wrong answer ends with the seed: the same seed draws the same inputs.
    """
    # In the kernel of a submission that is graded, the answers are tried elsewhere.
    if HAND_OVER in os.environ:
        hand_over(number, answers)
        return
    # These modules import torch, which takes seconds.
    from .any_order import confirm
    from .diagnosis import verdict
    from .evidence import Attempt, gather, known_attempts, solution_attempt
    from .tasks import find

    definition = find(number)
    call = f'check("{number}", {", ".join(definition.names)}'
    if len(answers) != len(definition.names):
        raise ValueError(f"{call}) is how this check is called")
    if seed is None:
        seed = secrets.randbelow(100_000)
    inputs = definition.inputs(seed)
    attempt = Attempt(definition, inputs, answers)
    solution, evidence = gather([solution_attempt(definition, inputs), attempt])
    result = verdict(
        definition, evidence, solution, lambda: gather(known_attempts(definition, inputs))
    )
    result = confirm(result, attempt)
    if result.message.startswith(UNSOLVED):
        print(f'{number} is not solved yet; hint("{number}") helps.')
        return
    keep("tasks", number, not result.message)
    if result.misconception:
        keep("misconceptions", number, result.misconception)
    if result.message:
        right_parts = [part for part, message in result.parts.items() if not message]
        so_far = f"{SO_FAR}{', '.join(right_parts)}; " if right_parts else ""
        raise Wrong(
            f"Exercise {number}: {result.message} ({so_far}again with the same inputs: {call},"
            f" seed={seed}))"
        )
    praise = CORRECT if inputs else "correct."
    print(f"Exercise {number}: {praise}")


def task(number: str, *answers: Any) -> str:
    """Check the answers to a task of a lesson once all are written; return one solution as text.

    An answer counts as not written as long as its code names NotImplementedError.
    """
    from .tasks import solution

    if any("NotImplementedError" in answer.__code__.co_names for answer in answers):
        print(f"Task {number} is open. Write it and run this cell again, or read on.")
    else:
        check(number, *answers)
    return solution(number)


def fill_in(function: Callable, cases: dict[tuple, Any]) -> None:
    """Say whether a function that a lesson writes by half is right, once its ... is replaced.

    `cases` are {arguments: what it returns for them}. Raises Wrong for the first that differs.
    """
    name = function.__name__
    if ... in function.__code__.co_consts:
        print(f"{name} is half written: put code in the place of ... and run this cell again.")
        return
    from .diagnosis import unlike

    for arguments, expected in cases.items():
        call = f"{name}({', '.join(map(repr, arguments))})"
        if fault := unlike(function(*arguments), expected, call):
            raise Wrong(fault)
    print(f"{name} is right in all {len(cases)} cases.")
