"""Exercises: checked while they are solved (`check`), and graded afterwards (`ddp-course grade`).

A submission's way to its mark goes in one direction, through five modules. `submissions` finds and reads the notebook,
and lays its cells, as they stand, into the pristine one, with the course's own check cells. `grader` leads, and puts
the points together. `run_cells` runs what was laid under nbval; its check cells write down what they are given.
`evidence` tries each of these answers on ranks, and brings back plain data. `diagnosis` holds that data against the
solution's and known wrong answers'. It takes three kinds of processes: the grader, where nothing of a submission ever
runs; nbval with the notebook's kernel; and the ranks. The last two are under the limits of `guard`. The check cell in
the lab takes the last two steps of the same way.
"""

import os
from typing import Any

from .guard import HAND_OVER, hand_over

__all__ = ["check", "hint"]


def check(number: str, *answers: Any, seed: int | None = None) -> None:
    """Say in one line that the answers to task `number` are right, or raise Wrong; `checking.py` has the words."""
    if HAND_OVER in os.environ:  # this is the kernel of a submission that is being graded
        hand_over(number, answers)
    else:
        from .checking import check  # on first use: it needs torch

        check(number, *answers, seed=seed)


def hint(number: str, level: int = 1) -> None:
    """Print one of the three hints for a task; `hints.py` has them."""
    if HAND_OVER not in os.environ:
        from .hints import hint

        hint(number, level)
