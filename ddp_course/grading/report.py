"""What was graded, for people and for programs: a table, CSV, JSON, and a page of HTML per learner (`report.html`)."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ..errors import GradingError
from ..running.files import replace_file
from .results import Result, TaskResult
from .submissions import UNTOUCHED

COLUMNS = ["learner", "exercise", "task", "points", "possible", "message", "parts", "suspicious", "hints"]


def write_files(results: Sequence[Result], args: Any, seed: int, missing: Sequence[str] = ()) -> None:
    """Write the reports that were asked for, each replaced as a whole."""
    if args.csv:
        replace_file(Path(args.csv), as_csv(results).encode())
    if args.json:
        replace_file(Path(args.json), as_json(results).encode())
    if args.html:
        for name, page in pages(results, seed, missing).items():
            replace_file(Path(args.html) / name, page.encode())


def check_writable(args: Any) -> None:
    """Make the folders of the reports now, so that an hour of grading is not lost for want of one."""
    folders = [Path(file).parent for file in (args.csv, args.json, args.grades) if file]
    for folder in [*folders, Path(args.html)] if args.html else folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GradingError(f'cannot write to "{folder}": {error.strerror}') from error


def clean(text: object) -> str:
    """Text without control characters, which could move the cursor or colour a terminal, and without half letters."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(text)).encode("utf-8", "replace").decode()
    return "".join(letter if letter in "\n\t" or unicodedata.category(letter)[0] != "C" else "?" for letter in text)


def table(results: Sequence[Result], missing: Sequence[str] = ()) -> str:
    """One line per submission, and one per task where points are missing, unless all tasks have the same message."""
    lines = []
    for result in results:
        exercise = f"exercise {result.exercise}" if result.exercise is not None else "no exercise"
        head = f"{clean(result.learner):<24.24} {exercise:<12} {result.points:g} of {result.possible:g}"
        messages = {task.message for task in result.tasks}
        common = messages.pop() if len(messages) == 1 else ""
        remarks = [text for text in (result.note, result.message or common) if text]
        lines.append(f"{head}  {first_line('; '.join(remarks))}".rstrip())
        if not result.message and not common:
            lines += [f"    {task.id:<6} {first_line(task.message)}" for task in result.tasks if task.message]
        lines += [f"    {task.id:<6} look at it: {first_line(why)}" for task in result.tasks for why in task.suspicious]
    lines += ["", *summary(results), ""] if len(results) > 1 else []
    if missing:
        lines.append(f"handed in nothing: {', '.join(map(clean, missing))}")
    passed = sum(result.passed for result in results)
    return "\n".join([*lines, f"{passed} of {len(results)} submissions have all points"])


def summary(results: Sequence[Result]) -> list[str]:
    """A line per task: how many solved it, how many have not begun, and the message that most others got."""
    by_task: dict[str, list[TaskResult]] = {}
    for result in results:
        for task in result.tasks:
            by_task.setdefault(task.id, []).append(task)
    lines = []
    for number, tasks in sorted(by_task.items(), key=lambda item: [int(part) for part in item[0].split(".")]):
        solved = sum(task.points == task.possible for task in tasks)
        untouched = sum(task.message.startswith(UNTOUCHED) for task in tasks)
        wrong = [first_line(task.message) for task in tasks if task.message and not task.message.startswith(UNTOUCHED)]
        often = f", most often: {max(set(wrong), key=wrong.count)[:90]}" if wrong else ""
        lines.append(f"task {number:<5} {solved} of {len(tasks)} solved, {untouched} not begun{often}")
    return lines


def first_line(message: str) -> str:
    """The first line of a message, at most 200 characters of it."""
    return clean(message).strip().split("\n")[0][:200]


def as_csv(results: Sequence[Result]) -> str:
    """The COLUMNS, a line per task."""
    rows: list[list] = [COLUMNS]
    for record in (result.as_dict() for result in results):
        exercise = "" if record["exercise"] is None else record["exercise"]
        for task in record["tasks"]:
            parts = "; ".join(f"{part['name']} {part['points']:g}/{part['possible']:g}" for part in task["parts"])
            points = [task["points"], task["possible"], task["message"], parts]
            rows.append(
                [record["learner"], exercise, task["id"], *points, "; ".join(task["suspicious"]), task["hints"]]
            )
    return as_rows(rows)


def as_rows(rows: Sequence[Sequence]) -> str:
    """CSV text, in which no cell is one that a spreadsheet takes for a formula."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in rows:
        texts = [clean(cell) for cell in row]
        writer.writerow([f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text for text in texts])
    return file.getvalue()


def as_json(results: Sequence[Result]) -> str:
    """A list of submissions with their tasks."""
    return json.dumps([cleaned(result.as_dict()) for result in results], indent=1, ensure_ascii=False) + "\n"


def cleaned(thing: Any) -> Any:
    """Plain data with every text in it cleaned."""
    if isinstance(thing, dict):
        return {key: cleaned(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [cleaned(value) for value in thing]
    return clean(thing) if isinstance(thing, str) else thing


def pages(results: Sequence[Result], seed: int, missing: Sequence[str] = ()) -> dict[str, str]:
    """{file name: page}: one self-contained page per learner, and index.html; what is not ours in them is escaped."""
    records: dict[str, list[dict]] = {}
    for result in results:
        records.setdefault(result.learner, []).append(cleaned(result.as_dict()))
    files = file_names(records)
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    made = {
        files[learner]: template.render(title=clean(learner), records=of_learner, seed=seed)
        for learner, of_learner in records.items()
    }
    about_all = {"class": records, "files": files, "missing": list(map(clean, missing)), "summary": summary(results)}
    return made | {"index.html": template.render(about_all, title="All submissions", seed=seed)}


def file_names(learners: Iterable[str]) -> dict[str, str]:
    """{learner: name of the page}, all different on systems too that do not tell A from a."""
    names, taken = {}, {"index"}
    for learner in learners:
        name = file_name(learner)
        while name.lower() in taken:
            name += "_"
        taken.add(name.lower())
        names[learner] = f"{name}.html"
    return names


def file_name(text: str) -> str:
    """A learner's name as a file can be called on any system: of letters, digits, "_" and "-"."""
    return re.sub(r"[^\w-]+", "_", unicodedata.normalize("NFC", clean(text)))[:80] or "learner"
