"""Stage 4's ring with its additions under its transfers."""

import torch
import torch.distributed as dist

from ..running import wire
from . import streams
from .flat import copied_back, flattened

SEGMENT = 2**20  # bytes: small enough to stay in the processor's cache until added


@wire.collective
@torch.no_grad()
def pipelined_ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Stage 4's ring, chunk by chunk in the same order, but each chunk travels as several segments.

    A segment is passed on as soon as it is added, while the next one is still on its way.
    """
    flat = flattened(tensor)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return tensor
    chunks = flat.tensor_split(world_size)
    parts = max(1, -(-len(chunks[0]) * flat.element_size() // SEGMENT))
    steps = range(2 * (world_size - 1))
    arriving = [segment for s in steps for segment in chunks[(rank - 1 - s) % world_size].tensor_split(parts)]
    to_add = len(arriving) // 2  # the reduce-scatter adds its segments; the allgather keeps its as they come
    with streams.to_neighbours(group, flat) as links:
        scratch = flat.new_empty(links.ahead, max(map(len, arriving)))
        places = [scratch[n % links.ahead, : len(s)] if n < to_add else s for n, s in enumerate(arriving)]
        for segment in chunks[rank].tensor_split(parts):
            links.send(segment)
        for number, place in enumerate(links.received(places)):
            if number < to_add:
                arriving[number].add_(place)
            if number + parts < len(arriving):
                links.send(arriving[number])
    return copied_back(flat, tensor)
