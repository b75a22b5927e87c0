"""NaN and infinity are named where they arise, before an average spreads them to all ranks."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from .errors import NotFiniteError
from .torch_inside import after_backward, backward_pass


def watch_finite(model: nn.Module) -> list[RemovableHandle]:
    """Check each gradient of `model` on this rank before it is averaged.

    Call this before wrapping the model. `backward()` then raises NotFiniteError with this rank and
    the parameter. Returns the hooks' handles.

    The check is one sum per parameter: a sum is finite only if all its terms are. On a GPU all sums
    are read together, when the pass is over: reading each would make the CPU wait for the GPU each
    time.
    """
    names = {
        parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    sums = SumsOfPass(names)

    def check_parameter(parameter):
        """Check a gradient that was just made; on a GPU, note its sum for the end of the pass."""
        if parameter.is_cuda:
            sums.note(parameter)
        else:
            check(parameter.grad, names[parameter])

    return [parameter.register_post_accumulate_grad_hook(check_parameter) for parameter in names]


class SumsOfPass:
    """The sums of the gradients of one backward pass, by the parameters' `names`.

    Each sum is started as its gradient is made, and all are read when the pass is over.
    """

    def __init__(self, names):
        self.names = names
        self.sums = {}
        self.backward_pass = None

    def note(self, parameter: nn.Parameter) -> None:
        """Queue the sum of a gradient that has just been made; nothing waits for the sum."""
        if self.backward_pass != backward_pass():
            # The last pass may have ended in an error, which left its sums behind.
            self.sums = {}
            self.backward_pass = backward_pass()
            after_backward(self.check_sums)
        if not parameter.grad.is_sparse:
            # A part of a sharded parameter's gradient refuses to be summed as one.
            gradient = parameter.grad.as_subclass(torch.Tensor)
            self.sums[self.names[parameter]] = gradient.sum(dtype=torch.float64)

    def check_sums(self) -> None:
        """Wait for all sums at once; raise NotFiniteError for the first that is not finite."""
        sums = self.sums
        self.sums = {}
        totals = torch.stack(list(sums.values())).tolist() if sums else []
        names = [name for name, total in zip(sums, totals, strict=True) if not math.isfinite(total)]
        if names:
            first, *others = names
            more = f", and of {len(others)} more parameters," if others else ""
            raise NotFiniteError(
                f"rank {this_rank()}: the gradient of {first}{more} has NaN or infinite elements"
                " on this rank, from before the average. Look at this rank's batch and at the"
                " learning rate."
            )


def this_rank() -> int:
    """Return the rank of this process; 0 outside of a job."""
    return dist.get_rank() if dist.is_initialized() else 0


def check(gradient: torch.Tensor, name: str) -> None:
    """Raise NotFiniteError if the `gradient` of parameter `name` has NaN or infinite elements."""
    if gradient.is_sparse:
        return
    # A part of a sharded parameter's gradient refuses to be summed as one.
    gradient = gradient.as_subclass(torch.Tensor)
    # Finite terms may have a sum that is too large for the dtype.
    if math.isfinite(gradient.sum().item()) or gradient.isfinite().all():
        return
    kinds = []
    if gradient.isnan().any():
        kinds.append("NaN")
    if gradient.isinf().any():
        kinds.append("infinite")
    bad_elements = int((~gradient.isfinite()).sum())
    raise NotFiniteError(
        f"rank {this_rank()}: {bad_elements} of {gradient.numel()} elements of the gradient of"
        f" {name} are not finite ({' and '.join(kinds)}). Nothing was averaged. Look at this rank's"
        " batch and at the learning rate."
    )
