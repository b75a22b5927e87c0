"""The collection of answers in tests/wrong_answers: how it is written, and how answers are put through a check.

A file exerciseNN.py there holds percent cells. `# %% 4.2 wrong: name | words` is followed by a wrong answer whose
message must hold the words; `# %% 4.2 right: name` by a right one. `# %% 4.2 hidden: name | words` is wrong too, but
passes the learner's own checks: only `--hidden` finds it. A body of lines `#- old` and `#+ new` edits the course's own
solution.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jupytext
from build import exercise

from ddp_course.grading.examine import PATIENCE_SECONDS, Item, draw, examine, verdict
from ddp_course.grading.submission import cells_for
from ddp_course.grading.tasks import find

ROOT = Path(__file__).parents[2]
HEADER = re.compile(r"(\d+\.\d+) (wrong|right|hidden): (.+?)(?: \| (.+))?$")


@dataclass(frozen=True)
class Answer:
    """One answer of the collection, of a kind: right, wrong or hidden; `words` must be in the message that it gets."""

    task: str
    kind: str
    name: str
    words: str
    source: str

    @property
    def right(self):
        """Whether it should pass everything."""
        return self.kind == "right"


@cache
def solutions(number):
    """The solution notebook of an exercise, built from its source."""
    (source,) = (ROOT / "authoring" / "lessons").glob(f"{number:02d}_*_exercise.py")
    return exercise(source, solved=True)


def tasks_of(number):
    """The numbers of an exercise's tasks, in order."""
    cells = solutions(number).cells
    return [
        cell.metadata.ddp_course.task for cell in cells if cell.metadata.get("ddp_course", {}).get("role") == "check"
    ]


def solution(task):
    """The source of the solution of a task."""
    name = f"answer-{task.replace('.', '-')}"
    return next(cell.source for cell in solutions(int(task.split(".")[0])).cells if cell.id == name)


@cache
def collection(number):
    """All answers to an exercise, right ones and wrong ones."""
    path = ROOT / "tests" / "wrong_answers" / f"exercise{number:02d}.py"
    answers = []
    for cell in jupytext.read(path, fmt="py:percent").cells:
        header = HEADER.match(cell.metadata.get("title", ""))
        if not header:
            assert cell.cell_type == "markdown" or not cell.metadata.get("title"), cell.metadata
            continue
        task, kind, name, words = header.groups()
        assert (words is None) == (kind == "right"), f"{path.name}: {task} {name}: a wrong answer needs its words"
        answers.append(Answer(task, kind, name, words or "", edited(solution(task), cell.source, name)))
    return answers


def edited(source, body, name):
    """The body itself, or the solution with the body's edits made."""
    edits = re.findall(r"((?:^#- ?.*\n?)+)((?:^#\+ ?.*\n?)*)", body, re.MULTILINE)
    if not edits:
        return body
    for old, new in edits:
        old, new = (re.sub(r"^#[-+] ?", "", text, flags=re.MULTILINE).rstrip("\n") for text in (old, new))
        assert source.count(old) == 1, f"{name}: {old!r} is {source.count(old)} times in the solution"
        source = source.replace(old, new)
    return source


def cells_with(task, source):
    """What an answer needs to run, with this answer in the solution notebook."""
    notebook = solutions(int(task.split(".")[0])).copy()
    notebook.cells = [cell.copy() for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.id == f"answer-{task.replace('.', '-')}":
            cell.source = source
    return tuple(cells_for(task, notebook))


def verdicts(answers, seed, hidden=False, patience=PATIENCE_SECONDS):
    """For each (task, source) None or the message it gets; all on the same launch where that goes."""
    return [None if one.right else one.message for one in full_verdicts(answers, seed, hidden, patience)]


def full_verdicts(answers, seed, hidden=False, patience=PATIENCE_SECONDS):
    """For each (task, source) its `Verdict`."""
    items = [Item(task, draw(task, seed, hidden), cells=cells_with(task, source)) for task, source in answers]
    results = examine(items, patience)
    return [verdict(find(item.number), result, item.inputs) for item, result in zip(items, results, strict=True)]
