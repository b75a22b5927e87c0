"""Tensors of any strides, worked on as flat memory."""

import torch


def copied_back(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with the values of `flat`, which is its own memory already if it is contiguous."""
    return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))
