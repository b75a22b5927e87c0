"""Exercises: checked while they are solved (`check`), and graded afterwards (`ddp-course grade`).

tasks/       what each task draws as inputs, does with an answer, and expects
examine.py   runs answers on ranks of their own; only plain data comes back
check.py     the check cell
submission.py, nbval_run.py, sandbox.py, zygote.py, grade.py, report.py   the grader
"""

from .check import check

__all__ = ["check"]
