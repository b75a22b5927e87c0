"""What one core of this processor carries: an emulated device must leave it time for the real arithmetic."""

import time
from functools import cache
from typing import Any

import torch
from torch.nn.functional import conv2d

from ..linux import usable_cores

HALF = 0.5  # the arithmetic may take this share of the emulated time; communication and Python need the rest
TRIES = 5
SAMPLES, CHANNELS, SIDE = 16, 32, 8  # the digits' small convolutions are the slowest of what the lessons train
VALUES = 1 << 20


def fitting(device: Any, world_size: int) -> float:
    """By what factor `device` must be slower for `world_size` of them to fit this machine; 1 or less if they do."""
    flops, nbytes = of_core()
    share = HALF * min(1.0, usable_cores() / world_size)
    return max(device.rate / (share * flops), (device.memory or 0.0) / (share * nbytes))


@cache
def of_core() -> tuple[float, float]:
    """Floating-point operations and bytes per second on one core, each at its best of several tries.

    Counted in the thread's own processor time, so that it does not matter what else runs on the machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return max(convolving() for _ in range(TRIES)), max(adding() for _ in range(TRIES))
    finally:
        torch.set_num_threads(threads)


def convolving() -> float:
    """Floating-point operations per second of a convolution."""
    images, kernels = torch.randn(SAMPLES, CHANNELS, SIDE, SIDE), torch.randn(CHANNELS, CHANNELS, 3, 3)
    start = time.thread_time()
    for _ in range(TRIES):
        conv2d(images, kernels, padding=1)
    return TRIES * 2 * images.numel() * CHANNELS * 9 / (time.thread_time() - start)


def adding() -> float:
    """Bytes per second that an addition in place reads and writes."""
    total, term = torch.zeros(2, VALUES)
    start = time.thread_time()
    for _ in range(TRIES):
        total.add_(term)
    return TRIES * 3 * total.numel() * total.element_size() / (time.thread_time() - start)
