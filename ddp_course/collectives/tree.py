"""The binomial tree: few steps, in which whole tensors travel."""

import torch
import torch.distributed as dist

from .. import wire
from .strides import copy_back, flat_memory


@wire.collective
@torch.no_grad()
def tree_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum up a binomial tree to rank 0, and copy the result down the same tree.

    A rank r that is an odd multiple of d = 1, 2, 4, … has rank r - d above it, and below it those
    of the ranks r + 1, r + 2, r + 4, … r + d/2 that exist.
    """
    flat = flat_memory(tensor)
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    # This is the docstring's d; it is 0 for rank 0, which has nobody above it.
    lowest_bit = rank & -rank
    above = wire.global_rank(rank - lowest_bit, group)
    below = []
    distance = 1
    while distance < (lowest_bit or world_size) and rank + distance < world_size:
        below.append(wire.global_rank(rank + distance, group))
        distance *= 2
    incoming = torch.empty_like(flat)
    for peer in below:
        wire.recv(incoming, peer, group)
        flat += incoming
    if lowest_bit:
        wire.send(flat, above, group)
        wire.recv(flat, above, group)
    for peer in reversed(below):
        wire.send(flat, peer, group)
    return copy_back(flat, tensor)
