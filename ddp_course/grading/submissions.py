"""What learners handed in: notebooks found in folders, read with patience, and laid into the pristine notebook.

What is graded are the learner's cells, as they stand, with the course's own checks below them.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from ..errors import GradingError
from .checks import cell_of

MOST_BYTES = 256 << 20
MISSING = "its answer cell is missing: it was deleted, or copied into a new cell"
UNTOUCHED = "not solved yet"
UNSOLVED = "NotImplementedError"  # what a pristine answer raises
NUMBERED = re.compile(r"(\d{1,2})[_\- .]")
ANSWER_ID = re.compile(r"answer-(\d+)-(\d+)$")
NBVAL_MARKER = re.compile(r"^(\s*#+\s*(?:NBVAL|PYTEST_VALIDATE)_\w+)\s*$", re.MULTILINE)
LEFT_BEHIND = {".ipynb_checkpoints", "__MACOSX"}  # by Jupyter and by archives


@dataclass
class Pristine:
    """One exercise as it was given out: its notebook, and {task: points}."""

    exercise: int
    notebook: Any
    points: dict[str, float]


@dataclass
class Submission:
    """One notebook of one learner. `path` is None if there is none; `trouble` says why it cannot be graded."""

    learner: str
    path: Path | None
    trouble: str = ""

    @property
    def file(self) -> str:
        """Its name within the learner's folder; "" if there is no notebook."""
        if self.path is None:
            return ""
        parts = self.path.parts
        return "/".join(parts[parts.index(self.learner) + 1 :]) if self.learner in parts[:-1] else self.path.name


@dataclass
class Cell:
    """A code cell that was handed in: its id, its source, and the task whose answer it is, "" if of none."""

    id: str
    source: str
    task: str = ""
    check: bool = False


@dataclass
class Laid:
    """The notebook to be run, {task: its last answer}, and {task: what is wrong before anything runs}."""

    notebook: Any
    sources: dict[str, str]
    troubles: dict[str, str]


