"""What a rank counts of its training: the steps of its optimizers."""

from typing import Any, cast

from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import flight_recorder, torch_inside
from .protocol import Stepped, send


class Steps:
    """Counts the steps of a rank's optimizers, and reports their number on the pipe `report`, if
    there is one.
    """

    def __init__(self, report: int | None):
        self.report = report
        self.done = 0
        self.optimizer = cast(Any, None)
        register_optimizer_step_post_hook(self.count)

    def count(self, optimizer: Any, *_: Any) -> None:
        self.done += 1
        self.optimizer = optimizer
        if self.report is not None:
            send(self.report, Stepped(self.done))

    def unconnected_model(self) -> float | None:
        """Return the sum over the model that this call trained, if this rank has exchanged no
        message; else None.
        """
        optimizer = self.optimizer
        self.optimizer = None  # Kept ranks have other calls, which may train nothing.
        if optimizer is None or torch_inside.messages() or flight_recorder.sequences:
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return sum(p.detach().double().sum().item() for p in parameters)
