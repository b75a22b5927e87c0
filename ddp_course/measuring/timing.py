"""How long a collective takes, on all ranks: the slowest counts. And layers that take a known time."""

import os
import signal
import tempfile
from contextlib import contextmanager
from time import perf_counter, sleep
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ..running import wire
from ..running.launch import launch


def time_collective(collective, nbytes, world_size, link=None, repeats=5):
    """Seconds of `collective(tensor)` on a float32 tensor of `nbytes` and `world_size` ranks: the best of `repeats`.

    The slowest rank counts in each. The best of several is the one that was least disturbed by what else runs on the
    machine. `collective` works in place and is called once beforehand, to open the connections.
    """
    ranks = launch(_time_on_rank, collective, nbytes, repeats, world_size=world_size, link=link, device="cpu")
    return min(max(times) for times in zip(*ranks, strict=True))


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
    return launch(_count_on_rank, collective, nbytes, world_size=world_size, device="cpu")


def _count_on_rank(collective, nbytes):
    tensor = torch.full((nbytes // 4,), 1.0 + dist.get_rank())
    with wire.counting() as traffic:
        collective(tensor)
    return traffic


@contextmanager
def stopwatch():
    """Time a block: `with stopwatch() as watch: …`, then `watch.seconds`."""
    watch, start = SimpleNamespace(seconds=0.0), perf_counter()
    yield watch
    watch.seconds = perf_counter() - start


class Delay(torch.nn.Module):
    """A layer that takes time and leaves its inputs alone: milliseconds a sample, forward and backward.

    It sleeps, so that ranks which share a core do not slow each other down, and waiting shows up as waiting.
    """

    def __init__(self, forward_ms, backward_ms):
        super().__init__()
        self.forward_ms, self.backward_ms = forward_ms, backward_ms

    def forward(self, inputs):
        """(N, …) to the same, after N times `forward_ms`."""
        return _Sleep.apply(inputs, self.forward_ms, self.backward_ms)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs, forward_ms, backward_ms):
        context.backward_ms = backward_ms
        sleep(forward_ms * len(inputs) / 1000)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context, gradient):
        sleep(context.backward_ms * len(gradient) / 1000)
        return gradient, None, None


def kill_this_process():
    """End this process as the system does when memory runs out: by SIGKILL, at once, without a word."""
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


@contextmanager
def temporary_folder():
    """A new folder, as text, that is deleted after the block."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder
