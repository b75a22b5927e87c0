"""What was graded, for people and for programs: a table, CSV, JSON, and a page of HTML a learner."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..errors import GradingError
from ..running.files import replace_file
from .laying import UNTOUCHED
from .results import Result, TaskResult

STYLE = """<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem }
tr { border-top: 1px solid #ddd } tr.part { border: 0; font-size: .9em }
.right { color: #0a6640 } .wrong { color: #a33100 }
td.message { white-space: pre-wrap; overflow-wrap: anywhere }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: .85em }
</style>"""
PAGE = """<!doctype html>
<html lang="en"><head>{style}<title>{title}</title></head><body><h1>{title}</h1>
{body}<p>Inputs were drawn from seed {seed}.</p></body></html>
"""
SECTION = """<h2>{title}: {points:g} of {possible:g} points</h2>
{message}<table><tr><th>Task</th><th>Points</th><th>What happened</th></tr>
{rows}</table>
{code}"""
ROW = '<tr><td>{id}</td><td class="{mark}">{points:g} of {possible:g}</td><td class="message">{message}</td></tr>\n'
PART = ROW.replace("<tr><td>{id}", '<tr class="part"><td>')
CODE = "<details><summary>Your answer to {id}</summary><pre>{answer}</pre></details>\n"
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
    folders += [Path(args.html)] if args.html else []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GradingError(f'cannot write to "{folder}": {error.strerror}') from error


def clean(text: object) -> str:
    """Text without control characters, which could move the cursor or colour a terminal, and without half letters."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(text)).encode("utf-8", "replace").decode()
    return "".join(letter if letter in "\n\t" or unicodedata.category(letter)[0] != "C" else "?" for letter in text)


def table(results: Sequence[Result], missing: Sequence[str] = ()) -> str:
    """One line a submission, and one a task where points are missing, unless all tasks have the same message."""
    lines = []
    for result in results:
        exercise = f"exercise {result.exercise}" if result.exercise is not None else "no exercise"
        head = f"{clean(result.learner):<24.24} {exercise:<12} {result.points:g} of {result.possible:g}"
        messages = {task.message for task in result.tasks}
        alike = messages.pop() if len(messages) == 1 else ""
        said = [text for text in (result.note, result.message or alike) if text]
        lines.append(f"{head}  {first_line('; '.join(said))}".rstrip())
        if not result.message and not alike:
            lines += [f"    {task.id:<6} {first_line(task.message)}" for task in result.tasks if task.message]
        lines += [f"    {task.id:<6} look at it: {first_line(one)}" for task in result.tasks for one in task.suspicious]
    lines += ["", *summary(results), ""] if len(results) > 1 else []
    if missing:
        lines.append(f"handed in nothing: {', '.join(map(clean, missing))}")
    passed = sum(result.passed for result in results)
    return "\n".join([*lines, f"{passed} of {len(results)} submissions have all points"])


def summary(results: Sequence[Result]) -> list[str]:
    """A line a task: how many solved it, how many have not begun, and the message that most others got."""
    by_task: dict[str, list[TaskResult]] = {}
    for result in results:
        for task in result.tasks:
            by_task.setdefault(task.id, []).append(task)
    lines = []
    for number, tasks in sorted(by_task.items(), key=lambda item: [int(part) for part in item[0].split(".")]):
        solved = sum(task.points == task.possible for task in tasks)
        untouched = sum(task.message.startswith(UNTOUCHED) for task in tasks)
        wrong = [first_line(task.message) for task in tasks if task.message and not task.message.startswith(UNTOUCHED)]
        often = max(set(wrong), key=wrong.count) if wrong else ""
        told = f", most often: {often[:90]}" if often else ""
        lines.append(f"task {number:<5} {solved} of {len(tasks)} solved, {untouched} not begun{told}")
    return lines


def first_line(message: str) -> str:
    """The first line of a message, at most 200 characters of it."""
    return clean(message).strip().split("\n")[0][:200]


def as_csv(results: Sequence[Result]) -> str:
    """The COLUMNS, a line a task; what a spreadsheet would run is made harmless."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        record = result.as_dict()
        for task in record["tasks"]:
            numbers = [task["points"], task["possible"]]
            exercise = "" if record["exercise"] is None else record["exercise"]
            parts = "; ".join(f"{one['name']} {one['points']:g}/{one['possible']:g}" for one in task.get("parts", []))
            texts = [harmless(text) for text in (task["message"], parts, "; ".join(task.get("suspicious", [])))]
            row = [harmless(record["learner"]), exercise, task["id"], *numbers, *texts, task.get("hints", 0)]
            writer.writerow(row)
    return file.getvalue()


def harmless(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    text = clean(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text


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
    """{file name: page}: one self-contained page a learner, and index.html; what is not ours in them is escaped."""
    by_learner: dict[str, list[Result]] = {}
    for result in results:
        by_learner.setdefault(result.learner, []).append(result)
    made: dict[str, str] = {}
    names = file_names(by_learner)
    for learner, of_learner in by_learner.items():
        points, possible = sum(one.points for one in of_learner), sum(one.possible for one in of_learner)
        total = f"<p>In all {points:g} of {possible:g} points.</p>\n" if len(of_learner) > 1 else ""
        body = total + "".join(map(section, of_learner))
        made[names[learner]] = PAGE.format(style=STYLE, title=escape(clean(learner)), body=body, seed=seed)
    body = index(by_learner, names, missing) + "".join(f"<p>{escape(line)}</p>\n" for line in summary(results))
    made["index.html"] = PAGE.format(style=STYLE, title="All submissions", body=body, seed=seed)
    return made


def index(by_learner: dict[str, list[Result]], names: dict[str, str], missing: Sequence[str]) -> str:
    """The table of all learners, with what each earned, and who has handed in nothing."""
    rows = []
    for learner, results in by_learner.items():
        points, possible = sum(one.points for one in results), sum(one.possible for one in results)
        each = ", ".join(f"{one.exercise}: {one.points:g}" for one in results if one.exercise is not None)
        link = f'<a href="{names[learner]}">{escape(clean(learner))}</a>'
        rows.append(f"<tr><td>{link}</td><td>{points:g} of {possible:g}</td><td>{each}</td></tr>\n")
    rows += [f"<tr><td>{escape(clean(learner))}</td><td>handed in nothing</td><td></td></tr>\n" for learner in missing]
    return f"<table><tr><th>Learner</th><th>Points</th><th>By exercise</th></tr>\n{''.join(rows)}</table>\n"


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
    """A learner's name as a file can be called on any system: letters, and none of the names that Windows reserves."""
    name = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", clean(text))).strip(".")[:80] or "learner"
    return f"_{name}" if re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name) else name


