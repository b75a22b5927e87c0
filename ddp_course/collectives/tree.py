"""The binomial tree: few steps, whole tensors."""

import torch
import torch.distributed as dist

from ..running import wire
from .flat import copied_back, flattened


@wire.collective
@torch.no_grad()
def tree_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum up a binomial tree to rank 0, and copy the result down the same tree.

    In round d = 1, 2, 4, … every rank r that is an odd multiple of d sends its sum so far to rank r
    - d.
    """
    flat = flattened(tensor)
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    incoming = torch.empty_like(flat)
    distances = [2**i for i in range(max(1, world_size - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            wire.send(flat, wire.global_rank(rank - distance, group), group)
            break
        if rank % (2 * distance) == 0 and rank + distance < world_size:
            wire.recv(incoming, wire.global_rank(rank + distance, group), group)
            flat += incoming
    for distance in reversed(distances):
        if rank % (2 * distance) == 0 and rank + distance < world_size:
            wire.send(flat, wire.global_rank(rank + distance, group), group)
        elif rank % (2 * distance) == distance:
            wire.recv(flat, wire.global_rank(rank - distance, group), group)
    return copied_back(flat, tensor)
