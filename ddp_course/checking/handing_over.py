"""In the grader, a check hands over the answers that it is given, to be tried elsewhere."""

import linecache
import os
from pathlib import Path

HAND_OVER = "DDP_COURSE_HAND_OVER"  # This variable names a folder for a kernel's answers.


def hand_over(number: str, answers: tuple) -> None:
    """Write down the answers that a check cell is given in the grader, with the source of the cells
    they come from.
    """
    from ..running.launching.pickling import dumps  # Importing `check` alone does not need it.

    sources = {}  # {name of a cell: its source}
    for name, entry in list(linecache.cache.items()):
        # (length, time, lines, name); an entry that has not been read yet is shorter.
        if len(entry) == 4 and not os.path.exists(name):
            sources[name] = "".join(entry[2])
    Path(os.environ[HAND_OVER], f"{number}.answers").write_bytes(dumps((answers, sources)))
