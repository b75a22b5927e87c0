"""Others who look at a gradient, or at a bucket, while the backward pass runs.

torch's class and ours are compared bit for bit.
"""

import copy
import functools
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from stage6_cases import Net, assert_raises, message_of, seeded
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_course import launch
from ddp_course.stage5_bucketed import BucketedDDP
from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_course.stage7_sharded import FullyShardedDataParallel

CLASSES = {"torch": TorchDDP, "ours": DistributedDataParallel}
WIDTH = 100  # a weight of 40 kB


def linear():
    return nn.Linear(WIDTH, WIDTH)


def train(forward, module, steps=6):
    """Return the gradients and weights after each step of training `module` with `forward`.

    The inputs are this rank's own.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    results = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        inputs = torch.randn(
            4, WIDTH, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step)
        )
        forward(inputs).square().mean().backward()
        results += [p.grad.detach().clone() for p in module.parameters()]
        optimizer.step()
        results += [p.detach().clone() for p in module.parameters()]
    return results


def nested(DDP, inside=None, outside=None):
    """Train a wrapper within a wrapper: both average the gradients of the inner layer."""
    outer = DDP(nn.Sequential(DDP(linear(), **inside or {}), linear()), **outside or {})
    return train(outer, outer)


def shared_layer(DDP):
    """Train two wrappers with a layer in common, used one after the other."""
    shared = linear()
    wrappers = [DDP(nn.Sequential(shared, nn.Tanh(), linear())) for _ in range(2)]
    return train(nn.Sequential(*wrappers), nn.Sequential(*wrappers))


def hook_of_another_layer(DDP, act):
    """Call `act(gradient)` on the last layer's gradient before the first layer's is computed."""
    layers = nn.Sequential(linear(), linear(), linear())
    layers[0].register_full_backward_hook(
        lambda *_: [act(p.grad) for p in layers[2].parameters()] and None
    )
    return train(DDP(layers), layers)


def read_by_a_hook(DDP):
    """Read in a hook this rank's own gradient of a later layer."""
    seen = []
    return hook_of_another_layer(DDP, lambda grad: seen.append(grad.clone())) + seen


def flat_gradients(DDP):
    """Lay each gradient into one flat tensor as soon as it is there, and find averages in it."""
    layers = nn.Sequential(linear(), linear())
    sizes = [p.numel() for p in layers.parameters()]
    flat = torch.zeros(sum(sizes))
    piece_of = {
        p: piece.view_as(p) for p, piece in zip(layers.parameters(), flat.split(sizes), strict=True)
    }

    def lay_out(parameter):
        piece_of[parameter].data.copy_(parameter.grad)
        parameter.grad = piece_of[parameter]

    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(lay_out)
    parallel = DDP(layers)
    seen = []
    for step in range(3):
        layers.zero_grad()
        inputs = torch.randn(
            4, WIDTH, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step)
        )
        parallel(inputs).square().sum().backward()
        seen.append(flat.clone())
    return seen


def parameter_as_output(DDP):
    """Train a model that returns one of its parameters; nothing may be left on that afterwards."""

    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, inputs):
            return self.layer(inputs), self.layer.weight

    model = Returning()
    parallel = DDP(model)
    weight = model.layer.weight
    results = train(
        lambda inputs: torch.stack([output.square().mean() for output in parallel(inputs)]), model
    )
    return [*results, torch.tensor(len(weight._backward_hooks or ()))]


