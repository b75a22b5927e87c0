"""Writes what was graded: a table (`report.txt`), CSV, JSON, and pages (`report.html`)."""

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ddp_course.base.files import replace_file

from .comments import EXCUSED
from .remarks import likeness
from .results import Result, first_line, grouped
from .tables import as_csv

TITLES = (
    "learner", "exercise", "task", "points", "possible", "message", "parts", "suspicious",
    "comment", "misconception", "published", "notes",
)  # fmt: skip


def write_files(
    results: Sequence[Result],
    args: Any,
    missing: Sequence[str] = (),
    grades: Mapping[str, str] = {},
) -> None:
    """Write the reports that were asked for, and `grades`, {path: content}, each as a whole."""
    files = dict(grades)
    if args.csv:
        files[args.csv] = as_table(results)
    if args.json:
        files[args.json] = json.dumps([each.as_dict() for each in results], indent=1) + "\n"
    if args.html:
        files |= {f"{args.html}/{name}": page for name, page in pages(results, missing).items()}
    for path, text in files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), text.encode(), "file for the report")


def table(results: Sequence[Result], missing: Sequence[str] = ()) -> str:
    """Return a table with a line per submission, and one per task with something to say.

    That is a task where points are missing, or which a teacher has commented, unless all tasks have
    the same message. Learners with answers alike, and those who are missing, come last.
    """
    return rendered("report.txt", results=results, alike=likeness(results), missing=missing)


def rendered(template: str, **names: Any) -> str:
    """Return the text of a template beside this module; HTML escapes what comes from others."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["first_line"] = first_line
    return environment.get_template(template).render(names)


def feedback(result: Result) -> str:
    """Return what a learner is told of an exercise, with a line for each task."""
    lines = [result.comment] if result.comment else []
    for task in result.tasks:
        words = "; ".join(filter(None, [task.comment, first_line(task.message)]))
        if words:
            lines.append(f"{task.id}: {words}")
    return "\n".join(lines)


def as_table(results: Sequence[Result]) -> str:
    """Return CSV with a line per task, and one for a comment on a whole exercise.

    Points are empty if a task could not be graded. A notebook of no exercise has a line, too.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        whose = {"learner": result.learner, "exercise": result.exercise}
        for task in result.tasks:
            parts = [f"{part.name} {part.points:g}/{part.possible:g}" for part in task.parts]
            points = task.earned if result.graded and task.graded else None
            cells = {
                "task": task.id,
                "points": points,
                "parts": "; ".join(parts),
                "suspicious": "; ".join(task.suspicious),
                "notes": "; ".join(task.notes),
            }
            rows.append(vars(task) | whose | cells)
        by_hand = EXCUSED if result.excused else result.extra
        if not result.tasks or result.comment or by_hand:
            cells = {"points": by_hand, "message": result.message, "comment": result.comment}
            rows.append(whose | cells)
    return as_csv(TITLES, rows)


def pages(results: Sequence[Result], missing: Sequence[str] = ()) -> dict[str, str]:
    """Return all pages, {file name: page}.

    These are index.html for the teacher, and in hand_back/ one self-contained page per learner.
    Text from submissions is escaped.
    """
    texts = {}
    files = {}
    for learner, own in grouped(results, lambda result: result.learner).items():
        file = f"hand_back/{file_name(learner)}.html"
        # Two learners' names may differ in nothing that a file's name shows.
        while file in texts:
            file = file.replace(".html", "_.html")
        files[learner] = file
        texts[file] = rendered("report.html", title=learner, records=own)
    by_number = sorted(results, key=lambda result: result.exercise or 0)
    texts["index.html"] = rendered(
        "report.html",
        title="All submissions",
        exercises=grouped(by_number, lambda result: result.exercise or 0),
        files=files,
        missing=missing,
        alike=likeness(results),
        misconceptions=misconceptions(results),
        rubrics=rubrics(results),
    )
    return texts


def rubrics(results: Sequence[Result]) -> list[tuple]:
    """Return (task, what to look for in its texts, [(learner, task)] of these texts) for each."""
    text = Path(__file__).with_name("rubrics.md").read_text(encoding="utf-8")
    found = []
    for number, rubric in re.findall(r"^## (\d+\.\d+)\n([^#]+)", text, re.MULTILINE):
        texts = []
        for result in results:
            for task in result.tasks:
                if task.id == number and task.answer:
                    texts.append((result.learner, task))
        if texts:
            found.append((number, rubric, texts))
    return found


def misconceptions(results: Sequence[Result]) -> dict[tuple[str, str], list[str]]:
    """Return {(task, known wrong answer): learners who gave it}, in the order of tasks."""
    given = defaultdict(list)
    for result in results:
        for task in result.tasks:
            if task.misconception:
                given[task.id, task.misconception].append(result.learner)
    return dict(sorted(given.items(), key=lambda pair: [*map(int, pair[0][0].split("."))]))


def file_name(learner: str) -> str:
    """Return a learner's name as a file's name, in small letters, digits, "_" and "-".

    So it is safe on systems for which A and a are the same.
    """
    name = unicodedata.normalize("NFC", learner).lower()
    return re.sub(r"[^\w-]+", "_", name)[:80] or "learner"
