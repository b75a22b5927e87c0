"""What was graded, for people and for programs: a table (`report.txt`), CSV, JSON, and pages
(`report.html`).
"""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from ddp_course.running.files import replace_file

from .remarks import likeness
from .results import Result


def write_files(
    results: Sequence[Result],
    args: Any,
    missing: Sequence[str] = (),
    grades: Any = (),
) -> None:
    """Write the reports that were asked for, and `grades`, {path: content}, each replaced as a
    whole.
    """
    records = [result.as_dict() for result in results]
    files = {
        args.csv: as_csv(results),
        args.json: json.dumps(records, indent=1) + "\n",
        **dict(grades),
    }
    if args.html:
        files |= {f"{args.html}/{name}": page for name, page in pages(results, missing).items()}
    for path, text in files.items():
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            replace_file(Path(path), text.encode(), "file for the report")


def table(results: Sequence[Result], missing: Sequence[str] = ()) -> str:
    """One line per submission, and one per task where points are missing, unless all tasks have the
    same message.
    """
    return rendered(
        ".txt",
        results=results,
        alike=likeness(results),
        missing=missing,
    )


def rendered(kind: str, **names: Any) -> str:
    """The text of a template beside this module; in HTML all that comes from others is escaped."""
    text = Path(__file__).with_suffix(kind).read_text(encoding="utf-8")
    html = kind == ".html"
    environment = jinja2.Environment(autoescape=html, trim_blocks=True, lstrip_blocks=True)
    environment.filters["first_line"] = first_line
    return environment.from_string(text).render(names)


def feedback(result: Result) -> str:
    """What a learner is told of an exercise, a line a task."""
    lines = [result.comment] if result.comment else []
    for task in result.tasks:
        said = "; ".join(filter(None, [task.comment, first_line(task.message)]))
        if said:
            lines.append(f"{task.id}: {said}")
    return "\n".join(lines)


def first_line(message: str) -> str:
    """The first line of a message, at most 200 characters of it."""
    return message.strip().split("\n")[0][:200]


def as_csv(results: Sequence[Result]) -> str:
    """A line per task; the points are empty if it could not be graded."""
    titles = "learner exercise task points possible message parts suspicious comment"
    rows: list[list] = [titles.split()]
    for result in results:
        for task in result.tasks:
            parts = [
                f"{part['name']} {part['points']:g}/{part['possible']:g}" for part in task.parts
            ]
            points = f"{task.earned:g}" if result.graded and task.graded else ""
            about = [task.id, points, f"{task.possible:g}", task.message, "; ".join(parts)]
            about += ["; ".join(task.suspicious), task.comment]
            rows.append([result.learner, result.exercise or "", *about])
        if result.comment or result.extra or result.excused:
            points = f"{result.extra:+g}" if not result.excused else "excused"
            rows.append(
                [result.learner, result.exercise or "", "", points, "", "", "", "", result.comment]
            )
    return as_rows(rows)


def as_rows(rows: Sequence[Sequence]) -> str:
    """CSV text without cells that a spreadsheet would take for a formula."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in rows:
        texts = map(str, row)
        writer.writerow([re.sub(r"^(?=[=+@\t-])", "'", text) for text in texts])
    return file.getvalue()


def pages(results: Sequence[Result], missing: Sequence[str] = ()) -> dict[str, str]:
    """{file name: page}: index.html for the teacher, and in hand_back/ one self-contained page per
    learner; text from submissions is escaped.
    """
    by_learner: dict[str, list[Result]] = {}
    for result in results:
        by_learner.setdefault(result.learner, []).append(result)
    files: dict[str, str] = {}
    taken = set()  # Names must differ even where a system does not tell A from a.
    for learner in by_learner:
        name = file_name(learner)
        while name.lower() in taken:
            name += "_"
        taken.add(name.lower())
        files[learner] = f"hand_back/{name}.html"
    exercises: dict[int, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.exercise or 0):
        exercises.setdefault(result.exercise or 0, []).append(result)
    index = rendered(
        ".html",
        title="All submissions",
        exercises=exercises,
        files=files,
        missing=missing,
        alike=likeness(results),
    )
    texts = {"index.html": index}
    for learner, own in by_learner.items():
        texts[files[learner]] = rendered(".html", title=learner, records=own)
    return texts


def file_name(learner: str) -> str:
    """A learner's name as a file can be called on any system: of letters, digits, "_" and "-"."""
    return re.sub(r"[^\w-]+", "_", unicodedata.normalize("NFC", learner))[:80] or "learner"
