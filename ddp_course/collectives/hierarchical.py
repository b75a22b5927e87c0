"""Rings inside hosts around rings between hosts, for links of two speeds."""

import os

import torch
import torch.distributed as dist

from .. import wire
from ..base.torch_private import default_group
from ..stage4_ring import allgather, reduce_scatter
from .strides import copy_back, flat_memory


@wire.collective
@torch.no_grad()
def hierarchical_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, ranks_per_host: int | None = None
) -> torch.Tensor:
    """Sum `tensor` over the ranks of `group` in place, on two levels.

    Each host's ranks reduce-scatter; each chunk then goes around a ring of hosts; and the host's
    ranks allgather. Hosts are runs of `ranks_per_host` consecutive ranks (default:
    LOCAL_WORLD_SIZE, else all ranks on one host). Only 2(H-1)/H p/R bytes of a rank cross between
    the H hosts of R ranks. Raises ValueError if K is no multiple of the number.
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
    place = rank % size  # the rank's number in its host
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
    """Return the group of these members of `whole`, which is `whole` itself for all members."""
    if len(members) == dist.get_world_size(whole):
        return whole
    return wire.group_of(whole, tuple(members))
