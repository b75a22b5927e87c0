"""Stage 3 equals one device: means by a server, of all dtypes, layers and groups."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracles import (
    assert_all_equal_mean,
    rank_tensor,
    tiny_batches,
    tiny_model,
    trained_alone,
    weights,
)

from ddp_course import launch, stage3_paramserver, stage4_ring, stage9_tensor, wire
from manyranks.errors import RankError

SHAPES = [(5, 3), (), (17,)]
ELEMENTS = 33  # of the three shapes together


class Averaged(NamedTuple):
    """A rank's tensors after the average, and what it cost."""

    tensors: list
    traffic: wire.Traffic


class Decay(NamedTuple):
    """A rank's model after training, beside one that was trained on the batches of both ranks."""

    unused_gradients: list
    averaged: torch.Tensor
    expected: torch.Tensor


def averaged(server, dtype):
    tensors = [
        rank_tensor(dist.get_rank(), shape, dtype, seed) for seed, shape in enumerate(SHAPES)
    ]
    with wire.counting() as traffic:
        stage3_paramserver.average_on_server(tensors, server)
    return Averaged(tensors, traffic)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rank_gets_the_mean(world_size, dtype):
    server = world_size - 1
    ranks = launch(averaged, server, dtype, world_size=world_size)
    for seed, shape in enumerate(SHAPES):
        means = [rank.tensors[seed] for rank in ranks]
        assert_all_equal_mean(means, world_size, shape, dtype, seed)
        assert all(torch.equal(mean, means[0]) for mean in means)
    payload = ELEMENTS * dtype.itemsize
    for rank, (_, traffic) in enumerate(ranks):
        peers = world_size - 1 if rank == server else min(1, world_size - 1)
        assert traffic.bytes_sent == peers * payload
        assert traffic.bytes_received == peers * payload
        assert traffic.messages_sent == peers
        assert traffic.messages_received == peers


def broken_average(fault):
    tensor = rank_tensor(dist.get_rank(), (33,))
    original = tensor.clone()
    if fault == "no division":
        tensor *= dist.get_world_size()
    if fault != "no sync":
        stage3_paramserver.average_on_server([tensor])
    if fault == "rank 0 only" and dist.get_rank():
        tensor.copy_(original)
    return tensor


@pytest.mark.parametrize("fault", ["no division", "no sync", "rank 0 only"])
def test_the_oracle_rejects(fault):
    results = launch(broken_average, fault, world_size=2)
    with pytest.raises(AssertionError, match="is off by"):
        assert_all_equal_mean(results, 2, (33,), torch.float32)


def mixed_dtypes():
    rank = dist.get_rank()
    tensors = [torch.full((3,), float(rank)), torch.full((2,), float(rank), dtype=torch.float64)]
    stage3_paramserver.average_on_server(tensors)
    return tensors


def test_dtypes_travel_apart():
    for single, double in launch(mixed_dtypes, world_size=3):
        assert single.dtype == torch.float32
        assert torch.allclose(single, torch.ones(3))
        assert double.dtype == torch.float64
        assert torch.allclose(double, torch.ones(2, dtype=torch.float64))


def server_of_a_subgroup():
    group = dist.new_group([1, 2])
    tensor = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() in (1, 2):
        stage3_paramserver.average_on_server([tensor], server=1, group=group)
    return tensor.item()


def test_a_subgroup_has_its_own_server():
    assert launch(server_of_a_subgroup, world_size=4) == [0.0, 1.5, 1.5, 3.0]


def model_with_buffers(seed):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.copy_(rank_tensor(seed, tensor.shape, tensor.dtype, number))
    return model


def broadcast(src):
    model = model_with_buffers(dist.get_rank())
    stage3_paramserver.broadcast_parameters(model, src)
    return model.state_dict()


@pytest.mark.parametrize("world_size, src", [(1, 0), (2, 0), (3, 2), (4, 1)])
def test_broadcast_gives_everyone_parameters_and_buffers_of_the_source(world_size, src):
    expected = model_with_buffers(src).state_dict()
    assert "1.running_mean" in expected
    for state in launch(broadcast, src, world_size=world_size):
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def train_stage(steps=4):
    # The weights differ: only the broadcast makes them equal.
    model = tiny_model(seed=dist.get_rank())
    losses = stage3_paramserver.train(
        model, tiny_batches(dist.get_rank(), dist.get_world_size(), steps), 0.1
    )
    return weights(model), losses


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_one_device(world_size):
    for result, losses in launch(train_stage, world_size=world_size):
        assert (result - trained_alone()).abs().max() < 1e-14
        assert len(losses) == 4


def train_with_decay(average):
    """Train with an optimizer that decays weights, and layers that some ranks use; return a Decay.

    No rank, rank 1 alone, or every rank uses a layer. The gradient of one is a negative zero on
    rank 1.
    """
    names = ("none", "some", "all", "negative zero")
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in names})
    layers.double()
    stage3_paramserver.broadcast_parameters(layers)
    alone = copy.deepcopy(layers)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1, weight_decay=0.5)
    optimizer_alone = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss_on(dist.get_rank(), layers).backward()
        average(stage3_paramserver.gradients(layers))
        optimizer.step()
        optimizer_alone.zero_grad()
        mean_loss = (loss_on(0, alone) + loss_on(1, alone)) / 2
        mean_loss.backward()
        optimizer_alone.step()
    unused_gradients = [layers["none"].weight.grad, alone["none"].weight.grad]
    return Decay(unused_gradients, weights(layers), weights(alone))


def loss_on(rank, model):
    """Return the loss that a rank computes, with the layers that this rank uses."""
    outputs = model["all"](rank_tensor(rank, (4, 3)).double())
    if rank == 0:
        return outputs.square().mean()
    nothing = 0.0 * model["negative zero"].weight.sum()
    return model["some"](outputs).square().mean() - nothing


@pytest.mark.parametrize(
    "average", [stage3_paramserver.average_on_server, stage4_ring.average_on_ring]
)
def test_a_layer_that_no_rank_uses_has_no_gradient_anywhere_and_does_not_decay(average):
    for rank in launch(train_with_decay, average, world_size=2):
        assert rank.unused_gradients == [None, None]
        assert (rank.averaged - rank.expected).abs().max() < 1e-14


def average_by_hand():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    stage3_paramserver.train(stage9_tensor.parallelize(model), [], 0.1)


def test_slices_of_one_layer_are_not_overwritten_by_each_other():
    with pytest.raises(RankError, match=r"parameter 0.weight is split over ranks of this process"):
        launch(average_by_hand, world_size=2)


def test_nothing_trainable_is_refused():
    with pytest.raises(ValueError, match="no trainable parameters"):
        stage3_paramserver.gradients(torch.nn.Linear(2, 2).requires_grad_(False))
