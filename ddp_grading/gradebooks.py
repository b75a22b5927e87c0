"""Points in the forms that gradebooks read: Canvas and Moodle. docs/GRADING.md has their sources.

Canvas finds an assignment by its title, and a learner by ID, else SIS User ID, else SIS Login ID,
else the name. Moodle's assignment finds a learner by the Identifier of its grading worksheet.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .people import Roster
from .report import as_rows, feedback
from .results import Result

CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE = ("Identifier", "Full name", "Email address")


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


def people(results: Sequence[Result], roster: Roster) -> Roster:
    """{learner: what the service knows them by}: the roster's come first, then all others."""
    everyone = {learner: dict(about) for learner, about in roster.items()}
    for result in results:
        about = everyone.setdefault(result.learner, {})
        everyone[result.learner] = result.about | about
    return everyone


def as_canvas(results: Sequence[Result], roster: Roster) -> str:
    """A CSV file for Canvas. Without a roster, and without Canvas' own names of files, a learner's
    folder is taken for the SIS login.
    """
    possible = possible_points(results)
    own = {title for about in roster.values() for title in about}
    titles = {}
    for exercise in possible:  # Canvas writes the number of an assignment behind its title.
        title = f"Exercise {exercise}"
        titles[exercise] = next((name for name in own if name.startswith(f"{title} (")), title)
    marks = {(result.learner, result.exercise): result.mark for result in results}
    rows: list[list] = [[*CANVAS, *titles.values()]]
    rows.append(
        ["    Points Possible", *[""] * 4, *(f"{points:g}" for points in possible.values())]
    )
    for learner, about in people(results, roster).items():
        if not {"ID", "SIS User ID"} & about.keys():
            about = {"SIS Login ID": learner} | about
        about = {"Student": learner} | about
        columns = [about.get(column, "") for column in CANVAS]
        rows.append([*columns, *(marks.get((learner, exercise), "") for exercise in possible)])
    return as_rows(rows)


def as_moodle(results: Sequence[Result], roster: Roster, exercise: int) -> str:
    """A grading worksheet for Moodle's assignment: a grade and its feedback."""
    rows: list[list] = [[*MOODLE, "Grade", "Feedback comments"]]
    of_exercise = {result.learner: result for result in results if result.exercise == exercise}
    for learner, about in people(results, roster).items():
        about = {"Full name": learner} | about
        row = [about.get(column, "") for column in MOODLE]
        if result := of_exercise.get(learner):
            row += [result.mark, feedback(result)]
        else:
            row += ["", ""]
        rows.append(row)
    return as_rows(rows)
