"""The progress bar of a launch, which the caller draws from the steps that rank 0 reports."""

import sys
import time
from contextlib import nullcontext, suppress
from typing import Any, cast

PATIENCE_SECONDS = 1.0


class Bar:
    """The bar in the caller, which is made at the first step, or when that is long in coming. Its
    seconds go on also where no step ends.
    """

    def __init__(self, progress: Any):
        """`progress`: how many steps are expected, a name and that, or True if nobody knows."""
        if not isinstance(progress, tuple):
            progress = ("rank 0", progress)
        self.name, self.total = progress
        self.bar = cast(Any, None)
        self.due = time.monotonic() + PATIENCE_SECONDS

    def wait(self) -> None:
        """Draw the bar anew every second, if one is wanted, so that its seconds go on."""
        if self.total and time.monotonic() > self.due:
            self.due += PATIENCE_SECONDS
            if self.bar is None:
                self.advance_to(0)
            self.bar.refresh()

    def advance_to(self, steps: int) -> None:
        """Show that rank 0 has done `steps` optimizer steps."""
        if self.bar is None:
            from tqdm.auto import tqdm  # this loads the notebook's widgets, which ranks do not need

            total = None if self.total is True else self.total
            self.bar = tqdm(total=total, desc=self.name, unit="step", disable=sys.stderr is None)
        self.bar.update(steps - self.bar.n)

    def print(self, text: str, stream: str) -> None:
        """Print a line above the bar. A stream that is closed or lacks a character must not cost
        the results.
        """
        file = getattr(sys, stream)
        above = nullcontext() if self.bar is None else self.bar.external_write_mode(file=file)
        # The stream may be None, or closed.
        with suppress(OSError, ValueError, AttributeError), above:
            try:
                file.write(text)
            except UnicodeEncodeError:
                file.write(text.encode(file.encoding, "backslashreplace").decode(file.encoding))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
