"""Classes that must fail: they have stage 6's whole interface, and do not average gradients."""

import torch
import torch.distributed as dist
from adapter import WithPrivateNames


class Silent(WithPrivateNames):
    """Every rank keeps its own gradients, whatever hook is registered."""

    def make_reducer(self):
        super().make_reducer()
        self.reducer.start = lambda bucket: bucket.buffer
        self.reducer.hooked = True

    def register_comm_hook(self, state, hook):
        """Nobody calls the hook."""


class OnceAtTheEnd(Silent):
    """Averages the weights once an iteration is over: replicas agree, and yet all are wrong."""

    @torch.no_grad()
    def before_forward(self):
        if torch.is_grad_enabled():
            for parameter in self.reducer.parameters:
                dist.all_reduce(
                    parameter.detach().div_(dist.get_world_size(self.process_group)),
                    group=self.process_group,
                )
        super().before_forward()