def section(result: Result) -> str:
    """One exercise of a learner as HTML."""
    title = f"Exercise {result.exercise}" if result.exercise is not None else "No exercise"
    rows = "".join(map(rows_of, result.tasks))
    message = f"<p>{escape(clean(result.note))}</p>\n" if result.note else ""
    message += f'<p class="wrong">{escape(clean(result.message))}</p>\n' if result.message else ""
    code = "".join(
        CODE.format(id=escape(task.id), answer=escape(clean(task.answer))) for task in result.tasks if task.answer
    )
    return SECTION.format(
        title=title, points=result.points, possible=result.possible, message=message, rows=rows, code=code
    )


def rows_of(task: TaskResult) -> str:
    """A task as rows of HTML: what happened, and below it its properties, if there are several."""
    asked = f"\n({task.hints} of 3 hints were asked for)" if task.hints else ""
    rows = [(ROW, (task.message or "correct") + asked, bool(task.message), task.points, task.possible)]
    if len(task.parts) > 1:
        rows += [
            (PART, part_in_words(part, task.message), bool(part["message"]), part["points"], part["possible"])
            for part in task.parts
        ]
    return "".join(
        row.format(id=escape(task.id), mark="wrong" if wrong else "right", points=points, possible=possible,
                   message=escape(clean(message)))
        for row, message, wrong, points, possible in rows
    )  # fmt: skip


def part_in_words(part: dict[str, Any], above: str) -> str:
    """A property and what is wrong with it, in one line, unless the line `above` says so already."""
    message = part["message"]
    return f"{part['name']}: {'as above' if message and above.startswith(message) else message or 'right'}"
