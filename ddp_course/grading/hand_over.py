"""The check cell in the grader: nothing is checked here, the answers are written down for those who will."""

import linecache
import os
import sys
from pathlib import Path
from typing import Any

from ..running.launching.pickling import dumps
from .guard import HAND_OVER, enter

MOST_PRINTED = 1 << 20  # characters


def begin() -> None:
    """In the notebook's kernel, before anything of the learner's runs: keep to limits, and print no floods."""
    enter(os.environ[HAND_OVER])
    for stream in (sys.stdout, sys.stderr):
        stream.write = print_at_most(stream.write, [0])  # type: ignore[method-assign]


def print_at_most(write: Any, printed: list[int]) -> Any:
    """`write`, which says nothing any more after so many characters."""

    def counted(text: str) -> int:
        printed[0] += len(text)
        return write(text) if printed[0] <= MOST_PRINTED else len(text)

    return counted


def hand_over(number: str, answers: tuple) -> None:
    """Write down what the check of a task was given, with the source of the cells that it comes from."""
    sources = {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
    Path(os.environ[HAND_OVER], f"{number}.answers").write_bytes(dumps((answers, sources)))
