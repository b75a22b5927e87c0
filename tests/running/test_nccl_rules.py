"""Every stage and every collective under NCCL's rules, on CPU tensors that pose as a GPU's
(support/fake_nccl.py).
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest.mock import patch

import fake_nccl
import pytest
import torch
import torch.distributed as dist
from oracles import rank_tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_course import (
    collectives,
    ladder,
    launch,
    problems,
    stage1_single,
    stage4_ring,
    stage6_ddp,
    stage8_pipeline,
    wire,
)
from ddp_course.measuring import finite

STAGES = [key for key, stage in ladder.STAGES.items() if not stage.one_process and key != "torch"]
SCHEDULES = [stage8_pipeline.gpipe, stage8_pipeline.interleaved, stage8_pipeline.zero_bubble]
SETTINGS = {
    "bitmap": {"find_unused_parameters": True, "all_reduce": stage4_ring.ring_all_reduce},
    "batch norm": {"all_reduce": stage4_ring.ring_all_reduce},
    "bitmap and batch norm": {
        "find_unused_parameters": True,
        "all_reduce": stage4_ring.ring_all_reduce,
    },
    "hook": {},
    "join": {"find_unused_parameters": True},
}


def distance(ours, exact):
    """The largest difference between two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(ours, exact, strict=True))


def stages():
    """For each stage how far its weights end from one device's."""
    problem, K = problems.make("digits", dtype=torch.float64), dist.get_world_size()
    single, distances = problem.model(0), {}
    stage1_single.train(single, problem.batches(24, 3, 0, 0, 1), 0.1)
    for key in STAGES:
        stage, model = ladder.find(key), problem.model(0)
        share = (dist.get_rank(), K) if stage.splits_batch else (0, 1)
        with fake_nccl.imposed():
            stage.trainer({"bucket_cap_mb": 0.1})(model, problem.batches(24, 3, 0, *share), 0.1)
        distances[key] = distance(model.parameters(), single.parameters())
    return distances


def pipelines():
    """How far a pipeline ends from one device with schedules that send to and fro, and around."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6) for _ in range(8)]
    model, K = torch.nn.Sequential(*layers).double(), dist.get_world_size()
    batches, distances = [(torch.randn(12, 6).double(), torch.randint(6, (12,)))] * 3, {}
    for schedule in SCHEDULES:
        ours, single = copy.deepcopy(model), copy.deepcopy(model)
        with fake_nccl.imposed():
            stage8_pipeline.train(ours, batches, 0.1, microbatches=2 * K, schedule=schedule)
        stage1_single.train(single, batches, 0.1)
        distances[schedule.__name__] = distance(ours.parameters(), single.parameters())
    return distances


def sums():
    """How far each collective's sum is from the sum."""
    exact = sum(rank_tensor(rank, 4099, torch.float64) for rank in range(dist.get_world_size()))
    ways = {name: way for name, way in vars(collectives).items() if name.endswith("_all_reduce")}
    ways |= {"ring": stage4_ring.ring_all_reduce, "whole": stage4_ring.whole_gradient_ring}
    distances = {}
    for name, all_reduce in ways.items():
        group, mine = dist.new_group(), rank_tensor(dist.get_rank(), 4099, torch.float64)
        with fake_nccl.imposed():
            all_reduce(mine, group=group)
        distances[name] = distance([mine], [exact])
    return distances


def gradients_of_stage_6(what):
    """Three steps with a bitmap of unused parameters or SyncBatchNorm beside communication, a hook,
    or uneven data.
    """
    torch.manual_seed(0)
    norm = stage6_ddp.SyncBatchNorm(8) if "batch norm" in what else torch.nn.Identity()
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 4)
    )
    ours = stage6_ddp.DistributedDataParallel(model.double(), bucket_cap_mb=1e-4, **SETTINGS[what])
    if what == "hook":
        ours.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with ours.join(enable=what == "join"):
        for step in range(3 + (what == "join") * dist.get_rank()):
            torch.manual_seed(10 * step + dist.get_rank())
            ours(torch.randn(6, 8).double()).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def hooks_join_and_the_models_own_collectives():
    """How far the gradients are from those without the rules, for each of the SETTINGS."""
    distances = {}
    for what in SETTINGS:
        plain = gradients_of_stage_6(what)
        with fake_nccl.imposed():
            distances[what] = distance(gradients_of_stage_6(what), plain)
    return distances


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "results, count",
    [
        (stages, len(STAGES)),
        (pipelines, 3),
        (sums, 6),
        (hooks_join_and_the_models_own_collectives, len(SETTINGS)),
    ],
)
def test_results_are_those_without_the_rules(results, count, world_size):
    for distances in launch(results, world_size=world_size, device="cpu", timeout=120):
        assert len(distances) >= count and max(distances.values()) < 1e-12, distances


