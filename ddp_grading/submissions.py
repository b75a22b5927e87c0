"""What learners handed in: notebooks found in folders and archives, all of them read before the
first one runs, and laid among the cells that were given out.
"""

import hashlib
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import yaml

from ddp_course.checking import UNSOLVED
from ddp_course.checking.checks import cell_of, solution
from ddp_course.errors import GradingError
from ddp_course.running.files import course_folder

from .people import NUMBERED, Owner, Roster, in_roster, owners_of
from .results import clean

MOST_BYTES = 256 << 20
TOO_LARGE = f"has more than {MOST_BYTES >> 20} MiB: clear its outputs"
MISSING = "its answer cell is missing: it was deleted, or copied into a new cell"
NO_NOTEBOOK = "there is no notebook (.ipynb) in the folder that can be read"
NO_ANSWERS = "holds no answer cell of any exercise: were the cells copied into a new notebook?"
ANSWER_ID = re.compile(r"answer-(\d+)-(\d+)$")
LEFT_BEHIND = {".ipynb_checkpoints", "__MACOSX"}  # Jupyter and archives leave these folders behind.
GRADESCOPE = {"Name": ":name", "Email": ":email", "SID": ":sid"}
METADATA = "submission_metadata.yml"  # This file of Gradescope's export has the learners' names.


class Pristine(NamedTuple):
    """One exercise as it was given out: {id: source} of the cells that are no task's, and {task:
    its answer cell}, {task: its check} and {task: points}.
    """

    given: dict[str, str]
    answers: dict[str, str]
    checks: dict[str, str]
    points: dict[str, float]


class Cell(NamedTuple):
    """A code cell that was handed in: its id, its source, and the task whose answer it is, "" if of
    none.
    """

    id: str
    source: str
    task: str = ""
    check: bool = False


@dataclass
class Submission:
    """One notebook of one learner, read: its `cells`, or the `fault` for which there are none.

    `file` is its path within what was named, `digest` a hash of its content; `about` has what a
    gradebook knows the learner by.
    """

    learner: str
    file: str = ""
    cells: list[Cell] = field(default_factory=list)
    fault: str = ""
    digest: str = ""
    late: bool = False
    about: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The notebook's name without its folders."""
        return self.file.split("/")[-1]


class Laid(NamedTuple):
    """The cells to be run, {id: source}, {task: its last answer}, and {task: what is wrong before
    anything runs}.
    """

    cells: dict[str, str]
    sources: dict[str, str]
    troubles: dict[str, str]


class Item(NamedTuple):
    """A file that was found, or an empty folder: its path from the named folder on, and its
    content, or the error that there was instead.
    """

    parts: tuple[str, ...]
    content: bytes | GradingError | None

    @property
    def is_notebook(self) -> bool:
        """Whether it is a notebook, or an archive that cannot be read."""
        archive = isinstance(self.content, GradingError)
        return archive or self.parts[-1].lower().endswith(".ipynb")

    @property
    def is_other(self) -> bool:
        """Whether it is neither a notebook nor anything else that says who handed in what."""
        return not self.is_notebook and self.parts[-1] not in ("", ".git", METADATA)


