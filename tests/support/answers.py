"""Answers for tests of the grading: tried on the same inputs, or handed in as notebooks."""

from functools import cache
from pathlib import Path

import nbformat

from ddp_exercises.attempt import Attempt
from ddp_exercises.diagnosis import verdict
from ddp_exercises.evidence import gather
from ddp_exercises.grading.people import Owner
from ddp_exercises.grading.submissions import read_submission, walk
from ddp_exercises.tasks import cell_of, cells_with, find, known_answers, known_wrong, solution

ROOT = Path(__file__).parents[2]
EXERCISES = sorted(int(path.stem) for path in (ROOT / "exercises/checks").glob("[0-9]*.py"))


def tried(task, sources, seed):
    """Return, for the solution and each answer (as source), its evidence and its verdict.

    All have the same inputs.
    """
    idle = "\n".join(f"def {name}(*args, **kwargs): pass" for name in task.names)
    known = [idle, *(answer.source for answer in known_wrong(task.number))]
    right, *others = evidence_of(task, [solution(task.number), *sources], seed)
    of_known = cache(lambda: evidence_of(task, known, seed))
    pairs = []
    for evidence in (right, *others):
        pairs.append((evidence, verdict(task, evidence, right, of_known)))
    return pairs


_tried = {}  # {(task, seed, source): evidence}


def evidence_of(task, sources, seed):
    """Return the evidence of answers.

    One that was tried with the same inputs before is not tried again.
    """
    inputs = task.inputs(seed)
    new = [text for text in dict.fromkeys(sources) if (task.number, seed, text) not in _tried]
    attempts = [Attempt(task, inputs, cells_with(task.number, text)) for text in new]
    for text, evidence in zip(new, gather(attempts), strict=True):
        _tried[task.number, seed, text] = evidence
    return [_tried[task.number, seed, text] for text in sources]


def verdict_on(number, text, seed=1):
    """Return the verdict on one answer."""
    _, of_answer = tried(find(number), [text], seed)
    _, words = of_answer
    return words


def of_kind(task, *kinds):
    """Return the known answers to a task of some kinds."""
    return [
        answer
        for answer in known_answers(task.exercise)
        if answer.task == task.number and answer.kind in kinds
    ]


def edited(number, *edits):
    """Return the solution of a task with each (old, new) in it replaced."""
    text = solution(number)
    for old, new in edits:
        assert text.count(old) == 1, f"{number}: {old}"
        text = text.replace(old, new)
    return text


def notebook_of(exercise, folder="solutions"):
    """Return an exercise's notebook, to be changed."""
    (path,) = (ROOT / folder).glob(f"{exercise:02d}_*.ipynb")
    return nbformat.read(path, as_version=4)


def hand_in(folder, answers, own=()):
    """Write the solution notebook with these {task: source} in it, and return its path.

    The answers stand after cells of the learner's own.
    """
    (exercise,) = {int(task.split(".")[0]) for task in answers}
    notebook = notebook_of(exercise)
    sources = {cell_of(task): text for task, text in answers.items()}
    for cell in notebook.cells:
        cell.source = sources.get(cell.id, cell.source)
    notebook.cells[1:1] = [nbformat.v4.new_code_cell(text) for text in own]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{exercise:02d}_mine.ipynb"
    nbformat.write(notebook, path)
    return path


def submission_of(path, learner="anna"):
    """Return a notebook, read as the grader reads it."""
    (item,) = walk(path, (path.name,))
    return read_submission(item, Owner(learner, path.name))
