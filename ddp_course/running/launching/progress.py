"""One progress bar for all ranks: rank 0 counts its optimizer steps, the caller draws them."""

import sys
from contextlib import nullcontext, suppress
from typing import Any, cast

from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import flight_recorder, torch_inside
from .channel import send


class Steps:
    """Counts the steps of a rank's optimizers, and reports their number on the pipe `report`, if
    there is one.
    """

    def __init__(self, report: int | None):
        self.report, self.done, self.optimizer = report, 0, cast(Any, None)
        register_optimizer_step_post_hook(self.count)

    def count(self, optimizer: Any, *_: Any) -> None:
        self.done += 1
        self.optimizer = optimizer
        if self.report is not None:
            send(self.report, "steps", self.done)

    def unconnected_model(self) -> float | None:
        """Return the sum over the model that this call trained, if this rank has exchanged no
        message; else None.
        """
        optimizer, self.optimizer = self.optimizer, None
        if optimizer is None or torch_inside.messages() or flight_recorder.sequences:
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return sum(p.detach().double().sum().item() for p in parameters)


class Bar:
    """The bar in the caller, which is made at the first step, so that nothing is drawn if nothing
    trains.
    """

    def __init__(self, total: int | None):
        self.total, self.bar = total, cast(Any, None)

    def advance_to(self, steps: int) -> None:
        """Show that rank 0 has done `steps` optimizer steps."""
        if self.bar is None:
            from tqdm.auto import tqdm  # this loads the notebook's widgets, which ranks do not need

            self.bar = tqdm(
                total=self.total, desc="rank 0", unit="step", disable=sys.stderr is None
            )
        self.bar.update(steps - self.bar.n)

    def print(self, text: str, stream: str) -> None:
        """Print a line above the bar. A stream that is closed or lacks a character must not cost
        the results.
        """
        file = getattr(sys, stream)
        above = nullcontext() if self.bar is None else self.bar.external_write_mode(file=file)
        with (
            suppress(OSError, ValueError, AttributeError),
            above,
        ):  # the stream may be None, or closed
            try:
                file.write(text)
            except UnicodeEncodeError:
                file.write(text.encode(file.encoding, "backslashreplace").decode(file.encoding))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
