"""A learner's copy of the course, which keeps solved tasks, guesses and the last visit."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..base.files import write_whole

RECORD = ".ddp-course.json"  # `ddp-course lab` marks a copy with this file.
PROGRESS = ".ddp-course-progress.json"  # This file of a copy has all that is kept.


def find_copy() -> Path | None:
    """Return the copy in which this process runs, else the one in `work`, or None."""
    folder = Path.cwd()
    for place in (folder, *folder.parents, folder / "work"):
        if (place / RECORD).is_file():
            return place
    return None


def progress_in(copy: Path) -> dict[str, Any]:
    """Return what is kept in a copy, by kind; a kind of which nothing is known is missing.

    - "tasks": {task: whether it is solved}
    - "guesses": {question: whether the guess was right}
    - "guessed": {question: what was guessed}
    - "runs": {name: in words, what a training of the learner's own did in the comparison}
    - "misconceptions": {task: the known wrong answer that was given}
    - "questions": {"NN name": whether it was answered right in the opening of lesson NN}
    - "visited": seconds since 1970
    """
    try:
        return json.loads((copy / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def keep(kind: str, name: str, value: bool | str) -> None:
    """Keep a `value` under a `name`, if this process runs in a learner's copy.

    `kind` is one of the keys of `progress_in`. A full disk, or a folder that cannot be written, is
    ignored, so that a check still gives its result.
    """
    copy = find_copy()
    if copy is None:
        return
    with suppress(OSError), FileLock(f"{copy / PROGRESS}.lock", timeout=5):
        known = progress_in(copy)
        known.setdefault(kind, {})[name] = value
        known["visited"] = time.time()
        write_whole(copy / PROGRESS, json.dumps(known, indent=1).encode(), 0o644)
