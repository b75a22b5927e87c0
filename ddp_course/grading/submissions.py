"""What learners handed in: notebooks found in folders, and read with patience; which exercise one answers, it says."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from ..errors import GradingError
from .laying import Cell, as_cell

MOST_BYTES = 256 << 20
LEADS_OUT = "is a symbolic link that leads out of the folder; hand in the file itself"
UNSOLVED = "NotImplementedError"  # what a pristine answer raises
NUMBERED = re.compile(r"(\d{1,2})[_\- .]")
NO_LEARNERS = {"__MACOSX"}  # what archives leave behind


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


def load_exercises(folder: str | Path) -> dict[int, Pristine]:
    """Read the pristine notebooks of a folder: {exercise: Pristine}."""
    found = {}
    for path in sorted(Path(folder).glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        told = [(cell, cell.metadata.get("ddp_course", {})) for cell in notebook.cells]
        if solved := [cell.id for cell, about in told if about.get("role") == "answer" and UNSOLVED not in cell.source]:
            raise GradingError(f'"{path}" is not pristine: {solved[0]} has been answered; name others with --exercises')
        points = {about.task: about.points for _, about in told if about.get("role") == "check"}
        number = notebook.metadata.ddp_course.exercise
        found[number] = Pristine(number, notebook, points)
    if not found:
        raise GradingError(f'no exercises in the folder "{folder}"; name theirs with --exercises')
    return found


def find_submissions(paths: Iterable[str | Path], skipped: list[Path] | None = None) -> list[Submission]:
    """All submissions under `paths`: notebooks, or folders with one folder or notebook a learner.

    Other files there are no submissions; their paths are appended to the list `skipped`.
    """
    found, skipped = [], [] if skipped is None else skipped
    for path in map(Path, paths):
        if not path.exists():
            raise GradingError(f'"{path}" does not exist')
        if path.is_file():
            found.append(Submission(path.stem, path))
            continue
        for child in sorted(path.iterdir()):
            if not child.name.startswith(".") and child.name not in NO_LEARNERS:
                found += of_learner(child, path.resolve(), skipped)
    if not found:
        raise GradingError(f"no submissions in {', '.join(map(str, paths))}")
    return found


def is_notebook(path: Path) -> bool:
    """Whether a file is called like a notebook, as some systems write it."""
    return path.suffix.lower() == ".ipynb"


def of_learner(child: Path, root: Path, skipped: list[Path]) -> list[Submission]:
    """The submissions of one learner, a file or all notebooks in a folder; what cannot be looked into is one too."""
    learner = child.stem if is_notebook(child) else child.name
    try:
        if not child.resolve().is_relative_to(root):
            return [Submission(learner, child, LEADS_OUT)]
        if child.is_dir():
            return in_folder(learner, child)
        if is_notebook(child):
            return [Submission(learner, child)]
    except (OSError, RuntimeError) as error:  # a loop of links, a folder that may not be searched
        return [Submission(learner, child, f"cannot be read: {getattr(error, 'strerror', None) or error}")]
    skipped.append(child)
    return []


def in_folder(learner: str, folder: Path) -> list[Submission]:
    """The submissions in a learner's folder; OSError if it cannot be searched."""
    os.listdir(folder)
    hidden = {".ipynb_checkpoints", *NO_LEARNERS}
    notebooks = [path for path in sorted(folder.rglob("*")) if is_notebook(path) and not hidden & {*path.parts}]
    if not notebooks:
        return [Submission(learner, None, "there is no notebook (.ipynb) in the folder")]
    inside = folder.resolve()
    return [Submission(learner, path, "" if path.resolve().is_relative_to(inside) else LEADS_OUT) for path in notebooks]


def read_notebook(path: Path) -> list[Cell]:
    """A notebook's code cells; GradingError says what is wrong with the file."""
    if not path.is_file():
        what = (
            "is not a file"
            if path.exists()
            else "is a symbolic link to nothing"
            if path.is_symlink()
            else "is not there"
        )
        raise GradingError(what)
    if path.stat().st_size > MOST_BYTES:
        raise GradingError(f"has {path.stat().st_size >> 20} MiB; clear its outputs (at most {MOST_BYTES >> 20} MiB)")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise GradingError(f"is not UTF-8 text (byte {error.start}); save it from JupyterLab again") from error
    except OSError as error:
        raise GradingError(f"cannot be read: {error.strerror}") from error
    if not text.strip():
        raise GradingError("is empty")
    try:
        return cells_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise GradingError(f"is not valid JSON: {error}") from error
    except (AttributeError, TypeError, LookupError) as error:
        raise GradingError(f"is not a notebook ({type(error).__name__}: {error})") from error


def cells_of(raw: Any) -> list[Cell]:
    """All code cells of a notebook in any format."""
    if not isinstance(raw, dict) or not isinstance(raw.get("nbformat"), int):
        raise KeyError("nbformat")
    cells = raw["cells"] if raw["nbformat"] >= 4 else [cell for sheet in raw["worksheets"] for cell in sheet["cells"]]
    return [as_cell(cell) for cell in cells if cell["cell_type"] == "code"]


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
