"""Adds a teacher's points, comments, penalties and excuses to results, from a CSV file.

The file is applied last in every run, and never changes what was graded. Its columns are learner,
exercise, task, points, comment; a line without a task is about the whole exercise.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

from ddp_exercises.errors import GradingError

from .results import ByHand, Result, clean
from .tables import read_table

EXCUSED = "excused"  # This word stands in place of points.
POINTS = re.compile(r"([-+]?\d+(\.\d+)?)?")  # A line that only comments has no points.


class Comment(NamedTuple):
    """A line of the file of comments."""

    learner: str
    exercise: str
    task: str
    points: str
    comment: str


def read_comments(path: str | Path) -> list[Comment]:
    """Return the lines of a file of comments; raises GradingError, which names a wrong line."""
    comments = []
    # Line 1 has the titles.
    for number, row in enumerate(read_table(path, Comment._fields), 2):
        comment = Comment._make(row.get(title, "") for title in Comment._fields)
        excuses = comment.points == EXCUSED and not comment.task
        if not excuses and not POINTS.fullmatch(comment.points):
            raise GradingError(
                f'"{path}", line {number}: the points are "{comment.points}"; a number such as 2.5'
                " stands instead of what was earned, +1 or -1 changes it, and for a whole exercise"
                f' "{EXCUSED}" gives no grade'
            )
        if any(comment):
            comments.append(comment)
    return comments


def with_comments(results: Sequence[Result], comments: Sequence[Comment]) -> list[Result]:
    """Return copies of the results with what was added by hand.

    Raises GradingError for a comment on a result that does not exist.
    """
    copies = deepcopy(list(results))
    by_exercise = {(result.learner, str(result.exercise)): result for result in copies}
    for comment in comments:
        result = by_exercise.get((comment.learner, comment.exercise.lstrip("0")))
        tasks = {task.id: task for task in result.tasks} if result else {}
        if result and not comment.task:
            add(comment, result, result.points)
        elif task := tasks.get(comment.task):
            add(comment, task, task.earned)
        else:
            raise GradingError(
                f"a comment is about {comment.learner}, exercise {comment.exercise}, task"
                f" {comment.task or 'any'}: there is no such result; the columns are"
                f" {', '.join(Comment._fields)}"
            )
    return copies


def add(comment: Comment, work: ByHand, earned: float) -> None:
    """Add a comment, and perhaps points or an excuse, to a task or an exercise."""
    work.comment = clean(comment.comment)
    if comment.points == EXCUSED:
        work.excused = True
    elif comment.points.startswith(("+", "-")):
        work.extra += float(comment.points)
    elif comment.points:
        work.extra += float(comment.points) - earned
