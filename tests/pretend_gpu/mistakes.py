"""Mistakes that a GPU punishes late or rarely, and the right ways.

`mistakes.py NAME right|wrong` runs one on two ranks.
"""

import sys
import threading

import torch
import torch.distributed as dist

from ddp_course import launch
from manyranks.devices import rank_device


def missing_wait(right):
    """Use a gradient before its all-reduce is over."""
    gradient = torch.ones(1000, device=rank_device())
    work = dist.all_reduce(gradient, async_op=True)
    if right:
        work.wait()
    return gradient.mul_(0.5)


def too_early(right):
    """Read on a stream what another has not written yet."""
    side = torch.cuda.Stream()
    values = torch.ones(1000, device=rank_device())
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.sum()


def not_awaited(right):
    """Read the result of another stream too early."""
    side = torch.cuda.Stream()
    values = torch.ones(1000, device=rank_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        double = values * 2
    if right:
        torch.cuda.current_stream().wait_stream(side)
    return double + 1


def freed_early(right):
    """Memory is given out again while another stream reads it."""
    side = torch.cuda.Stream()
    values = torch.ones(1000, device=rank_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.sum()
    if right:
        values.record_stream(side)
    del values
    return torch.zeros(1000, device=rank_device())


def other_device(right):
    """Use a tensor of another rank's GPU."""
    foreign = rank_device() if right else torch.device("cuda", 1 - dist.get_rank())
    return torch.ones(3, device=rank_device()) + torch.ones(3, device=foreign)


def other_collective(right):
    """Let one rank sum and the other one broadcast."""
    values = torch.ones(3, device=rank_device())
    if right or dist.get_rank() == 0:
        dist.all_reduce(values)
    else:
        dist.broadcast(values, 0)


def new_thread(right):
    """Start a new thread, which begins on GPU 0."""

    def job():
        if right:
            torch.cuda.set_device(rank_device())
        torch.ones(1, device="cuda")

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()


def item_in_the_loop(right):
    """Let the processor wait for each of twenty losses, where the last one would do."""
    loss = torch.zeros((), device=rank_device())
    for _ in range(20):
        loss = loss + 1
        if not right and loss.item() > 100:
            break


MISTAKES = {
    function.__name__: function
    for function in (
        missing_wait, too_early, not_awaited, freed_early, other_device, other_collective,
        new_thread, item_in_the_loop,
    )
}  # fmt: skip


def call(name, right):
    """Make the mistake and return nothing: a result would make the processor wait."""
    MISTAKES[name](right)


if __name__ == "__main__":
    launch(call, sys.argv[1], sys.argv[2] == "right", world_size=2)
