"""What a teacher adds to results by hand: points, comments, penalties and excuses, from a CSV file.

The file is applied last in every run, and never changes what was graded. Its columns are learner,
exercise, task, points, comment; a line without a task is about the whole exercise.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_course.errors import GradingError

from .people import lines_of
from .results import Result, clean

COLUMNS = ["learner", "exercise", "task", "points", "comment"]
EXCUSED = "excused"  # Instead of points: the learner gets no grade, and no zero either.
POINTS = re.compile(r"[-+]?\d+(\.\d+)?")


def read_comments(path: str | Path) -> list[dict[str, str]]:
    """The lines of a file of comments; GradingError says in which line something is wrong."""
    lines = csv.DictReader(lines_of(path, "comments"))
    if not {"learner", "exercise"} <= set(lines.fieldnames or []):
        raise GradingError(f'the columns of "{path}" are not {", ".join(COLUMNS)}')
    comments = []
    for number, line in enumerate(lines, 2):
        comment = {column: (line.get(column) or "").strip() for column in COLUMNS}
        points = comment["points"]
        if points and points != EXCUSED and not POINTS.fullmatch(points):
            raise GradingError(
                f'"{path}", line {number}: the points are "{points}"; a number such as 2.5 stands'
                f' instead of what was earned, +1 or -1 changes it, "{EXCUSED}" gives no grade'
            )
        comments.append(comment)
    return comments


def with_comments(results: Sequence[Result], comments: Sequence[dict[str, str]]) -> list[Result]:
    """Copies of the results with what was added by hand; GradingError for a line about nobody."""
    copies = [replace(result, tasks=list(map(replace, result.tasks))) for result in results]
    graded = {(result.learner, str(result.exercise)): result for result in copies}
    for comment in comments:
        result = graded.get((comment["learner"], comment["exercise"].lstrip("0")))
        if result is None:
            raise GradingError(
                f"a comment is about {comment['learner']}, exercise {comment['exercise']}: there is"
                " no such result"
            )
        if comment["task"]:
            comment_on_task(result, comment)
        else:
            comment_on_exercise(result, comment)
    return copies


def comment_on_task(result: Result, comment: dict[str, str]) -> None:
    """Add a comment, and perhaps points, to a task. Raises GradingError for a task that there is
    not.
    """
    task = next((task for task in result.tasks if task.id == comment["task"]), None)
    if task is None:
        raise GradingError(f"a comment is about task {comment['task']}: there is no such task")
    task.comment = clean(comment["comment"])
    if comment["points"]:
        task.by_hand = changed(task.earned, comment["points"])


def comment_on_exercise(result: Result, comment: dict[str, str]) -> None:
    """Add a comment, and perhaps points or an excuse, to an exercise."""
    result.comment = clean(comment["comment"])
    if comment["points"] == EXCUSED:
        result.excused = True
    elif comment["points"]:
        result.extra += changed(result.points, comment["points"]) - result.points


def changed(points: float, by: str) -> float:
    """Points after "+1" or "-1" was added, or "2" was put in their place."""
    return points + float(by) if by[0] in "+-" else float(by)
