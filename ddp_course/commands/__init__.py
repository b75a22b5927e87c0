"""Commands of this package: what `ddp-course` runs, one file each."""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

DOT_SECONDS = 2.0


@contextmanager
def say_while(text: str) -> Iterator[None]:
    """While the block runs, show `text` and a growing line of dots; only on a terminal."""
    ended = threading.Event()

    def add_dots() -> None:
        while not ended.wait(DOT_SECONDS):
            print(".", end="", file=sys.stderr, flush=True)

    if not (sys.stderr and sys.stderr.isatty()):
        yield
        return
    print(f"{text} ", end="", file=sys.stderr, flush=True)
    threading.Thread(target=add_dots, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        print(file=sys.stderr)


def as_typed(words: str) -> str:
    """`ddp-course` with `words`, as it is to be typed in this shell: with its path where the shell
    would not find it.
    """
    program = sys.argv[0]
    if shutil.which("ddp-course") or not program.endswith("ddp-course"):
        return f"ddp-course {words}"
    return f"{min(program, os.path.relpath(program), key=len)} {words}"
