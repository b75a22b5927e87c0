"""Rings inside hosts around rings between them: for links of two speeds."""

import os

import torch
import torch.distributed as dist

from .. import wire
from ..stage4_ring import allgather, reduce_scatter
from ..torch_private import default_group
from .strides import copy_back, flat_memory


@wire.collective
@torch.no_grad()
def hierarchical_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, ranks_per_host: int | None = None
) -> torch.Tensor:
    """Two levels: reduce-scatter inside each host, a ring of the hosts for each chunk, allgather
    inside each host.

    Hosts are runs of `ranks_per_host` consecutive ranks (default: LOCAL_WORLD_SIZE, else all on one
    host); the number must divide K, or ValueError. Only 2(H-1)/H p/R bytes of a rank cross between
    the H hosts of R ranks.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    size = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    size = min(size, world_size)
    if world_size % size:
        raise ValueError(
            f"{world_size} ranks cannot be divided into hosts of {size}; choose ranks_per_host"
            " to fit"
        )
    whole = group or default_group()
    place = rank % size  # in the host
    first = rank - place
    inside = group_of(whole, range(first, first + size))
    across = group_of(whole, range(place, world_size, size))
    flat = flat_memory(tensor)
    chunks = flat.tensor_split(size)
    wire.warm_up(flat, inside)
    reduce_scatter(chunks, inside)
    # The ring left the sum of chunk `place` + 1 here, and on all ranks of `across`.
    pieces = chunks[(place + 1) % size].tensor_split(world_size // size)
    wire.warm_up(flat, across)
    reduce_scatter(pieces, across)
    allgather(pieces, across)
    allgather(chunks, inside)
    return copy_back(flat, tensor)


def group_of(whole: dist.ProcessGroup, members: range) -> dist.ProcessGroup:
    """The group of these members of `whole`, which is `whole` itself if they are all of it."""
    if len(members) == dist.get_world_size(whole):
        return whole
    return wire.group_of(whole, tuple(members))
