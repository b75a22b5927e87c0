"""Forward and backward passes in any order and number: right, or the pass is refused.

Right gradients are those of one process.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from ddp_course import launch
from ddp_course.stage5_bucketed import BucketedDDP
from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_course.stage7_sharded import FullyShardedDataParallel


class Net(nn.Module):
    """A trunk and two heads; `which` chooses what is returned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)])
        self.double()

    def forward(self, x, which="sum"):
        h = self.trunk(x)
        outputs = [head(h) for head in self.heads]
        if which == "both":
            return outputs
        return outputs[0].tanh() + outputs[1].tanh() if which == "sum" else outputs[which]


def loss_of(outputs):
    return outputs.square().sum(1).mean()


# Each program gets a model (a wrapper, or the model of one process) and two batches.


def a_then_b(model, x, y):
    a = loss_of(model(x))
    b = loss_of(model(y))
    a.backward()
    b.backward()


def b_then_a(model, x, y):
    a = loss_of(model(x))
    b = loss_of(model(y))
    b.backward()
    a.backward()


def nested_three(model, x, y):
    a = loss_of(model(x))
    b = loss_of(model(y))
    b.backward()
    c = loss_of(model(x + y))
    a.backward()
    c.backward()


def one_backward_of_two(model, x, y):
    (loss_of(model(x)) + loss_of(model(y))).backward()


def chained(model, x, y):
    loss_of(model(model(x))).backward()


def retained(model, x, y):
    a = loss_of(model(x))
    a.backward(retain_graph=True)
    a.backward()


def retained_with_another_between(model, x, y):
    a = loss_of(model(x))
    a.backward(retain_graph=True)
    loss_of(model(y)).backward()
    a.backward()


def unused_forward_between(model, x, y):
    a = loss_of(model(x))
    model(y)
    a.backward()
    loss_of(model(y)).backward()


def evaluation_between(model, x, y):
    a = loss_of(model(x))
    with torch.no_grad():
        model(y)
    a.backward()


def heads_one_after_the_other(model, x, y):
    first, second = model(x, "both")
    loss_of(first).backward(retain_graph=True)
    loss_of(second).backward()
    return model(y)


def heads_together(model, x, y):
    torch.autograd.backward([loss_of(each) for each in model(x, "both")])


def part_by_part(model, x, y):
    parameters = list(model.parameters())
    a = loss_of(model(x))
    a.backward(inputs=parameters[:1], retain_graph=True)
    a.backward(inputs=parameters[1:])


def one_part(model, x, y):
    loss_of(model(x)).backward(inputs=list(model.parameters())[1:])
    return model(y)


def penalty(model, x, y):
    x = x.requires_grad_()
    outputs = model(x)
    (slope,) = grad(outputs.sum(), x, create_graph=True)
    (loss_of(outputs) + loss_of(slope)).backward()


def penalty_alone(model, x, y):
    x = x.requires_grad_()
    (slope,) = grad(model(x).sum(), x, create_graph=True)
    loss_of(slope).backward()


def penalty_afterwards(model, x, y):
    x = x.requires_grad_()
    outputs = model(x)
    (slope,) = grad(outputs.sum(), x, create_graph=True)
    loss_of(outputs).backward(retain_graph=True)
    loss_of(slope).backward()


def slope_of_inputs(model, x, y):
    x = x.requires_grad_()
    grad(model(x).sum(), x)
    loss_of(model(y)).backward()


