"""The progress bar of a launch, which the caller draws from the steps that rank 0 reports."""

import sys
import time
from contextlib import nullcontext, suppress
from typing import Any

from .protocol import Progress

DRAWING_SECONDS = 1.0  # The bar is drawn this often.
LATE_SECONDS = 5.0  # Nobody should look at nothing for longer.


def somebody_looks() -> bool:
    """Tell whether a person sees what appears now: at a terminal, or in a notebook that is open.

    Programs that run notebooks, such as tests, take no input.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return sys.stderr is not None and sys.stderr.isatty()
    return getattr(getattr(shell, "kernel", None), "_allow_stdin", False)


class Bar:
    """The bar that the caller shows.

    It appears with the first step, or after a second without one, and its seconds go on between
    steps, too. A launch without steps that takes long shows its seconds as long as it runs.
    """

    def __init__(self, progress: Progress):
        """Prepare a bar for `progress` steps.

        It is True if nobody knows the number, False for no bar, or a pair of the bar's name and one
        of these.
        """
        if not isinstance(progress, tuple):
            progress = ("rank 0", progress)
        self.name, self.total = progress
        self.bar: Any = None  # what is drawn
        wait = DRAWING_SECONDS if self.total else LATE_SECONDS
        self.next_drawing = time.monotonic() + wait

    def tick(self) -> None:
        """Draw the bar again every second, if one is wanted, so that its seconds go on."""
        if time.monotonic() > self.next_drawing:
            self.next_drawing += DRAWING_SECONDS
            if self.bar is None and self.total:
                self.advance_to(0)
            elif self.bar is None and somebody_looks():
                self.bar = self.seconds()
            if self.bar is not None:
                self.bar.refresh()

    def seconds(self) -> Any:
        """Return a bar without a length that says how long the launch takes, and ends with it."""
        from .drawn_bar import DrawnBar

        seconds = DrawnBar(bar_format="the launch runs: {elapsed}", leave=False)
        seconds.start_t -= LATE_SECONDS
        return seconds

    def advance_to(self, steps: int) -> None:
        """Show that rank 0 has done `steps` optimizer steps."""
        if self.bar is None:
            # This loads the notebook's widgets, which ranks do not need.
            from .drawn_bar import DrawnBar

            total = None if self.total is True else self.total  # tqdm's None is "nobody knows".
            hidden = sys.stderr is None
            self.bar = DrawnBar(total=total, desc=self.name, unit="step", disable=hidden)
        self.bar.update(steps - self.bar.n)

    def print(self, text: str, stream: str) -> None:
        """Print a line above the bar, on "stdout" or "stderr".

        A stream that is closed or lacks a character costs the line, and not the results.
        """
        file = getattr(sys, stream)
        above_bar = nullcontext() if self.bar is None else self.bar.external_write_mode(file=file)
        # The stream may be None or closed.
        with suppress(OSError, ValueError, AttributeError), above_bar:
            try:
                file.write(text)
            except UnicodeEncodeError:
                writable = text.encode(file.encoding, "backslashreplace")
                file.write(writable.decode(file.encoding))

    def close(self) -> None:
        """End the bar: a full one stays, and another goes."""
        if self.bar is not None:
            self.bar.close()
