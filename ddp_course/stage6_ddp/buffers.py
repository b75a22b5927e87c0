"""Makes parameters equal on all ranks at the start, and buffers before every forward pass.

Buffers, such as the running averages of batch normalisation, have no gradients that could keep them
equal: each rank updates its own from its own share of the batch. So rank 0's buffers are broadcast,
and those of the other ranks are lost.
"""

import torch.distributed as dist

from .. import wire
from ..stage3_paramserver import flattened, unflatten


def broadcast_tensors(tensors, src, group):
    """Overwrite `tensors` with those of rank `src` of `group`, a message per dtype and device."""
    for flat, members in flattened([tensor.detach() for tensor in tensors]):
        with wire.naming_absent(group):
            dist.broadcast(flat, group_src=src, group=group)
        unflatten(flat, members)
