"""The exercises as they were given out, and where in a learner's notebook the answers are.

A person would find an answer by what it defines, wherever it stands. So does this: the last cell
that was changed and defines what the task asks for, among those that carry the task's sign, or else
among all cells.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import nbformat

from ddp_course.checking import UNSOLVED
from ddp_course.checking.tasks import cell_of, find
from ddp_course.running.files import course_folder

from .cells import Cell

CHECKED = re.compile(r"""\bcheck\(\s*["'](\d{1,4}\.\d{1,4})["']""")
LEAST_SIGNS = 2  # So many names or checks of an exercise tell that a notebook answers it.


class Pristine(NamedTuple):
    """One exercise as it was given out: `given` is {id: source} of the cells that are no task's;
    `answers` and `checks` are {task: source of its cell}, and `points` {task: points}.
    """

    given: dict[str, str]
    answers: dict[str, str]
    checks: dict[str, str]
    points: dict[str, float]


Exercises = dict[int, Pristine]  # {number: the exercise}


class Answer(NamedTuple):
    """The answer to a task: the `places` of its versions among the cells, of which the last counts,
    the source of that one, and what a teacher should know of how it was found.
    """

    places: tuple[int, ...]
    source: str
    notes: tuple[str, ...] = ()


def load_exercises() -> Exercises:
    """All exercises as they were given out: {exercise: Pristine}.

    They are read from the solutions, which nobody solves in: a cell that was given out in another
    form has that form in its metadata.
    """
    exercises = {}
    for path in sorted(course_folder("solutions").glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        pristine = Pristine({}, {}, {}, {})
        exercises[notebook.metadata.ddp_course.exercise] = pristine
        for cell in notebook.cells:
            about = cell.metadata.get("ddp_course", {})
            source = about.get("given", cell.source)
            if about.get("role") == "answer":
                pristine.answers[about.task] = source
            elif about.get("role") == "check":
                pristine.checks[about.task] = source
                pristine.points[about.task] = about.points
            elif cell.cell_type == "code":
                pristine.given[cell.id] = source
    return exercises


def exercise_by_content(cells: Sequence[Cell], exercises: Exercises) -> int | None:
    """Which exercise a notebook answers whose cells carry no sign: the one whose checks it calls,
    and whose functions it defines. None for a lesson, and where too little tells.
    """
    if any(cell.role == "task" for cell in cells):
        return None  # Lessons have such cells.
    counts: Counter[int] = Counter()
    text = "\n".join(cell.source for cell in cells if not cell.text_type)
    called = set(CHECKED.findall(text))
    for exercise, pristine in exercises.items():
        for task in pristine.points:
            counts[exercise] += (task in called) + defines(text, find(task).names)
    exercise, count = counts.most_common(1)[0]
    return exercise if count >= LEAST_SIGNS else None


def find_answers(pristine: Pristine, cells: Sequence[Cell]) -> dict[str, Answer]:
    """{task: its answer} of all tasks that somebody has begun to answer."""
    answers = {}
    for task in pristine.answers:
        places = places_of(task, pristine, cells)
        if places:
            last = cells[places[-1]]
            notes = notes_on(last, task)
            first_name = find(task).names[:1]
            versions = sum(defines(cells[place].source, first_name) for place in places)
            if versions > 1:
                notes.append(f"{versions} versions, the last counts")
            answers[task] = Answer(tuple(places), last.source, tuple(notes))
    return answers


def places_of(task: str, pristine: Pristine, cells: Sequence[Cell]) -> list[int]:
    """The places of the cells that answer a task: those with its sign that define one of its names,
    and any others that define what these lack. If there are none, those with its sign that were
    changed.
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
    defined = "\n".join(own_parts[place] for place in places)
    lacking = [name for name in names if not defines(defined, [name])]
    if lacking:
        others = [place for place, part in own_parts.items() if defines(part, lacking)]
        found = "\n".join(own_parts[place] for place in others)
        if all(defines(found, [name]) for name in lacking):
            places = sorted({*places, *others})
    return places or [place for place in signed if not cells[place].text_type]


def without_placeholder(cell: Cell, task: str, pristine: Pristine) -> str:
    """What a learner has written into a cell: all but what the task's cell, or one that is no
    task's, was given out with.
    """
    if cell.source.strip() in map(str.strip, pristine.given.values()):
        return ""
    return cell.source.replace(pristine.answers[task].strip(), "").strip()


def defines(source: str, names: Sequence[str]) -> bool:
    """Whether a line of the source begins to define one of the names, also beside magics and
    errors of syntax.
    """
    either = "|".join(names)
    return bool(
        re.search(
            rf"^(?:(?:async +)?def|class) +(?:{either})\b|^(?:\w+ *[,=] *)*(?:{either})\b"
            r"(?: *, *\w+)* *(?::[^=\n]+)?=(?!=)",
            source,
            re.MULTILINE,
        )
    )


def notes_on(cell: Cell, task: str) -> list[str]:
    """How an answer was found, where that is not by the id of its cell."""
    notes = []
    if cell.role != "answer" or cell.task != task:
        whose = f"the cell of {cell.task}" if cell.task else "another cell"
        notes.append(f"found in {whose}, by what it defines")
    elif cell.sign != "id":
        notes.append(f"found by its {cell.sign}")
    if cell.text_type:
        notes.append(f"its cell is {cell.text_type}, read as code")
    return notes


def troubles_of(
    pristine: Pristine, cells: Sequence[Cell], answers: Mapping[str, Answer]
) -> dict[str, str]:
    """{task: what is wrong before anything runs}, for tasks without an answer."""
    troubles = {}
    for task in pristine.answers:
        if task in answers:
            continue
        own = [cell for cell in cells if cell.role == "answer" and cell.task == task]
        code = [cell for cell in own if not cell.text_type]
        names = " or ".join(find(task).names)
        if code or any(pristine.answers[task].strip() in cell.source for cell in cells):
            troubles[task] = UNSOLVED
        elif own:
            troubles[task] = f"its answer cell is {own[-1].text_type}, and defines no {names}"
        else:
            troubles[task] = f"its answer cell is missing, and no other cell defines {names}"
    return troubles


def assemble(
    pristine: Pristine, cells: Sequence[Cell], answers: Mapping[str, Answer]
) -> dict[str, str]:
    """The cells to be run, {id: source}: the learner's in their order, unchanged, among the
    pristine ones. Each check runs where the learner has it, if that is below the answer, or else
    right behind it.

    A learner's cell has its place as id, such as "own-7". Untouched cells of tasks that were
    answered elsewhere are left out.
    """
    given, placeholders, checks, _ = pristine
    names = {source.strip(): name for name, source in given.items()}
    placeholder_tasks = {source.strip(): task for task, source in placeholders.items()}
    check_places = {
        task: place_of_check(task, cells, answer.places[-1]) for task, answer in answers.items()
    }
    # First the imports, and what the learner has deleted; the rest comes where the learner has it.
    theirs = {cell.id for cell in cells} | {names.get(cell.source.strip()) for cell in cells}
    theirs -= {"imports"}
    assembled = {name: source for name, source in given.items() if name not in theirs}
    answered = {place for answer in answers.values() for place in answer.places}
    for place, cell in enumerate(cells):
        text = cell.source.strip()
        name = names.get(text)
        if name == "imports":  # A `%reset` above may have taken away what was imported.
            assembled[f"imports-{place}"] = given[name]
        elif name or cell.id in given:
            assembled.setdefault(name or cell.id, given[name or cell.id])
        is_code = not cell.text_type or place in answered
        is_check = cell.role == "check" and text == checks.get(cell.task, "").strip()
        is_untouched = placeholder_tasks.get(text) in answers
        if is_code and not name and not is_check and not is_untouched:
            assembled[f"own-{place}"] = cell.source
        for task, check_place in check_places.items():
            if check_place == place:
                assembled[check_of(task)] = checks[task]
    return assembled


def calls_check(cell: Cell, task: str = "") -> bool:
    """Whether a cell that runs calls the check of a task, or of any."""
    called = [] if cell.text_type else CHECKED.findall(cell.source)
    return task in called if task else bool(called)


def place_of_check(task: str, cells: Sequence[Cell], answer: int) -> int:
    """The place of the learner's own check of a task, if it is the answer's or below it; else the
    answer's.
    """
    for place, cell in enumerate(cells[answer:], answer):
        if calls_check(cell, task):
            return place
    return answer


def check_of(task: str) -> str:
    """The id of the check cell of a task, such as "check-4-2"."""
    return cell_of(task).replace("answer", "check")
