"""Finds what learners handed in, and reads all of it before the first notebook runs."""

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

import yaml

from ddp_exercises.errors import GradingError
from ddp_exercises.tasks import solution

from .answers import Exercises, exercise_by_content, find_answers
from .cells import Cell, read_cells, read_script
from .people import NUMBERED, Owner, Roster, in_roster, owners_of, sections_in
from .results import clean

MOST_BYTES = 256 << 20
NO_NOTEBOOK = "there is no notebook (.ipynb) in the folder that can be read; in it is "
NO_ANSWERS = "holds no answer: no cell has the id or tag of one, or defines what a task asks for"
METADATA = "submission_metadata.yml"  # This file of Gradescope's export has the learners' names.


Place = Path | zipfile.Path  # where a file is: on the disk, or in an archive


@dataclass
class Submission(Owner):
    """A notebook of a learner that was read: its `cells`, or the `fault` why there are none.

    `parts` are its path, from the named folder on; the last is "" for a learner's folder without a
    notebook. `digest` is a hash of its content, and `place` says where it is.
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
        """The cells whose sign says that they answer a task."""
        return [cell for cell in self.cells if cell.role == "answer"]


class Item(NamedTuple):
    """A file that was found, or, with the name "", a folder that has no notebook.

    `parts` are its path from the named folder on, and `place` says where it is. In a folder without
    a notebook, a `script` to which one was exported may count.
    """

    parts: tuple[str, ...]
    place: Place
    script: bool = False

    @property
    def counts(self) -> bool:
        """Whether it stands for a submission: it is a notebook, or should be or hold one."""
        name = self.parts[-1].lower()
        return name.endswith((".ipynb", ".zip")) or not name or self.script


def find_submissions(
    paths: Sequence[str | Path], roster: Roster | None = None
) -> tuple[list[Submission], list[str]]:
    """Return all submissions in `paths`, read, and the names of other files.

    The paths are notebooks, archives, and folders of either. Raises GradingError if two folders
    claim to be one learner's, or if a learner is not in the roster.
    """
    items: list[Item] = []
    for path in map(Path, paths):
        if not os.path.lexists(path):
            raise GradingError(f'"{path}" does not exist')
        real = path.resolve() if path.is_dir() else path.absolute()
        # One of several paths, or a notebook, is a learner's, so the folder that holds it is named,
        # too.
        is_class = len(paths) == 1 and real.suffix.lower() != ".ipynb"
        items += walk(real, real.parts[-1:] if is_class else real.parts[-2:])
    items.sort(key=attrgetter("parts"))
    known_owners = owners_told(items)
    sections = sections_in(item.parts for item in items if item.counts and item.parts[-1])
    works: list[Submission] = []
    for item in items:
        if item.counts:
            owners = owners_of(item.parts, known_owners, sections)
            works += [read_submission(item, owner) for owner in owners]
    answered = {work.folder for work in works if work.answers}
    notebooks = [work for work in works if work.name and not work.name.endswith(".py")]
    handed_in = [work for work in notebooks if not is_given_out(work, answered)]
    if roster:
        for work in works:
            work.learner = in_roster(work, work.parts, roster)
            work.note = ""
    check_owners(handed_in)
    # A learner's folder without a notebook, or with a script, counts only if it lies beside folders
    # with a notebook, as a copy of the course has more such folders.
    learners = {work.learner for work in handed_in}
    holders = {work.holder for work in handed_in}
    for work in works:
        lies_beside = not holders or work.holder in holders
        if work not in notebooks and lies_beside and work.learner not in {"", *learners}:
            handed_in.append(work)
    if not handed_in:
        raise GradingError(f"no submissions in {', '.join(map(str, paths))}")
    # Only other files in the named folder itself are named.
    others = {item.parts[-1] for item in items if not item.counts and len(item.parts) == 2}
    return handed_in, sorted(others - {".git", METADATA})


def walk(path: Place, parts: tuple[str, ...]) -> list[Item]:
    """Return the files in a folder or archive, and in those inside it; a file is its only item.

    An item whose name is "" stands for a folder without notebooks.
    """
    folder = as_folder(path)
    if folder is None:
        return [Item(parts, path)]
    items = []
    for child in folder.iterdir():
        if child.name == ".git" or not child.name.startswith((".", "__MACOSX")):
            items += walk(child, (*parts, child.name))
    if not any(item.counts for item in items):
        items = [item._replace(script=is_script(item.place)) for item in items]
    if not any(item.counts for item in items):
        items.append(Item((*parts, ""), folder))
    return items


def is_script(path: Place) -> bool:
    """Return whether a file is a notebook that was exported as a script."""
    with suppress(GradingError, OSError, UnicodeDecodeError):
        return path.name.endswith(".py") and bool(read_script(read_file(path)))
    return False


def as_folder(path: Place) -> Place | None:
    """Return a folder, or an archive as one, without writing anything to the disk.

    Return None for files, archives that cannot be read, links to folders, and git's own folder.
    """
    if path.is_dir() and not is_link(path) and path.name != ".git":
        return path
    if path.name.lower().endswith(".zip"):
        with suppress(GradingError, zipfile.BadZipFile, RuntimeError):
            archive = zipfile.ZipFile(BytesIO(read_file(path)))
            # Windows writes "homework\\02.ipynb".
            for entry in archive.filelist:
                entry.filename = entry.filename.replace("\\", "/")
                archive.NameToInfo[entry.filename] = entry
            return zipfile.Path(archive)
    return None


def owners_told(items: Sequence[Item]) -> dict[str, list[Owner]]:
    """Return the owners of folders that are named by a `.git`, or by Gradescope's export."""
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
    """Return whether a path is a link, which may lead anywhere."""
    return isinstance(path, Path) and path.is_symlink()


