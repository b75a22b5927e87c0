"""Tensors of any strides as flat memory, and back."""

import torch


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensor` as flat memory: the tensor's own, or a copy.

    It is a copy if the tensor has gaps, or is a conjugated or negated view.
    """
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    # A single element may have any stride, so the stride is set here.
    return flat.as_strided([flat.numel()], [1])


def copy_back(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with the values of `flat`, which may be its own memory."""
    return tensor if flat.data_ptr() == tensor.data_ptr() else tensor.copy_(flat.view(tensor.shape))
