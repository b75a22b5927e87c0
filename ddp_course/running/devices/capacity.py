"""What one core of this processor carries: an emulated device must leave it time for the real
arithmetic.
"""

import time
import timeit
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.functional import conv2d

from ..linux import usable_cores

# the arithmetic may take this share of the emulated time; communication and Python need the rest
HALF = 0.5
TRIES, CALLS = 8, 5
SAMPLES, CHANNELS, SIDE = (
    16,
    32,
    8,
)  # the digits' small convolutions are the slowest of what the lessons train


def fitting(device: Any, world_size: int) -> float:
    """Return the factor by which `device` must be slower so that `world_size` of them fit; 1 or
    less if they do fit.
    """
    flops, nbytes = of_core()
    share = HALF * min(1.0, usable_cores() / world_size)
    return max(device.rate / (share * flops), (device.memory or 0.0) / (share * nbytes))


@cache
def of_core() -> tuple[float, float]:
    """Return what one core does per second: the flops of a convolution, and the bytes of an
    addition in place.
    """
    images, kernels = (
        torch.randn(SAMPLES, CHANNELS, SIDE, SIDE),
        torch.randn(CHANNELS, CHANNELS, 3, 3),
    )
    total, term = torch.zeros(2, 1 << 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = most_per_second(
            lambda: conv2d(images, kernels, padding=1), 2 * images.numel() * CHANNELS * 9
        )
        return flops, most_per_second(lambda: total.add_(term), 3 * total.nbytes)
    finally:
        torch.set_num_threads(threads)


def most_per_second(operation: Callable, work: float) -> float:
    """Return how much of its `work` an operation does per second of this thread's time, at best in
    several tries.
    """
    return (
        CALLS
        * work
        / min(timeit.repeat(operation, timer=time.thread_time, repeat=TRIES, number=CALLS))
    )
