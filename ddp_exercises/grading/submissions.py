"""What learners handed in: notebooks found in folders and archives, all of them read before the
first one runs, and put among the cells that were given out.
"""

import hashlib
import os
import re
import zipfile
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

import nbformat
import yaml

from ddp_course.lab.folders import course_folder
from ddp_exercises import UNSOLVED
from ddp_exercises.errors import GradingError
from ddp_exercises.tasks import cell_of, solution

from .people import NUMBERED, Owner, Roster, in_roster, owners_of
from .results import clean

MOST_BYTES = 256 << 20
MISSING = "its answer cell is missing: it was deleted, or copied into a new cell"
NO_NOTEBOOK = "there is no notebook (.ipynb) in the folder that can be read"
NO_ANSWERS = "holds no answer cell of any exercise: were the cells copied into a new notebook?"
TASK = re.compile(r"\d{1,4}\.\d{1,4}")  # A learner may have written anything instead.
METADATA = "submission_metadata.yml"  # This file of Gradescope's export has the learners' names.


class Pristine(NamedTuple):
    """One exercise as it was given out: `given` is {id: source} of the cells that are no task's;
    `answers` and `checks` are {task: source of its cell}, and `points` {task: points}.
    """

    given: dict[str, str]
    answers: dict[str, str]
    checks: dict[str, str]
    points: dict[str, float]


Exercises = dict[int, Pristine]  # {number: the exercise}
Place = Path | zipfile.Path  # Where a file is: on the disk, or in an archive.


class Cell(NamedTuple):
    """A code cell that was handed in: its id, its source, and the task whose answer it is, "" if of
    none.
    """

    id: str
    source: str
    task: str = ""

    @property
    def exercise(self) -> str:
        """The exercise whose task it answers."""
        return self.task.split(".")[0]


@dataclass
class Submission(Owner):
    """One notebook of one learner, read: its `cells` without checks, or the `fault` for which there
    are none.

    `parts` are its path, from the named folder on, whose last is "" for a learner's folder without
    a notebook. `digest` is a hash of its content, and `place` where it is.
    """

    parts: tuple[str, ...] = ()
    place: Place | None = None
    cells: list[Cell] = field(default_factory=list)
    fault: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        """The notebook's name without its folders; "" if there is no notebook."""
        return clean(self.parts[-1])

    @property
    def file(self) -> str:
        """The notebook's path within the learner's folder; "" if there is no notebook."""
        path = "/".join(self.parts) if self.name else ""
        return clean(path.removeprefix(f"{self.folder}/").removeprefix(f"{self.holder}/"))

    @property
    def answers(self) -> list[Cell]:
        """The cells that answer a task."""
        return [cell for cell in self.cells if cell.task]


class Item(NamedTuple):
    """A file that was found, or (without a name) a folder that has no notebook: its path from the
    named folder on, and where it is.
    """

    parts: tuple[str, ...]
    place: Place

    @property
    def counts(self) -> bool:
        """Whether it stands for a submission: a notebook, or what should be or hold one."""
        name = self.parts[-1].lower()
        return name.endswith((".ipynb", ".zip")) or not name


def load_exercises() -> Exercises:
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
        if not os.path.lexists(path):
            raise GradingError(f'"{path}" does not exist')
        real = path.resolve() if path.is_dir() else path.absolute()
        # One of several paths, or a notebook, is a learner's; so the folder that holds it is named.
        is_class = len(paths) == 1 and real.suffix.lower() != ".ipynb"
        items += walk(real, real.parts[-1:] if is_class else real.parts[-2:])
    items.sort(key=attrgetter("parts"))
    known_owners = owners_told(items)
    works: list[Submission] = []
    for item in items:
        if item.counts:
            works += [read_submission(item, owner) for owner in owners_of(item.parts, known_owners)]
    answered = {work.folder for work in works if work.answers}
    handed_in = [work for work in works if work.name and not is_given_out(work, answered)]
    if roster:
        for work in works:
            work.learner = in_roster(work, work.parts, roster)
    check_owners(handed_in)
    # A learner's folder without a notebook counts if it lies beside folders with one.
    learners = {work.learner for work in handed_in}
    holders = {work.holder for work in handed_in}
    for work in works:
        lies_beside = not holders or work.holder in holders
        if not work.name and lies_beside and work.learner not in {"", *learners}:
            handed_in.append(work)
    if not handed_in:
        raise GradingError(f"no submissions in {', '.join(map(str, paths))}")
    # Names of files are told if they lie in the named folder itself.
    others = {item.parts[-1] for item in items if not item.counts and len(item.parts) == 2}
    return handed_in, sorted(others - {".git", METADATA})


