"""The register of packages whose lines are not the program's: this library, and those built on it.

A package that is built on this library registers itself as it is imported. A deadlock then names
the program's own lines, and none of the package's. Each launch brings the register along: what its
ranks need of these packages is imported once for all of them, and again when a file of the packages
has changed.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple


class Package(NamedTuple):
    """A registered package: its folder, where Python finds it, and what launches need of it."""

    folder: str
    found_in: str  # the folder in which Python finds the package
    modules: tuple[str, ...]  # the modules that launches need, with all that these import


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
# In a rank these files call the program: its own lines begin where these files end.
CALLING = (
    os.path.join(HERE, "launching", "rank.py"),
    os.path.join(HERE, "launching", "cell.py"),
    os.path.join(HERE, "rehearsal", "script.py"),
)
