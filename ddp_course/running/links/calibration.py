"""What an emulated link really carries, headers and all: the measured alpha and beta."""

import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.distributed as dist

from .. import wire
from ..launching.launch import launch
from .link import Link

SMALL = 8  # bytes: a message that takes no longer than the latency
MESSAGE_SECONDS, SHORTEST = 0.1, 1 << 15  # link time and least bytes of the longest message of a calibration
ROUNDS, PAUSE_SECONDS = 10, 0.01  # a pause, so that every message finds rested links


def calibrate(link: Link, world_size: int = 2) -> dict:
    """Measure the link by a ping-pong between two hosts: what it really carries, headers and all.

    Returns bandwidth_bits_s, latency_s (half a round trip of 8 bytes), and the points: bytes and seconds one way, the
    fastest of several, as whatever else the machine does only makes it slower. `world_size` ranks are up, the first
    two play. Measured once in a process for each setting.
    """
    return dict(_calibrate(link.mode, link.bandwidth, link.latency, world_size))


@cache
def _calibrate(mode, bandwidth, latency, world_size):
    link = Link(f"{bandwidth}bit", f"{latency}s", mode=mode)
    largest = max(int(MESSAGE_SECONDS * bandwidth / 8), SHORTEST)
    sizes = [SMALL, *(largest * quarter // 32 * 8 for quarter in (1, 2, 4))]
    points = launch(ping_pong, sizes, world_size=world_size, device="cpu", link=link)[0]
    slope, _ = np.polyfit(sizes[1:], points[1:], 1, w=1 / np.array(points[1:]))
    return {"bandwidth_bits_s": float(8 / slope), "latency_s": points[0], "bytes": sizes, "seconds": points}


def ping_pong(sizes: Sequence[int]) -> list:
    """Send messages of these sizes (bytes) to and fro between ranks 0 and 1; returns the fewest seconds one way."""
    rank, times = dist.get_rank(), {size: [] for size in sizes}
    for _ in range(ROUNDS if rank < 2 else 0):
        for size in sizes:
            message = torch.zeros(size, dtype=torch.uint8)
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            for turn in (0, 1):
                (wire.send if rank == turn else wire.recv)(message, 1 - rank)
            times[size].append((time.perf_counter() - start) / 2)
    dist.barrier()
    return [min(taken) for taken in times.values()] if rank < 2 else []
