"""A learner's copy of the course, and what is kept in it: tasks solved, guesses, the last visit."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from .files import write_whole

RECORD = ".ddp-course.json"  # `ddp-course lab` marks a copy with this file.
PROGRESS = ".ddp-course-progress.json"


def find_copy() -> Path | None:
    """The copy in which this process runs, or that lies in `work` below it; None without one."""
    folder = Path.cwd()
    places = (folder, *folder.parents, folder / "work")
    return next((place for place in places if (place / RECORD).is_file()), None)


def progress_in(copy: Path) -> dict[str, Any]:
    """{"tasks": {task: solved}, "guesses": {question: right}, "visited": seconds since 1970}, as
    far as something is known.
    """
    try:
        return json.loads((copy / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def keep(kind: str, name: str, value: bool) -> None:
    """Keep the result of a task or a guess; nothing is kept outside a copy, and no full disk or
    folder without rights may cost a check.
    """
    copy = find_copy()
    if copy is None:
        return
    with suppress(OSError), FileLock(f"{copy / PROGRESS}.lock", timeout=5):
        known = progress_in(copy)
        known.setdefault(kind, {})[name] = value
        known["visited"] = time.time()
        write_whole(copy / PROGRESS, json.dumps(known, indent=1).encode(), 0o644)
