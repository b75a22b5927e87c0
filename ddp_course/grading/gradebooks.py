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
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import GradingError
from .report import as_rows, file_name
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


def read_roster(path: str | Path) -> Roster:
    """A roster from a file: one learner per line, or CSV whose column `learner` says how their folders are called."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GradingError(f'the roster "{path}" cannot be read: {getattr(error, "strerror", error)}') from error
    rows = [row for row in csv.reader(lines) if any(cell.strip() for cell in row)]
    if not rows:
        raise GradingError(f'the roster "{path}" is empty; one learner per line, called as their folder is')
    header = [cell.strip() for cell in rows[0]]
    if "learner" not in header:
        return Roster({row[0].strip(): {} for row in rows})
    place = header.index("learner")
    records = [dict(zip(header, map(str.strip, row), strict=False)) for row in rows[1:] if len(row) > place]
    return Roster({record["learner"]: record for record in records})


def by_learner(results: Sequence[Result], roster: Roster) -> tuple[dict[int, float], list[tuple[str, list]]]:
    """{exercise: points possible}, and for each learner the result of each of these exercises, None if there is none.

    The roster's learners come first, then who else has handed something in.
    """
    belonging = sorted((result for result in results if result.exercise), key=lambda result: result.exercise or 0)
    possible = {result.exercise or 0: result.possible for result in belonging}
    by_both = {(result.learner, result.exercise): result for result in belonging}
    learners = dict.fromkeys([*roster.rows, *(result.learner for result in results)])
    return possible, [(name, [by_both.get((name, exercise)) for exercise in possible]) for name in learners]


def as_canvas(results: Sequence[Result], roster: Roster) -> str:
    """A CSV file for Canvas. Without a roster, a learner's folder is taken for the SIS login."""
    possible, learners = by_learner(results, roster)
    rows: list[list] = [[*CANVAS, *(f"Exercise {exercise}" for exercise in possible)]]
    rows.append(["    Points Possible", "", "", "", "", *(f"{points:g}" for points in possible.values())])
    for learner, own in learners:
        defaults = {"Student": learner, "SIS Login ID": learner}
        who = [roster.says(learner, column, defaults.get(column, "")) for column in CANVAS]
        rows.append([*who, *(f"{result.points:g}" if result else "" for result in own)])
    return as_rows(rows)


def as_moodle(results: Sequence[Result], roster: Roster) -> str:
    """A CSV file for Moodle: a grade and its feedback for each exercise."""
    possible, learners = by_learner(results, roster)
    titles = [title for exercise in possible for title in (f"Exercise {exercise}", f"Exercise {exercise} (feedback)")]
    rows: list[list] = [[*MOODLE, *titles]]
    for learner, own in learners:
        row = [roster.says(learner, "ID number", learner), roster.says(learner, "Email address")]
        for result in own:
            wrong = [task for task in result.tasks if task.message] if result else []
            feedback = "\n".join(f"{task.id}: {task.message.splitlines()[0][:200]}" for task in wrong)
            row += [f"{result.points:g}", feedback] if result else ["", ""]
        rows.append(row)
    return as_rows(rows)


def gradescope_files(results: Sequence[Result]) -> dict[str, str]:
    """{path: content}: a results.json for each learner and exercise."""
    return {
        f"{file_name(result.learner)}/exercise{result.exercise:02d}/results.json": as_gradescope(result)
        for result in results
        if result.exercise is not None
    }


def as_gradescope(result: Result) -> str:
    """The results.json of one submission."""
    tests = [
        {"name": task.id, "number": task.id, "score": task.points, "max_score": task.possible,
         "status": "passed" if task.points == task.possible else "failed", "output": task.message or "correct"}
        for task in result.tasks
    ]  # fmt: skip
    output = "\n".join(filter(None, [result.message, result.note]))
    whole = {"score": result.points, "output": output, "visibility": "visible", "tests": tests}
    return json.dumps(whole, indent=1) + "\n"


WHOLE_CLASS: dict[str, Callable[[Sequence[Result], Roster], str]] = {"canvas": as_canvas, "moodle": as_moodle}
FORMATS = (*WHOLE_CLASS, "gradescope")