def own_gradients(model, x, y):
    """They are written into .grad, as a program does that clips each sample's."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, grad(loss_of(model(x)), parameters), strict=True):
        parameter.grad = gradient


def curvature(model, x, y):
    slopes = grad(loss_of(model(x)), list(model.parameters()), create_graph=True)
    sum(map(loss_of, slopes)).backward()


def own_gradients_allowed(model, x, y):
    a = loss_of(model(x))
    with model.no_sync():
        grad(a, list(model.parameters()), retain_graph=True)
    a.backward()


def turns(model, x, y):
    """Train a discriminator with two passes, and then a generator while it is frozen."""
    noise = (2 * y).requires_grad_()
    (loss_of(model(x)) - loss_of(model(noise.detach()))).backward()
    model.requires_grad_(False)
    loss_of(model(noise)).backward()
    model.requires_grad_(True)
    loss_of(model(x)).backward()


def turns_without_freezing(model, x, y):
    noise = (2 * y).requires_grad_()
    loss_of(model(noise)).backward()
    model.zero_grad()
    real = loss_of(model(x))
    fake = loss_of(model(noise.detach()))
    real.backward()
    fake.backward()


def recomputed(model, x, y):
    a = loss_of(checkpoint(model, x.requires_grad_(), use_reentrant=False))
    b = loss_of(model(y))
    a.backward()
    b.backward()


def backward_in_a_hook(model, x, y):
    b = loss_of(model(y))
    a = model(x)
    a.register_hook(lambda gradient: b.backward())
    loss_of(a).backward()


def local_first(model, x, y):
    with model.no_sync():
        a = loss_of(model(x))
    b = loss_of(model(y))
    a.backward()
    b.backward()


def local_together(model, x, y):
    with model.no_sync():
        a = loss_of(model(x))
    (a + loss_of(model(y))).backward()


def local_within(model, x, y):
    with model.no_sync():
        loss_of(model(x)).backward()
        loss_of(model(x + 1)).backward()
    loss_of(model(y)).backward()


def only_a_head(model, x, y):
    loss_of(model(x, 0)).backward()
    loss_of(model(y, 1)).backward()
    return model(x)


PROGRAMS = [
    a_then_b,
    b_then_a,
    nested_three,
    one_backward_of_two,
    chained,
    retained,
    retained_with_another_between,
    unused_forward_between,
    evaluation_between,
    heads_one_after_the_other,
    heads_together,
    part_by_part,
    one_part,
    penalty,
    penalty_alone,
    penalty_afterwards,
    slope_of_inputs,
    own_gradients,
    curvature,
    own_gradients_allowed,
    turns,
    turns_without_freezing,
    recomputed,
    backward_in_a_hook,
    local_first,
    local_together,
    local_within,
    only_a_head,
]
NEEDS_NO_SYNC = {own_gradients_allowed, local_first, local_together, local_within}
# These may be refused by stage 6, in any of its kinds.
MAY_BE_REFUSED = {
    heads_one_after_the_other,
    one_part,
    penalty_afterwards,
    only_a_head,
    backward_in_a_hook,
    part_by_part,
    own_gradients,
    curvature,
}
WRAPPERS = {
    "6": DistributedDataParallel,
    "6 views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "6 small": partial(DistributedDataParallel, bucket_cap_mb=0.0001),
    "6 unused": partial(DistributedDataParallel, find_unused_parameters=True),
    "6 static": partial(DistributedDataParallel, static_graph=True),
    "5": BucketedDDP,
    "7": FullyShardedDataParallel,
}


def batches():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 4, generator=generator).double() for _ in range(2)]


class OneProcess(Net):
    """The model of one process, which has nothing to synchronise."""

    no_sync = torch.enable_grad


def outcome(program, wrap, warm):
    """Return a refusal's words, or "right", or how far gradients are from one process's."""
    group = dist.new_group()
    model = Net()
    wrapper = wrap(model, process_group=group)
    own = [each.chunk(dist.get_world_size())[dist.get_rank()] for each in batches()]
    one = OneProcess()
    try:
        if warm:
            loss_of(wrapper(own[0])).backward()
            wrapper.zero_grad()
        program(wrapper, *own)
    except RuntimeError as error:
        return str(error)
    program(one, *batches())
    if isinstance(wrapper, FullyShardedDataParallel):
        return "right"  # Its shards are compared elsewhere.
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        if (p.grad is None) != (q.grad is None):
            return f"wrong: {name} {p.grad} for {q.grad}"
        if p.grad is not None and not torch.allclose(p.grad, q.grad):
            return f"wrong: {name} off by {(p.grad - q.grad).abs().max():.3f}"
    return "right"


def outcomes(stage):
    told = {}
    for program in PROGRAMS:
        if program in NEEDS_NO_SYNC and stage in "57":
            continue
        for warm in (False, True):
            told[program.__name__, warm] = outcome(program, WRAPPERS[stage], warm)
    return told


@pytest.mark.parametrize("stage", WRAPPERS)
def test_gradients_are_those_of_one_process_or_refused(stage):
    for told in launch(outcomes, stage, world_size=2):
        for (name, warm), words in told.items():
            assert not words.startswith("wrong"), (stage, name, warm, words)
            if stage.startswith("6") and globals()[name] not in MAY_BE_REFUSED:
                assert words == "right" or stage == "6 static", (stage, name, warm, words)
