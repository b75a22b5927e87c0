"""Answers for tests of the grading: tried on the same inputs, or handed in as notebooks."""

from pathlib import Path

import nbformat

from ddp_course.grading.checking import book_of, solved, source
from ddp_course.grading.checks import cell_of, find, known_answers, solution
from ddp_course.grading.diagnosis import verdict
from ddp_course.grading.evidence import Attempt, gather

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 3.0  # that a rank waits for a message of a wrong answer


def tried(task, sources, seed, hidden=False):
    """For the solution and each answer (as source) its evidence and its verdict, on the same inputs."""
    inputs = task.inputs(seed, hidden)
    attempts = [Attempt(task.number, inputs, source(task, text)) for text in sources]
    right, *found = gather([solved(task, inputs), *attempts], PATIENCE_SECONDS)
    book = book_of(task, inputs, right)
    return [(one, verdict(task, one, book, inputs)) for one in (right, *found)]


def verdict_on(number, text, seed=1):
    """The verdict on one answer."""
    return tried(find(number), [text], seed)[1][1]


def of_kind(task, *kinds):
    """The known answers to a task of some kinds."""
    return [one for one in known_answers(task.exercise) if one.task == task.number and one.kind in kinds]


def edited(number, *edits):
    """The solution of a task with each (old, new) in it replaced."""
    text = solution(number)
    for old, new in edits:
        assert text.count(old) == 1, f"{number}: {old}"
        text = text.replace(old, new)
    return text


def notebook_of(exercise, folder="solutions"):
    """An exercise's notebook, to be changed."""
    (path,) = (ROOT / folder).glob(f"{exercise:02d}_*.ipynb")
    return nbformat.read(path, as_version=4)


def hand_in(folder, answers, own=()):
    """Write the solution notebook with these {task: source} in it, after cells of the learner's own; its path."""
    (exercise,) = {int(task.split(".")[0]) for task in answers}
    notebook, sources = notebook_of(exercise), {cell_of(task): text for task, text in answers.items()}
    for cell in notebook.cells:
        cell.source = sources.get(cell.id, cell.source)
    notebook.cells[1:1] = [nbformat.v4.new_code_cell(text) for text in own]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{exercise:02d}_mine.ipynb"
    nbformat.write(notebook, path)
    return path
