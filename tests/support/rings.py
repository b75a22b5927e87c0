"""A ring all-reduce in plain `torch.distributed` that the flight recorder knows.

Tests run it where they need an algorithm of many messages.
"""

import torch
import torch.distributed as dist

from manyranks import flight_recorder


def ring_all_reduce(tensor):
    """Sum a contiguous `tensor` over all ranks in place: a chunk goes right in each step."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    with flight_recorder.entry("ring_all_reduce", tensor, None):
        chunks = tensor.view(-1).tensor_split(size)
        for step in range(size - 1):
            target = chunks[(rank - step - 1) % size]
            received = torch.empty_like(target)
            exchange(chunks[(rank - step) % size], received)
            target += received
        for step in range(size - 1):
            exchange(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size])
    return tensor


def exchange(outgoing, incoming):
    """Send to the right neighbour while receiving from the left one."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    tag = flight_recorder.tag()
    arriving = dist.irecv(incoming, (rank - 1) % size, tag=tag)
    leaving = dist.isend(outgoing, (rank + 1) % size, tag=tag)
    arriving.wait()
    leaving.wait()
