"""Optimizers that step inside `backward`: on averages, once, and no gradient is left."""

import functools

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model, weights
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.functional import cross_entropy

from ddp_course import launch
from ddp_course.stage6_ddp import DistributedDataParallel


def train(in_backward=(), before=True, steps=4):
    """Weights, and which gradients were left, where the layers `in_backward` have optimizers of their own.

    They come `before` the model is wrapped, or after it.
    """
    model = tiny_model()
    chosen = [p for place in in_backward for p in model[place].parameters()]
    others = [p for p in model.parameters() if p not in set(chosen)]
    wrapped = None if before else DistributedDataParallel(model)
    for rate in (0.05, 0.02):  # two a parameter: both step
        _apply_optimizer_in_backward(torch.optim.SGD, chosen, {"lr": rate})
    wrapped = wrapped or DistributedDataParallel(model)
    optimizer, left = torch.optim.SGD(others, lr=0.07) if others else None, []
    for inputs, targets in tiny_batches(dist.get_rank(), dist.get_world_size(), steps):
        cross_entropy(wrapped(inputs), targets).backward()
        left.append([p.grad is not None for p in model.parameters()])
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), left


def trained():
    everywhere = (0, 2, 4)
    ways = {"plain": (), "all": (everywhere,), "wrapped first": (everywhere, False), "some": ((2,),)}
    return {name: train(*settings) for name, settings in ways.items()}


@functools.cache
def results(world_size):
    return launch(trained, world_size=world_size, timeout=60)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["all", "wrapped first", "some"])
def test_averages_are_applied_and_let_go_of(name, world_size):
    """Both optimizers of a parameter together step as far as the one of the plain run."""
    for rank in results(world_size):
        found, left = rank[name]
        assert (found - rank["plain"][0]).abs().max() < 1e-14
        assert left == [[name == "some" and index not in (2, 3) for index in range(6)]] * 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_stay_the_same(world_size):
    one, *others = [rank["all"][0] for rank in results(world_size)]
    assert all(torch.equal(one, other) for other in others)
