"""The course's own stages and schedules, and torch's own classes, are right in every order."""

import pytest
import torch
import torch.distributed as dist
from oracles import ALL_REDUCES
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddp_course import job, ladder, stage3_paramserver, stage4_ring
from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_course.stage8_pipeline import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    train,
    zero_bubble,
)
from manyranks import every_order

RANKS = 3


def assert_right(program, *args, world_size=RANKS, threads=False):
    """Assert that one run proves the program right; of ranks with threads, that 21 orders are."""
    verdict = every_order(program, *args, world_size=world_size)
    assert verdict.ok, verdict
    runs = 21 if threads else 1
    assert verdict.runs == runs, verdict
    assert verdict.events, "nothing was sent"


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_our_own_all_reduces(world_size):
    assert_right(all_of_them, world_size=world_size)


def all_of_them():
    stages = [stage4_ring.ring_all_reduce, stage4_ring.whole_gradient_ring]
    for all_reduce in [*stages, *ALL_REDUCES.values()]:
        all_reduce(torch.arange(23.0) * (dist.get_rank() + 1))
    stage3_paramserver.average_on_server([torch.arange(23.0) * (dist.get_rank() + 1)])


STAGES = [key for key, stage in ladder.STAGES.items() if not stage.one_process]
WITH_THREADS = ["5", "7"]  # 21 orders of these stages are drawn, which takes long.


@pytest.mark.parametrize("key", [key for key in STAGES if key not in WITH_THREADS])
def test_each_stage(key):
    assert_right(trained, key)


@pytest.mark.slow
@pytest.mark.parametrize("key", WITH_THREADS)
def test_each_stage_with_threads(key):
    assert_right(trained, key, threads=True)


def test_stage_6_with_our_own_ring_in_its_thread():
    assert_right(wrapped, threads=True)


def wrapped():
    ring = stage4_ring.ring_all_reduce
    model = DistributedDataParallel(layers(), bucket_cap_mb=0.0001, all_reduce=ring)
    two_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 6))


def trained(key):
    stage = ladder.find(key)
    if stage.splits_batch:
        work = job.make_job("digits", RANKS, 2, 12, 0.1)
        batches = work.batches(dist.get_rank(), RANKS)
    else:
        work = job.make_job("bytes", RANKS, 2, 12, 0.1, parameters=20_000)
        batches = work.batches()
    train_stage = stage.trainer({"bucket_cap_mb": 0.01, "tensor": RANKS, "stages": RANKS})
    train_stage(work.model(), batches, work.lr)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(2 * RANKS)))


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward, interleaved, zero_bubble])
def test_each_schedule_of_stage_8(schedule):
    assert_right(piped, schedule)


def piped(schedule):
    batches = [(torch.ones(6, 6), torch.zeros(6, dtype=torch.long))] * 2
    train(layers(), batches, 0.1, stages=RANKS, microbatches=6, schedule=schedule)


def two_steps(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def fully_sharded():
    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    two_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 6))


def fully_sharded_by_the_older_class():
    model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
    two_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 6))


def zero_redundancy():
    model = nn.parallel.DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    two_steps(model, optimizer, torch.ones(4, 6))


def tensor_parallel():
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    two_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 12))


def torchs_gpipe():
    pipeline(pipelining.ScheduleGPipe)


def torchs_1f1b():
    pipeline(pipelining.Schedule1F1B)


def pipeline(kind):
    rank = dist.get_rank()
    stage = pipelining.PipelineStage(layers()[rank], rank, RANKS, torch.device("cpu"))
    schedule = kind(stage, 4, loss_fn=nn.MSELoss())
    x = torch.ones(8, 6)
    for _ in range(2):
        # The first stage is given the inputs, the last one the targets, and the others nothing.
        if rank == 0:
            schedule.step(x)
        elif rank == RANKS - 1:
            schedule.step(target=x)
        else:
            schedule.step()


@pytest.mark.parametrize(
    "program",
    [
        fully_sharded,
        fully_sharded_by_the_older_class,
        zero_redundancy,
        tensor_parallel,
        torchs_gpipe,
        torchs_1f1b,
    ],
)
def test_torchs_own_classes(program):
    assert_right(program)
