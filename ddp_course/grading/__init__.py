"""Exercises: checked while they are solved (`check`), and graded afterwards (`ddp-course grade`)."""

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
    from .checks import checks_file

    if GRADED:
        from .hand_over import hand_over

        hand_over(number, answers)
        return
    if checks_file(int(str(number).split(".")[0])).exists():
        from .checking import check as check_anew  # on first use: it needs torch

        check_anew(number, *answers, seed=seed)
        return
    from .check_cell import check

    check(number, *answers, seed=seed)


def hint(number: str, level: int = 1) -> None:
    """Print one of the three hints for a task; `hints.py` has them."""
    if not GRADED:
        from .hints import hint

        hint(number, level)
