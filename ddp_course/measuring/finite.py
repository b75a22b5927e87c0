"""NaN and infinity, named where they arise: an average spreads them to all ranks, and hides where they came from."""

import math

import torch
import torch.distributed as dist

from ..errors import NotFiniteError


def watch(model):
    """Check each gradient of `model` on this rank before it is averaged; call this before wrapping the model.

    `backward()` then raises NotFiniteError with this rank and the parameter. Returns the hooks' handles. The check
    is one sum a parameter: a sum is finite only if all its terms are.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [parameter.register_post_accumulate_grad_hook(lambda p: check(p.grad, names[p])) for parameter in names]


def check(gradient, name):
    """Raise NotFiniteError if the `gradient` of the parameter called `name` has NaN or infinite elements."""
    if gradient.is_sparse or math.isfinite(gradient.sum().item()) or bool(gradient.isfinite().all()):
        return  # the last: finite terms whose sum is too large for the dtype
    bad = int((~gradient.isfinite()).sum())
    rank = dist.get_rank() if dist.is_initialized() else 0
    raise NotFiniteError(
        f"rank {rank}: {bad} of {gradient.numel()} elements of the gradient of {name} are not finite "
        f"({describe(gradient)}). Nothing was averaged. Look at this rank's batch and at the learning rate."
    )


def describe(tensor):
    """ "NaN", "infinite" or both: what is wrong with `tensor`."""
    kinds = [("NaN", torch.isnan(tensor)), ("infinite", torch.isinf(tensor))]
    return " and ".join(name for name, found in kinds if bool(found.any()))
