"""Reads the files beside an exercise: `checks/NN.py` tries its tasks, `answers/NN.py` answers them.

A task draws inputs from a seed (`draw`), tries an answer on some rank (`probe`, which yields
evidence, as plain data), and names its parts with their points. An answer is right if its evidence
equals that of the course's own solution. docs/CONTRIBUTING.md says how both files are written.
"""

import copy
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from ddp_course.lab.folders import course_folder

HEADER = re.compile(r"^# %% (\d+\.\d+) (right|wrong|told): (.+?)(?: \| (.+))?$", re.MULTILINE)
EDIT = re.compile(r"((?:^#- ?.*\n?)+)((?:^#\+ ?.*\n?)*)", re.MULTILINE)
MARK = re.compile(r"^#[-+] ?", re.MULTILINE)


def each_case(answer: Callable, rows: list) -> Iterator[tuple]:
    """Return what an answer returns in each case, for copies of the arguments: the usual probe."""
    return ((part, case, answer(*copy.deepcopy(arguments))) for part, case, arguments in rows)


def each_return(answer: Callable, cases: list) -> Iterator[tuple]:
    """Yield what an answer returns for a copy of each case: the usual probe before a `read`."""
    for number, arguments in enumerate(cases):
        yield "", number, answer(*copy.deepcopy(arguments))


@dataclass(eq=False)
class Task:
    """One task.

    Its answer cell defines `names`; `parts` has the weight of each property among the task's
    points.

    - `draw(random)` returns keyword arguments. Every draw has what the task asks for, and chance
      only adds to it. Without a `probe`, `draw` yields (part, case, arguments).
    - `probe(*answers, **inputs)` runs on each of `ranks` ranks and yields (part, case, value).
    - `read(values, **inputs)` computes what is compared, in the grader's process, out of the
      answer's reach. It gets the values of `probe`, as a list for each rank if there are several,
      and yields as `probe` does, with {rank: value} for several ranks.
    - Numbers may differ by `bound` times the largest.
    - `forbidden` are dotted names of functions that an answer must not call.
    - The values of `secret` parts are not told.
    - `hang` is the hint if ranks wait for ever, and an attempt may take `seconds`.
    - `every_order` is the part that is wrong if an answer is right, but not in every order of its
      messages; without it this is not tried.
    """

    number: str
    names: tuple
    parts: dict[str, float]
    draw: Callable
    probe: Callable
    ranks: int = 1
    bound: float = 1e-6
    forbidden: tuple = ()
    secret: tuple = ()
    hang: str = "does every receive have its send, and every send its receive, on all ranks?"
    seconds: float = 5.0
    every_order: str = ""
    read: Callable | None = None

    def __reduce__(self):
        """Travel to ranks as a number: each rank has the functions from its own files."""
        return find, (self.number,)

    @property
    def exercise(self) -> int:
        """The number of the exercise that this task is a part of."""
        return int(self.number.split(".")[0])

    def inputs(self, seed: int) -> dict[str, Any]:
        """Return the inputs that are drawn from a seed."""
        drawn = self.draw(random.Random(f"{seed} {self.number}"))
        return {"rows": list(drawn)} if isinstance(drawn, Iterator) else drawn


_tasks: dict[str, Task] = {}


def task(number: str, names: str | tuple, parts: dict[str, float], **settings: Any) -> Callable:
    """Decorate a class with `draw`, and perhaps `probe` and `read`, so that it becomes a task."""

    def register(definition: Any) -> Any:
        """Keep the task that a class defines, and return the class."""
        defined = (names,) if isinstance(names, str) else names
        read = getattr(definition, "read", None)
        probe = getattr(definition, "probe", each_return if read else each_case)
        _tasks[number] = Task(number, defined, parts, definition.draw, probe, read=read, **settings)
        return definition

    return register


