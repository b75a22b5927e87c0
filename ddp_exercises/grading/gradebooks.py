"""Writes points in the forms that Canvas and Moodle read. docs/GRADING.md has the sources.

Canvas finds an assignment by its title, and a learner by ID, else SIS User ID, else SIS Login ID,
else the name. Moodle's assignment finds a learner by the Identifier of its grading worksheet.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .people import Roster
from .report import feedback
from .results import Result
from .tables import as_csv

CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE = ("Identifier", "Full name", "Email address")


def grade_files(args: Any, results: Sequence[Result], roster: Roster) -> dict[str, str]:
    """Return the files that services import, {path: content}: for Moodle one per exercise."""
    files = {}
    if args.canvas:
        files[args.canvas] = as_canvas(results, roster)
    if args.moodle:
        path = Path(args.moodle)
        for exercise in possible_points(results):
            file = path.with_name(f"{path.stem}_{exercise:02d}{path.suffix}")
            files[str(file)] = as_moodle(results, roster, exercise)
    return files


def possible_points(results: Sequence[Result]) -> dict[int, float]:
    """Return the points that each exercise has, in the order of exercises."""
    return dict(sorted((result.exercise, result.possible) for result in results if result.exercise))


def rows_of(results: Sequence[Result], roster: Roster, titles: Sequence[str], name: str) -> Roster:
    """Return a roster of all learners, with the `titles` by which a service knows them.

    The roster's learners come first, then all others. `name` is the title of a learner's name,
    which is the one used here if no other is known.
    """
    handed_in = {result.learner: result.about for result in results}
    rows = {}
    for learner in (*roster, *handed_in):
        about = {name: learner} | handed_in.get(learner, {}) | roster.get(learner, {})
        rows[learner] = {title: about[title] for title in titles if title in about}
    return rows


def as_canvas(results: Sequence[Result], roster: Roster) -> str:
    """Return a CSV file for Canvas.

    Without a roster, and without Canvas' own names of files, a learner's folder is taken for the
    SIS login.
    """
    rows = rows_of(results, roster, CANVAS, name="Student")
    for learner, row in rows.items():
        if not {"ID", "SIS User ID"} & row.keys():
            row.setdefault("SIS Login ID", learner)
    titles = {}
    possible = {"Student": "    Points Possible"}
    for exercise, points in possible_points(results).items():
        titles[exercise] = canvas_title(exercise, roster)
        possible[titles[exercise]] = f"{points:g}"
    for result in results:
        if result.exercise:
            rows[result.learner][titles[result.exercise]] = result.mark
    return as_csv([*CANVAS, *titles.values()], [possible, *rows.values()])


def canvas_title(exercise: int, roster: Roster) -> str:
    """Return Canvas' name of an exercise, by its export: "Exercise 4 (77)", or "Exercise 4"."""
    for about in roster.values():
        for title in about:
            if re.match(rf"Exercise {exercise}\b", title):
                return title
    return f"Exercise {exercise}"


def as_moodle(results: Sequence[Result], roster: Roster, exercise: int) -> str:
    """Return a grading worksheet for Moodle's assignment, with grades and feedback."""
    rows = rows_of(results, roster, MOODLE, name="Full name")
    for result in results:
        if result.exercise == exercise:
            rows[result.learner] |= {"Grade": result.mark, "Feedback comments": feedback(result)}
    return as_csv([*MOODLE, "Grade", "Feedback comments"], rows.values())