def read_file(path: Place) -> bytes:
    """Return what is in a file; raises GradingError if it is no file, or too large."""
    # A fifo would never come to its end.
    if not path.is_file():
        raise GradingError("is not a file, or a link to nothing")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise GradingError(f"has more than {MOST_BYTES >> 20} MiB: clear its outputs")
    return content


def copy_neighbours(place: Any, folder: Path) -> None:
    """Copy the files that lie beside a notebook into a folder.

    They may be the learner's data and modules. A link could lead anywhere, and is left out.
    """
    for file in place.parent.iterdir():
        if not is_link(file) and not file.name.endswith((".ipynb", ".zip")):
            with suppress(GradingError, OSError):
                (folder / file.name).write_bytes(read_file(file))


def read_submission(item: Item, owner: Owner) -> Submission:
    """Return a notebook as a submission.

    A notebook that cannot be read raises nothing: the submission's `fault` says what is wrong.
    """
    work = Submission(**vars(owner), parts=item.parts, place=item.place)
    try:
        if not work.name:
            names = [child.name for child in item.place.iterdir()]
            raise GradingError(NO_NOTEBOOK + (", ".join(names[:9]) or "nothing"))
        content = read_file(item.place)
        work.digest = hashlib.sha256(content).hexdigest()[:16]
        if work.name.lower().endswith(".zip"):
            raise GradingError("cannot be read as an archive")
        if not content.strip():
            raise GradingError("is empty")
        work.cells = read_script(content) if item.script else read_cells(content)
    except GradingError as error:
        work.fault = str(error)
    except json.JSONDecodeError as error:
        line = error.doc.split("\n")[error.lineno - 1]
        work.fault = f'is not valid JSON, so Jupyter opens it no more: {error.msg}, "{line[:60]}"'
    except Exception as error:
        # It may be encrypted, no UTF-8, or odd in a way of its own.
        work.fault = f"cannot be read as a notebook ({type(error).__name__}: {error})"
    return work


def is_given_out(work: Submission, answered: Set[str]) -> bool:
    """Return whether a notebook is the course's own.

    It may be a solution in a copy of the course, or a lesson, which calls no check, in a folder
    with answers as well; `answered` are the folders with answers.
    """
    if work.answers or work.fault:
        return "solutions" in work.parts[:-1] and all(map(is_solution, work.answers))
    return work.folder in answered and not any(cell.checks for cell in work.cells)


def is_solution(cell: Cell) -> bool:
    """Return whether an answer is the course's own solution of its task."""
    with suppress(ValueError, KeyError):
        return solution(cell.task) == cell.source
    return False


def check_owners(works: Sequence[Submission]) -> None:
    """Raise GradingError if it is not clear whose a notebook is, or which of two is meant."""
    unknown = ["/".join(work.parts) for work in works if not work.learner]
    if unknown:
        raise GradingError(f"not in the roster: {', '.join(unknown)}; nothing was graded")
    # Each key is what is wrong if two notebooks claim it, and the value is the first that does.
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
    """Return the submissions without untouched notebooks of exercises that nobody has begun.

    If nobody has begun any exercise, all stay. A copy of the course has all exercises.
    """
    begun = set()
    untouched = {}  # {place of a notebook: its exercise}
    for place, work in enumerate(works):
        # If this fails, the grading of the work itself says why.
        with suppress(Exception):
            number = exercise_of(work, exercises)
            if find_answers(exercises[number], work.cells):
                begun.add(number)
            elif work.answers:
                untouched[place] = number
    left_out = {place for place, number in untouched.items() if begun and number not in begun}
    return [work for place, work in enumerate(works) if place not in left_out]


def exercise_of(work: Submission, exercises: Exercises) -> int:
    """Return which exercise a notebook answers.

    Most of its answer cells say that, or else its name, or else its content. Raises GradingError if
    none of these names an exercise of this course.
    """
    numbered = NUMBERED.match(work.name)
    number = int(numbered[1]) if numbered else exercise_by_content(work.cells, exercises)
    if work.answers:
        number = mode(int(cell.task.split(".")[0]) for cell in work.answers)
    if number is None:
        raise GradingError(work.fault or NO_ANSWERS)
    if number not in exercises:
        raise GradingError(f"answers exercise {number}, which this course does not have")
    return number
