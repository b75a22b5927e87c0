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


DRAWN = {"5": pytest.mark.slow, "7": pytest.mark.slow}  # of these, 21 orders are drawn


@pytest.mark.parametrize("key", [pytest.param(key, marks=DRAWN.get(key, ())) for key in STAGES])
def test_each_stage(key):
    assert_right(trained, key, threads=key in ("5", "7"))


def test_stage_6_with_our_own_ring_in_its_thread():
    assert_right(wrapped, threads=True)


def wrapped():
    ring = stage4_ring.ring_all_reduce
    model = DistributedDataParallel(layers(), bucket_cap_mb=0.0001, all_reduce=ring)
    two_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 6))


def trained(key):
    stage = ladder.find(key)
    problem = "digits" if stage.splits_batch else "bytes"
    size = {} if stage.splits_batch else {"parameters": 20_000}
    work = job.make_job(problem, RANKS, 2, 12, 0.1, **size)
    shares = (dist.get_rank(), RANKS) if stage.splits_batch else ()
    train_stage = stage.trainer({"bucket_cap_mb": 0.01, "tensor": RANKS, "stages": RANKS})
    train_stage(work.model(), work.batches(*shares), work.lr)


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
    given = {0: ((x,), {}), RANKS - 1: ((), {"target": x})}
    args, kwargs = given.get(rank, ((), {}))
    for _ in range(2):
        schedule.step(*args, **kwargs)


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
