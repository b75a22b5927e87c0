"""SyncBatchNorm against BatchNorm on the whole batch, and torch's formula for averages.

These are the running averages.
"""

from contextlib import ExitStack
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from stage6_cases import assert_replicas_agree, message_of

from ddp_course import launch
from ddp_course.stage6_ddp import DistributedDataParallel, SyncBatchNorm

SHAPES = {"1d": (6,), "2d": (6, 3, 4), "3d": (6, 2, 3, 2)}
SIZES = {"equal": (4, 4, 4, 4), "uneven": (5, 2, 3, 1), "one rank empty": (4, 0, 3, 2)}
SETTINGS = {
    "defaults": {},
    "no affine": {"affine": False},
    "cumulative": {"momentum": None},
    "no running averages": {"track_running_stats": False},
}


def shares(sizes, shape, step, offset=100.0):
    """Return all ranks' inputs, which are far from zero.

    So E[x^2] - E[x]^2 would lose all digits in float32.
    """
    generator = torch.Generator().manual_seed(step)
    whole = offset + torch.randn(sum(sizes), *shape, generator=generator)
    return whole.split(list(sizes))


def layer_pair(shape, settings, layer_class):
    """Return a layer and an ordinary BatchNorm in float64 with the same weights."""
    batch_norm = getattr(torch.nn, f"BatchNorm{max(1, len(shape) - 1)}d")
    mine = layer_class(6, **settings)
    whole = batch_norm(6, **settings).double()
    if mine.affine:
        generator = torch.Generator().manual_seed(1)
        torch.nn.init.uniform_(mine.weight, 0.5, 2.0, generator=generator)
        mine.bias.data.fill_(0.3)
        whole.load_state_dict(mine.state_dict())
    return mine, whole


def largest_error(pairs):
    """Return the largest |found - expected| / (1 + |expected|) of all elements of the pairs."""
    errors = []
    for found, expected in pairs:
        if found.numel():
            error = (found.double() - expected.double()).abs() / (1 + expected.double().abs())
            errors.append(error.max().item())
    return max(errors)


def against_batch_norm(sizes, shape, settings, layer_class=SyncBatchNorm):
    """Return the largest error of the layer's outputs, gradients and buffers on the ranks.

    They are compared with those of BatchNorm in float64 on the whole batch.
    """
    sizes = sizes[: dist.get_world_size()]
    mine, whole = layer_pair(shape, settings, layer_class)
    errors = []
    for step in range(3):
        inputs = shares(sizes, shape, step)
        x = inputs[dist.get_rank()].clone().requires_grad_()
        reference = torch.cat(inputs).double().requires_grad_()
        out = mine(x)
        expected = whole(reference)
        slope = shares(sizes, shape, step + 10, offset=0)
        mine.zero_grad()
        whole.zero_grad()
        (out * slope[dist.get_rank()]).sum().backward()
        (expected * torch.cat(slope).double()).sum().backward()
        expected_here = expected.split(sizes)[dist.get_rank()]
        gradient_here = reference.grad.split(sizes)[dist.get_rank()]
        pairs = [(out, expected_here), (x.grad, gradient_here)]
        if mine.affine:
            dist.all_reduce(mine.weight.grad)
            dist.all_reduce(mine.bias.grad)
            pairs += [(mine.weight.grad, whole.weight.grad), (mine.bias.grad, whole.bias.grad)]
        pairs += zip(mine.buffers(), whole.buffers(), strict=True)
        errors.append(largest_error(pairs))
    return max(errors)


