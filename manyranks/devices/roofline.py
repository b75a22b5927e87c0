"""Says what an operation costs a device: its flops, and the bytes that it reads and writes.

A device takes max(flops/rate, bytes/memory bandwidth): the roofline. Source: Williams, Waterman and
Patterson, "Roofline: an insightful visual performance model for multicore architectures", CACM 52
(2009).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Attention has other names on the CPU, but its work is the same.
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
# These operations are no views for torch, but they touch no element either.
NO_TRAFFIC = {
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
}


def flops_formula(operation: Any) -> Callable | None:
    """Return torch's formula for the flops of an operation, or None if torch has none.

    The formula takes the operation's arguments, and its result as `out_val`.
    """
    packet = operation.overloadpacket
    return flop_registry.get(ATTENTION.get(packet, packet))


@cache
def is_attention(operation: Any) -> bool:
    """Return whether `operation` is all of attention in one."""
    return "scaled_dot_product" in operation.overloadpacket.__name__


@cache
def has_traffic(operation: Any) -> bool:
    """Return whether an operation reads or writes memory: views and collectives do not."""
    name = operation.overloadpacket.__name__
    return operation.namespace == "aten" and not operation.is_view and name not in NO_TRAFFIC


@cache
def yields_a_value(operation: Any) -> bool:
    """Return whether the host learns a value of a tensor by an operation, and so waits for a GPU.

    Such operations are `loss.item()`, or those whose result's size follows from values.
    """
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in operation.tags for tag in tags)
