"""Write docs/LAZY_ANSWERS.md from exercises/answers: `python authoring/lazy_answers.py`.

A lazy answer has what is asked for by a way that leaves the task's point out: torch's own function,
all work on one rank, everything in memory. Its name in exercises/answers begins with "lazy, ", and
tests/exercises/test_known_answers.py sees that each is told what the table says.
"""

import re
from pathlib import Path

from ddp_exercises.tasks import known_answers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "LAZY_ANSWERS.md"
TITLE = re.compile(r"^# ## (\d+\.\d+) (.+)$", re.MULTILINE)
LAZY = "lazy, "
HEAD = """# Lazy answers

"Which lazy answer has the right number?" was asked of every task. A lazy answer leaves the point
of the task out: it calls the function that is to be written, joins what was to be worked on in
pieces, lets one rank do all the work, keeps everything in memory, or sends whole tensors. This
table says what each of them is told. `python authoring/lazy_answers.py` makes it from
`exercises/answers`, and `tests/exercises/test_known_answers.py` tries every row.

| task | lazy answer | what it is told |
|---|---|---|
"""


def titles():
    """Return {number of a task: its title} of all exercises."""
    found = {}
    for source in sorted((ROOT / "authoring" / "lessons").glob("*_exercise.py")):
        found.update(TITLE.findall(source.read_text(encoding="utf-8")))
    return found


def lazy_answers():
    """Return [(task, lazy answer)] of all exercises, in the order of the tasks."""
    pairs = []
    for path in sorted((ROOT / "exercises" / "answers").glob("*.py")):
        answers = [each for each in known_answers(int(path.stem)) if each.name.startswith(LAZY)]
        answers.sort(key=lambda each: int(each.task.split(".")[1]))
        pairs += [(each.task, each) for each in answers]
    return pairs


def page():
    """Return the text of docs/LAZY_ANSWERS.md."""
    title_of = titles()
    rows = []
    for task, answer in lazy_answers():
        cells = [f"{task} {title_of[task]}", answer.name.removeprefix(LAZY), answer.message]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
