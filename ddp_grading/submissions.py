"""What learners handed in: notebooks found in folders and archives, all of them read before the
first one runs, and put among the cells that were given out.
"""

import hashlib
import re
import zipfile
from collections.abc import Sequence
from contextlib import suppress
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
MISSING = "its answer cell is missing: it was deleted, or copied into a new cell"
NO_NOTEBOOK = "there is no notebook (.ipynb) in the folder that can be read"
NO_ANSWERS = "holds no answer cell of any exercise: were the cells copied into a new notebook?"
TASK = re.compile(r"\d{1,4}\.\d{1,4}")
ANSWER_ID = re.compile(r"answer-(\d+)-(\d+)$")
GRADESCOPE = (("Name", ":name"), ("Email", ":email"), ("SID", ":sid"))
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
class Submission(Owner):
    """One notebook of one learner, read: its `cells`, or the `fault` for which there are none.

    `parts` are its path, from the named folder on, `file` is that path within the learner's folder,
    `digest` a hash of its content, and `place` where it is, on the disk or in an archive.
    """

    parts: tuple[str, ...] = ()
    file: str = ""
    cells: list[Cell] = field(default_factory=list)
    fault: str = ""
    digest: str = ""
    place: Any = None

    @property
    def name(self) -> str:
        """The notebook's name without its folders."""
        return self.file.split("/")[-1]


class Assembly(NamedTuple):
    """The cells to be run, {id: source}, {task: its last answer}, and {task: what is wrong before
    anything runs}.
    """

    cells: dict[str, str]
    sources: dict[str, str]
    troubles: dict[str, str]


class Item(NamedTuple):
    """A file that was found, or (without a name) a folder that has no notebook: its path from the
    named folder on, its content if that counts, or what is wrong with it, and where it is.
    """

    parts: tuple[str, ...]
    content: bytes | GradingError | None = None
    place: Any = None

    @property
    def counts(self) -> bool:
        """Whether it stands for a submission: a notebook, or what should be or hold one."""
        name = self.parts[-1].lower()
        return name.endswith((".ipynb", ".zip")) or not name


def load_exercises() -> dict[int, Pristine]:
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
    repositories = {"/".join(item.parts[:-1]) for item in items if item.parts[-1] == ".git"}
    submitters = submitters_in(items)
    works: list[Submission] = []
    for item in items:
        if item.counts:
            owners = owners_of(item.parts, repositories, submitters)
            works += [read_submission(item, owner) for owner in owners]
    handed_in = [work for work in works if work.file and not is_given_out(work, works)]
    if roster:
        for work in works:
            work.learner = in_roster(work, work.parts, roster)
    check_owners(handed_in)
    # A learner's folder without a notebook counts if it lies beside folders with one.
    learners = {work.learner for work in handed_in}
    holders = {holder_of(work) for work in handed_in}
    for work in works:
        is_near = not holders or holder_of(work) in holders
        if not work.file and is_near and work.learner not in {"", *learners}:
            handed_in.append(work)
    if not handed_in:
        raise GradingError(f"no submissions in {', '.join(map(str, paths))}")
    others = [item.parts[-1] for item in items if not item.counts and len(item.parts) == 2]
    return handed_in, [name for name in others if name not in (".git", METADATA)]


def walk(path: Path | zipfile.Path, parts: tuple[str, ...]) -> list[Item]:
    """The files in a folder or archive, and in those in it; an item of an empty name stands for a
    folder without notebooks. Nothing of an archive is written to the disk, and no link to a folder
    is followed.
    """
    if path.is_dir() and not is_link(path):
        items = []
        children: list[Any] = list(path.iterdir())
        for child in sorted(children, key=lambda child: child.name):
            if child.name == ".git":
                items.append(Item((*parts, child.name)))
            elif not child.name.startswith((".", "__MACOSX")):
                items += walk(child, (*parts, child.name))
        if not any(item.counts for item in items):
            items.append(Item((*parts, "")))
        return items
    name = parts[-1].lower()
    if not name.endswith((".ipynb", ".zip", METADATA)):
        return [Item(parts)]
    try:
        content = read_file(path)
        if name.endswith(".zip"):
            return walk(zipfile.Path(BytesIO(content)), parts)
        return [Item(parts, content, path)]
    except GradingError as error:
        return [Item(parts, error)]
    except (zipfile.BadZipFile, RuntimeError) as error:
        return [Item(parts, GradingError(f"cannot be read as an archive ({error})"))]


