"""NaN and infinity, named where they arise: an average spreads them to all ranks, and hides where
they came from.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from ..errors import NotFiniteError
from ..running.torch_inside import after_backward, backward_pass


def watch(model: torch.nn.Module) -> list:
    """Check each gradient of `model` on this rank before it is averaged; call this before wrapping
    the model.

    `backward()` then raises NotFiniteError with this rank and the parameter. Returns the hooks'
    handles. The check is one sum per parameter: a sum is finite only if all its terms are. On a GPU
    all sums are read together, when the pass is over: reading each would make the CPU wait for the
    GPU each time.
    """
    names = {
        parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    later = Later(names)

    def check_parameter(parameter):
        """Look at a gradient that has just been made, now or on a GPU at the end of the pass."""
        if parameter.is_cuda:
            later.note(parameter)
        else:
            check(parameter.grad, names[parameter])

    return [parameter.register_post_accumulate_grad_hook(check_parameter) for parameter in names]


class Later:
    """The sums of one backward pass, which are started as its gradients are made and read when the
    pass is over.
    """

    def __init__(self, names):
        self.names = names
        self.sums = {}
        self.backward_pass = None

    def note(self, parameter: nn.Parameter) -> None:
        """Queue the sum of a gradient that has just been made; nothing waits for it."""
        if self.backward_pass != backward_pass():
            self.sums = {}  # The last pass may have ended in an error.
            self.backward_pass = backward_pass()
            after_backward(self.check_sums)
        if not parameter.grad.is_sparse:
            gradient = parameter.grad.as_subclass(torch.Tensor)  # It may be a part of one.
            self.sums[self.names[parameter]] = gradient.sum(dtype=torch.float64)

    def check_sums(self) -> None:
        """Wait for all sums at once; raise NotFiniteError for the first that is not finite."""
        sums = self.sums
        self.sums = {}
        totals = torch.stack(list(sums.values())).tolist() if sums else []
        bad = [name for name, total in zip(sums, totals, strict=True) if not math.isfinite(total)]
        if bad:
            more = f", and of {len(bad) - 1} more parameters," if bad[1:] else ""
            raise NotFiniteError(
                f"rank {this_rank()}: the gradient of {bad[0]}{more} has NaN or infinite elements"
                " on this rank, from before the average. Look at this rank's batch and at the"
                " learning rate."
            )


def this_rank() -> int:
    """The rank of this process; 0 outside of a job."""
    return dist.get_rank() if dist.is_initialized() else 0


def check(gradient: torch.Tensor, name: str) -> None:
    """Raise NotFiniteError if the `gradient` of the parameter called `name` has NaN or infinite
    elements.
    """
    if gradient.is_sparse:
        return
    gradient = gradient.as_subclass(torch.Tensor)  # It may be a part of one.
    if math.isfinite(gradient.sum().item()) or bool(gradient.isfinite().all()):
        return  # Finite terms may have a sum that is too large for the dtype.
    kinds = {"NaN": gradient.isnan(), "infinite": gradient.isinf()}
    raise NotFiniteError(
        f"rank {this_rank()}: {int((~gradient.isfinite()).sum())} of {gradient.numel()} elements of"
        f" the gradient of {name} are not finite"
        f" ({' and '.join(kind for kind, elements in kinds.items() if elements.any())}). Nothing"
        " was averaged. Look at this rank's batch and at the learning rate."
    )
