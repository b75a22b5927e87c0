"""Measures how long a collective takes on all ranks, and how much it sends; and a stopwatch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from manyranks.devices import rank_device
from manyranks.launching.launch import launch
from manyranks.links import Link

from ... import wire


def time_collective(
    collective: Callable[[torch.Tensor], Any],
    nbytes: int,
    world_size: int,
    link: Link | None = None,
    repeats: int = 5,
    device: str = "cpu",
) -> float:
    """Return the seconds of `collective(tensor)` on `world_size` ranks: the best of `repeats`.

    The tensor has `nbytes` of float32. In each repeat the slowest rank counts. The best repeat is
    the one that other programs on the machine disturbed least. `collective` works in place, and is
    called once beforehand to open the connections. `device` is as in `launch`.
    """
    ranks = launch(
        _on_rank, collective, nbytes, repeats, world_size=world_size, link=link, device=device
    )
    times_by_rank = [times for _, times in ranks]
    return min(max(repeat) for repeat in zip(*times_by_rank, strict=True))


def count_traffic(
    collective: Callable[[torch.Tensor], Any], nbytes: int, world_size: int
) -> list[wire.Traffic]:
    """Return what each rank sends and receives in one `collective(tensor)` of `nbytes`."""
    ranks = launch(_on_rank, collective, nbytes, 0, world_size=world_size, device="cpu")
    return [traffic for traffic, _ in ranks]


def _on_rank(collective, nbytes, repeats):
    """Return the traffic of a first call, which opens connections, and the seconds of `repeats`."""
    tensor = torch.full((nbytes // 4,), 1.0 + dist.get_rank(), device=rank_device())
    times = []
    # The collective works in place: each call gets a copy, so that numbers do not grow.
    with wire.counting() as traffic:
        collective(tensor.clone())
    for _ in range(repeats):
        copied = tensor.clone()
        synchronize(copied)
        dist.barrier()
        start = perf_counter()
        collective(copied)
        synchronize(copied)
        times.append(perf_counter() - start)
    return traffic, times


def synchronize(tensor: torch.Tensor) -> None:
    """Wait until a GPU has done the work that is queued; a processor has none."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


@contextmanager
def stopwatch() -> Iterator[SimpleNamespace]:
    """Time a block: `with stopwatch() as watch: …`, then `watch.seconds`."""
    watch = SimpleNamespace(seconds=0.0)
    start = perf_counter()
    yield watch
    watch.seconds = perf_counter() - start
