"""The questions about earlier lessons with which lessons open, and which were answered.

questions.json has them by name: `lesson` decides a question, `opens` is the lesson that asks it
first, and each of its `answers` has a reason.
"""

import json
from pathlib import Path
from typing import Any

from .learners_copy import progress_in

# At most so many of the questions that were answered wrong are asked again in one lesson.
MOST_AGAIN = 2


def read_questions() -> dict[str, dict[str, Any]]:
    """Return all questions by name."""
    return json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))


def title(question: dict[str, Any]) -> str:
    """Return the question, with the lesson that decides it."""
    return f"{question['ask']} (lesson {question['lesson']:02})"


def answered(copy: Path | None, first: int = 0, last: int = 99) -> dict[str, bool]:
    """Return whether each question of the lessons `first` to `last` was answered right, by name.

    If several lessons asked a question, the last one counts.
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
    """Return the names of the questions that were answered wrong in the lessons up to `last`."""
    known = read_questions()
    wrong = [name for name, right in answered(copy, last=last).items() if not right]
    return [name for name in wrong if name in known]


def asked_by(lesson: int, copy: Path | None) -> list[str]:
    """Return the names of a lesson's questions, and of some that were answered wrong before."""
    own = [name for name, question in read_questions().items() if question["opens"] == lesson]
    return own + wrong_so_far(copy, lesson - 1)[:MOST_AGAIN]