class Doubled(torch.autograd.Function):
    """A loss with a field of the name that autograd gives to parameters."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.variable = ["not", "hashable"]
        return 2 * inputs

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def field_called_variable(DDP):
    class Model(nn.Sequential):
        def forward(self, inputs):
            return Doubled.apply(super().forward(inputs))

    model = Model(linear())
    return train(DDP(model, find_unused_parameters=True), model)


def second_order(DDP):
    """Refused: gradients of gradients would not be averaged."""
    parallel = DDP(seeded(Net))
    loss = parallel(torch.ones(2, 5)).pow(3).sum()
    words = ["create_graph=True"] if DDP is DistributedDataParallel else []
    assert_raises(lambda: loss.backward(create_graph=True), RuntimeError, *words)
    return []


def hooked(DDP, hook, make_state=lambda: None, layers=None):
    model = nn.Sequential(linear(), linear()) if layers is None else layers()
    parallel = DDP(model)
    parallel.register_comm_hook(make_state(), hook)
    return train(parallel, model)


def cleared_by_a_hook(DDP):
    """Let go of all gradients in the middle of the pass.

    The parameters get the averages all the same.
    """
    layers = nn.Sequential(linear(), linear())
    layers[0].weight.register_hook(lambda grad: layers.zero_grad())
    return train(DDP(layers), layers)


def another_buffer(state, bucket):
    """Replaces the buffer, and then changes the gradients in it."""
    bucket.set_buffer(bucket.buffer() / dist.get_world_size())
    for gradient in bucket.gradients():
        gradient.mul_(3)
    return (
        dist.all_reduce(bucket.buffer(), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )


def power_state():
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)


def pictures():
    convolution = nn.Conv2d(1, 8, 3).to(memory_format=torch.channels_last)
    wider = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(
        nn.Unflatten(1, (1, 10, 10)), convolution, wider, nn.Flatten(), nn.Linear(576, 4)
    )


power = partial(hooked, hook=powerSGD_hook.powerSGD_hook, make_state=power_state)
power_in_half = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
UNUSED = {"find_unused_parameters": True}
NEIGHBOURS = {
    "a nested wrapper": nested,
    "a nested wrapper that looks for unused parameters": partial(nested, inside=UNUSED),
    "a wrapper that looks for unused parameters around another": partial(nested, outside=UNUSED),
    "a layer in two wrappers": shared_layer,
    "a hook that reads a gradient": read_by_a_hook,
    "a hook that scales a gradient": partial(hook_of_another_layer, act=lambda grad: grad.mul_(2)),
    "a hook that clears the gradients": cleared_by_a_hook,
    "gradients in a flat tensor": flat_gradients,
    "a parameter as output": parameter_as_output,
    "a function with a field called variable": field_called_variable,
    "create_graph": second_order,
    "a hook that sets another buffer": partial(hooked, hook=another_buffer),
    "PowerSGD": power,
    "PowerSGD in half precision": partial(power, hook=power_in_half),
    "PowerSGD of channels_last": partial(power, layers=pictures),
}


def outcomes():
    """Return {name: {class: tensors, or the error}} of all neighbours on this rank."""
    warnings.simplefilter("ignore")
    results = {name: {} for name in NEIGHBOURS}
    for name, neighbour in NEIGHBOURS.items():
        for kind, DDP in CLASSES.items():
            torch.manual_seed(0)
            try:
                results[name][kind] = neighbour(DDP)
            except Exception as error:
                results[name][kind] = f"{type(error).__name__}: {error}"
    return results


@functools.cache
def launched():
    return launch(outcomes, world_size=2)


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_torchs_class_and_ours_do_the_same_beside(name):
    for rank in launched():
        theirs = rank[name]["torch"]
        ours = rank[name]["ours"]
        assert isinstance(theirs, list), (theirs, ours)
        assert isinstance(ours, list), (theirs, ours)
        assert len(theirs) == len(ours)
        differences = [
            (a.double() - b.double()).abs().max().item() for a, b in zip(theirs, ours, strict=True)
        ]
        assert all(difference == 0 for difference in differences), (
            f"off by up to {max(differences):.2g}"
        )


def copied_by_rank_0():
    """Copy for averaged weights, on one rank only, before and after buckets are rebuilt."""
    parallel = DistributedDataParallel(seeded(Net))
    for step in range(3):
        if dist.get_rank() == 0:
            copy.deepcopy(parallel)
        parallel.zero_grad()
        parallel(torch.full((2, 5), dist.get_rank() + step + 1.0)).sum().backward()
    return parallel.reducer.rebuilt, [len(bucket.parameters) for bucket in parallel.reducer.buckets]


def test_one_rank_may_copy_the_wrapper():
    first, second = launch(copied_by_rank_0, world_size=2)
    assert first == second
    assert first[0]


def refusals_of_a_sharded_model():
    """Return what the wrapper says of a sharded model, and of one with a sharded layer."""
    sharded = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    around = nn.Sequential(nn.Linear(4, 4), sharded)
    return [
        message_of(lambda: DistributedDataParallel(sharded), ValueError),
        message_of(lambda: DistributedDataParallel(around), ValueError),
    ]


def test_a_sharded_model_is_refused():
    for messages in launch(refusals_of_a_sharded_model, world_size=2):
        assert all("sharded by FullyShardedDataParallel" in message for message in messages)


def whole_step(wrap, compiled):
    """Return the weights after steps whose parts may be compiled together.

    The parts are forward, backward and update.
    """
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    parallel = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(inputs):
        optimizer.zero_grad()
        parallel(inputs).square().sum().backward()
        optimizer.step()

    run = torch.compile(step, backend="eager") if compiled else step
    for _ in range(3):
        run(torch.full((2, 4), dist.get_rank() + 1.0))
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [DistributedDataParallel, BucketedDDP])
def test_a_whole_step_may_be_compiled(wrap):
    compiled = launch(whole_step, wrap, True, world_size=2)
    for ours, theirs in zip(compiled, launch(whole_step, wrap, False, world_size=2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
