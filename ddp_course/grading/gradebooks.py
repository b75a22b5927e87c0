"""Points in the forms that gradebooks read: Canvas, Moodle, Gradescope.

Canvas: `Student, ID, SIS User ID, SIS Login ID, Section` in this order, then a column an assignment, found by its
title, and a row whose first cell has "Points Possible". Who a row is about is told by ID, else SIS User ID, else SIS
Login ID, else the name.
Source: https://github.com/instructure/canvas-lms, lib/gradebook_importer.rb (what it reads) and gradebook_exporter.rb
Moodle: "Email address" is mapped to useremail, or "ID number" to useridnumber; other columns to grade items. Feedback
is only taken together with its grade, so both are there. A learner whom Moodle does not know ends the whole import.
Sources: https://docs.moodle.org/en/Grade_import and https://github.com/moodle/moodle, grade/import/csv
Gradescope: a `results.json` a submission, with score, output, visibility, and tests of name, number, score, max_score,
status and output. Source: https://gradescope-autograders.readthedocs.io/en/latest/specs/
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import GradingError
from .report import file_name, harmless
from .results import Result

CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE = ("ID number", "Email address")


@dataclass
class Roster:
    """Who is in the class: {learner: what the roster's columns say}; no rows if there is no roster."""

    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def missing(self, results: Sequence[Result]) -> list[str]:
        """Learners of the roster who have handed in nothing."""
        return [learner for learner in self.rows if learner not in {result.learner for result in results}]

    def says(self, learner: str, column: str, default: str = "") -> str:
        """What a column says about a learner."""
        return self.rows.get(learner, {}).get(column) or default

    def order(self, results: Sequence[Result]) -> list[str]:
        """All learners: those of the roster, then who else has handed something in."""
        return list(dict.fromkeys([*self.rows, *(result.learner for result in results)]))


def read_roster(path: str | Path) -> Roster:
    """A roster from a file: a learner a line, or CSV whose column `learner` says how their folders are called."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GradingError(f'the roster "{path}" cannot be read: {getattr(error, "strerror", error)}') from error
    rows = [row for row in csv.reader(lines) if any(cell.strip() for cell in row)]
    if not rows:
        raise GradingError(f'the roster "{path}" is empty; a learner a line, called as their folder is')
    header = [cell.strip() for cell in rows[0]]
    if "learner" not in header:
        return Roster({row[0].strip(): {} for row in rows})
    place = header.index("learner")
    records = [dict(zip(header, map(str.strip, row), strict=False)) for row in rows[1:] if len(row) > place]
    return Roster({record["learner"]: record for record in records})


def totals(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """{learner: {exercise: result}} of all that belongs to an exercise."""
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        if result.exercise is not None:
            found.setdefault(result.learner, {})[result.exercise] = result
    return found


def exercises_of(results: Sequence[Result]) -> dict[int, float]:
    """{exercise: points possible}, in order."""
    return {
        result.exercise: result.possible for result in sorted(results, key=lambda r: r.exercise or 0) if result.exercise
    }


def as_canvas(results: Sequence[Result], roster: Roster) -> str:
    """A CSV file for Canvas. Without a roster, a learner's folder is taken for the SIS login."""
    exercises, of = exercises_of(results), totals(results)
    rows: list[list] = [[*CANVAS, *(f"Exercise {exercise}" for exercise in exercises)]]
    rows.append(["    Points Possible", "", "", "", "", *map(plain, exercises.values())])
    for learner in roster.order(results):
        defaults = {"Student": learner, "SIS Login ID": learner}
        who = [roster.says(learner, column, defaults.get(column, "")) for column in CANVAS]
        got = [of.get(learner, {}).get(exercise) for exercise in exercises]
        rows.append([*who, *(plain(one.points) if one else "" for one in got)])
    return as_rows(rows)


def as_moodle(results: Sequence[Result], roster: Roster) -> str:
    """A CSV file for Moodle: a grade and its feedback for each exercise."""
    exercises, of = exercises_of(results), totals(results)
    titles = [title for exercise in exercises for title in (f"Exercise {exercise}", f"Exercise {exercise} (feedback)")]
    rows: list[list] = [[*MOODLE, *titles]]
    for learner in roster.order(results):
        who = [roster.says(learner, "ID number", learner), roster.says(learner, "Email address")]
        cells: list = []
        for exercise in exercises:
            one = of.get(learner, {}).get(exercise)
            cells += [plain(one.points), feedback(one)] if one else ["", ""]
        rows.append([*who, *cells])
    return as_rows(rows)


def as_gradescope(result: Result) -> str:
    """The results.json of one submission."""
    tests = [
        {"name": task.id, "number": task.id, "score": task.points, "max_score": task.possible,
         "status": "passed" if task.points == task.possible else "failed", "output": task.message or "correct"}
        for task in result.tasks
    ]  # fmt: skip
    told = "\n".join(filter(None, [result.message, result.note]))
    whole = {"score": result.points, "output": told, "visibility": "visible", "tests": tests}
    return json.dumps(whole, indent=1) + "\n"


def gradescope_files(results: Sequence[Result]) -> dict[str, str]:
    """{path: content}: a results.json for each learner and exercise."""
    return {
        f"{file_name(result.learner)}/exercise{result.exercise:02d}/results.json": as_gradescope(result)
        for result in results
        if result.exercise is not None
    }


def feedback(result: Result) -> str:
    """What was wrong, a line a task."""
    return "\n".join(f"{task.id}: {task.message.splitlines()[0][:200]}" for task in result.tasks if task.message)


def plain(points: float) -> str:
    """Points without a tail of zeros."""
    return f"{points:g}"


def as_rows(rows: Sequence[Sequence]) -> str:
    """CSV text; what a spreadsheet would run as a formula is made harmless."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([[harmless(str(cell)) for cell in row] for row in rows])
    return file.getvalue()


WHOLE_CLASS: dict[str, Callable[[Sequence[Result], Roster], str]] = {"canvas": as_canvas, "moodle": as_moodle}
FORMATS = (*WHOLE_CLASS, "gradescope")
