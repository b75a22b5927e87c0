"""What a learner handed in: found, read with suspicion, and turned into a fresh notebook.

Of a submission only the source of its answer cells counts, found by their ids. Outputs, tags, metadata, check cells
and everything else are the pristine notebook's.
"""

import ast
import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from ..errors import GradingError

MOST_BYTES = 32 << 20
MOST_SOURCE = 100_000
NBVAL_MARKER = re.compile(r"^(\s*#+\s*(?:NBVAL|PYTEST_VALIDATE)_\w+)\s*$", re.MULTILINE)
TASK_ID = re.compile(r"answer-(\d+)-(\d+)$")
NUMBERED = re.compile(r"(\d+)[_\- .]")
OUT_OF_BOUNDS = {
    "ctypes", "gc", "_getframe", "currentframe", "f_back", "__closure__", "__code__", "__subclasses__", "settrace",
    "setprofile", "_exit", "kill", "killpg", "abort",
}  # fmt: skip


@dataclass
class Pristine:
    """One exercise as it was given out: the notebook, and {task: (check cell's id, points)}."""

    exercise: int
    notebook: nbformat.NotebookNode
    checks: dict

    def answer(self, task):
        """The answer cell of a task."""
        return next(cell for cell in self.notebook.cells if cell.id == f"answer-{task.replace('.', '-')}")


@dataclass
class Submission:
    """One notebook of one learner. `path` is None if there is none; `trouble` says why it cannot be graded."""

    learner: str
    path: Path | None
    trouble: str = ""


@dataclass
class Answers:
    """The answers of a submission: source by task, and for some tasks what is wrong before anything runs."""

    sources: dict
    troubles: dict = field(default_factory=dict)


def load_exercises(folder):
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
        found[number] = Pristine(number, notebook, checks)
    if not found:
        raise GradingError(f'no exercises in the folder "{folder}"; name theirs with --exercises')
    return found


def find_submissions(paths):
    """All submissions under `paths`: notebooks, or folders with one folder or notebook a learner."""
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise GradingError(f'"{path}" does not exist')
        if path.is_file():
            found.append(Submission(path.stem, path))
            continue
        for child in sorted(path.iterdir()):
            if not child.name.startswith("."):
                found += of_learner(child, path.resolve())
    if not found:
        raise GradingError(f"no submissions in {', '.join(map(str, paths))}")
    return found


def of_learner(child, root):
    """The submissions of one learner: a file, or all notebooks in a folder."""
    learner = child.stem if child.suffix == ".ipynb" else child.name
    if not child.resolve().is_relative_to(root):
        return [Submission(learner, child, "is a symbolic link that leads out of the folder; hand in the file itself")]
    if not child.is_dir():
        return [Submission(learner, child)] if child.suffix == ".ipynb" else []
    notebooks = [path for path in sorted(child.rglob("*.ipynb")) if ".ipynb_checkpoints" not in path.parts]
    if not notebooks:
        return [Submission(learner, None, "there is no notebook (.ipynb) in the folder")]
    inside = child.resolve()
    return [
        Submission(learner, path)
        if path.resolve().is_relative_to(inside)
        else Submission(learner, path, "is a symbolic link that leads out of the folder; hand in the file itself")
        for path in notebooks
    ]


def read_notebook(path):
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


def cells_of(raw):
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


def exercise_of(path, cells, exercises):
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


def take_answers(cells, pristine):
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
            answers.troubles[task] = "not solved yet"
        else:
            trouble = at_first_sight(sources[0])
            if trouble:
                answers.troubles[task] = trouble
    return answers


def at_first_sight(source):
    """What is wrong with an answer before it runs: not Python, too long, or out of bounds."""
    if len(source) > MOST_SOURCE:
        return f"the answer has {len(source):,} characters; at most {MOST_SOURCE:,} are read"
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        line = source.splitlines()[error.lineno - 1].strip() if error.lineno and source.splitlines() else ""
        magic = " (no magics or shell commands in an answer)" if line.startswith(("%", "!")) else ""
        return f"line {error.lineno} is not Python: {line[:80]}{magic}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"the answer cannot be read as Python: {error}"
    used = names_in(tree) & OUT_OF_BOUNDS
    return f"the answer uses {min(used)}, which no answer needs" if used else ""


def names_in(tree):
    """All names, attributes and imported modules in a piece of Python."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(part for alias in node.names for part in alias.name.split("."))
            names.update((getattr(node, "module", None) or "").split("."))
    return names


def fresh_notebook(pristine, answers):
    """The pristine notebook with the learner's answers in it; tasks in trouble stay unsolved and unchecked."""
    notebook = copy.deepcopy(pristine.notebook)
    cells = {cell.id: cell for cell in notebook.cells}
    for task, source in answers.sources.items():
        if task in answers.troubles:
            cells[pristine.checks[task][0]].source = "pass"
        else:
            cells[pristine.answer(task).id].source = NBVAL_MARKER.sub(r"\1 (without effect here)", source)
    return notebook


def cells_for(task, notebook):
    """[(id, source)] that an answer needs: the imports, the answer, and other answers that define names it uses."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    roles = {cell.id: cell.metadata.get("ddp_course", {}).get("role") for cell in code}
    answers = {cell.id: ast.parse(cell.source) for cell in code if roles[cell.id] == "answer"}
    wanted, waiting = set(), [f"answer-{task.replace('.', '-')}"]
    while waiting:
        wanted.add(waiting.pop())
        used = set().union(*(names_in(answers[name]) for name in wanted))
        waiting = [name for name, tree in answers.items() if name not in wanted and defined_in(tree) & used]
    return [(cell.id, cell.source) for cell in code if roles[cell.id] is None or cell.id in wanted]


def defined_in(tree):
    """Names that the top level of a piece of Python defines."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        else:
            stores = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            names.update(stores)
    return names
