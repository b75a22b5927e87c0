"""Finds out whose a notebook in a folder or in a zip is, before anything runs.

The learner is the roster's entry whose name, id or mail is in the path. Without a roster the names
of Canvas', Moodle's and Gradescope's downloads say whose it is, or else the folder that holds the
notebook.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
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


def owners_of(
    parts: Sequence[str], known_owners: Mapping[str, list[Owner]], sections: Set[str]
) -> list[Owner]:
    """Return the owners of the notebook at `parts`, a path that begins with the named folder.

    `known_owners` has the owners of folders about which a file says so; a notebook of a group has
    several owners. Else a folder says it, which is none of `sections`.
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
    return [owner_by_folder(parts, sections)]


def sections_in(paths: Iterable[Sequence[str]]) -> set[str]:
    """Return the folders, archives among them, in which several learners have a folder each.

    `paths` are those of notebooks. Where most folders of one depth hold several folders with
    notebooks, all of that depth are sections; a learner may have made several, too.
    """
    held: dict[tuple, set[tuple]] = {}  # {folder: those below it in which notebooks lie}
    for parts in paths:
        folders = without_places(parts)
        for depth in range(2, len(folders) + 1):
            held.setdefault(folders[:depth], set()).add(folders)
    depths = Counter(map(len, held))
    crowded = Counter(
        len(folder) for folder, below in held.items() if len(below) > 1 and folder not in below
    )
    return {"/".join(each) for each in held if 2 * crowded[len(each)] >= depths[len(each)]}


def owner_by_folder(parts: Sequence[str], sections: Set[str]) -> Owner:
    """Return the owner: the first folder that is no section says it, whatever lies in it.

    A notebook in the named folder itself has its learner's name, unless its name is the exercise's.
    """
    folders = without_places(parts)
    if not folders or (len(parts) == 2 and not NUMBERED.match(parts[-1])):
        return Owner(clean(without_ending(parts[-1])), "/".join(parts))
    named = folders[:2]
    while len(named) < len(folders) and ("/".join(named) in sections or is_place(named[-1])):
        named = folders[: len(named) + 1]
    owner = Owner(clean(without_ending(named[-1])), "/".join(named))
    if named != folders:
        owner.note = f"the folder {clean(owner.folder)} says whose it is"
    return owner


def without_places(parts: Sequence[str]) -> tuple[str, ...]:
    """The folders that hold a notebook, up to the last one that may be a person's."""
    folders = tuple(parts[:-1])
    if parts[-1].lower().endswith(".zip"):  # It could not be read, and would be a folder.
        folders = tuple(parts)
    while len(folders) > 1 and is_place(folders[-1]):
        folders = folders[:-1]
    return folders


def is_place(folder: str) -> bool:
    """Whether a folder's name is no person's."""
    return bool(PLACES.fullmatch(folder))


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
