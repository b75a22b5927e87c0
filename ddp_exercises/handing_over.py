"""In the grader, a check hands over the answers that it is given, to be tried elsewhere."""

import linecache
import os
from pathlib import Path

HAND_OVER = "DDP_COURSE_HAND_OVER"  # This variable names a folder for a kernel's answers.


def hand_over(number: str, answers: tuple) -> None:
    """Write down the answers that a check cell is given in the grader.

    With them goes the source of the cells they come from.
    """
    from manyranks.launching.pickling import dumps  # Importing `check` alone does not need it.

    # An entry is (length, time, lines, name); one that has not been read yet is shorter.
    sources = {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
    Path(os.environ[HAND_OVER], f"{number}.answers").write_bytes(dumps((answers, sources)))
