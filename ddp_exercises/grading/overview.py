"""Says where a learner is, from their copy: points, next tasks, guesses, and figures."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import nbformat

from ddp_course.lab import questions
from ddp_course.lab.learners_copy import progress_in
from ddp_exercises.tasks import find, known_wrong

from .answers import Exercises
from .results import Result, TaskResult

# In these cells a learner's own training is compared.
OWN = "yours-in-the-comparison"
# These figures of one's own are worth keeping: each lesson has the cells that draw them.
FIGURES = {
    "00_start_here": ["comparison-figure"],
    "03_parameter_server": [OWN],
    "04_ring_all_reduce": ["time-by-ranks", OWN],
    "05_bucketed_ddp": ["regimes", OWN],
    "06_complete_ddp": [OWN],
}


def results_so_far(copy: Path, exercises: Exercises) -> list[Result]:
    """Return a result of each exercise, by the last check of each task."""
    solved = progress_in(copy).get("tasks", {})
    results = []
    for number, pristine in exercises.items():
        tasks = [
            TaskResult(task, worth if solved.get(task) else 0, worth)
            for task, worth in pristine.points.items()
        ]
        results.append(Result("you", number, tasks))
    return results


def begun(copy: Path, results: list[Result]) -> list[Result]:
    """Return the results of exercises in which a task was checked; without any, the first one."""
    checked = progress_in(copy).get("tasks", {})
    found = []
    for each in results:
        if any(task.id in checked for task in each.tasks):
            found.append(each)
    return found or results[:1]


def sentence(copy: Path) -> str:
    """Return how many guesses and questions were right, and when the learner was here last."""
    progress = progress_in(copy)
    if not progress:
        return "nothing was checked or guessed yet"
    last_visit = time.strftime("%d %B, %H:%M", time.localtime(progress["visited"]))
    guesses = progress.get("guesses", {}).values()
    count = f"right in {sum(guesses)} of {len(guesses)} guesses" if guesses else "no guess yet"
    answers = questions.answered(copy).values()
    if answers:
        count += f", and in {sum(answers)} of {len(answers)} questions that lessons open with"
    return f"{count}; last visit: {last_visit}"


def asked_again(copy: Path, results: Sequence[Result]) -> list[str]:
    """Return a line for each known wrong answer that the learner gave once, and may give again.

    The learner may give it again if an open task of a later exercise knows it, too. Each opening
    question that was answered wrong has a line as well.
    """
    known = questions.read_questions()
    wrong = questions.wrong_so_far(copy)
    lines = [f"wrong so far: {questions.title(known[name])}" for name in wrong]
    open_tasks = [
        task.id for result in results for task in result.tasks if task.points < task.possible
    ]
    for task, name in progress_in(copy).get("misconceptions", {}).items():
        for other in open_tasks:
            is_later = find(other).exercise > find(task).exercise
            if is_later and name in [answer.name for answer in known_wrong(other)]:
                lines.append(f'you fell for "{name}" in {task}; {other} asks it again')
    return lines


def figures(copy: Path) -> Iterator[tuple[str, str]]:
    """Yield (lesson, PNG in base64) for each figure that the learner's own run has drawn."""
    for lesson, identifiers in FIGURES.items():
        # A learner may have changed or deleted anything in a copy.
        with suppress(OSError, ValueError, KeyError):
            notebook = nbformat.read(copy / "notebooks" / f"{lesson}.ipynb", as_version=4)
            cells = {cell["id"]: cell for cell in notebook.cells}
            outputs = [each for name in identifiers for each in cells[name]["outputs"]]
            for output in outputs:
                if png := output.get("data", {}).get("image/png"):
                    yield lesson.replace("_", " "), png
