"""Which torch this is: whether anybody tried it, and which of its private parts are gone."""

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pkgutil import resolve_name
from typing import Any, NoReturn

from .errors import ManyranksError


@cache
def tried() -> list[dict[str, str]]:
    """Return the rows of `tried.csv`: each torch that was tried, when, where, with what result."""
    text = files(__package__).joinpath("tried.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def minor(release: str) -> str:
    """Return the minor version of a release: "2.15" for 2.15.0+cpu and 2.15.1.

    A nightly such as 2.15.0.dev1 is returned whole, since it shares its minor version with no
    release.
    """
    public = release.partition("+")[0]
    if public.replace(".", "").isdigit():
        return ".".join(public.split(".")[:2])
    return public


def trial() -> dict[str, str] | None:
    """Return the last row of `tried` about a release of this torch's minor version, if any."""
    rows = [row for row in tried() if minor(row["torch"]) == minor(version("torch"))]
    return rows[-1] if rows else None


def untried() -> str:
    """Return a sentence that says that no release of this minor version was tried, or "" if so."""
    if trial():
        return ""
    releases = dict.fromkeys(row["torch"] for row in tried())
    return (
        f"torch {version('torch')} has not been tried; {', '.join(releases)} have been"
        " (docs/VERSIONS.md). Results are checked all the same."
    )


@cache
def say_once() -> None:
    """Print that nobody tried this torch, if nobody did, at the first call in a process."""
    if untried():
        print(untried(), file=sys.stderr)


def part(path: str, feature: str) -> Any:
    """Return the part of torch at a path such as "torch.optim:SGD" (module, colon, names).

    torch promises to nobody that the part stays. Where it is gone, what is returned can still be
    imported and derived from, and each use of it raises a ManyranksError, which names the part and
    the `feature` that needs it.
    """
    try:
        return resolve_name(path)
    except (AttributeError, ImportError):
        return Gone("Gone", (), {"path": path.replace(":", "."), "feature": feature})


class Gone(type):
    """The class of classes that stand for a part of torch which is gone."""

    path: str
    feature: str

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise gone(cls.path, cls.feature)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these, as when a class is derived.
            raise AttributeError(name)
        raise gone(cls.path, cls.feature)

    def __instancecheck__(cls, _: Any) -> NoReturn:
        raise gone(cls.path, cls.feature)

    def __subclasscheck__(cls, _: Any) -> NoReturn:
        raise gone(cls.path, cls.feature)


@contextmanager
def needing(feature: str) -> Iterator[None]:
    """Turn the error of a function that uses a private part of torch into a ManyranksError.

    The new error names the part that is gone and the `feature` that needs it.
    """
    try:
        yield
    except AttributeError as error:
        raise gone(str(error), feature) from error


def gone(what: str, feature: str) -> ManyranksError:
    """Return the error about a part of torch that is gone.

    `what` is its path, or Python's own sentence about it.
    """
    return ManyranksError(
        f"{feature} needs a private part of torch that torch {version('torch')} does not have as"
        f" expected ({what}); the rest of the package works. Install a torch that docs/VERSIONS.md"
        " lists."
    )
