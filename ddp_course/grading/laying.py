"""Lay a learner's cells into the pristine notebook, so that what is graded has the course's own checks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import nbformat

from .checks import cell_of

ANSWER_ID = re.compile(r"answer-(\d+)-(\d+)$")
NBVAL_MARKER = re.compile(r"^(\s*#+\s*(?:NBVAL|PYTEST_VALIDATE)_\w+)\s*$", re.MULTILINE)
MOST_SOURCE = 100_000
MISSING = "its answer cell is missing: it was deleted, or copied into a new cell"
UNTOUCHED = "not solved yet"


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
    troubles: dict[str, str] = field(default_factory=dict)


def as_cell(raw: dict) -> Cell:
    """A code cell of a notebook, whatever its format; an answer is told by its metadata or by its id."""
    source, metadata = raw.get("source", raw.get("input", "")), raw.get("metadata", {})
    name = str(raw.get("id") or metadata.get("nbgrader", {}).get("grade_id", ""))
    told, match = metadata.get("ddp_course", {}), ANSWER_ID.match(name)
    graded = metadata.get("nbgrader", {}).get("grade_id", "")
    match = match or ANSWER_ID.match(str(graded))
    task = str(told.get("task", "")) if told.get("role") == "answer" else f"{match[1]}.{match[2]}" if match else ""
    check = told.get("role") == "check" or name.startswith("check-")
    return Cell(name, source if isinstance(source, str) else "".join(source), task, check)


def lay(pristine: Any, cells: Sequence[Cell], without: Sequence[str] = ()) -> Laid:
    """The learner's cells in their order, as they stand, among the pristine ones; each check follows its answer.

    `without` are ids of laid cells that are left out: they ended the whole notebook when it ran.
    """
    code = [cell for cell in pristine.cells if cell.cell_type == "code"]
    role = {cell.id: cell.metadata.get("ddp_course", {}) for cell in code}
    given = {cell.id: cell for cell in code if role[cell.id].get("role") not in ("answer", "check")}
    checks = {role[cell.id].task: cell for cell in code if role[cell.id].get("role") == "check"}
    answers = {role[cell.id].task: cell for cell in code if role[cell.id].get("role") == "answer"}
    laid, own = [], [cell for cell in cells if not cell.check]
    last = {cell.task: place for place, cell in enumerate(own)}
    there = {cell.id for cell in own}
    laid += [cell for name, cell in given.items() if name == "imports" or name not in there]
    for place, cell in enumerate(own):
        if cell.id in given and cell.id != "imports":
            laid.append(given.pop(cell.id))
        if cell.task not in answers and not (cell.id in given and cell.source == given[cell.id].source):
            laid.append(as_it_stands(cell, f"own-{place}"))
        if cell.task in answers:
            laid.append(as_it_stands(cell, f"{cell_of(cell.task)}-{place}"))
            if last[cell.task] == place:
                laid.append(checks[cell.task])
    kept = [cell for cell in laid if cell.id not in without]
    notebook = nbformat.v4.new_notebook(cells=kept, metadata=pristine.metadata)
    sources = {cell.task: cell.source for cell in own if cell.task in answers}
    return Laid(
        notebook, sources, {task: said for task, cell in answers.items() if (said := trouble(task, cell, sources))}
    )


def as_it_stands(cell: Cell, name: str) -> Any:
    """A laid cell with a learner's source, but for what would tell nbval to skip it."""
    return nbformat.v4.new_code_cell(NBVAL_MARKER.sub(r"\1 (without effect here)", cell.source), id=name)


def trouble(task: str, pristine: Any, sources: dict[str, str]) -> str:
    """What is wrong with an answer before anything runs, or ""."""
    if task not in sources:
        return MISSING
    if sources[task].strip() == pristine.source.strip():
        return UNTOUCHED
    long = len(sources[task]) > MOST_SOURCE
    return f"the answer has {len(sources[task]):,} characters; at most {MOST_SOURCE:,} are read" if long else ""
