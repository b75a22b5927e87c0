"""A sharded model beside others: two wrappers at once, torch's own ways to shard, and buffers."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model, weights
from torch.nn.functional import cross_entropy

from ddp_course import launch
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer


def place():
    return dist.get_rank(), dist.get_world_size()


def trained(model, forward, batches):
    """Train as the loop of stage 1 does, with AdamW."""
    optimizer = torch.optim.AdamW(forward.parameters(), lr=0.01)
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(forward(inputs), targets).backward()
        optimizer.step()
    return model


def two_wrappers():
    """Train B(A(x)); return the weights of both, which are sharded apart, after a few steps."""
    layers = list(tiny_model())
    wrapped = [
        FullyShardedDataParallel(torch.nn.Sequential(*part)) for part in (layers[:2], layers[2:])
    ]
    # The loop's model has the parameters of both wrappers.
    trained(None, torch.nn.Sequential(*wrapped), tiny_batches(*place()))
    return torch.cat([weights(wrapper.restore()) for wrapper in wrapped])


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_wrappers_in_one_backward_pass(world_size):
    model = tiny_model()
    expected = weights(trained(model, model, tiny_batches()))
    for result in launch(two_wrappers, world_size=world_size):
        assert (result - expected).abs().max() < 1e-12


KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


class Way(NamedTuple):
    """A way of sharding: what a loop calls, what it steps, and how it clips gradients."""

    forward: torch.nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable


def frozen_model():
    """Return a model with a weight that is not trained."""
    model = tiny_model()
    model[2].weight.requires_grad_(False)
    return model


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def clip_by_torch(model):
    """Return a function that clips the gradients of a model as torch's users do."""
    return partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))


def train_in_micro_batches(way):
    """Train with gradients of two micro-batches, clipped, at a learning rate that falls."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(way.optimizer, 4)
    for inputs, targets in tiny_batches(*place()):
        way.optimizer.zero_grad()
        for x, y in zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True):
            cross_entropy(way.forward(x), y).backward()
        way.clip(max_norm=0.2)
        way.optimizer.step()
        schedule.step()


def torchs_zero_1(kind, settings):
    """Return the weights after torch's ZeroRedundancyOptimizer under its DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = frozen_model()
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(trainable(parallel), kind, **settings)
    train_in_micro_batches(Way(parallel, optimizer, clip_by_torch(parallel)))
    return weights(model)


def our_zero_1(kind, settings):
    model = frozen_model()
    optimizer = ShardedOptimizer(trainable(model), kind, **settings)
    train_in_micro_batches(Way(model, optimizer, optimizer.clip_grad_norm_))
    return weights(model)


def torchs_fully_shard(kind, settings):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = frozen_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model[0], model[4], model):
        fully_shard(part, mesh=mesh)
    optimizer = kind(trainable(model), **settings)
    train_in_micro_batches(Way(model, optimizer, clip_by_torch(model)))
    whole = [parameter.full_tensor().detach().reshape(-1) for parameter in model.parameters()]
    return torch.cat(whole)


def our_sharding(kind, settings):
    model = frozen_model()
    parallel = FullyShardedDataParallel(model)
    optimizer = kind(trainable(parallel), **settings)
    train_in_micro_batches(Way(parallel, optimizer, parallel.clip_grad_norm_))
    parallel.restore()
    return weights(model)


def beside_torch(name):
    """Return the weights after each way of sharding, ours and torch's."""
    warnings.simplefilter("ignore")
    kind, settings = KINDS[name]
    ways = (torchs_zero_1, our_zero_1, torchs_fully_shard, our_sharding)
    return {way.__name__: way(kind, settings) for way in ways}


@pytest.mark.parametrize("name", KINDS)
def test_beside_torchs_own_with_accumulation_clipping_and_schedules(name):
    for ways in launch(beside_torch, name, world_size=2):
        for way, result in ways.items():
            assert (result - ways["torchs_zero_1"]).abs().max() < 1e-8, way
        moved = ways["our_sharding"] - weights(tiny_model())
        assert moved.abs().max() > 1e-3, "nothing was trained"


def buffers():
    """Return the statistics of each rank's own samples, as they are saved."""
    parallel = FullyShardedDataParallel(
        torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    parallel(torch.randn(8, 3, generator=generator)).sum().backward()
    return parallel.state_dict()["0.running_mean"]


def test_all_ranks_save_the_same_buffers():
    mean, other = launch(buffers, world_size=2)
    assert torch.equal(mean, other)
    assert mean.abs().max() > 0


def tiny_gradient():
    """Average a gradient so small that divided by the number of ranks it is zero."""
    model = FullyShardedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.tensor([[1.4e-45, 0.0]])).sum().backward()
    return [parameter.grad is not None for parameter in model.parameters()]


def test_a_gradient_that_is_nearly_zero_is_a_gradient():
    assert launch(tiny_gradient, world_size=2) == [[True], [True]]


class PartlyUsed(torch.nn.Module):
    """Three layers: one that no rank uses, one that some use, and one for all."""

    def __init__(self):
        super().__init__()
        self.none = torch.nn.Linear(3, 3)
        self.some = torch.nn.Linear(3, 3)
        self.all = torch.nn.Linear(3, 3)

    def forward(self, inputs, more):
        outputs = self.all(inputs)
        return self.some(outputs) if more else outputs


def trained_in_part(sharded_model):
    """Return how much three steps with weight decay change each weight of a layer.

    It is the least and the most. Only rank 1 uses `some`.
    """
    torch.manual_seed(0)
    model = PartlyUsed()
    before = {name: layer.weight.detach().clone() for name, layer in model.named_children()}
    forward = FullyShardedDataParallel(model) if sharded_model else model
    kind = torch.optim.AdamW
    settings = {"lr": 0.1, "weight_decay": 0.5}
    if sharded_model:
        optimizer = kind(forward.parameters(), **settings)
    else:
        optimizer = ShardedOptimizer(model.parameters(), kind, **settings)
    for _ in range(3):
        optimizer.zero_grad()
        forward(torch.ones(2, 3), dist.get_rank() == 1).square().mean().backward()
        optimizer.step()
    if sharded_model:
        forward.restore()
    changes = {}
    for name, layer in model.named_children():
        change = (layer.weight - before[name]).abs()
        changes[name] = (change.min().item(), change.max().item())
    return changes


@pytest.mark.parametrize("sharded_model", [False, True])
def test_a_layer_that_no_rank_uses_does_not_decay_and_one_that_some_use_is_trained(sharded_model):
    first, second = launch(trained_in_part, sharded_model, world_size=2)
    assert first == second
    assert first["none"] == (0.0, 0.0)
    # Of `some`, rank 0 has elements too: it must learn that rank 1 has used it.
    assert min(*first["some"], *first["all"]) > 0.001
    assert min(first["some"][1], first["all"][1]) > 0.1
