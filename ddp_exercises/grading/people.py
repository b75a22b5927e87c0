"""Finds out whose a notebook in a folder or in a zip is, before anything runs.

The learner is the roster's entry whose name, id or mail is in the path. Without a roster the names
of Canvas', Moodle's and Gradescope's downloads say whose it is, or else the folder that holds the
notebook.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_exercises.errors import GradingError

from .results import clean
from .tables import read_table

# Canvas: "doejane_LATE_12348_67893_mine.ipynb"; Moodle: "Jane Doe_123_assignsubmission_file_".
CANVAS = re.compile(r"([^\W\d_][^\W_]*)_(LATE_)?(\d{3,})_(\d{3,})_")
MOODLE = re.compile(r"(.+?)_(\d+)_assignsubmission_(?:file|onlinetext)_?")
NUMBERED = re.compile(r"(\d{1,2})[_\- .]")  # A notebook's name may begin with its exercise.
# A folder with such a name is no person.
PLACES = re.compile(
    r"(exercises|notebooks|solutions|work|submitted|src|ddp_course)"
    r"|\d{1,2}|(exercise|assignment|homework|hw|ps|lab|week|task)[-_ ]?\d{1,2}([-_ .].*)?",
    re.IGNORECASE,
)
# By these titles a roster knows a learner; the first one that it has is the learner's name.
KNOWN_BY = (
    "learner", "Student", "Full name", "Name", "ID", "SIS User ID", "SIS Login ID", "Email address",
    "Email", "ID number", "Identifier", "SID", "identifier", "github_username",
)  # fmt: skip
Roster = dict[str, dict[str, str]]  # the cells of each learner's line, by their titles


@dataclass
class Owner:
    """Whose a notebook is.

    By `about`, {title: cell}, a gradebook knows the learner; `folder` is the part of the path that
    is the learner's alone. A `note` says what may be surprising about that.
    """

    learner: str
    folder: str
    about: dict[str, str] = field(default_factory=dict)
    late: bool = False
    note: str = ""

    @property
    def holder(self) -> str:
        """The folder in which the learner's own folder lies."""
        return self.folder.rpartition("/")[0]


def read_roster(path: str | Path) -> Roster:
    """Return the roster that a file holds.

    The file has one learner per line, or it is CSV with titles, such as Canvas' export of its
    gradebook, Moodle's grading worksheet, or any table with a column `learner`. Raises GradingError
    for a roster without learners.
    """
    roster = {}
    for about in read_table(path, KNOWN_BY):
        names = [about[title] for title in KNOWN_BY if title in about]
        # Canvas' export has a line of points among those of learners.
        if names and names[0] not in ("", "Points Possible"):
            roster[names[0]] = about
    if not roster:
        raise GradingError(
            f'the roster "{path}" is empty; one learner per line, called as their folder is'
        )
    return roster


def owners_of(parts: Sequence[str], known_owners: Mapping[str, list[Owner]]) -> list[Owner]:
    """Return the owners of the notebook at `parts`, a path that begins with the named folder.

    `known_owners` has the owners of folders about which a file says so; a notebook of a group has
    several owners.
    """
    for place, part in enumerate(parts[1:], 1):
        holder = "/".join(parts[:place])
        if canvas := CANVAS.match(part):
            name, late, number, _ = canvas.groups()
            return [Owner(name, f"{holder}/{name}_{number}", {"ID": number}, bool(late))]
        if moodle := MOODLE.fullmatch(part):
            name, number = moodle.groups()
            about = {"Identifier": f"Participant {number}"}
            return [Owner(clean(name), f"{holder}/{number}", about)]
        if owners := known_owners.get(f"{holder}/{part}"):
            return owners
    return [owner_by_folder(parts)]


def owners_of_archives(paths: Iterable[Sequence[str]]) -> dict[str, list[Owner]]:
    """Return the owner of each archive in the named folder.

    Whatever names a learner has given inside, an archive belongs to the folder that a service or
    the teacher has named, or else to its own name. An archive that holds several folders, and no
    notebook beside them, is a class.
    """
    inside: dict[tuple, set[str]] = {}
    for parts in paths:
        for place, part in enumerate(parts[1:-1], 2):
            if part.lower().endswith(".zip"):
                child = parts[place] if place + 1 < len(parts) else ""
                inside.setdefault(tuple(parts[:place]), set()).add(child)
    owners = {}
    for archive, children in inside.items():
        # In a section's folder there are several archives, one of each learner.
        beside = Counter(other[:-1] for other in inside if len(other) == len(archive))
        named = archive if max(beside.values()) > 1 or len(archive) == 2 else archive[:-1]
        if len(children) == 1 or "" in children:
            owner = owner_by_folder((*named, ""))
            if owner.folder != "/".join(archive):
                owner.note = f"the folder {clean(owner.folder)} says whose it is"
            owners["/".join(archive)] = [owner]
    return owners


def owner_by_folder(parts: Sequence[str]) -> Owner:
    """Return the owner of a notebook, by the folder that holds it.

    A notebook in the named folder itself has its learner's name, unless its name is the exercise's.
    """
    *folders, file = parts
    if not folders or (len(folders) == 1 and not NUMBERED.match(file)):
        return Owner(clean(without_ending(file)), "/".join(parts))
    while len(folders) > 1 and PLACES.fullmatch(folders[-1]):
        folders.pop()
    return Owner(clean(without_ending(folders[-1])), "/".join(folders))


def without_ending(name: str) -> str:
    """Return the name of a folder, an archive or a notebook without its ending."""
    return re.sub(r"\.(zip|ipynb)$", "", name, flags=re.IGNORECASE)


def in_roster(owner: Owner, parts: Sequence[str], roster: Roster) -> str:
    """Return the roster's learner whose name, ids and mail are most in the path.

    Return "" if no learner's are, or those of several learners equally often.
    """
    words = [owner.learner, *owner.about.values()]
    # A service says which words of a path are the learner's; a folder does not.
    if not owner.about:
        for part in map(without_ending, parts):
            words += part.split("_")
            # "ring-jane-doe" may be of "jane-doe", or of "doe".
            while part:
                words.append(part)
                _, _, part = part.partition("-")
    plain_words = set(map(plainly, words))
    counts = {
        learner: len(plain_words & names_of(learner, about)) for learner, about in roster.items()
    }
    most = max(1, *counts.values())
    learners = [learner for learner, count in counts.items() if count == most]
    return learners[0] if len(learners) == 1 else ""


def names_of(learner: str, about: Mapping[str, str]) -> set[str]:
    """Return a learner's names in a roster; "Doe, Jane" and "Jane Doe" count in both orders."""
    names = {learner} | {about[title] for title in KNOWN_BY if title in about}
    for name in list(names):
        last, comma, first = name.partition(",")
        names.add(first + last if comma else "".join(reversed(name.split())))
    return set(map(plainly, names)) - {""}


def plainly(name: str) -> str:
    """Return a name without case, spaces and punctuation, as services write it in file names."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFC", name).casefold())
