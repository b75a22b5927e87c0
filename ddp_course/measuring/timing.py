"""How long a collective takes, on all ranks: the slowest counts, because everyone waits for it."""

import statistics
from time import perf_counter

import torch
import torch.distributed as dist

from ..running import wire
from ..running.launch import launch


def time_collective(collective, nbytes, world_size, link=None, repeats=3):
    """Median seconds of `collective(tensor)` on a float32 tensor of `nbytes`, over `repeats`, on `world_size` ranks.

    `collective` works in place and is called once beforehand, to open the connections. The slowest rank counts.
    """
    ranks = launch(_time_on_rank, collective, nbytes, repeats, world_size=world_size, link=link)
    return statistics.median(max(times) for times in zip(*ranks, strict=True))


def _time_on_rank(collective, nbytes, repeats):
    tensor = torch.full((nbytes // 4,), 1.0 + dist.get_rank())
    collective(tensor.clone())
    times = []
    for _ in range(repeats):
        mine = tensor.clone()
        dist.barrier()
        start = perf_counter()
        collective(mine)
        times.append(perf_counter() - start)
    return times


def count_traffic(collective, nbytes, world_size):
    """What each rank sends and receives in one `collective(tensor)` of `nbytes`: a list of `wire.Traffic`."""
    return launch(_count_on_rank, collective, nbytes, world_size=world_size)


def _count_on_rank(collective, nbytes):
    tensor = torch.full((nbytes // 4,), 1.0 + dist.get_rank())
    with wire.counting() as traffic:
        collective(tensor)
    return traffic
