"""Stage 4's ring with its additions under its transfers."""

from collections.abc import Sequence
from math import ceil

import torch
import torch.distributed as dist

from ddp_course import wire
from ddp_course.collectives.strides import copy_back, flat_memory

from . import streams

SEGMENT = 2**20  # A segment of this many bytes stays in the processor's cache until it is added.


@wire.collective
@torch.no_grad()
def pipelined_ring_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Stage 4's ring, chunk by chunk in the same order, but each chunk travels as several segments.

    A segment is passed on as soon as it is added, while the next one is still on its way. The
    tensor must be in a processor's memory, and time must be real.
    """
    flat = flat_memory(tensor)
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return tensor
    chunks = flat.tensor_split(world_size)
    pass_around(chunks, rank, group)
    return copy_back(flat, tensor)


def pass_around(chunks: Sequence[torch.Tensor], rank: int, group: dist.ProcessGroup | None) -> None:
    """Reduce-scatter and allgather, segment by segment."""
    world_size = len(chunks)
    parts = max(1, ceil(chunks[0].nbytes / SEGMENT))
    # The segments of this rank's tensor, in the order in which the left neighbour's come in.
    arriving: list[torch.Tensor] = []
    for step in range(2 * (world_size - 1)):
        arriving += chunks[(rank - 1 - step) % world_size].tensor_split(parts)
    # Reduce-scatter adds the segments that arrive; allgather keeps them as they are.
    to_add = len(arriving) // 2
    scratch = torch.empty_like(max(arriving, key=len))
    places = [scratch[: len(segment)] for segment in arriving[:to_add]]
    places += arriving[to_add:]
    with streams.to_neighbours(group, sum(chunk.nbytes for chunk in chunks)) as links:
        for segment in chunks[rank].tensor_split(parts):
            links.send(segment)
        for number, place in enumerate(links.received(places)):
            if number < to_add:
                arriving[number].add_(place)
            if number + parts < len(arriving):  # What comes in the last step goes no further.
                links.send(arriving[number])
