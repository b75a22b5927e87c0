"""Points in the forms that gradebooks read: Canvas, Moodle, Gradescope. docs/GRADING.md has their
sources.

Canvas finds an assignment by its title, and a learner by ID, else SIS User ID, else SIS Login ID,
else the name. Moodle takes feedback only together with its grade, and nothing from a file that has
a learner whom it does not know.
"""

import csv
import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from ddp_course.errors import GradingError

from .report import as_rows, file_name
from .results import Result

CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE = ("ID number", "Email address")
Roster = dict[str, dict[str, str]]  # A roster is {learner: {title: cell} of the learner's line}.


def read_roster(path: str | Path) -> Roster:
    """A roster from a file: one learner per line, or CSV whose column `learner` has the names of
    their folders.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GradingError(
            f'the roster "{path}" cannot be read: {getattr(error, "strerror", error)}'
        ) from error
    rows = [
        [cell.strip() for cell in row]
        for row in csv.reader(text.splitlines())
        if any(map(str.strip, row))
    ]
    if not rows:
        raise GradingError(
            f'the roster "{path}" is empty; one learner per line, called as their folder is'
        )
    titles, *lines = rows if "learner" in rows[0] else [["learner"], *rows]
    records = [dict(zip(titles, line, strict=False)) for line in lines]
    return {record["learner"]: record for record in records if "learner" in record}


def possible_points(results: Sequence[Result]) -> dict[int, float]:
    """{exercise: points possible}, in order."""
    return dict(sorted((result.exercise, result.possible) for result in results if result.exercise))


def by_learner(results: Sequence[Result], roster: Roster) -> dict[str, list[Result | None]]:
    """{learner: their result of each exercise}: the roster's come first, then others who handed
    something in.
    """
    graded = {(result.learner, result.exercise): result for result in results}
    learners = [*roster, *(result.learner for result in results)]
    return {
        learner: [graded.get((learner, exercise)) for exercise in possible_points(results)]
        for learner in learners
    }


def as_canvas(results: Sequence[Result], roster: Roster) -> str:
    """A CSV file for Canvas. Without a roster, a learner's folder is taken for the SIS login."""
    possible = possible_points(results)
    rows: list[list] = [[*CANVAS, *(f"Exercise {exercise}" for exercise in possible)]]
    rows.append(
        ["    Points Possible", "", "", "", "", *(f"{points:g}" for points in possible.values())]
    )
    for learner, own in by_learner(results, roster).items():
        about = {"Student": learner, "SIS Login ID": learner} | roster.get(learner, {})
        points = [f"{result.points:g}" if result else "" for result in own]
        rows.append([*(about.get(column, "") for column in CANVAS), *points])
    return as_rows(rows)


def as_moodle(results: Sequence[Result], roster: Roster) -> str:
    """A CSV file for Moodle: a grade and its feedback for each exercise."""
    titles = [
        (f"Exercise {exercise}", f"Exercise {exercise} (feedback)")
        for exercise in possible_points(results)
    ]
    rows: list[list] = [[*MOODLE, *chain(*titles)]]
    for learner, own in by_learner(results, roster).items():
        about = {"ID number": learner} | roster.get(learner, {})
        row = [about.get(column, "") for column in MOODLE]
        for result in own:
            wrong = [task for task in result.tasks if task.message] if result else []
            feedback = "\n".join(
                f"{task.id}: {task.message.splitlines()[0][:200]}" for task in wrong
            )
            row += [f"{result.points:g}", feedback] if result else ["", ""]
        rows.append(row)
    return as_rows(rows)


def grade_files(
    form: str, target: str, results: Sequence[Result], roster: Roster
) -> dict[str, str]:
    """{path: content}: the file `target`, or for Gradescope one per learner and exercise below
    it.
    """
    if form in WHOLE_CLASS:
        return {target: WHOLE_CLASS[form](results, roster)}
    return {
        f"{target}/{file_name(result.learner)}/exercise{result.exercise:02d}/results.json": (
            as_gradescope(result)
        )
        for result in results
        if result.exercise
    }


def as_gradescope(result: Result) -> str:
    """The results.json of one submission."""
    tests = [
        {
            "name": task.id,
            "number": task.id,
            "score": task.points,
            "max_score": task.possible,
            "status": "passed" if task.points == task.possible else "failed",
            "output": task.message or "correct",
        }
        for task in result.tasks
    ]
    output = "\n".join(filter(None, [result.message, result.note]))
    whole = {"score": result.points, "output": output, "visibility": "visible", "tests": tests}
    return json.dumps(whole, indent=1) + "\n"


WHOLE_CLASS: dict[str, Callable[[Sequence[Result], Roster], str]] = {
    "canvas": as_canvas,
    "moodle": as_moodle,
}
FORMATS = (*WHOLE_CLASS, "gradescope")
