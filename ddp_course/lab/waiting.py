"""Counts seconds in a line on the terminal while something takes long."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK_SECONDS = 1


@contextmanager
def say_while(text: str, wanted: bool = True) -> Iterator[None]:
    """Show `text` and count seconds on the terminal while this block runs.

    Later output replaces the seconds. Nothing is shown without a terminal, or unless it is
    `wanted`.
    """
    ended = threading.Event()

    def count_seconds():
        seconds = 0
        while not ended.wait(TICK_SECONDS):
            seconds += TICK_SECONDS
            print(f"{seconds} s", end="\r", file=sys.stderr, flush=True)

    if wanted and sys.stderr and sys.stderr.isatty():
        print(text, file=sys.stderr)
        # Nobody joins this thread: it ends as soon as `ended` is set.
        threading.Thread(target=count_seconds).start()
    try:
        yield
    finally:
        ended.set()
