"""Rings inside hosts around rings between them: for links of two speeds."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..running import wire
from .flat import copied_back, flattened


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
    size = min(world_size, ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if world_size % size:
        raise ValueError(
            f"{world_size} ranks cannot be divided into hosts of {size}; choose ranks_per_host"
            " to fit"
        )
    host, place = divmod(rank, size)
    inside = [host * size + i for i in range(size)]
    across = [i * size + place for i in range(world_size // size)]
    flat = flattened(tensor)
    chunks = flat.tensor_split(size)
    finished = reduce_scatter_among(chunks, inside, group)
    pieces = chunks[finished].tensor_split(len(across))
    reduce_scatter_among(pieces, across, group)
    allgather_among(pieces, across, group)
    allgather_among(chunks, inside, group)
    return copied_back(flat, tensor)


def reduce_scatter_among(
    chunks: Sequence[torch.Tensor], members: list[int], group: dist.ProcessGroup | None = None
) -> int:
    """Stage 4's reduce-scatter in the ring of the ranks `members`; return the index of the chunk
    finished here.
    """
    place, size, left, right = ring_of(members, group)
    scratch = torch.empty_like(chunks[0])
    for step in range(size - 1):
        target = chunks[(place - step - 1) % size]
        wire.exchange(chunks[(place - step) % size], right, scratch[: len(target)], left, group)
        target += scratch[: len(target)]
    return (place + 1) % size


def allgather_among(
    chunks: Sequence[torch.Tensor], members: list[int], group: dist.ProcessGroup | None = None
) -> None:
    """Stage 4's allgather in the ring of the ranks `members`."""
    place, size, left, right = ring_of(members, group)
    for step in range(size - 1):
        wire.exchange(
            chunks[(place + 1 - step) % size], right, chunks[(place - step) % size], left, group
        )


def ring_of(
    members: list[int], group: dist.ProcessGroup | None = None
) -> tuple[int, int, int, int]:
    """Return this rank's place among `members`, their number, and the neighbours' global ranks."""
    size = len(members)
    place = members.index(dist.get_rank(group))
    left, right = (wire.global_rank(members[(place + step) % size], group) for step in (-1, 1))
    return place, size, left, right
