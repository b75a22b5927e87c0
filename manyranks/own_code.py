"""Which files are ours: those of this library, and of packages that are built on it.

Such a package registers itself as it is imported. Its lines are not those of the program that runs,
so a deadlock names the program's. Each launch brings the register along: what its ranks need of
these packages is imported once for all of them, and again when a file of theirs has changed.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple


class Package(NamedTuple):
    """A registered package."""

    folder: str
    found_in: str  # Python finds the package from this folder.
    modules: tuple[str, ...]  # Launches need these, with all that they import.


packages: dict[str, Package] = {}  # by name
scripts: set[str] = set()  # The paths of programs that are run from files, wherever they lie.


def register(name: str, folder: str, modules: Iterable[str] = ()) -> None:
    """Register the package `name`, whose files are in `folder`, and its `modules` for launches."""
    found_in = folder
    for _ in name.split("."):
        found_in = os.path.dirname(found_in)
    packages[name] = Package(folder, found_in, tuple(f"{name}.{module}" for module in modules))


def folders() -> tuple[str, ...]:
    """Return how the paths of all registered packages' files begin."""
    return tuple(package.folder + os.sep for package in packages.values())


HERE = os.path.dirname(__file__)
register(
    __package__,
    HERE,
    [
        "launching.agent",
        "launching.rank",
        "links.link",
        "clocks.group",
        "clocks.threads",
    ],
)
LIBRARY = packages[__package__]
# In a rank these files call the program, whose own lines are those that they have called.
CALLING = (
    os.path.join(HERE, "launching", "rank.py"),
    os.path.join(HERE, "launching", "cell.py"),
    os.path.join(HERE, "rehearsal", "script.py"),
)
