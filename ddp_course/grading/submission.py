"""What a learner handed in: found, read with suspicion, and turned into a fresh notebook.

Of a submission only the source of its answer cells counts, found by their ids. Outputs, tags, metadata, check cells
and everything else are the pristine notebook's.
"""

import ast
import copy
import json
import os
import re
import symtable
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from ..errors import GradingError
from .first_sight import FILES, MOST_SOURCE, at_first_sight, imports_of
from .results import UNTOUCHED
from .suspicion import remarks
from .tasks import find

MOST_BYTES = 32 << 20
LEADS_OUT = "is a symbolic link that leads out of the folder; hand in the file itself"
NBVAL_MARKER = re.compile(r"^(\s*#+\s*(?:NBVAL|PYTEST_VALIDATE)_\w+)\s*$", re.MULTILINE)
UNSOLVED = "NotImplementedError"  # what a pristine answer raises
TASK_ID = re.compile(r"answer-(\d+)-(\d+)$")
NUMBERED = re.compile(r"(\d+)[_\- .]")
Cell = tuple[str, str]  # id and source
CARRIED = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


@dataclass
class Pristine:
    """One exercise as it was given out: the notebook, and {task: (check cell's id, points)}."""

    exercise: int
    notebook: nbformat.NotebookNode
    checks: dict

    def answer(self, task: str) -> Any:
        """The answer cell of a task."""
        return next(cell for cell in self.notebook.cells if cell.id == f"answer-{task.replace('.', '-')}")

    @property
    def imports(self) -> frozenset[str]:
        """The dotted names that its import cell imports, but for files, which are for the tasks that need them."""
        (source,) = [cell.source for cell in self.notebook.cells if cell.id == "imports"] or [""]
        return frozenset(name for _, name in imports_of(ast.parse(source))) - FILES


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
class Answers:
    """The answers of a submission: source by task, and for some tasks what is wrong before anything runs.

    `helpers` are (id, source) of other cells, of which the answers use something.
    """

    sources: dict
    troubles: dict = field(default_factory=dict)
    helpers: list = field(default_factory=list)


