"""Points in the forms that gradebooks read: Canvas and Moodle. docs/GRADING.md has their sources.

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
Rows = dict[str, dict[str, str]]  # Rows are {learner: {title: cell}}.


def grade_files(args: Any, results: Sequence[Result], roster: Roster) -> dict[str, str]:
    """{path: content} of what services import: for Moodle a file per exercise."""
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
    """{exercise: points possible}, in order."""
    return dict(sorted((result.exercise, result.possible) for result in results if result.exercise))


def rows_of(results: Sequence[Result], roster: Roster, name: str, titles: Sequence[str]) -> Rows:
    """{learner: the cells by which a service knows them}: the roster's come first, then all
    others. Whose `name` is not known has that which they are called by here.
    """
    handed_in = {result.learner: result.about for result in results}
    rows: Rows = {}
    for learner in (*roster, *handed_in):
        about = {name: learner} | handed_in.get(learner, {}) | roster.get(learner, {})
        rows[learner] = {title: about[title] for title in titles if title in about}
    return rows


def as_canvas(results: Sequence[Result], roster: Roster) -> str:
    """A CSV file for Canvas. Without a roster, and without Canvas' own names of files, a learner's
    folder is taken for the SIS login.
    """
    rows = rows_of(results, roster, "Student", CANVAS)
    for learner, row in rows.items():
        if not {"ID", "SIS User ID"} & row.keys():
            row.setdefault("SIS Login ID", learner)
    own = next(iter(roster.values()), {})  # Its titles have Canvas' numbers, as "Exercise 4 (77)".
    titles = {}
    possible = {"Student": "    Points Possible"}
    for exercise, points in possible_points(results).items():
        named = (title for title in own if re.match(rf"Exercise {exercise}\b", title))
        titles[exercise] = next(named, f"Exercise {exercise}")
        possible[titles[exercise]] = f"{points:g}"
    for result in results:
        if result.exercise:
            rows[result.learner][titles[result.exercise]] = result.mark
    return as_csv([*CANVAS, *titles.values()], [possible, *rows.values()])


def as_moodle(results: Sequence[Result], roster: Roster, exercise: int) -> str:
    """A grading worksheet for Moodle's assignment: a grade and its feedback."""
    rows = rows_of(results, roster, "Full name", MOODLE)
    for result in results:
        if result.exercise == exercise:
            rows[result.learner] |= {"Grade": result.mark, "Feedback comments": feedback(result)}
    return as_csv([*MOODLE, "Grade", "Feedback comments"], rows.values())
