"""Commands of this package: what `ddp-course` runs, one file each."""

import os
import shutil
import sys


def as_typed(words: str) -> str:
    """`ddp-course` with `words`, as it is to be typed in this shell: with its path where the shell
    would not find it.
    """
    program = sys.argv[0]
    if shutil.which("ddp-course") or not program.endswith("ddp-course"):
        return f"ddp-course {words}"
    shortest = min(program, os.path.relpath(program), key=len)
    return f"{shortest} {words}"
