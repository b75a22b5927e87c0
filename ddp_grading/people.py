"""Who is who, before anything runs: whose notebook is it that lies in a folder, or in a zip?

The learner is the roster's entry whose name, id or mail is in the path. Without a roster it is what
the names of Canvas', Moodle's and Gradescope's downloads say, or else the folder that holds the
notebook.
"""

import csv
import re
import unicodedata
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from ddp_course.errors import GradingError

from .results import clean

CANVAS = re.compile(r"([^\W\d_][^\W_]*)_(LATE_)?(\d{3,})_(\d{3,})_")
MOODLE = re.compile(r"(.+?)_(\d+)_assignsubmission_(?:file|onlinetext)_?")
NUMBERED = re.compile(r"(\d{1,2})[_\- .]")
PLACES = re.compile(  # A folder that is called so is no person.
    r"(exercises|notebooks|solutions|work|submitted|src|ddp_course)"
    r"|\d{1,2}|(exercise|assignment|homework|hw|ps|lab|week|task)[-_ ]?\d{1,2}([-_ .].*)?",
    re.IGNORECASE,
)
LEARNER = "learner"
NAMES = ("Student", "Full name", "Name")
IDS = (
    "ID", "SIS User ID", "SIS Login ID", "Email address", "Email", "ID number", "Identifier", "SID",
    "identifier", "github_username",
)  # fmt: skip
Roster = dict[str, dict[str, str]]  # A roster is {learner: {title: cell} of the learner's line}.


@dataclass
class Owner:
    """Whose a notebook is: `about` are titles and cells by which a gradebook knows the learner, and
    `folder` is what is the learner's alone.
    """

    learner: str
    folder: str
    about: dict[str, str] = field(default_factory=dict)
    late: bool = False


def lines_of(path: str | Path, what: str) -> list[str]:
    """The lines of a teacher's file. Raises GradingError for a file that cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GradingError(f'the {what} "{path}" cannot be read: {error}') from error


def read_roster(path: str | Path) -> Roster:
    """A roster from a file: one learner per line, or CSV with titles, such as Canvas' export of its
    gradebook, Moodle's grading worksheet, or any table with a column `learner`. Raises GradingError
    for a roster without learners.
    """
    rows = list(csv.reader(lines_of(path, "roster")))
    titles = [cell.strip() for cell in rows[0]] if rows else []
    known = [title for title in (LEARNER, *NAMES, *IDS) if title in titles]
    if not known:
        titles = known = [LEARNER]
    roster = {}
    for row in rows:
        about = {title: cell.strip() for title, cell in zip(titles, row, strict=False)}
        roster[about.get(known[0], "")] = about
    for no_learner in ("", known[0], "Points Possible"):
        roster.pop(no_learner, None)
    if not roster:
        raise GradingError(
            f'the roster "{path}" is empty; one learner per line, called as their folder is'
        )
    return roster


def owners_of(
    parts: Sequence[str], repositories: Set[str], submitters: Mapping[str, list]
) -> list[Owner]:
    """Whose the notebook is that lies at `parts`, a path that begins with the named folder.

    `submitters` are {folder: people} of Gradescope's export; `repositories` are the folders that
    have a `.git`. A notebook of a group has several owners.
    """
    for place, part in enumerate(parts[1:], 1):
        holder = "/".join(parts[:place])
        folder = f"{holder}/{part}"
        if canvas := CANVAS.match(part):
            name, late, number, _ = canvas.groups()
            about = {"Student": name, "ID": number}
            return [Owner(name, f"{holder}/{name}_{number}", about, bool(late))]
        if moodle := MOODLE.fullmatch(part):
            name, number = moodle.groups()
            about = {"Full name": name, "Identifier": f"Participant {number}"}
            return [Owner(clean(name), f"{holder}/{number}", about)]
        if part in submitters:
            return [Owner(clean(about["Name"]), folder, about) for about in submitters[part]]
        if folder in repositories:
            return [Owner(clean(part), folder)]
    return [owner_by_folder(parts)]


def owner_by_folder(parts: Sequence[str]) -> Owner:
    """The folder that holds a notebook; a notebook that lies in the named folder itself has its
    learner's name, unless that is the exercise's.
    """
    *folders, file = parts
    if not folders or (len(folders) == 1 and not NUMBERED.match(file)):
        return Owner(clean(PurePath(file).stem), "/".join(parts))
    depth = len(folders)
    while depth > 1 and PLACES.fullmatch(folders[depth - 1]):
        depth -= 1
    return Owner(clean(without_ending(folders[depth - 1])), "/".join(folders[:depth]))


def without_ending(name: str) -> str:
    """The name of a folder, an archive or a notebook."""
    return re.sub(r"\.(zip|ipynb)$", "", name, flags=re.IGNORECASE)


def in_roster(owner: Owner, parts: Sequence[str], roster: Roster) -> str:
    """The roster's learner whose id or mail, or else whose name, is in the path; "" if none is, or
    several are.
    """
    words = list(owner.about.values())  # A service says which words of a path are the learner's.
    if not words:
        for part in map(without_ending, parts):
            words += [part, *part.split("_")]
            words += [part[dash.end() :] for dash in re.finditer("-", part)]
    wanted = set(map(plainly, words)) - {""}
    for known_by in (ids_of, names_of):
        learners = [name for name, about in roster.items() if wanted & known_by(name, about)]
        if len(learners) == 1:
            return learners[0]
    return ""


def ids_of(learner: str, about: dict[str, str]) -> set[str]:
    """What only one learner is called."""
    return set(map(plainly, [learner, *(about.get(title, "") for title in IDS)]))


def names_of(learner: str, about: dict[str, str]) -> set[str]:
    """A learner's name, in both orders."""
    names = set()
    for name in (learner, *(about.get(title, "") for title in NAMES)):
        last, comma, first = name.partition(",")
        turned = first + last if comma else "".join(name.split()[::-1])
        names |= {plainly(name), plainly(turned)}
    return names


def plainly(name: str) -> str:
    """A name without case, spaces and punctuation, as services write it into names of files."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFC", name).casefold())
