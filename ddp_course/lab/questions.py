"""The questions that lessons open with, about earlier lessons, and which of them were answered.

They are in questions.json by name: `lesson` decides a question, `opens` is the lesson that asks it
first, and each of its `answers` has a reason.
"""

import json
from pathlib import Path
from typing import Any

from .learners_copy import progress_in

# So many of those that were answered wrong come back at once.
MOST_AGAIN = 2


def read_questions() -> dict[str, dict[str, Any]]:
    """All questions by name."""
    return json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))


def title(question: dict[str, Any]) -> str:
    """The question and the lesson that decides it."""
    return f"{question['ask']} (lesson {question['lesson']:02})"


def answered(copy: Path | None, first: int = 0, last: int = 99) -> dict[str, bool]:
    """{name: right} of the questions that the lessons from `first` to `last` have asked.

    If several of them asked a question, the last one counts.
    """
    latest: dict[str, bool] = {}
    if copy is None:
        return latest
    for key, right in sorted(progress_in(copy).get("questions", {}).items()):
        lesson, _, name = key.partition(" ")
        if first <= int(lesson) <= last:
            latest[name] = right
    return latest


def wrong_so_far(copy: Path | None, last: int = 99) -> list[str]:
    """The names of the questions that were answered wrong in the lessons up to `last`."""
    known = read_questions()
    wrong = [name for name, right in answered(copy, last=last).items() if not right]
    return [name for name in wrong if name in known]


def asked_by(lesson: int, copy: Path | None) -> list[str]:
    """The names of a lesson's own questions, and of some that were answered wrong before it."""
    own = [name for name, question in read_questions().items() if question["opens"] == lesson]
    return own + wrong_so_far(copy, lesson - 1)[:MOST_AGAIN]
