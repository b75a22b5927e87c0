"""Where a learner is: points and the next task of each exercise, and guesses, from their copy."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import nbformat

from ddp_course.running.learners_copy import progress_in

from .submissions import Pristine

# The figures of one's own that are worth keeping: the cell that draws each.
FIGURES = {
    "00_start_here": "comparison-figure",
    "04_ring_all_reduce": "time-by-ranks",
    "05_bucketed_ddp": "regimes",
}


class Row(NamedTuple):
    """One exercise: points earned and possible, and the next task, "" if all are solved."""

    exercise: int
    earned: float
    possible: float
    next_task: str


def rows(copy: Path, exercises: dict[int, Pristine]) -> list[Row]:
    """A row for each exercise, by the last check of each task."""
    solved = progress_in(copy).get("tasks", {})
    table = []
    for number, exercise in exercises.items():
        earned = sum(points for task, points in exercise.points.items() if solved.get(task))
        left = [task for task in exercise.points if not solved.get(task)]
        table.append(Row(number, earned, sum(exercise.points.values()), left[0] if left else ""))
    return table


def sentence(copy: Path) -> str:
    """How many guesses were right, and when something was checked or guessed last."""
    known = progress_in(copy)
    guesses = list(known.get("guesses", {}).values())
    if not known:
        return "nothing was checked or guessed yet"
    last = time.strftime("%d %B, %H:%M", time.localtime(known["visited"]))
    said = f"right in {sum(guesses)} of {len(guesses)} guesses" if guesses else "no guess yet"
    return f"{said}; last visit: {last}"


def figures(copy: Path) -> Iterator[tuple[str, str]]:
    """(Lesson, PNG in base64) of each figure that the learner's own run has drawn."""
    for lesson, identifier in FIGURES.items():
        with suppress(OSError, ValueError):
            notebook = nbformat.read(copy / "notebooks" / f"{lesson}.ipynb", as_version=4)
            for cell in notebook.cells:
                outputs: list[Any] = cell.get("outputs", []) if cell.id == identifier else []
                for output in outputs:
                    if "image/png" in output.get("data", {}):
                        yield lesson.replace("_", " "), output["data"]["image/png"]


def page(copy: Path, exercises: dict[int, Pristine]) -> str:
    """One HTML page to keep, which loads nothing."""
    source = Path(__file__).with_name("overview.html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True).from_string(source)
    own = list(figures(copy))
    return template.render(rows=rows(copy, exercises), sentence=sentence(copy), figures=own)