WAITS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
)  # for them the host waits for the GPU


def waits_of_the_host(what, size):
    """How often a step asks a tensor for its value: with so many norms, parameters or
    micro-batches.

    A pipeline's last rank asks what the activations of this batch look like, and for the loss.
    """
    torch.manual_seed(0)
    asked, inputs = [], torch.randn(48, 8)
    norms = [
        stage6_ddp.SyncBatchNorm(8) if what == "batch norm" else torch.nn.Linear(8, 8)
        for _ in range(size)
    ]
    model = torch.nn.Sequential(*norms, torch.nn.Linear(8, 8))
    if what == "micro-batches":
        halves = stage8_pipeline.split([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)], 2)
        pipeline = stage8_pipeline.Pipeline(torch.nn.Sequential(*halves[dist.get_rank()]), size)
        step = lambda: pipeline.step(inputs, torch.zeros(48, dtype=torch.int64))  # noqa: E731
    else:
        parallel = stage6_ddp.DistributedDataParallel(
            model, find_unused_parameters=what == "bitmap"
        )
        later = finite.Later({parameter: name for name, parameter in model.named_parameters()})
        if what == "finite":
            [p.register_post_accumulate_grad_hook(later.note) for p in model.parameters()]
        step = lambda: parallel(inputs).square().sum().backward()  # noqa: E731
    step()  # the first one may ask: shapes, buckets
    step()
    with ExitStack() as counting:
        for name in WAITS:
            true = getattr(torch.Tensor, name)

            def counted(*args, true=true, name=name, **more):
                asked.append(name)
                return true(*args, **more)

            counting.enter_context(patch.object(torch.Tensor, name, counted))
        step()
    return asked


@pytest.mark.parametrize(
    "what, most", [("batch norm", 0), ("bitmap", 1), ("micro-batches", 2), ("finite", 1)]
)
def test_the_host_waits_once_or_twice_a_step_and_not_for_each_part(what, most):
    few, many = (
        launch(waits_of_the_host, what, size, world_size=2, device="cpu") for size in (2, 6)
    )
    assert few == many and max(len(asked) for asked in few) <= most, (few, many)


def broken(rule):
    """Break one of the rules; return what happens."""
    rank, peer, ones = dist.get_rank(), 1 - dist.get_rank(), torch.ones(3)
    with fake_nccl.imposed(patience=1.5):
        try:
            if rule == "a message between two blocks until both come" and rank == 0:
                dist.isend(ones, peer)
            if rule == "the first batch needs all ranks" and rank == 0:
                dist.batch_isend_irecv([dist.P2POp(dist.isend, ones, peer)])
            if rule == "one after the other":
                wire.warm_up(ones)
                receives = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(3), peer)])
                dist.batch_isend_irecv([dist.P2POp(dist.isend, ones, peer)])
                receives[0].wait()
            if rule == "one thread":
                wire.warm_up(ones)
                dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(3), peer)])
                with ThreadPoolExecutor(1) as other:
                    other.submit(dist.barrier).result()
        except Exception as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "rule, told",
    [
        ("a message between two blocks until both come", "not all of ranks [0, 1] came"),
        ("the first batch needs all ranks", "not all of ranks [0, 1] came"),
        ("one after the other", "nothing came in 1.5 s"),
        ("one thread", "two threads use one NCCL communicator"),
    ],
)
def test_the_rules_bite(rule, told):
    assert told in launch(broken, rule, world_size=2, device="cpu")[0]
