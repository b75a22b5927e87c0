"""Clips gradients by their norm where each rank has a part of them."""

import torch
import torch.distributed as dist

from ..stage4_ring import ring_all_reduce


def clip_grad_norm_(parameters, max_norm, norm_type, group, device):
    """Scale all ranks' gradients to a norm of at most `max_norm`; return the norm before.

    The result is that of `torch.nn.utils.clip_grad_norm_` with all gradients on one device. All
    ranks of `group` must call this; each sends 16 (K-1) bytes. Raises ValueError unless the order
    of the norm is positive.
    """
    parameters = list(parameters)
    total = total_norm(parameters, norm_type, group, device)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def total_norm(parameters, norm_type, group, device):
    """Return the norm of the gradients of all ranks' `parameters` together.

    Raises ValueError unless the order of the norm is positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be a positive number, or infinity")
    gradients = [
        parameter.grad.as_subclass(torch.Tensor)  # A part refuses to be given to a norm.
        for parameter in parameters
        if parameter.grad is not None and parameter.grad.numel()
    ]
    # The norm of the ranks' norms is the norm of all gradients. Each rank fills in its own place of
    # a vector, and the sum of these vectors has the norms of all.
    norms = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=device)
    norms[dist.get_rank(group)] = torch.nn.utils.get_total_norm(gradients, norm_type)
    return torch.linalg.vector_norm(ring_all_reduce(norms, group), norm_type)
