"""Exercises: checked while they are solved (`check`), and graded afterwards (`ddp-course grade`).

tasks/          what each task draws as inputs, does with an answer, and expects
probing.py      one answer at work on one rank
examine.py      answers at work on the ranks of a launch; only plain data comes back, and is judged
check_cell.py   what a check cell calls
hints.py        three hints for each task, in hints.md
harness.py, answering.py, examiner.py   the same for the grader: the judge in one process, answers in others
submission.py, first_sight.py, nbval_run.py, sandbox.py, zygote.py, grade.py, report.py   the grader
"""

from typing import Any

__all__ = ["check", "hint"]


def check(number: str, *answers: Any, seed: int | None = None) -> None:
    """Say in one line that the answers to task `number` are right, or raise Wrong; `check_cell.py` has the words."""
    from .check_cell import check  # on first use: the grader's other processes do without the tasks

    check(number, *answers, seed=seed)


def hint(number: str, level: int = 1) -> None:
    """Print one of the three hints for a task; `hints.py` has them."""
    from .hints import hint

    hint(number, level)
