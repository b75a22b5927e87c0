"""What was graded, for people and for programs: a table, CSV, JSON, and a page of HTML a learner."""

import csv
import io
import json
import re
import unicodedata
from html import escape
from pathlib import Path

from ..errors import GradingError
from ..running.files import replace_file

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{learner}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem .6rem }}
tr {{ border-top: 1px solid #ddd }} tr.part {{ border: 0; font-size: .9em }}
.right {{ color: #0a6640 }} .wrong {{ color: #a33100 }}
td.message {{ white-space: pre-wrap; overflow-wrap: anywhere }}
</style></head><body><h1>{learner}</h1>
{sections}<p>Inputs were drawn from seed {seed}.</p></body></html>
"""
SECTION = """<h2>{title}: {points:g} of {possible:g} points</h2>
{message}<table><tr><th>Task</th><th>Points</th><th>What happened</th></tr>
{rows}</table>
"""
ROW = '<tr><td>{id}</td><td class="{mark}">{points:g} of {possible:g}</td><td class="message">{message}</td></tr>\n'
PART = ROW.replace("<tr><td>{id}", '<tr class="part"><td>')


def write_files(results, args, seed):
    """Write the reports that were asked for, each replaced as a whole."""
    if args.csv:
        replace_file(Path(args.csv), as_csv(results).encode())
    if args.json:
        replace_file(Path(args.json), as_json(results).encode())
    if args.html:
        for learner, page in pages(results, seed).items():
            replace_file(Path(args.html) / learner, page.encode())


def check_writable(args):
    """Make the folders of the reports now, so that an hour of grading is not lost for want of one."""
    folders = [Path(file).parent for file in (args.csv, args.json) if file]
    folders += [Path(args.html)] if args.html else []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GradingError(f'cannot write to "{folder}": {error.strerror}') from error


def clean(text):
    """Text without control characters, which could move the cursor or colour a terminal, and without half letters."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(text)).encode("utf-8", "replace").decode()
    return "".join(letter if letter == "\n" or unicodedata.category(letter)[0] != "C" else "?" for letter in text)


def table(results):
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
    passed = sum(result.passed for result in results)
    return "\n".join([*lines, f"{passed} of {len(results)} submissions have all points"])


def first_line(message):
    """The first line of a message, at most 200 characters of it."""
    return clean(message).strip().split("\n")[0][:200]


def as_csv(results):
    """learner, exercise, task, points, possible, message, parts; what a spreadsheet would run is made harmless."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["learner", "exercise", "task", "points", "possible", "message", "parts"])
    for result in results:
        record = result.as_dict()
        for task in record["tasks"]:
            numbers = [task["points"], task["possible"]]
            exercise = "" if record["exercise"] is None else record["exercise"]
            parts = "; ".join(f"{one['name']} {one['points']:g}/{one['possible']:g}" for one in task.get("parts", []))
            texts = [harmless(task["message"]), harmless(parts)]
            writer.writerow([harmless(record["learner"]), exercise, task["id"], *numbers, *texts])
    return file.getvalue()


def harmless(text):
    """A cell that no spreadsheet takes for a formula."""
    text = clean(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text


def as_json(results):
    """A list of submissions with their tasks."""
    return json.dumps([cleaned(result.as_dict()) for result in results], indent=1, ensure_ascii=False) + "\n"


def cleaned(thing):
    """Plain data with every text in it cleaned."""
    if isinstance(thing, dict):
        return {key: cleaned(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [cleaned(value) for value in thing]
    return clean(thing) if isinstance(thing, str) else thing


def pages(results, seed):
    """{file name: page} with one self-contained page a learner; everything in it that is not ours is escaped."""
    by_learner = {}
    for result in results:
        by_learner.setdefault(result.learner, []).append(result)
    made = {}
    for learner, of_learner in by_learner.items():
        name = re.sub(r"[^\w.-]+", "_", clean(learner)).strip(".")[:80] or "learner"
        while f"{name}.html" in made:
            name += "_"
        sections = "".join(map(section, of_learner))
        made[f"{name}.html"] = PAGE.format(learner=escape(clean(learner)), sections=sections, seed=seed)
    return made


def section(result):
    """One exercise of a learner as HTML."""
    title = f"Exercise {result.exercise}" if result.exercise is not None else "No exercise"
    rows = "".join(map(rows_of, result.tasks))
    message = f"<p>{escape(clean(result.note))}</p>\n" if result.note else ""
    message += f'<p class="wrong">{escape(clean(result.message))}</p>\n' if result.message else ""
    return SECTION.format(title=title, points=result.points, possible=result.possible, message=message, rows=rows)


def rows_of(task):
    """A task as rows of HTML: what happened, and below it its properties, if there are several."""
    rows = [(ROW, task.message or "correct", bool(task.message), task.points, task.possible)]
    if len(task.parts) > 1:
        rows += [
            (PART, part_in_words(part), bool(part["message"]), part["points"], part["possible"]) for part in task.parts
        ]
    return "".join(
        row.format(id=escape(task.id), mark="wrong" if wrong else "right", points=points, possible=possible,
                   message=escape(clean(message)))
        for row, message, wrong, points, possible in rows
    )  # fmt: skip


def part_in_words(part):
    """A property and what is wrong with it, in one line."""
    return f"{part['name']}: {part['message'] or 'right'}"