def load_exercises(folder: str | Path) -> dict[int, Pristine]:
    """Read the pristine notebooks of a folder: {exercise: Pristine}."""
    found = {}
    for path in sorted(Path(folder).glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        checks = {
            cell.metadata.ddp_course.task: (cell.id, cell.metadata.ddp_course.points)
            for cell in notebook.cells
            if cell.metadata.get("ddp_course", {}).get("role") == "check"
        }
        number = notebook.metadata.ddp_course.exercise
        solved = [cell.id for cell in notebook.cells if TASK_ID.match(cell.id) and UNSOLVED not in cell.source]
        if solved:
            raise GradingError(f'"{path}" is not pristine: {solved[0]} has been answered; name others with --exercises')
        found[number] = Pristine(number, notebook, checks)
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
            if not child.name.startswith("."):
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
    notebooks = [
        path for path in sorted(folder.rglob("*")) if is_notebook(path) and ".ipynb_checkpoints" not in path.parts
    ]
    if not notebooks:
        return [Submission(learner, None, "there is no notebook (.ipynb) in the folder")]
    inside = folder.resolve()
    return [Submission(learner, path, "" if path.resolve().is_relative_to(inside) else LEADS_OUT) for path in notebooks]


def read_notebook(path: Path) -> list[Cell]:
    """A notebook's cells as [(id, source)]; GradingError says what is wrong with the file."""
    if not path.is_file():
        raise GradingError("is not a file" if path.exists() else "is a symbolic link to nothing")
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
        raw = json.loads(text)
        return cells_of(raw)
    except (ValueError, RecursionError) as error:
        raise GradingError(f"is not valid JSON: {error}") from error
    except (AttributeError, TypeError, KeyError, LookupError) as error:
        raise GradingError(f"is not a notebook ({type(error).__name__}: {error})") from error


def cells_of(raw: Any) -> list[Cell]:
    """[(id, source)] of all code cells; in formats before 4.5 cells have no ids, but nbgrader's name for them."""
    if not isinstance(raw, dict) or not isinstance(raw.get("nbformat"), int):
        raise KeyError("nbformat")
    cells = raw["cells"] if raw["nbformat"] >= 4 else [cell for sheet in raw["worksheets"] for cell in sheet["cells"]]
    found = []
    for cell in cells:
        if cell["cell_type"] == "code":
            source = cell.get("source", cell.get("input", ""))
            named = cell.get("id") or cell.get("metadata", {}).get("nbgrader", {}).get("grade_id", "")
            found.append((str(named), source if isinstance(source, str) else "".join(source)))
    return found


def exercise_of(path: Path, cells: Sequence[Cell], exercises: dict[int, Pristine]) -> int:
    """Which exercise a notebook answers, by its cells; GradingError if the file's name says another."""
    answered = {int(match[1]) for name, _ in cells if (match := TASK_ID.match(name))}
    numbered = NUMBERED.match(path.name)
    named = int(numbered[1]) if numbered else None
    if named is not None and answered and named not in answered:
        raise GradingError(f"is named as exercise {named}, but holds answers to exercise {min(answered)}")
    number = named if named is not None else min(answered, default=None)
    if number is None:
        raise GradingError("holds no answer cell of any exercise: were the cells copied into a new notebook?")
    if number not in exercises:
        raise GradingError(f"is named as exercise {number}, which this course does not have")
    return number


def take_answers(cells: Sequence[Cell], pristine: Pristine) -> Answers:
    """The learner's source for each task of an exercise, and what is wrong with it at first sight."""
    answers = Answers({})
    for task in pristine.checks:
        wanted = pristine.answer(task)
        sources = [source for name, source in cells if name == wanted.id]
        answers.sources[task] = sources[0] if sources else wanted.source
        if not sources:
            answers.troubles[task] = "its answer cell is missing: it was deleted, or copied into a new cell"
        elif len(sources) > 1:
            answers.troubles[task] = "its answer cell is there twice: delete one"
        elif sources[0] == wanted.source:
            answers.troubles[task] = UNTOUCHED
        else:
            trouble = at_first_sight(sources[0], allowed_in(task, pristine))
            if trouble:
                answers.troubles[task] = trouble
    take_helpers(cells, pristine, answers)
    return answers


def allowed_in(task: str, pristine: Pristine) -> frozenset[str]:
    """What an answer to a task may import and name, besides what only computes."""
    return pristine.imports | set(find(task).imports)


def take_helpers(cells: Sequence[Cell], pristine: Pristine, answers: Answers) -> None:
    """Carry along what the learner's other cells define and answers use, directly or by way of another helper.

    A helper keeps to the rules of the answers that use it. Of such a cell only imports, definitions and assignments are
    taken: what it tries out, draws or prints has done its work.
    """
    known = {cell.id: cell.source for cell in pristine.notebook.cells}
    fixed = set(known) - {"imports"}
    others = [
        (f"cell-{place}", source)
        for place, (name, source) in enumerate(cells, 1)
        if name not in fixed and source != known.get(name)
    ]
    trees = {name: tree for name, source in others if (tree := parsed(source)) is not None}
    for task, source in answers.sources.items():
        if task in answers.troubles:
            continue
        for name, helper in helpers_of(source, trees, dict(others)):
            trouble = at_first_sight(helper, allowed_in(task, pristine))
            if trouble:
                answers.troubles[task] = f"in {name.replace('-', ' ')} of your notebook, which it uses, {trouble}"
                break
            answers.helpers.append((name, helper))
    answers.helpers = together(answers.helpers)


def remarks_on(task: str, answers: Answers, pristine: Pristine) -> list[str]:
    """What a person should look at in the answer to a task, or in a helper of it."""
    allowed = allowed_in(task, pristine)
    told = remarks(answers.sources[task], allowed) if answers.troubles.get(task) != UNTOUCHED else []
    return told + [f"{name}, {one}" for name, source in answers.helpers for one in remarks(source, allowed)]


def parsed(source: str) -> ast.Module | None:
    """A cell as a tree, or None if it is not plain Python."""
    try:
        return ast.parse(source) if len(source) <= MOST_SOURCE else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def helpers_of(source: str, trees: dict[str, ast.Module], sources: dict[str, str]) -> list[Cell]:
    """[(id, source)] of the statements, out of other cells, that a piece of source needs; the rest is left blank."""
    needed, seen, kept = globals_used(source), set(), {}
    while needed - seen:
        seen |= (new := needed - seen)
        for name, tree in trees.items():
            for node in tree.body:
                if isinstance(node, CARRIED) and defined_in(ast.Module([node], [])) & new:
                    kept.setdefault(name, {})[node.lineno] = node
                    needed = needed | globals_used(blanked(sources[name], [node]))
    return [(name, blanked(sources[name], list(nodes.values()))) for name, nodes in kept.items()]


def blanked(source: str, nodes: Sequence[ast.stmt]) -> str:
    """A cell's source with everything but these statements left blank, so that lines keep their numbers."""
    wanted = set()
    for node in nodes:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        wanted |= set(range(first, (node.end_lineno or first) + 1))
    lines = source.splitlines()
    return "\n".join(line if number in wanted else "" for number, line in enumerate(lines, 1))


def together(helpers: Sequence[Cell]) -> list[Cell]:
    """Helpers of several answers, each cell once, with all the lines that some answer needs."""
    merged = {}
    for name, source in sorted(helpers, key=lambda helper: int(helper[0].removeprefix("cell-"))):
        lines, had = source.split("\n"), merged.get(name)
        merged[name] = [new or old for new, old in zip(lines, had or lines, strict=True)]
    return [(name, "\n".join(lines)) for name, lines in merged.items()]


def globals_used(source: str) -> set[str]:
    """The global names that a piece of Python uses, whatever its functions call their own."""
    try:
        names, waiting = set(), [symtable.symtable(source, "answer", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        top = table.get_type() == "module"
        names |= {one.get_name() for one in table.get_symbols() if one.is_referenced() and (top or one.is_global())}
    return names


def fresh_notebook(pristine: Pristine, answers: Answers) -> Any:
    """The pristine notebook with the learner's answers and helpers in it; tasks in trouble stay unsolved.

    It has no check cells: what they would check is put to the test elsewhere, where the judge is out of reach.
    """
    notebook = copy.deepcopy(pristine.notebook)
    checks = {cell for cell, _ in pristine.checks.values()}
    notebook.cells = [cell for cell in notebook.cells if cell.id not in checks]
    for task, source in answers.sources.items():
        if task not in answers.troubles:
            (cell,) = [cell for cell in notebook.cells if cell.id == f"answer-{task.replace('.', '-')}"]
            cell.source = NBVAL_MARKER.sub(r"\1 (without effect here)", source)
    first = next((place for place, cell in enumerate(notebook.cells) if cell.id.startswith("answer-")), 0)
    for name, source in reversed(answers.helpers):
        cell = nbformat.v4.new_code_cell(source, id=name, metadata={"ddp_course": {"role": "helper"}})
        notebook.cells.insert(first, cell)
    return notebook


def cells_for(task: str, notebook: Any) -> list[Cell]:
    """[(id, source)] that an answer needs: the imports, itself, helpers and other answers that define what it uses."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    sources = {cell.id: cell.source for cell in code if role_of(cell) in ("answer", "helper")}
    defined = {name: defined_in(ast.parse(source)) for name, source in sources.items()}
    wanted, waiting = set(), [f"answer-{task.replace('.', '-')}"]
    while waiting:
        wanted.add(waiting.pop())
        used = set().union(*(globals_used(sources[name]) for name in wanted))
        waiting = [name for name, names in defined.items() if name not in wanted and names & used]
    return [(cell.id, cell.source) for cell in code if cell.id == "imports" or cell.id in wanted]


def role_of(cell: Any) -> str | None:
    """What a cell of a pristine or fresh notebook is for: "answer", "check", "helper" or None."""
    return cell.metadata.get("ddp_course", {}).get("role")


def defined_in(tree: ast.Module) -> set[str]:
    """Names that the top level of a piece of Python defines."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        else:
            names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return names