def load_exercises(folder: str | Path) -> dict[int, Pristine]:
    """Read the pristine notebooks of a folder: {exercise: Pristine}."""
    exercises = {}
    for path in sorted(Path(folder).glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        cells = [(cell, cell.metadata.get("ddp_course", {})) for cell in notebook.cells]
        for cell, about in cells:
            if about.get("role") == "answer" and UNSOLVED not in cell.source:
                raise GradingError(
                    f'"{path}" is not pristine: {cell.id} has been answered; name others with --exercises'
                )
        points = {about.task: about.points for _, about in cells if about.get("role") == "check"}
        number = notebook.metadata.ddp_course.exercise
        exercises[number] = Pristine(number, notebook, points)
    if not exercises:
        raise GradingError(f'no exercises in the folder "{folder}"; name theirs with --exercises')
    return exercises


def find_submissions(paths: Iterable[str | Path], skipped: list[Path] | None = None) -> list[Submission]:
    """All submissions under `paths`: notebooks, or folders with one folder or notebook per learner.

    Other files there are no submissions; their paths are appended to the list `skipped`.
    """
    submissions, skipped = [], [] if skipped is None else skipped
    for path in map(Path, paths):
        if not path.exists():
            raise GradingError(f'"{path}" does not exist')
        if path.is_file():
            submissions.append(Submission(path.stem, path))
            continue
        for child in sorted(path.iterdir()):
            if not child.name.startswith(".") and child.name not in LEFT_BEHIND:
                submissions += of_learner(child, skipped)
    if not submissions:
        raise GradingError(f"no submissions in {', '.join(map(str, paths))}")
    return submissions


def is_notebook(path: Path) -> bool:
    """Whether a file is called like a notebook, as some systems write it."""
    return path.suffix.lower() == ".ipynb"


def of_learner(child: Path, skipped: list[Path]) -> list[Submission]:
    """The submissions of one learner, a file or all notebooks in a folder; what cannot be looked into is one too."""
    learner = child.stem if is_notebook(child) else child.name
    if child.is_dir():
        try:
            os.listdir(child)
        except OSError as error:
            return [Submission(learner, child, f"cannot be read: {error.strerror}")]
        paths = [path for path in sorted(child.rglob("*")) if is_notebook(path) and not LEFT_BEHIND & {*path.parts}]
        nothing = Submission(learner, None, "there is no notebook (.ipynb) in the folder")
        return [Submission(learner, path) for path in paths] or [nothing]
    if is_notebook(child):
        return [Submission(learner, child)]
    skipped.append(child)
    return []


def read_notebook(path: Path) -> list[Cell]:
    """A notebook's code cells, in any of its formats; GradingError says what is wrong with the file."""
    if not path.is_file():
        link = "is a symbolic link to nothing" if path.is_symlink() else "is not there"
        raise GradingError("is not a file" if path.exists() else link)
    if path.stat().st_size > MOST_BYTES:
        raise GradingError(f"has {path.stat().st_size >> 20} MiB; clear its outputs (at most {MOST_BYTES >> 20} MiB)")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if not text.strip():
            raise GradingError("is empty")
        raw = json.loads(text)
        if not isinstance(raw, dict) or not isinstance(raw.get("nbformat"), int):
            raise KeyError("nbformat")
        sheets = [raw] if raw["nbformat"] >= 4 else raw["worksheets"]
        return [as_cell(cell) for sheet in sheets for cell in sheet["cells"] if cell["cell_type"] == "code"]
    except UnicodeDecodeError as error:
        raise GradingError(f"is not UTF-8 text (byte {error.start}); save it from JupyterLab again") from error
    except OSError as error:
        raise GradingError(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise GradingError(f"is not valid JSON: {error}") from error
    except (AttributeError, TypeError, LookupError) as error:
        raise GradingError(f"is not a notebook ({type(error).__name__}: {error})") from error


def as_cell(raw: dict) -> Cell:
    """A code cell of a notebook, whatever its format; an answer is told by its metadata or by its id."""
    source, metadata = raw.get("source", raw.get("input", "")), raw.get("metadata", {})
    about, graded = metadata.get("ddp_course", {}), str(metadata.get("nbgrader", {}).get("grade_id", ""))
    name = str(raw.get("id") or graded)
    match = ANSWER_ID.match(name) or ANSWER_ID.match(graded)
    task = str(about.get("task", "")) if about.get("role") == "answer" else f"{match[1]}.{match[2]}" if match else ""
    check = about.get("role") == "check" or name.startswith("check-")
    return Cell(name, source if isinstance(source, str) else "".join(source), task, check)


def exercise_of(path: Path, cells: Sequence[Cell], exercises: dict[int, Pristine]) -> int:
    """Which exercise a notebook answers: what most of its answer cells say, or else the file's name."""
    answered = [int(cell.task.split(".")[0]) for cell in cells if re.fullmatch(r"\d{1,4}\.\d{1,4}", cell.task)]
    numbered = NUMBERED.match(path.name)
    number = max(answered, key=answered.count) if answered else int(numbered[1]) if numbered else None
    if number is None:
        raise GradingError("holds no answer cell of any exercise: were the cells copied into a new notebook?")
    if number not in exercises:
        raise GradingError(f"answers exercise {number}, which this course does not have")
    return number


def lay(pristine: Any, cells: Sequence[Cell], without: Sequence[str] = ()) -> Laid:
    """The learner's cells in their order, as they stand, among the pristine ones; each check follows its answer.

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
            laid.append(as_it_stands(cell, f"{cell_of(cell.task)}-{place}"))
            laid += [checks[cell.task]] if last[cell.task] == place else []
        elif not (cell.id in given and cell.source == given[cell.id].source):
            laid.append(as_it_stands(cell, f"own-{place}"))
    kept = [cell for cell in laid if cell.id not in without]
    sources = {cell.task: cell.source for cell in own if cell.task in answers}
    troubles = {task: trouble(sources.get(task), cell.source) for task, cell in answers.items()}
    notebook = nbformat.v4.new_notebook(cells=kept, metadata=pristine.metadata)
    return Laid(notebook, sources, {task: message for task, message in troubles.items() if message})


def as_it_stands(cell: Cell, name: str) -> Any:
    """A laid cell with a learner's source, but for what would tell nbval to skip it."""
    return nbformat.v4.new_code_cell(NBVAL_MARKER.sub(r"\1 (without effect here)", cell.source), id=name)


def trouble(source: str | None, pristine: str) -> str:
    """What is wrong with an answer before anything runs, or ""."""
    if source is None:
        return MISSING
    return UNTOUCHED if source.strip() == pristine.strip() else ""