def load_exercises() -> dict[int, Pristine]:
    """All exercises as they were given out: {exercise: Pristine}.

    They are read from the solutions, which nobody solves in: a cell that was given out in another
    form has that form in its metadata.
    """
    exercises = {}
    for path in sorted(course_folder("solutions").glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        pristine = exercises[notebook.metadata.ddp_course.exercise] = Pristine({}, {}, {}, {})
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


def find_submissions(
    paths: Sequence[str | Path], roster: Roster | None = None
) -> tuple[list[Submission], list[str]]:
    """All submissions in `paths` (notebooks, archives, folders of either), read; and the names of
    other files.

    GradingError if two folders claim to be one learner's, or a learner is not in the roster.
    """
    items: list[Item] = []
    for path in map(Path, paths):
        if not path.exists() and not path.is_symlink():
            raise GradingError(f'"{path}" does not exist')
        real = path.resolve() if path.is_dir() else path
        whole = path.is_dir() or path.suffix.lower() == ".zip"
        root = [] if whole and len(paths) == 1 else [path.absolute().parent.name]
        items += walk(real, (*root, real.name))
    notebooks = [item for item in items if item.is_notebook]
    owned = [(item, owner) for item in notebooks for owner in owners_of_item(item, items)]
    submissions = [read_submission(item, owner) for item, owner in owned]
    kept = [
        (item, owner, work)
        for (item, owner), work in zip(owned, submissions, strict=True)
        if not is_given_out(item, work, submissions)
    ]
    check_owners([(item, owner) for item, owner, _ in kept], roster)
    for _, owner, work in kept:
        work.learner = owner.learner
    found = [work for _, _, work in kept] + without_notebook(
        items, [own for _, own, _ in kept], roster
    )
    if not found:
        raise GradingError(f"no submissions in {', '.join(map(str, paths))}")
    others = [item.parts[-1] for item in items if item.is_other and len(item.parts) == 2]
    return found, others


def walk(path: Path, parts: tuple[str, ...]) -> list[Item]:
    """The files in a folder, in its folders and archives; an item of an empty name stands for a
    folder without notebooks.
    """
    if not path.is_dir():
        try:
            if path.stat().st_size > MOST_BYTES:
                raise GradingError(
                    f"is too large ({path.stat().st_size >> 20} MiB): clear its outputs"
                )
            wanted = path.suffix.lower() in (".ipynb", ".zip") or path.name == METADATA
            content = path.read_bytes() if wanted else b""
        except GradingError as error:
            return [Item(parts, error)]
        except OSError:
            return [Item(parts, GradingError("is not a file, or a link to nothing"))]
        return unpack(content, parts) if path.suffix.lower() == ".zip" else [Item(parts, content)]
    items = [Item((*parts, ".git"), None)] if (path / ".git").exists() else []
    for child in sorted(path.iterdir()):
        if not is_left_behind(child.name):
            items += walk(child, (*parts, child.name))
    empty = [] if any(item.is_notebook for item in items) else [Item((*parts, ""), None)]
    return items + empty


def is_left_behind(name: str) -> bool:
    """Whether a file or folder is none of the learner's."""
    return name.startswith(".") or name in LEFT_BEHIND


def unpack(content: bytes, parts: tuple[str, ...]) -> list[Item]:
    """The notebooks in an archive, and in archives in it; nothing of it is written to the disk."""
    items: list[Item] = []
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            for about in archive.infolist():
                names = Path(about.filename).parts
                if about.is_dir() or any(
                    name.startswith(".") or name in LEFT_BEHIND for name in names
                ):
                    continue
                inner = (*parts, *names)
                if about.file_size > MOST_BYTES:
                    items.append(Item(inner, GradingError(TOO_LARGE)))
                elif names[-1].lower().endswith(".zip"):
                    items += unpack(archive.read(about), inner)
                elif names[-1].lower().endswith(".ipynb") or names[-1] == METADATA:
                    items.append(Item(inner, archive.read(about)))
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError) as error:
        return [Item(parts, GradingError(f"cannot be read as an archive ({error})"))]
    return items or [Item((*parts, ""), None)]


def owners_of_item(item: Item, items: Sequence[Item]) -> list[Owner]:
    """Whose a notebook is, by what else was found."""
    repositories = {"/".join(other.parts[:-1]) for other in items if other.parts[-1] == ".git"}
    submitters: dict[str, list] = {}
    for other in items:
        if other.parts[-1] == METADATA and isinstance(other.content, bytes):
            for folder, about in (yaml.safe_load(other.content) or {}).items():
                submitters[str(folder)] = [
                    {title: str(person.get(key, "")) for title, key in GRADESCOPE.items()}
                    for person in about[":submitters"]
                ]
    return owners_of(item.parts, repositories, submitters)


def read_submission(item: Item, owner: Owner) -> Submission:
    """Read a notebook; what is wrong with it becomes the submission's fault."""
    parent = owner.folder.rpartition("/")[0]
    path = "/".join(item.parts)
    file = path.removeprefix(f"{owner.folder}/").removeprefix(f"{parent}/")
    content = item.content
    work = Submission(owner.learner, clean(file), late=owner.late, about=owner.about)
    try:
        if not isinstance(content, bytes):
            raise content or GradingError(NO_NOTEBOOK)
        work.digest = hashlib.sha256(content).hexdigest()[:16]
        work.cells = read_notebook(content)
    except GradingError as error:
        work.fault = str(error)
    return work


def is_given_out(item: Item, work: Submission, submissions: Sequence[Submission]) -> bool:
    """Whether a notebook is the course's own: a solution in a copy of the course, or a lesson
    beside other notebooks of the same learner.
    """
    answers = {cell.task: cell.source for cell in work.cells if cell.task}
    if not answers and not work.fault:
        others = [other for other in submissions if other.learner == work.learner]
        return any(cell.task for other in others for cell in other.cells)
    return "solutions" in item.parts[:-1] and all(map(is_solution, answers, answers.values()))


def is_solution(task: str, source: str) -> bool:
    """Whether an answer is the course's own solution of a task."""
    try:
        return solution(task) == source
    except (ValueError, KeyError):
        return False