def is_link(path: Path | zipfile.Path) -> bool:
    """Whether a path is a link, which may lead anywhere."""
    return isinstance(path, Path) and path.is_symlink()


def read_file(path: Path | zipfile.Path) -> bytes:
    """What is in a file, if it is one and not too large. Raises GradingError otherwise."""
    if not path.is_file():  # A fifo would never come to its end.
        raise GradingError("is not a file, or a link to nothing")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise GradingError(f"has more than {MOST_BYTES >> 20} MiB: clear its outputs")
    return content


def copy_neighbours(place: Any, folder: Path) -> None:
    """Copy the files that lie beside a notebook, such as data and modules of the learner's, into a
    folder. A link could lead anywhere, and is left out.
    """
    for file in place.parent.iterdir():
        if not is_link(file) and not file.name.endswith((".ipynb", ".zip")):
            with suppress(GradingError):
                (folder / file.name).write_bytes(read_file(file))


def submitters_in(items: Sequence[Item]) -> dict[str, list[dict[str, str]]]:
    """{folder: who handed it in}, as Gradescope's exports say."""
    submitters = {}
    for item in items:
        known = item.parts[-1] == METADATA and isinstance(item.content, bytes)
        folders = yaml.safe_load(item.content) if known else {}
        for folder, about in folders.items():
            people = submitters[str(folder)] = []
            for person in about[":submitters"]:
                people.append({title: str(person.get(key, "")) for title, key in GRADESCOPE})
    return submitters


def read_submission(item: Item, owner: Owner) -> Submission:
    """Read a notebook; what is wrong with it becomes the submission's fault. Raises nothing."""
    work = Submission(**vars(owner), parts=item.parts, fault=NO_NOTEBOOK, place=item.place)
    if not item.parts[-1]:
        return work
    path = "/".join(item.parts)
    work.file = clean(path.removeprefix(f"{owner.folder}/").removeprefix(f"{holder_of(owner)}/"))
    try:
        if not isinstance(item.content, bytes):
            raise item.content or GradingError(NO_NOTEBOOK)
        work.digest = hashlib.sha256(item.content).hexdigest()[:16]
        work.cells = read_notebook(item.content)
        work.fault = ""
    except GradingError as error:
        work.fault = str(error)
    return work


def holder_of(owner: Owner) -> str:
    """The folder in which the learner's own folder lies."""
    return owner.folder.rpartition("/")[0]


def is_given_out(work: Submission, works: Sequence[Submission]) -> bool:
    """Whether a notebook is the course's own: a solution in a copy of the course, or a lesson
    beside other notebooks of the same learner.
    """
    answers = [cell for cell in work.cells if cell.task]
    if answers or work.fault:
        return "solutions" in work.parts[:-1] and all(map(is_solution, answers))
    others = [other for other in works if other.folder == work.folder]
    return any(cell.task for other in others for cell in other.cells)


def is_solution(cell: Cell) -> bool:
    """Whether an answer is the course's own solution of its task."""
    try:
        return solution(cell.task) == cell.source
    except (ValueError, KeyError):
        return False


