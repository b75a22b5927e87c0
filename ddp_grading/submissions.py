"""What learners handed in: notebooks found in folders, read with patience, and laid into the
pristine notebook.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from ddp_course.checking.checks import cell_of
from ddp_course.errors import GradingError

from .results import clean

PRISTINE = Path(__file__).with_name(
    "pristine"
)  # This folder has the exercises as given out; learners solve copies.
MOST_BYTES = 256 << 20
MISSING = "its answer cell is missing: it was deleted, or copied into a new cell"
UNTOUCHED = "not solved yet"
NUMBERED = re.compile(r"(\d{1,2})[_\- .]")
ANSWER_ID = re.compile(r"answer-(\d+)-(\d+)$")
LEFT_BEHIND = {".ipynb_checkpoints", "__MACOSX"}  # Jupyter and archives leave these folders behind.


class Pristine(NamedTuple):
    """One exercise as it was given out: its notebook, and {task: points}."""

    notebook: Any
    points: dict[str, float]


class Submission(NamedTuple):
    """One notebook of one learner; `path` is None if there is none."""

    learner: str
    path: Path | None

    @property
    def file(self) -> str:
        """The notebook's name within the learner's folder; "" if there is no notebook."""
        if self.path is None:
            return ""
        parts = self.path.parts
        return (
            "/".join(parts[parts.index(self.learner) + 1 :])
            if self.learner in parts[:-1]
            else self.path.name
        )


class Cell(NamedTuple):
    """A code cell that was handed in: its id, its source, and the task whose answer it is, "" if of
    none.
    """

    id: str
    source: str
    task: str = ""
    check: bool = False


class Laid(NamedTuple):
    """The notebook to be run, {task: its last answer}, and {task: what is wrong before anything
    runs}.
    """

    notebook: Any
    sources: dict[str, str]
    troubles: dict[str, str]


def load_exercises(folder: str | Path = PRISTINE) -> dict[int, Pristine]:
    """Read the pristine notebooks of a folder: {exercise: Pristine}."""
    exercises = {}
    for path in sorted(Path(folder).glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        about = [cell.metadata.get("ddp_course", {}) for cell in notebook.cells]
        points = {
            of_cell.task: of_cell.points for of_cell in about if of_cell.get("role") == "check"
        }
        exercises[notebook.metadata.ddp_course.exercise] = Pristine(notebook, points)
    if not exercises:
        raise GradingError(f'no exercises in the folder "{folder}"; name theirs with --exercises')
    return exercises


def find_submissions(paths: Iterable[str | Path]) -> tuple[list[Submission], list[Path]]:
    """All submissions under `paths`, notebooks, or folders with one folder or notebook per learner;
    and other files.
    """
    submissions: list[Submission] = []
    others: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise GradingError(f'"{path}" does not exist')
        for child in [path] if path.is_file() else sorted(path.iterdir()):
            if child.name.startswith(".") or child.name in LEFT_BEHIND:
                continue
            inside = sorted(child.rglob("*")) if child.is_dir() else [child]
            notebooks = [
                file
                for file in inside
                if file.suffix.lower() == ".ipynb" and not LEFT_BEHIND & {*file.parts}
            ]
            learner = clean(child.stem if child in notebooks else child.name)
            submissions += [Submission(learner, file) for file in notebooks]
            if not notebooks and child.is_dir():
                submissions.append(Submission(learner, None))
            elif not notebooks:
                others.append(child)
    if not submissions:
        raise GradingError(f"no submissions in {', '.join(map(str, paths))}")
    return submissions, others


def read_notebook(path: Path | None) -> list[Cell]:
    """A notebook's code cells, in any of its formats; GradingError says what is wrong with the
    file.
    """
    if path is None:
        raise GradingError("there is no notebook (.ipynb) in the folder that can be read")
    if not path.is_file():
        raise GradingError("is not a file, or a link to nothing")
    if path.stat().st_size > MOST_BYTES:
        raise GradingError(
            f"has {path.stat().st_size >> 20} MiB; clear its outputs (at most {MOST_BYTES >> 20}"
            " MiB)"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        return [
            as_cell(cell)
            for cell in nbformat.reads(text, as_version=4).cells
            if cell.cell_type == "code"
        ]
    except nbformat.reader.NotJSONError as error:
        raise GradingError("is not valid JSON" if text.strip() else "is empty") from error
    # The file is not UTF-8, say, or has a form for which nbformat has no error of its own.
    except Exception as error:
        raise GradingError(
            f"cannot be read as a notebook ({type(error).__name__}: {error})"
        ) from error


def as_cell(cell: Any) -> Cell:
    """A code cell that was handed in; an answer is recognised by its metadata or by its id."""
    about, name = cell.get("metadata", {}).get("ddp_course", {}), cell.get("id", "")
    match = ANSWER_ID.match(name)
    task = (
        str(about.get("task", ""))
        if about.get("role") == "answer"
        else f"{match[1]}.{match[2]}"
        if match
        else ""
    )
    return Cell(name, cell.source, task, about.get("role") == "check" or name.startswith("check-"))


def exercise_of(cells: Sequence[Cell], number: int | None, exercises: dict[int, Pristine]) -> int:
    """Which exercise a notebook answers: what most of its answer cells say, or else its file's
    name, `number`.
    """
    answered = [
        int(cell.task.split(".")[0])
        for cell in cells
        if re.fullmatch(r"\d{1,4}\.\d{1,4}", cell.task)
    ]
    number = max(answered, key=answered.count) if answered else number
    if number is None:
        raise GradingError(
            "holds no answer cell of any exercise: were the cells copied into a new notebook?"
        )
    if number not in exercises:
        raise GradingError(f"answers exercise {number}, which this course does not have")
    return number


def lay(pristine: Any, cells: Sequence[Cell], without: Sequence[str] = ()) -> Laid:
    """The learner's cells in their order, unchanged, among the pristine ones; each check follows
    its answer.

    `without` are ids of laid cells that are left out: they ended the whole notebook when it ran.
    """
    given, checks, answers = {}, {}, {}
    for cell in (cell for cell in pristine.cells if cell.cell_type == "code"):
        about = cell.metadata.get("ddp_course", {})
        places = {"answer": answers, "check": checks}.get(about.get("role"), given)
        places[cell.id if places is given else about.task] = cell
    own = [cell for cell in cells if not cell.check]
    last = {cell.task: place for place, cell in enumerate(own)}
    there = {cell.id for cell in own} - {"imports"}
    laid = [cell for name, cell in given.items() if name not in there]
    for place, cell in enumerate(own):
        if cell.id in given and cell.id != "imports":
            laid.append(given.pop(cell.id))
        if cell.task in answers:
            laid.append(new_code_cell(cell.source, id=f"{cell_of(cell.task)}-{place}"))
            laid += [checks[cell.task]] if last[cell.task] == place else []
        elif not (cell.id in given and cell.source == given[cell.id].source):
            laid.append(new_code_cell(cell.source, id=f"own-{place}"))
    kept = [cell for cell in laid if cell.id not in without]
    sources = {cell.task: cell.source for cell in own if cell.task in answers}
    pristine_sources = {task: cell.source.strip() for task, cell in answers.items()}
    troubles = {
        task: UNTOUCHED if task in sources else MISSING
        for task, source in pristine_sources.items()
        if sources.get(task, source).strip() == source
    }
    notebook = new_notebook(cells=kept, metadata=pristine.metadata)
    return Laid(notebook, sources, troubles)