def check_owners(owned: Sequence[tuple[Item, Owner]], roster: Roster | None) -> None:
    """Call learners as the roster does; GradingError where it is not clear whose a notebook is."""
    unknown, folders = {}, {}
    for item, owner in owned:
        name = in_roster(owner, item.parts, roster) if roster else owner.learner
        if roster and not name:
            unknown[owner.folder] = owner.learner
        owner.learner = name
        folders.setdefault(name, {})[owner.folder] = None
    if unknown:
        raise GradingError(f"not in the roster: {', '.join(unknown.values())}; nothing was graded")
    for name, claimed in folders.items():
        if len(claimed) > 1:
            raise GradingError(
                f"two folders claim to be {name}'s: {' and '.join(claimed)}; nothing was graded."
                " Remove one, or tell people apart by --roster"
            )
    numbers: Counter = Counter()
    for item, owner in owned:
        if number := NUMBERED.match(item.parts[-1]) if owner.folder == item.parts[0] else None:
            numbers[owner.folder, number[1]] += 1
    for (folder, number), count in numbers.items():
        if count > 1:
            raise GradingError(
                f"{count} notebooks of exercise {number} lie in {folder} itself: whose are they?"
                " Put each into a folder that is called as its learner"
            )


def without_notebook(
    items: Sequence[Item], owners: Sequence[Owner], roster: Roster | None
) -> list[Submission]:
    """A submission for each folder without a notebook that lies beside the learners' folders."""
    beside = {owner.folder.rpartition("/")[0] for owner in owners}
    learners = {owner.learner for owner in owners}
    found = []
    for item in items:
        folder, holder = "/".join(item.parts[:-1]), "/".join(item.parts[:-2])
        if item.parts[-1] or (owners and holder not in beside) or not holder:
            continue
        (owner, *_) = owners_of((*item.parts[:-1], "none.ipynb"), {folder}, {})
        owner.learner = in_roster(owner, item.parts, roster) if roster else owner.learner
        if owner.learner and owner.learner not in learners:
            found.append(Submission(owner.learner, fault=NO_NOTEBOOK, about=owner.about))
    return found


def without_exercises_not_begun(
    submissions: Sequence[Submission], exercises: dict[int, Pristine]
) -> list[Submission]:
    """Leave out untouched notebooks of exercises that nobody in the class has begun, if there are
    others: a copy of the course has all exercises.
    """
    begun = set()
    numbers = []
    for work in submissions:
        try:
            number = exercise_of(work.cells, None, exercises)
        except GradingError:
            number = None
        numbers.append(number)
        laid = lay(exercises[number], work.cells) if number else None
        if laid and laid.sources.keys() - laid.troubles.keys():
            begun.add(number)
    if not begun:
        return list(submissions)
    pairs = zip(submissions, numbers, strict=True)
    return [work for work, number in pairs if number is None or number in begun]


def read_notebook(content: bytes) -> list[Cell]:
    """A notebook's code cells, in any of its formats; GradingError says what is wrong with it."""
    try:
        text = content.decode("utf-8-sig")
        cells = nbformat.reads(text, as_version=4).cells
        return [as_cell(cell) for cell in cells if cell.cell_type == "code"]
    except nbformat.reader.NotJSONError as error:
        raise GradingError("is not valid JSON" if text.strip() else "is empty") from error
    except Exception as error:  # It is not UTF-8, or has a form for which nbformat has no error.
        raise GradingError(
            f"cannot be read as a notebook ({type(error).__name__}: {error})"
        ) from error


def as_cell(cell: Any) -> Cell:
    """A code cell that was handed in; an answer is recognised by its metadata or by its id."""
    about, name = cell.get("metadata", {}).get("ddp_course", {}), cell.get("id", "")
    match = ANSWER_ID.match(name)
    task = f"{match[1]}.{match[2]}" if match else ""
    if about.get("role") == "answer":
        task = str(about.get("task", ""))
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
        raise GradingError(NO_ANSWERS)
    if number not in exercises:
        raise GradingError(f"answers exercise {number}, which this course does not have")
    return number


def lay(pristine: Pristine, cells: Sequence[Cell]) -> Laid:
    """The learner's cells in their order, unchanged, among the pristine ones; each check follows
    its answer.
    """
    given, answers, checks, _ = pristine
    own = [cell for cell in cells if not cell.check]
    last = {cell.task: place for place, cell in enumerate(own)}
    changed = {cell.id for cell in own} - {"imports"}
    laid = {name: source for name, source in given.items() if name not in changed}
    for place, cell in enumerate(own):
        if cell.id in given:
            laid.setdefault(cell.id, given[cell.id])
        if cell.task in answers:
            laid[f"{cell_of(cell.task)}-{place}"] = cell.source
            if last[cell.task] == place:
                laid[cell_of(cell.task).replace("answer", "check")] = checks[cell.task]
        elif cell.source != given.get(cell.id):
            laid[f"own-{place}"] = cell.source
    sources = {cell.task: cell.source for cell in own if cell.task in answers}
    troubles = {}
    for task, source in answers.items():
        if sources.get(task, source).strip() == source.strip():
            troubles[task] = UNSOLVED if task in sources else MISSING
    return Laid(laid, sources, troubles)