@cache
def load_tasks(exercise: int) -> Any:
    """Return the module of an exercise's tasks, imported once per process; None without a file."""
    folder = course_folder("exercises") / "checks"
    # No package has this name; it is made so that the files can import `.shared`.
    package = sys.modules.setdefault("exercise_checks", ModuleType("exercise_checks"))
    package.__path__ = [str(folder)]
    if (folder / f"{exercise:02d}.py").exists():
        return import_module(f"exercise_checks.{exercise:02d}")
    return None


@cache
def check_files() -> set[str]:
    """Return the names of the files that try answers, such as 04.py."""
    return {path.name for path in (course_folder("exercises") / "checks").glob("*.py")}


def find(number: str) -> Task:
    """Return the task with this number, such as "4.2"; raises ValueError if there is none."""
    exercise = str(number).split(".")[0]
    if exercise.isdigit():
        load_tasks(int(exercise))
    if number not in _tasks:
        raise ValueError(f"there is no task {number}")
    return _tasks[number]


def of_exercise(exercise: int) -> list[Task]:
    """Return all tasks of an exercise, in order."""
    load_tasks(exercise)
    return [task for task in _tasks.values() if task.exercise == exercise]


@dataclass(frozen=True)
class Known:
    """A known answer to a task, whose `kind` is "right", "wrong" or "told".

    The `message` of a wrong answer goes to all answers with the same evidence. A "told" answer is
    wrong, too, but no diagnosis of others: it raises, waits for ever, or has the wrong type; its
    `message` is a part of what the learner is told.
    """

    task: str
    kind: str
    name: str
    message: str
    source: str


@cache
def known_answers(exercise: int) -> list[Known]:
    """Return all known answers of `answers/NN.py`.

    They are cells with a header and a body, which is an answer or edits of the solution. Code above
    the first of them is put above each.
    """
    path = course_folder("exercises") / "answers" / f"{exercise:02d}.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # The pieces are the groups of each header, and the body that follows it.
    opening, *pieces = HEADER.split(text)
    _, _, above = opening.partition("\n\n")
    answers = []
    for start in range(0, len(pieces), 5):
        number, kind, name, message, body = pieces[start : start + 5]
        source = edit_solution(solution(number), body.strip("\n") + "\n", name)
        answers.append(Known(number, kind, name, message or "", above + source))
    return answers


def known_wrong(number: str) -> list[Known]:
    """Return the known answers to a task that are of the kind "wrong", and so a diagnosis."""
    answers = known_answers(find(number).exercise)
    return [known for known in answers if known.task == number and known.kind == "wrong"]


def edit_solution(source: str, body: str, name: str) -> str:
    """Return the body, or the solution with the body's edits: lines `#- old`, then `#+ new`.

    Raises ValueError for an old text that is not in the solution exactly once.
    """
    edits = EDIT.findall(body)
    for edit in edits:
        old, new = [MARK.sub("", lines).rstrip("\n") for lines in edit]
        if source.count(old) != 1:
            raise ValueError(f"{name}: {old!r} is {source.count(old)} times in the solution")
        source = source.replace(old, new)
    return source if edits else body


@cache
def solved_cells(exercise: int) -> dict[str, str]:
    """Return the code cells of an exercise's solution, {id: source}, without its checks."""
    (path,) = course_folder("solutions").glob(f"{exercise:02d}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {
        cell["id"]: "".join(cell["source"])
        for cell in cells
        if cell["cell_type"] == "code" and not cell["id"].startswith("check-")
    }


def cell_of(number: str) -> str:
    """Return the id of the answer cell of a task, such as "answer-4-2"."""
    return f"answer-{number.replace('.', '-')}"


def solution(number: str) -> str:
    """Return the source of the solution of a task."""
    return solved_cells(find(number).exercise)[cell_of(number)]


def cells_with(number: str, source: str) -> dict[str, str]:
    """Return the cells of the solved exercise without its checks, with this answer in it."""
    return solved_cells(find(number).exercise) | {cell_of(number): source}
