"""Parameters must be equal on all ranks at the start, buffers before every forward pass.

Buffers, such as the running averages of batch normalisation, have no gradients that could keep them equal: each rank
updates its own from its own share of the batch. So rank 0's are broadcast, and those of the others are lost.
"""

import torch
import torch.distributed as dist

MESSAGE = 250 * 2**20  # a broadcast has no more bytes, because its flat copy takes memory


@torch.no_grad()
def broadcast_tensors(tensors, src=0, group=None):
    """Overwrite `tensors` with those of rank `src` of `group`, in few messages: many tensors travel in one."""
    for batch in batches(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
        dist.broadcast(flat, group_src=src, group=group)
        if dist.get_rank(group) != src:
            for tensor, piece in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


def batches(tensors, limit=MESSAGE):
    """Split `tensors` into lists of one dtype and device and at most `limit` bytes (or a single tensor)."""
    filling = {}
    for tensor in tensors:
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        batch, so_far = filling.get(key, ([], 0))
        if batch and so_far + size > limit:
            yield batch
            batch, so_far = [], 0
        filling[key] = [*batch, tensor], so_far + size
    for batch, _ in filling.values():
        yield batch
