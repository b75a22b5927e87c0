"""Ranks that disagree where nobody compares, as under torchrun.

All end within their group's time-out, and name the ranks that have not come.
"""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_course import DistributedDataParallel, FullyShardedDataParallel, stage9_tensor
from ddp_course.stage3_paramserver import average_on_server
from ddp_course.stage4_ring import ring_all_reduce
from manyranks import flight_recorder, launch

SECONDS = 3.0


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


def passes(parallel):
    """Rank 2 makes one pass less."""
    for _ in range(1 if dist.get_rank() == 2 else 2):
        parallel(torch.ones(3, 4)).sum().backward()


def comes_not(function, *arguments):
    if dist.get_rank() != 2:
        function(*arguments)


def size():
    return 8 if dist.get_rank() == 2 else 4


def split(group):
    layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    return stage9_tensor.parallelize(layers, group)


CASES = {
    "a pass less, stage 6": lambda group: passes(
        DistributedDataParallel(model(), process_group=group, broadcast_buffers=False)
    ),
    "a pass less, with buffers": lambda group: passes(
        DistributedDataParallel(model(), process_group=group)
    ),
    "unused parameters": lambda group: passes(
        DistributedDataParallel(model(), process_group=group, find_unused_parameters=True)
    ),
    "no wrapper on a rank, stage 6": lambda group: comes_not(
        lambda: DistributedDataParallel(model(), process_group=group)
    ),
    "no wrapper on a rank, stage 7": lambda group: comes_not(
        lambda: FullyShardedDataParallel(model(), process_group=group)
    ),
    "not split on a rank": lambda group: comes_not(split, group),
    "a pass less, stage 9": lambda group: passes(split(group)),
    "no message, stage 3": lambda group: comes_not(average_on_server, [torch.ones(3)], 0, group),
    "another size, stage 4": lambda group: ring_all_reduce(torch.ones(size()), group),
}


def outside_launch(case):
    """Return what a rank says in the end."""
    flight_recorder._own.memory = None
    dist.barrier()  # The group waits for no rank that still imports.
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    dist.barrier()
    try:
        CASES[case](group)
        said = ""
    except RuntimeError as error:
        said = str(error)
    dist.barrier()  # A rank that leaves would be noticed at once.
    return said


SOMETIMES = ("unused parameters", "no wrapper on a rank, stage 7", "a pass less, stage 9")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c in SOMETIMES else ()) for c in CASES]
)
def test_ranks_that_disagree_end_in_time_and_are_named(case):
    ranks = launch(outside_launch, case, world_size=3)
    naming = re.compile(r"ranks \[2\]|rank 2 (has not come to|broke off)")
    assert any(naming.search(said) for said in ranks), ranks
