"""Finds the answers in a learner's notebook, by the exercises as they were given out.

A person would find an answer by what it defines, wherever it stands, and so does this module: it
takes the last cell that was changed and defines what the task asks for, among those that carry the
task's sign, or else among all cells.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import nbformat

from ddp_course.lab.folders import course_folder
from ddp_exercises import UNSOLVED
from ddp_exercises.tasks import cell_of, find

from .cells import Cell

LEAST_SIGNS = 2  # So many names or checks of an exercise show that a notebook answers it.


class Pristine(NamedTuple):
    """One exercise as it was given out.

    `given` is {id: source} of the cells that belong to no task; `answers` and `checks` are {task:
    source of its cell}, and `points` {task: points}. No source begins or ends with a blank.
    """

    given: dict[str, str]
    answers: dict[str, str]
    checks: dict[str, str]
    points: dict[str, float]


Exercises = dict[int, Pristine]  # the exercises by their numbers


class Answer(NamedTuple):
    """The answer to a task.

    `places` are those of its versions among the cells, of which the last counts, and `source` is
    that of the last. There are none if only the learner's check knows the answer. `check` is the
    place of the check, and `notes` say how the answer was found, if not by an id.
    """

    places: list[int]
    source: str
    check: int
    notes: list[str]


def load_exercises() -> Exercises:
    """Return all exercises as they were given out, by their numbers.

    They are read from the notebooks of solutions, where a cell that was given out in another form
    has that form in its metadata.
    """
    exercises = {}
    for path in sorted(course_folder("solutions").glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        pristine = Pristine({}, {}, {}, {})
        exercises[notebook.metadata.ddp_course.exercise] = pristine
        for cell in notebook.cells:
            about = cell.metadata.get("ddp_course", {})
            source = about.get("given", cell.source).strip()
            if about.get("role") == "answer":
                pristine.answers[about.task] = source
            elif about.get("role") == "check":
                pristine.checks[about.task] = source
                pristine.points[about.task] = about.points
            elif cell.cell_type == "code":
                pristine.given[cell.id] = source
    return exercises


def exercise_by_content(cells: Sequence[Cell], exercises: Exercises) -> int | None:
    """Return which exercise a notebook answers whose cells carry no sign.

    It is the one whose checks it calls, and whose functions it defines. It is None for a lesson,
    and if too few signs are found.
    """
    # Only lessons have such cells.
    if any(cell.role == "task" for cell in cells):
        return None
    text = "\n".join(cell.source for cell in cells if not cell.text_type)
    called = [task for cell in cells for task in cell.checks]
    counts: Counter[int] = Counter()
    for exercise, pristine in exercises.items():
        for task in pristine.points:
            if task in called or defines(text, find(task).names):
                counts[exercise] += 1
    exercise = max(exercises, key=counts.__getitem__)
    return exercise if counts[exercise] >= LEAST_SIGNS else None


def find_answers(pristine: Pristine, cells: Sequence[Cell]) -> dict[str, Answer]:
    """Return the answers to all tasks that somebody has begun to answer, by task.

    A check is where the learner has it, if that is below the answer, or else right behind the
    answer.
    """
    answers = {}
    for task in pristine.answers:
        checks = [place for place, cell in enumerate(cells) if task in cell.checks]
        if places := places_of(task, pristine, cells, checks):
            *earlier, last = places
            cell = cells[last]
            notes = []
            if (cell.role, cell.task) != ("answer", task):
                notes.append("found by what it defines, in another cell")
            elif cell.sign != "id":
                notes.append(f"found by its {cell.sign}")
            if cell.text_type:
                notes.append(f"its cell is {cell.text_type}, read as code")
            if earlier and defines(cells[earlier[-1]].source, find(task).names[:1]):
                notes.append("there are several versions, the last counts")
            check = min([place for place in checks if place > last], default=last)
            answers[task] = Answer(places, cell.source, check, notes)
        elif checks and may_be_defined(task, pristine, cells):
            answers[task] = Answer([], "", checks[-1], ["no cell defines it; its check had it"])
    return answers


def may_be_defined(task: str, pristine: Pristine, cells: Sequence[Cell]) -> bool:
    """Tell whether a check may be given an answer that no cell is seen to define.

    It may have been imported with a star, or been given another name: the placeholder is gone, or
    a cell of the learner's speaks of it.
    """
    given, placeholders, checks, _ = pristine
    given_out = {*given.values(), *placeholders.values(), *checks.values()}
    sources = {cell.source.strip() for cell in cells if not cell.text_type}
    if placeholders[task] not in sources:
        return True
    words = re.compile(rf"\b(?:{'|'.join(find(task).names)}|{re.escape(task)})\b")
    return any(words.search(source) for source in sources - given_out)


def places_of(
    task: str, pristine: Pristine, cells: Sequence[Cell], checks: Sequence[int]
) -> list[int]:
    """Return the places of the cells that answer a task.

    They are those with its sign that define one of its names, any below that define it anew before
    one of the learner's `checks`, and any others that define what these lack. If there are none,
    they are those with its sign that were changed.
    """
    own_parts = {}
    signed = []
    for place, cell in enumerate(cells):
        part = without_placeholder(cell, task, pristine)
        is_signed = cell.role == "answer" and cell.task == task
        if part and (is_signed or not cell.text_type):
            own_parts[place] = part
            if is_signed:
                signed.append(place)
    names = find(task).names
    places = [place for place in signed if defines(own_parts[place], names)]
    if places and checks:
        for place, part in own_parts.items():
            if places[-1] < place <= checks[-1] and defines(part, names):
                places.append(place)
    defined = "\n".join(own_parts[place] for place in places)
    lacking = [name for name in names if not defines(defined, [name])]
    if lacking:
        others = [place for place, part in own_parts.items() if defines(part, lacking)]
        found = "\n".join(own_parts[place] for place in others)
        if all(defines(found, [name]) for name in lacking):
            places = sorted({*places, *others})
    return places or [place for place in signed if not cells[place].text_type]


def without_placeholder(cell: Cell, task: str, pristine: Pristine) -> str:
    """Return what a learner has written into a cell: all but the text that was given out."""
    if cell.source.strip() in pristine.given.values():
        return ""
    return cell.source.replace(pristine.answers[task], "").strip()


def defines(source: str, names: Sequence[str]) -> bool:
    """Return whether a line of the source begins to define a name, whatever else is in there."""
    either = "|".join(names)
    function = rf"(?:(?:async +)?def|class) +(?:{either})\b"
    names_of_values = rf"(?:\w+ *[,=] *)*(?:{either})\b(?: *, *\w+)* *(?::[^=\n]+)?=(?!=)"
    return bool(re.search(f"^(?:{function}|{names_of_values})", source, re.MULTILINE))


def trouble(task: str, pristine: Pristine, cells: Sequence[Cell]) -> str:
    """Return what is wrong, before anything runs, with a task that has no answer."""
    names = find(task).names
    for cell in cells:
        if cell.text_type and defines(cell.source, names):
            return f"its answer is in a {cell.text_type} cell, which does not run: make it code"
    for cell in cells:
        is_own = cell.role == "answer" and cell.task == task
        if pristine.answers[task] in cell.source or (is_own and not cell.text_type):
            return UNSOLVED
    return f"its answer cell is missing, and no other cell defines {' or '.join(names)}"


def assemble(
    pristine: Pristine, cells: Sequence[Cell], answers: Mapping[str, Answer]
) -> dict[str, str]:
    """Return the cells to be run, {id: source}: the learner's, unchanged, among the pristine ones.

    The learner's cells keep their order. Each has its place as its id, such as "own-7". Untouched
    cells of tasks that were answered elsewhere are left out.
    """
    given, placeholders, checks, _ = pristine
    names = {source: name for name, source in given.items()}
    left_out = {*checks.values(), *(placeholders[task] for task in answers)}
    answered = {place for answer in answers.values() for place in answer.places}
    # The imports come first, and cells that the learner has deleted; the rest comes where the
    # learner has it.
    theirs = {names.get(cell.source.strip(), cell.id) for cell in cells} - {"imports"}
    assembled = {name: source for name, source in given.items() if name not in theirs}
    for place, cell in enumerate(cells):
        text = cell.source.strip()
        name = names.get(text, cell.id)
        # A `%reset` above may have taken away what was imported.
        if name == "imports":
            assembled[f"imports-{place}"] = given[name]
        elif name in given:
            assembled.setdefault(name, given[name])
        runs = place in answered or not cell.text_type
        if runs and text not in left_out and text not in names:
            assembled[f"own-{place}"] = cell.source
        for task, answer in answers.items():
            if answer.check == place:
                assembled[check_of(task)] = checks[task]
    return assembled


def check_of(task: str) -> str:
    """Return the id of the check cell of a task, such as "check-4-2"."""
    return cell_of(task).replace("answer", "check")
