"""Counts the steps of a rank's optimizers."""

from typing import Any, cast

from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import flight_recorder, torch_inside
from ..errors import ManyranksError
from .protocol import Stepped, send


class Steps:
    """Counts the steps of a rank's optimizers, and reports their number on the pipe `report`."""

    def __init__(self, report: int | None):
        self.report = report
        self.done = 0
        self.optimizer = cast(Any, None)  # the last one that made a step
        register_optimizer_step_post_hook(self.count)

    def count(self, optimizer: Any, *_: Any) -> None:
        """Count a step that this optimizer has made, and report the number."""
        self.done += 1
        self.optimizer = optimizer
        if self.report is not None:
            send(self.report, Stepped(self.done))

    def unconnected_model(self) -> float | None:
        """Return the sum of a trained model's weights if no message was exchanged, else None.

        Where these sums differ between ranks, so do the models.
        """
        optimizer = self.optimizer
        try:
            sent = torch_inside.messages()
        except ManyranksError:
            # This torch does not say how many messages there were.
            return None
        if optimizer is None or sent or flight_recorder.sequences:
            return None
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        return sum(parameter.detach().double().sum().item() for parameter in parameters)