def check_owners(works: Sequence[Submission]) -> None:
    """GradingError where it is not clear whose a notebook is."""
    unknown = ["/".join(work.parts) for work in works if not work.learner]
    if unknown:
        raise GradingError(f"not in the roster: {', '.join(unknown)}; nothing was graded")
    folders: dict[str, str] = {}
    loose: set[tuple[str, str]] = set()
    for work in works:
        folder = folders.setdefault(work.learner, work.folder)
        if folder != work.folder:
            raise GradingError(
                f"two folders claim to be {work.learner}'s: {folder} and {work.folder}; nothing was"
                " graded. Remove one, or tell people apart by --roster"
            )
        numbered = NUMBERED.match(work.name)
        if numbered and folder == work.parts[0]:
            if (folder, numbered[1]) in loose:
                raise GradingError(
                    f"two notebooks of exercise {numbered[1]} lie in {folder} itself: whose are"
                    " they? Put each into a folder that is called as its learner"
                )
            loose.add((folder, numbered[1]))


def without_exercises_not_begun(
    works: Sequence[Submission], exercises: dict[int, Pristine]
) -> list[Submission]:
    """Leave out untouched notebooks of exercises that nobody in the class has begun, if there are
    others: a copy of the course has all exercises.
    """
    answers = {}
    for pristine in exercises.values():
        answers |= pristine.answers
    begun = set()
    for work in works:
        for cell in work.cells:
            if cell.source.strip() != answers.get(cell.task, cell.source).strip():
                begun.add(exercise_in(cell))
    asked_for = []
    for work in works:
        exercises_in = {exercise_in(cell) for cell in work.cells if cell.task in answers}
        if not begun or not exercises_in or exercises_in & begun:
            asked_for.append(work)
    return asked_for


def exercise_in(cell: Cell) -> str:
    """The number of the exercise that a cell is an answer of."""
    return cell.task.split(".")[0]


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
    about = cell.get("metadata", {}).get("ddp_course", {})
    name = cell.get("id", "")
    match = ANSWER_ID.match(name)
    task = f"{match[1]}.{match[2]}" if match else ""
    if about.get("role") == "answer":
        task = str(about.get("task", ""))
    return Cell(name, cell.source, task, about.get("role") == "check" or name.startswith("check-"))


def exercise_of(work: Submission, exercises: dict[int, Pristine]) -> int:
    """Which exercise a notebook answers: what most of its answer cells say, or else its name.
    Raises GradingError if neither says one of this course.
    """
    numbered = NUMBERED.match(work.name)
    numbers = [exercise_in(cell) for cell in work.cells if TASK.fullmatch(cell.task)]
    if numbered and not numbers:
        numbers.append(numbered[1])
    if not numbers:
        raise GradingError(work.fault or NO_ANSWERS)
    number = int(max(numbers, key=numbers.count))
    if number not in exercises:
        raise GradingError(f"answers exercise {number}, which this course does not have")
    return number


def assemble(pristine: Pristine, cells: Sequence[Cell]) -> Assembly:
    """The learner's cells in their order, unchanged, among the pristine ones; each check follows
    its answer.
    """
    given, answers, checks, _ = pristine
    own = [cell for cell in cells if not cell.check]
    last = {cell.task: place for place, cell in enumerate(own)}
    changed = {cell.id for cell in own} - {"imports"}
    assembled = {name: source for name, source in given.items() if name not in changed}
    for place, cell in enumerate(own):
        if cell.id in given:
            assembled.setdefault(cell.id, given[cell.id])
        if cell.task in answers:
            assembled[f"{cell_of(cell.task)}-{place}"] = cell.source
            if last[cell.task] == place:
                assembled[cell_of(cell.task).replace("answer", "check")] = checks[cell.task]
        elif cell.source != given.get(cell.id):
            assembled[f"own-{place}"] = cell.source
    sources = {cell.task: cell.source for cell in own if cell.task in answers}
    troubles = {}
    for task, source in answers.items():
        if sources.get(task, source).strip() == source.strip():
            troubles[task] = UNSOLVED if task in sources else MISSING
    return Assembly(assembled, sources, troubles)
