"""Exercises: checked while they are solved (`check`), and graded afterwards (`ddp-course grade`).

A submission's way to its mark goes in one direction. `submissions` finds and reads the notebook. `laying` lays its
cells, as they stand, into the pristine notebook, with the course's own check cells. `run_cells` runs that under nbval,
in a process with limits (`guard`); the check cells write down what they are given. `evidence` tries each of these
answers on the ranks of a launch of its own, with limits too, and brings back plain data. `diagnosis` holds that data
against the solution's and known wrong answers', in the process of the grader, where nothing of a submission ever runs.
Three processes, then: the grader, the notebook's kernel with nbval before it, and the ranks. The check cell in the lab
takes the last two steps of the same way. `grader` leads, and `results`, `report` and `gradebooks` tell.
"""

import os
from typing import Any

from .guard import HAND_OVER

__all__ = ["check", "hint"]
GRADED = bool(os.environ.get(HAND_OVER))  # this is the kernel of a submission that is being graded
if GRADED:
    from .hand_over import begin

    begin()


def check(number: str, *answers: Any, seed: int | None = None) -> None:
    """Say in one line that the answers to task `number` are right, or raise Wrong; `checking.py` has the words."""
    if GRADED:
        from .hand_over import hand_over

        hand_over(number, answers)
    else:
        from .checking import check  # on first use: it needs torch

        check(number, *answers, seed=seed)


def hint(number: str, level: int = 1) -> None:
    """Print one of the three hints for a task; `hints.py` has them."""
    if not GRADED:
        from .hints import hint

        hint(number, level)
