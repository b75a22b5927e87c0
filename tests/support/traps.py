"""A layer that raises where it is told to, for tests of what comes after an error."""

import torch


class Boom(Exception):
    """What goes wrong in the middle of a pass."""


class Trap(torch.nn.Module):
    """Passes its input on, or raises in forward or in backward."""

    place = None

    def forward(self, inputs):
        """Any shape."""
        if self.place == "forward":
            raise Boom
        if self.place == "backward" and inputs.requires_grad:
            inputs.register_hook(self.spring)
        return inputs * 1

    def spring(self, gradient):
        """Raise, as a hook."""
        raise Boom
