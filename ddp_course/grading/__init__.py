"""Exercises: checked while they are solved (`check`), and graded afterwards (`ddp-course grade`).

tasks/          what each task draws as inputs, does with an answer, and expects
examine.py      runs answers on ranks of their own; only plain data comes back
check_cell.py   what a check cell calls
hints.py        three hints for each task, in hints.md
submission.py, first_sight.py, nbval_run.py, sandbox.py, zygote.py, grade.py, report.py   the grader
"""

from importlib import import_module

__all__ = ["check", "hint"]


def __getattr__(name):
    """Import on first use: the sandbox and the reports do without torch."""
    if name in __all__:
        return getattr(import_module({"check": ".check_cell", "hint": ".hints"}[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
