"""The files beside an exercise.

`checks/NN.py` says how its tasks are tried, `answers/NN.py` has known answers to them.

A task draws inputs from a seed (`draw`), tries an answer on some rank (`probe`, which gives
evidence: plain data), and names its parts with their points. An answer is right if its evidence
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
    """The usual probe: what an answer returns in each case, called with copies of the arguments."""
    return ((part, case, answer(*copy.deepcopy(arguments))) for part, case, arguments in rows)


def each_return(answer: Callable, cases: list) -> Iterator[tuple]:
    """The usual probe before a `read`: what an answer returns, called with a copy of each case."""
    for number, arguments in enumerate(cases):
        yield "", number, answer(*copy.deepcopy(arguments))


@dataclass(eq=False)
class Task:
    """One task.

    `names` are what its answer cell defines; `parts` are {property: its weight among the task's
    points}.

    `draw(random)` gives keyword arguments: what the task asks for is in every draw, and chance only
    adds to it. `probe(*answers, **inputs)` runs on each of `ranks` ranks and yields (part, case,
    value); without it `draw` yields (part, case, arguments). `read(values, **inputs)` computes, out
    of the answer's reach in the grader's process, what is compared: it gets the values of `probe`
    (of several ranks a list for each), and yields as `probe` does (of several ranks {rank: value}).
    Numbers may differ by `bound` times the largest. `forbidden` are dotted names of functions that
    an answer must not call. The values of `secret` parts are not told; `hang` is the hint if ranks
    wait for ever; an attempt may take `seconds`. `every_order` is the part that is wrong if an
    answer is right, but not in every order of its messages; without it this is not tried.
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

    @property
    def exercise(self) -> int:
        """The number of the exercise that this task is a part of."""
        return int(self.number.split(".")[0])

    def inputs(self, seed: int) -> dict[str, Any]:
        """The inputs that are drawn from a seed."""
        drawn = self.draw(random.Random(f"{seed} {self.number}"))
        return {"rows": list(drawn)} if isinstance(drawn, Iterator) else drawn


_tasks: dict[str, Task] = {}


def task(number: str, names: str | tuple, parts: dict[str, float], **settings: Any) -> Callable:
    """Decorate a class with `draw`, and perhaps `probe`: it becomes a task."""

    def register(definition: Any) -> Any:
        """Keep the task that the class defines."""
        defined = (names,) if isinstance(names, str) else names
        read = getattr(definition, "read", None)
        probe = getattr(definition, "probe", each_return if read else each_case)
        _tasks[number] = Task(number, defined, parts, definition.draw, probe, read=read, **settings)
        return definition

    return register


@cache
def load_tasks(exercise: int) -> Any:
    """Import the file of an exercise's tasks, once per process.

    Return the module, or None if there is no file.
    """
    folder = course_folder("exercises") / "checks"
    # No package has this name: it is made, so that the files can import `.shared`.
    package = sys.modules.setdefault("exercise_checks", ModuleType("exercise_checks"))
    package.__path__ = [str(folder)]
    if (folder / f"{exercise:02d}.py").exists():
        return import_module(f"exercise_checks.{exercise:02d}")
    return None


@cache
def check_files() -> set[str]:
    """The names of the files that try answers, such as 04.py."""
    return {path.name for path in (course_folder("exercises") / "checks").glob("*.py")}


def find(number: str) -> Task:
    """The task with this number, such as "4.2"; ValueError if there is none."""
    exercise = str(number).split(".")[0]
    if exercise.isdigit():
        load_tasks(int(exercise))
    if number not in _tasks:
        raise ValueError(f"there is no task {number}")
    return _tasks[number]


def of_exercise(exercise: int) -> list[Task]:
    """All tasks of an exercise, in order."""
    load_tasks(exercise)
    return [task for task in _tasks.values() if task.exercise == exercise]


@dataclass(frozen=True)
class Known:
    """A known answer to a task: "right", "wrong" or "told".

    The `message` of a wrong one goes to all answers with the same evidence.

    A "told" answer is wrong, but no diagnosis of other answers: it raises, waits for ever, or has
    the wrong type; its `message` is a part of what the learner is told.
    """

    task: str
    kind: str
    name: str
    message: str
    source: str


@cache
def known_answers(exercise: int) -> list[Known]:
    """All known answers of `answers/NN.py`.

    They are cells with a header and a body, which is an answer or edits of the solution.
    """
    path = course_folder("exercises") / "answers" / f"{exercise:02d}.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    _, *pieces = HEADER.split(text)  # the groups of each header, and what follows it
    answers = []
    for start in range(0, len(pieces), 5):
        number, kind, name, message, body = pieces[start : start + 5]
        source = edit_solution(solution(number), body.strip("\n") + "\n", name)
        answers.append(Known(number, kind, name, message or "", source))
    return answers


def known_wrong(number: str) -> list[Known]:
    """The known answers to a task that are of the kind "wrong", and so a diagnosis."""
    answers = known_answers(find(number).exercise)
    return [known for known in answers if known.task == number and known.kind == "wrong"]


def edit_solution(source: str, body: str, name: str) -> str:
    """The body itself, or the solution with the body's edits (lines `#- old`, then `#+ new`) made.

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
    """{id: source} of the code cells of an exercise's solution, without its checks."""
    (path,) = course_folder("solutions").glob(f"{exercise:02d}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {
        cell["id"]: "".join(cell["source"])
        for cell in cells
        if cell["cell_type"] == "code" and not cell["id"].startswith("check-")
    }


def cell_of(number: str) -> str:
    """The id of the answer cell of a task, such as "answer-4-2"."""
    return f"answer-{number.replace('.', '-')}"


def solution(number: str) -> str:
    """The source of the solution of a task."""
    return solved_cells(find(number).exercise)[cell_of(number)]


def cells_with(number: str, source: str) -> dict[str, str]:
    """{id: source} of what an answer needs to run.

    It is the solved exercise without its checks, with this answer in it.
    """
    return solved_cells(find(number).exercise) | {cell_of(number): source}
