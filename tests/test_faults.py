"""A rank that is slow, computes nonsense, hangs or dies while it trains."""

import time

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model
from soak.faults import soak
from torch.nn.functional import cross_entropy

from ddp_course.stage3_paramserver import gradients
from ddp_course.stage4_ring import average_on_ring, ring_all_reduce
from ddp_course.stage5_bucketed import BucketedDDP
from ddp_course.stage7_sharded import FullyShardedDataParallel
from manyranks import launch, watch_finite
from manyranks.errors import LaunchTimeout, NotFiniteError, RankError


def poisoned(wrap):
    """Train two steps; in the second one rank 1 meets a batch with NaN in it."""
    torch.manual_seed(0)
    model = tiny_model()
    watch_finite(model)
    parallel = wrap(model)
    batches = tiny_batches(dist.get_rank(), dist.get_world_size(), steps=2)
    for step, (inputs, targets) in enumerate(batches):
        if step == 1 and dist.get_rank() == 1:
            inputs[0, 0] = float("nan")
        cross_entropy(parallel(inputs), targets).backward()
        if wrap is plain:
            average_on_ring(gradients(model))


def plain(model):
    return model


@pytest.mark.parametrize("wrap", [plain, BucketedDDP, FullyShardedDataParallel])
def test_nan_is_named_with_its_rank_and_parameter(wrap):
    with pytest.raises(RankError) as raised:
        launch(poisoned, wrap, world_size=3)
    assert raised.value.rank == 1
    assert raised.value.type_name == "NotFiniteError"
    assert "rank 1: " in raised.value.message
    assert "elements of the gradient of " in raised.value.message
    assert "(NaN)" in raised.value.message


def test_large_but_finite_gradients_pass():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float32))
    watch_finite(torch.nn.ParameterList([parameter]))
    (parameter * 3e38).sum().backward()  # their sum is infinite
    parameter.grad = None
    with pytest.raises(
        NotFiniteError,
        match=r"rank 0: 1 of 4 elements of the gradient of 0 are not finite \(infinite\)",
    ):
        (parameter * torch.tensor([1.0, 2.0, float("inf"), 3.0])).sum().backward()


def rank_one_stops_calling():
    ring_all_reduce(torch.ones(7))
    if dist.get_rank() == 1:
        time.sleep(600)
    ring_all_reduce(torch.ones(3, 5))


def test_a_hang_is_reported_with_every_ranks_last_collective():
    with pytest.raises(LaunchTimeout) as raised:
        launch(rank_one_stops_calling, world_size=3, timeout=3)
    late, *others = raised.value.states
    assert late.rank == 1, "the one that is waited for comes first"
    assert [state.rank for state in others] == [0, 2]
    second = "ring_all_reduce of float32 [3, 5], call 2"
    assert f"3 s: rank 1 has not entered {second}, in which ranks 0 and 2 wait" in str(raised.value)
    assert "ring_all_reduce of float32 [7], call 1" in late.collective
    for state in others:
        assert second in state.collective
    assert "time.sleep" in late.stack or "rank_one_stops_calling" in late.stack


@pytest.mark.slow
def test_training_under_faults_ends_with_the_same_bits():
    # tests/soak/faults.py does this for half an hour.
    faults, _ = soak(minutes=3, every=5, pause=0.3, enough=4)
    assert faults == 4