def grid():
    return {
        names: against_batch_norm(SIZES[names[0]], SHAPES[names[1]], SETTINGS[names[2]])
        for names in product(SIZES, SHAPES, SETTINGS)
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_agrees_with_batch_norm_on_the_whole_batch(world_size):
    for rank in launch(grid, world_size=world_size):
        assert {key: error for key, error in rank.items() if not error < 1e-4} == {}


def local_batch_norm(features, **settings):
    return torch.nn.BatchNorm1d(features, **settings)


def without_synchronisation():
    return against_batch_norm(SIZES["equal"], SHAPES["1d"], {}, local_batch_norm)


def test_the_comparison_rejects_unsynchronised_layers():
    assert min(launch(without_synchronisation, world_size=2)) > 1e-2


def collectives():
    """Return the names of the collectives of a pass, and of a forward pass in evaluation."""
    layer = SyncBatchNorm(3)
    calls = []
    with ExitStack() as patches:
        for name in ("all_reduce", "all_gather"):
            function = getattr(dist, name)

            def noting(*a, name=name, function=function, **k):
                calls.append(name)
                return function(*a, **k)

            patches.enter_context(patch.object(dist, name, noting))
        layer(torch.randn(4, 3).requires_grad_()).sum().backward()
        trained = list(calls)
        layer.eval()(torch.randn(4, 3))
    return trained, calls[len(trained) :]


def test_one_collective_each_way_and_none_in_evaluation():
    assert launch(collectives, world_size=2) == [(["all_gather", "all_reduce"], [])] * 2


def in_evaluation():
    """Return how far the layer is from BatchNorm on this rank's batch alone.

    It has running averages, or none.
    """
    inputs = shares((4, 3), (6,), 0)[dist.get_rank()]
    errors = []
    for track in (True, False):
        pair = [
            kind(6, track_running_stats=track) for kind in (SyncBatchNorm, torch.nn.BatchNorm1d)
        ]
        found, expected = (layer.eval()(inputs) for layer in pair)
        errors.append((found - expected).abs().max().item())
    return errors


def test_evaluation_is_ordinary_batch_normalisation():
    assert launch(in_evaluation, world_size=2) == [[0, 0]] * 2


def in_half_precision(dtype):
    """Return the dtype of the outputs, and how far all is from the same numbers in float32.

    All are outputs and gradients.
    """
    results = []
    for kind in (dtype, torch.float32):
        layer = SyncBatchNorm(6)
        inputs = (
            shares((400, 300), (6,), 0, offset=1)[dist.get_rank()]
            .to(dtype)
            .to(kind)
            .requires_grad_()
        )
        outputs = layer(inputs)
        # This gradient's sum over the batch is beyond float16.
        outputs.backward(torch.full_like(outputs, 400.0))
        results.append((outputs, inputs.grad, layer.weight.grad, layer.bias.grad))
    return results[0][0].dtype, [
        (a.float() - b).abs().max().item() for a, b in zip(*results, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_in_half_precision_beside_weights_in_float32(dtype):
    for kind, (outputs, grad, weight, bias) in launch(in_half_precision, dtype, world_size=2):
        assert kind == dtype
        assert outputs < 0.02
        assert grad < 1e-2
        assert weight < 1
        assert bias < 1


def in_a_model():
    """Convert, wrap and train a model; return how far it ends from one process.

    That one has BatchNorm on the whole batch.
    """

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 6, 3),
            torch.nn.BatchNorm2d(6),
            torch.nn.Flatten(),
            torch.nn.Linear(24, 2),
        )

    whole = make()
    mine = SyncBatchNorm.convert_sync_batchnorm(make())
    parallel = DistributedDataParallel(mine)
    assert isinstance(mine[1], SyncBatchNorm)
    k = dist.get_world_size()
    r = dist.get_rank()
    for step in range(4):
        batch = torch.randn(4 * k, 1, 4, 4, generator=torch.Generator().manual_seed(step))
        for model, inputs in ((whole, batch), (parallel, batch[4 * r : 4 * r + 4])):
            model.zero_grad()
            model(inputs).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    assert_replicas_agree(list(mine.parameters()))
    pairs = zip(whole.state_dict().values(), mine.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_in_a_model():
    assert max(launch(in_a_model, world_size=2)) < 1e-4


def refusals_of_bad_input():
    """Return what the layer says of four channels, of one dimension, and of a single value."""
    # Only rank 0 has a value, which has no variance.
    single = torch.ones(1, 3)[dist.get_rank() :]
    return [
        message_of(partial(SyncBatchNorm(3), inputs), ValueError)
        for inputs in (torch.ones(2, 4), torch.ones(3), single)
    ]


def test_bad_input_is_refused():
    for channels, dimensions, values in launch(refusals_of_bad_input, world_size=2):
        assert "(N, 3, …)" in channels
        assert "(N, 3, …)" in dimensions
        assert "more than 1 value per channel" in values