def walk(path: Place, parts: tuple[str, ...]) -> list[Item]:
    """The files in a folder or archive, and in those in it; an item whose name is "" stands for a
    folder without notebooks. A file is its own only item.
    """
    folder = as_folder(path)
    if folder is None:
        return [Item(parts, path)]
    items = []
    for child in folder.iterdir():
        if child.name == ".git" or not child.name.startswith((".", "__MACOSX")):
            items += walk(child, (*parts, child.name))
    if not any(item.counts for item in items):
        items.append(Item((*parts, ""), folder))
    return items


def as_folder(path: Place) -> Place | None:
    """A folder, or an archive as one, of which nothing is written to the disk. None for files,
    archives that cannot be read, links to folders, and what git keeps.
    """
    if path.is_dir() and not is_link(path) and path.name != ".git":
        return path
    if path.name.lower().endswith(".zip"):
        with suppress(GradingError, zipfile.BadZipFile, RuntimeError):
            return zipfile.Path(BytesIO(read_file(path)))
    return None


def owners_told(items: Sequence[Item]) -> dict[str, list[Owner]]:
    """{folder: its owners} where that is told: by a repository's `.git`, by Gradescope's export."""
    owners = {}
    for item in items:
        *folders, name = item.parts
        holder = "/".join(folders)
        if name == ".git":
            owners[holder] = [Owner(clean(folders[-1]), holder)]
        elif name == METADATA:
            for folder, submission in yaml.safe_load(read_file(item.place)).items():
                path = f"{holder}/{folder}"
                owners[path] = []
                for person in submission[":submitters"]:
                    about = {title: str(value) for title, value in person.items()}
                    owners[path].append(Owner(clean(about[":name"]), path, about))
    return owners


def is_link(path: Place) -> bool:
    """Whether a path is a link, which may lead anywhere."""
    return isinstance(path, Path) and path.is_symlink()


def read_file(path: Place) -> bytes:
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
            with suppress(GradingError, OSError):
                (folder / file.name).write_bytes(read_file(file))


def read_submission(item: Item, owner: Owner) -> Submission:
    """Read a notebook; what is wrong with it becomes the submission's fault. Raises nothing."""
    work = Submission(**vars(owner), parts=item.parts, place=item.place)
    try:
        if not work.name:
            raise GradingError(NO_NOTEBOOK)
        content = read_file(item.place)
        work.digest = hashlib.sha256(content).hexdigest()[:16]
        if work.name.lower().endswith(".zip"):
            raise GradingError("cannot be read as an archive")
        text = content.decode("utf-8-sig")
        if not text.strip():
            raise GradingError("is empty")
        cells = map(as_cell, nbformat.reads(text, as_version=4).cells)
        work.cells = [cell for cell in cells if cell]
    except GradingError as error:
        work.fault = str(error)
    except nbformat.reader.NotJSONError:
        work.fault = "is not valid JSON"
    except Exception as error:  # It is encrypted, no UTF-8, or odd in a way of its own.
        work.fault = f"cannot be read as a notebook ({type(error).__name__}: {error})"
    return work


def as_cell(cell: Any) -> Cell | None:
    """A code cell that was handed in, if it is no check; an answer is recognised by its metadata
    or, as in "answer-4-2", by its id.
    """
    about = cell.metadata.get("ddp_course", {})
    cell_id = cell.get("id", "")
    role, _, number = cell_id.partition("-")
    role = about.get("role", role)
    if cell.cell_type != "code" or role == "check":
        return None
    task = str(about.get("task", number.replace("-", ".")))
    is_answer = role == "answer" and TASK.fullmatch(task)
    return Cell(cell_id, cell.source, task if is_answer else "")


