"""torch's own classes run under virtual time: right results, and the same moments in each run.

What takes seconds to import is imported where it is used: each rank imports this file.
"""

import multiprocessing
import threading
import time
import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader

from manyranks import Device, Link, clocks, launch
from manyranks.clocks.table import real_sleep

RANKS = 4
SETTING = {"device": Device("1GFLOP/s"), "link": Link("100Mbit", "100us")}


def small_model():
    """Return the same layers on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def batch_of(rank, size=8):
    """Return a rank's share of one batch."""
    whole = torch.randn(RANKS * size, 16, generator=torch.Generator().manual_seed(1))
    return whole[rank * size : (rank + 1) * size]


def trained(model, optimizer):
    """Train two steps on this rank's share."""
    for _ in range(2):
        optimizer.zero_grad()
        model(batch_of(dist.get_rank())).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def alone():
    """Return the weights after two steps on the whole batch, in one process."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack(
            [model(batch_of(rank)).square().mean() for rank in range(RANKS)]
        ).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def by_ddp():
    model = TorchDDP(small_model(), bucket_cap_mb=0.002)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1))


def by_ddp_with_a_hook():
    model = TorchDDP(small_model(), bucket_cap_mb=0.002)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1))


def by_zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = TorchDDP(small_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return trained(model, optimizer)


def by_fully_shard():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    weights = trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [weight.full_tensor() for weight in weights]


TRAININGS = (by_ddp, by_ddp_with_a_hook, by_zero, by_fully_shard)


def timed(*ways):
    """Return what each way returns, and the moment of its end."""
    warnings.simplefilter("ignore")
    outcomes = []
    for way in ways:
        outcomes.append((way(), clocks.moment()))
    return outcomes


def take_the_same_time_twice(*ways):
    """Run all ways in one launch, and again in another; return the results of each rank."""
    first, second = (launch(timed, *ways, world_size=RANKS, **SETTING) for _ in range(2))
    results = []
    for outcomes, again in zip(first, second, strict=True):
        moments = [moment for _, moment in outcomes]
        assert moments == [moment for _, moment in again]
        assert all(0 < before < after for before, after in pairwise(moments))
        results.append([result for result, _ in outcomes])
    return results


def test_torch_trains_as_one_process_does_and_takes_the_same_time_twice():
    for results in take_the_same_time_twice(*TRAININGS):
        for way, weights in zip(TRAININGS, results, strict=True):
            for own, expected in zip(weights, alone(), strict=True):
                torch.testing.assert_close(own, expected, msg=way.__name__)


def by_tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (RANKS,))
    model = small_model()
    expected = model(batch_of(0)).detach()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    result = parallelize_module(model, mesh, plan)(batch_of(0)).detach()
    torch.testing.assert_close(result, expected)
    whole = torch.arange(32.0).view(8, 4)
    assert distribute_tensor(whole, mesh, [Shard(0)]).full_tensor().equal(whole)
    return True


def by_pipeline(schedule):
    from torch.distributed import pipelining

    rank = dist.get_rank()
    layers = [nn.Linear(16, 16) for _ in range(RANKS)]
    for number, layer in enumerate(layers):
        torch.manual_seed(number)
        nn.init.normal_(layer.weight)
    stage = pipelining.PipelineStage(layers[rank], rank, RANKS, torch.device("cpu"))
    kind = getattr(pipelining, schedule)
    plan = kind(stage, n_microbatches=4, loss_fn=lambda output, _: output.square().mean())
    inputs = batch_of(0)
    losses: list = []
    if rank == 0:
        plan.step(inputs)
    else:
        plan.step(target=inputs, losses=losses)
    return layers[rank].weight.grad.abs().sum().item() > 0


def by_objects():
    rank = dist.get_rank()
    everyone = [None] * RANKS
    dist.all_gather_object(everyone, {"rank": rank})
    assert [each["rank"] for each in everyone] == list(range(RANKS))
    shared = [rank]
    dist.broadcast_object_list(shared, 2)
    return shared == [2]


def by_groups():
    rank = dist.get_rank()
    even = dist.new_group([0, 2])
    odd = dist.new_group([1, 3])
    own = torch.tensor([float(rank)])
    group = odd if rank % 2 else even
    dist.all_reduce(own, group=group)
    dist.monitored_barrier()
    expected = 4.0 if rank % 2 else 2.0
    assert own.item() == expected
    return True


def by_all_to_all():
    rank = dist.get_rank()
    sent = [torch.full((2,), 10.0 * rank + peer) for peer in range(RANKS)]
    received = [torch.zeros(2) for _ in range(RANKS)]
    dist.all_to_all(received, sent)
    assert [part[0].item() for part in received] == [10.0 * peer + rank for peer in range(RANKS)]
    single = torch.zeros(2 * RANKS)
    dist.all_to_all_single(single, torch.cat(sent))
    return single.equal(torch.cat(received))


def by_a_batch_of_messages():
    rank = dist.get_rank()
    sent = torch.full((3,), float(rank))
    received = torch.zeros(3)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % RANKS),
        dist.P2POp(dist.irecv, received, (rank - 1) % RANKS),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received[0].item() == (rank - 1) % RANKS


def by_whoever_is_first():
    """Send from ranks 3, 2 and 1 in this order of virtual time; rank 0 receives in it, and ties go
    by rank.
    """
    rank = dist.get_rank()
    order = []
    for late in (True, False):
        if rank:
            time.sleep(late * 0.01 * (RANKS - rank))
            dist.send(torch.tensor([rank]), 0)
        else:
            time.sleep(0 if late else 1)
            received = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS - 1)]
            order.append([dist.recv(tensor) for tensor in received])
        dist.barrier()
    return rank or order == [[3, 2, 1], [1, 2, 3]]


def by_a_loader():
    loader = DataLoader([torch.full((2,), float(i)) for i in range(8)], batch_size=2, num_workers=2)
    total = sum(batch.sum() for batch in loader)
    dist.all_reduce(total)
    return total.item() == RANKS * 56.0


def by_a_slow_first_sign():
    """Start a thread on rank 0 that gives its first sign of life late, while the others wait for
    this rank: it is no deadlock.
    """
    if dist.get_rank() == 0:
        begin = threading.Thread._bootstrap_inner

        def begin_late(thread):
            real_sleep(0.5)
            begin(thread)

        threading.Thread._bootstrap_inner = begin_late
        try:
            items = multiprocessing.Queue()
            items.put(1)
        finally:
            threading.Thread._bootstrap_inner = begin
        assert items.get() == 1
    dist.barrier()
    return True


def by_questions():
    rank = dist.get_rank()
    before = time.perf_counter()
    work = dist.all_reduce(torch.zeros(125_000), async_op=True)
    while not work.is_completed():
        assert time.perf_counter() - before < 1
    work.wait()
    took = time.perf_counter() - before
    took = round(took, 9)  # The clocks count whole nanoseconds.
    assert 0.0606 <= took <= 0.0607, took  # 6 steps of 10 ms and 100 µs, in questions of 10 µs
    before = time.monotonic()
    time.sleep(3 + rank)
    return time.monotonic() - before == pytest.approx(3 + rank)


FUNCTIONS = (
    by_tensor_parallel,
    by_objects,
    by_groups,
    by_all_to_all,
    by_a_batch_of_messages,
    by_whoever_is_first,
    by_a_loader,
    by_a_slow_first_sign,
    by_questions,
    partial(by_pipeline, "ScheduleGPipe"),
    partial(by_pipeline, "Schedule1F1B"),
)


def test_torchs_functions_run():
    for results in take_the_same_time_twice(*FUNCTIONS):
        assert all(results), results
