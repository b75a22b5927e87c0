"""What was graded, for people and for programs: a table, CSV, JSON, and a page of HTML per learner
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

from .results import Result
from .submissions import UNTOUCHED


def write_files(
    results: Sequence[Result], args: Any, seed: int, missing: Sequence[str] = (), grades: Any = ()
) -> None:
    """Write the reports that were asked for, and `grades`, {path: content}, each replaced as a
    whole.
    """
    everything = json.dumps([result.as_dict() for result in results], indent=1) + "\n"
    files = {args.csv: as_csv(results), args.json: everything, **dict(grades)}
    if args.html:
        files |= {
            str(Path(args.html, name)): page for name, page in pages(results, seed, missing).items()
        }
    for path, text in files.items():
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            replace_file(Path(path), text.encode())


def table(results: Sequence[Result], missing: Sequence[str] = ()) -> str:
    """One line per submission, and one per task where points are missing, unless all tasks have the
    same message.
    """
    lines = []
    for result in results:
        exercise = f"exercise {result.exercise}" if result.exercise is not None else "no exercise"
        head = f"{result.learner:<24.24} {exercise:<12} {result.points:g} of {result.possible:g}"
        messages = {task.message for task in result.tasks}
        common = result.message or (messages.pop() if len(messages) == 1 else "")
        lines.append(
            f"{head}  {first_line('; '.join(filter(None, [result.note, common])))}".rstrip()
        )
        if not common:
            lines += [
                f"    {task.id:<6} {first_line(task.message)}"
                for task in result.tasks
                if task.message
            ]
        lines += [
            f"    {task.id:<6} look at it: {first_line(why)}"
            for task in result.tasks
            for why in task.suspicious
        ]
    lines += ["", *summary(results), ""] if len(results) > 1 else []
    if missing:
        lines.append(f"handed in nothing: {', '.join(missing)}")
    passed = sum(result.passed for result in results)
    return "\n".join([*lines, f"{passed} of {len(results)} submissions have all points"])


def summary(results: Sequence[Result]) -> list[str]:
    """A line per task: how many solved it, how many have not begun, and the message that most
    others got.
    """
    in_order = sorted(
        (result for result in results if result.exercise), key=lambda result: result.exercise or 0
    )
    everyones, lines = [task for result in in_order for task in result.tasks], []
    for number in dict.fromkeys(task.id for task in everyones):
        tasks = [task for task in everyones if task.id == number]
        solved = sum(task.points == task.possible for task in tasks)
        untouched = sum(task.message.startswith(UNTOUCHED) for task in tasks)
        wrong = [
            first_line(task.message)
            for task in tasks
            if task.message and not task.message.startswith(UNTOUCHED)
        ]
        often = f", most often: {max(set(wrong), key=wrong.count)[:90]}" if wrong else ""
        lines.append(
            f"task {number:<5} {solved} of {len(tasks)} solved, {untouched} not begun{often}"
        )
    return lines


def first_line(message: str) -> str:
    """The first line of a message, at most 200 characters of it."""
    return message.strip().split("\n")[0][:200]


def as_csv(results: Sequence[Result]) -> str:
    """A line per task."""
    rows: list[list] = [
        ["learner", "exercise", "task", "points", "possible", "message", "parts", "suspicious"]
    ]
    for result in results:
        for task in result.tasks:
            parts = "; ".join(
                f"{part['name']} {part['points']:g}/{part['possible']:g}" for part in task.parts
            )
            about = [task.id, f"{task.points:g}", f"{task.possible:g}", task.message, parts]
            rows.append([result.learner, result.exercise or "", *about, "; ".join(task.suspicious)])
    return as_rows(rows)


def as_rows(rows: Sequence[Sequence]) -> str:
    """CSV text without cells that a spreadsheet would take for a formula."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in rows:
        texts = map(str, row)
        writer.writerow(
            [f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text for text in texts]
        )
    return file.getvalue()


def pages(results: Sequence[Result], seed: int, missing: Sequence[str] = ()) -> dict[str, str]:
    """{file name: page}: one self-contained page per learner, and index.html; text from submissions
    is escaped.
    """
    by_learner = {
        result.learner: [other for other in results if other.learner == result.learner]
        for result in results
    }
    files: dict[str, str] = {}
    for learner in by_learner:  # Names must differ even where a system does not tell A from a.
        name = file_name(learner)
        while f"{name}.html".lower() in ["index.html", *map(str.lower, files.values())]:
            name += "_"
        files[learner] = f"{name}.html"
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).from_string(text)
    about_all = {
        "class": by_learner,
        "files": files,
        "missing": missing,
        "summary": summary(results),
    }
    own = {
        files[name]: template.render(title=name, records=records, seed=seed)
        for name, records in by_learner.items()
    }
    return {"index.html": template.render(about_all, title="All submissions", seed=seed), **own}


def file_name(learner: str) -> str:
    """A learner's name as a file can be called on any system: of letters, digits, "_" and "-"."""
    return re.sub(r"[^\w-]+", "_", unicodedata.normalize("NFC", learner))[:80] or "learner"