def is_given_out(work: Submission, answered: Set[str]) -> bool:
    """Whether a notebook is the course's own: a solution in a copy of the course, or a lesson, in a
    folder that has answers as well; `answered` are the folders that have some.
    """
    if work.answers or work.fault:
        return "solutions" in work.parts[:-1] and all(map(is_solution, work.answers))
    return work.folder in answered


def is_solution(cell: Cell) -> bool:
    """Whether an answer is the course's own solution of its task."""
    with suppress(ValueError, KeyError):
        return solution(cell.task) == cell.source
    return False


def check_owners(works: Sequence[Submission]) -> None:
    """GradingError where it is not clear whose a notebook is, or which of two is meant."""
    unknown = ["/".join(work.parts) for work in works if not work.learner]
    if unknown:
        raise GradingError(f"not in the roster: {', '.join(unknown)}; nothing was graded")
    # {what is wrong if two claim it: who does}
    claimed: dict[str, str] = {}
    for work in works:
        claims = {f"two folders claim to be {work.learner}'s": work.folder}
        numbered = NUMBERED.match(work.name)
        if numbered and work.folder == work.parts[0]:
            claims[f"two notebooks of exercise {numbered[1]} lie in {work.folder}"] = work.name
        for problem, place in claims.items():
            other = claimed.setdefault(problem, place)
            if other != place:
                raise GradingError(
                    f"{problem}: {other} and {place}; nothing was graded. Remove one, put each into"
                    " a folder that is called as its learner, or tell people apart by --roster"
                )


def without_exercises_not_begun(
    works: Sequence[Submission], exercises: Exercises
) -> list[Submission]:
    """Leave out untouched notebooks of exercises that nobody in the class has begun, if there are
    others: a copy of the course has all exercises.
    """
    given = {}
    for pristine in exercises.values():
        given |= pristine.answers
    begun = set()
    for work in works:
        for cell in work.answers:
            if cell.source.strip() != given.get(cell.task, "").strip():
                begun.add(cell.exercise)
    if not begun:
        return list(works)
    asked_for = []
    for work in works:
        answered = {cell.exercise for cell in work.answers}
        if not answered or answered & begun:
            asked_for.append(work)
    return asked_for


def exercise_of(work: Submission, exercises: Exercises) -> int:
    """Which exercise a notebook answers: what most of its answer cells say, or else its name.
    Raises GradingError if neither says one of this course.
    """
    numbers = [int(cell.exercise) for cell in work.answers]
    numbered = NUMBERED.match(work.name)
    if numbered and not numbers:
        numbers = [int(numbered[1])]
    if not numbers:
        raise GradingError(work.fault or NO_ANSWERS)
    number = mode(numbers)
    if number not in exercises:
        raise GradingError(f"answers exercise {number}, which this course does not have")
    return number


def troubles_of(pristine: Pristine, sources: Mapping[str, str]) -> dict[str, str]:
    """{task: what is wrong before anything runs} of the answers in `sources`, {task: source}."""
    troubles = {}
    for task, source in pristine.answers.items():
        if sources.get(task, source).strip() == source.strip():
            troubles[task] = UNSOLVED if task in sources else MISSING
    return troubles


def assemble(pristine: Pristine, cells: Sequence[Cell]) -> dict[str, str]:
    """The cells to be run, {id: source}: the learner's in their order, unchanged, among the
    pristine ones; each check follows its answer.
    """
    given, answers, checks, _ = pristine
    last = {cell.task: place for place, cell in enumerate(cells) if cell.task in answers}
    # First the imports, and what the learner has deleted; the rest comes where the learner has it.
    theirs = {cell.id for cell in cells} - {"imports"}
    assembled = {name: source for name, source in given.items() if name not in theirs}
    for place, cell in enumerate(cells):
        if cell.id in given:
            assembled.setdefault(cell.id, given[cell.id])
        if cell.source != given.get(cell.id):
            kind = cell_of(cell.task) if cell.task in answers else "own"
            assembled[f"{kind}-{place}"] = cell.source
        if place == last.get(cell.task):
            assembled[cell_of(cell.task).replace("answer", "check")] = checks[cell.task]
    return assembled
