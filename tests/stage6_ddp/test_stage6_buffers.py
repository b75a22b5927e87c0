"""Buffers on their way to the other ranks: from which rank, in how many messages, and unnoticed by autograd."""

import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.stage6_ddp.buffers import batches, broadcast_tensors


def sent():
    """Tensors of two dtypes after a broadcast from rank 0, and from rank 1."""
    results = []
    for source in ((), (1,)):
        tensors = [torch.full((2,), dist.get_rank() + 5.0), torch.tensor(dist.get_rank() + 7)]
        broadcast_tensors(tensors, *source)
        results.append([tensors[0].tolist(), tensors[1].item()])
    return results


def test_all_ranks_get_the_tensors_of_one():
    assert launch(sent, world_size=3) == [[[[5, 5], 7], [[6, 6], 8]]] * 3


def test_many_buffers_travel_in_few_messages():
    sizes, kinds = (3, 4, 9, 2, 2), (torch.float32, torch.float32, torch.float32, torch.int64, torch.float32)
    tensors = [torch.zeros(size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)]
    messages = [[len(tensor) for tensor in batch] for batch in batches(tensors, limit=28)]
    assert sorted(messages) == [[2], [2], [3, 4], [9]]  # one dtype each, 28 bytes at most or a single tensor
