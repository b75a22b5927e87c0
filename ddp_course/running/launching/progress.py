"""One progress bar for all ranks: rank 0 counts its optimizer steps, the caller draws them."""

import sys
import time
from collections.abc import Callable
from typing import Any, cast

from torch.optim.optimizer import register_optimizer_step_post_hook

from .channel import write

SECONDS_BETWEEN = 0.1


def count_steps(report: int) -> Callable:
    """In rank 0: report optimizer steps on the pipe `report`, ten times a second at most; returns the last report.

    Without any step nothing is reported, so that no dead bar is drawn.
    """
    done, told = 0, 0.0

    def tell():
        if done:
            write(report, ("steps", done))

    def stepped(*_):
        nonlocal done, told
        done += 1
        if time.monotonic() - told > SECONDS_BETWEEN:
            told = time.monotonic()
            tell()

    register_optimizer_step_post_hook(stepped)
    return tell


class Bar:
    """The bar in the caller: made with the first step, so that nothing is drawn if nothing trains."""

    def __init__(self, total: int | None):
        self.total, self.bar = total, cast(Any, None)

    def advance_to(self, steps: int) -> None:
        """Show that rank 0 has done `steps` optimizer steps."""
        if self.bar is None:
            from tqdm.auto import tqdm  # here: it loads the notebook's widgets, which ranks do not need

            self.bar = tqdm(total=self.total, desc="rank 0", unit="step")
        self.bar.update(steps - self.bar.n)

    def print(self, text: str, stream: str) -> None:
        """Print a line above the bar."""
        if self.bar is None:
            getattr(sys, stream).write(text)
            return
        with self.bar.external_write_mode(file=getattr(sys, stream)):
            getattr(sys, stream).write(text)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()
