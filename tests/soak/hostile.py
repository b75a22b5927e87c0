"""Hostile use, in four tables: `python tests/soak/hostile.py [PART…]`.

A part is weights, split, stages or launches. Each case does to a sharded or split model, to a stage
or to a launch what somebody may well do, and does the same to torch's own classes, or on one
device. It must be right, that is, end with the same numbers, or be refused in words that say what
to do. Prints every other outcome, and how many cases ended how; the exit code is the number of the
others.
"""

import copy
import io
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_course import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    ShardedOptimizer,
    launch,
    stage9_tensor,
)
from ddp_course.stage3_paramserver import average_on_server, broadcast_parameters, gradients
from ddp_course.stage4_ring import average_on_ring
from ddp_course.stage5_bucketed import BucketedDDP
from manyranks.errors import LaunchError, LaunchTimeout
from manyranks.joining.join import from_slurm

RIGHT = "right"
REFUSED = "refused"
AS_TORCH = "fails as torch's does"
WAYS_OUT = """
    instead before after only must call make wrap write use take choose give see set stage freeze
    launch free cannot return print leave once_differentiable stay name allows
"""
REFUSALS = (RuntimeError, ValueError, TypeError, LaunchError)


class Case(NamedTuple):
    """What is done, and what does the same on one device or with torch's classes."""

    name: str
    ours: Callable
    expected: Callable


class Launched(NamedTuple):
    """What is launched, and what the launch returns, or words of its error."""

    function: Callable
    arguments: list
    wanted: Any


def words_of(error):
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def refusal(error):
    if any(word in str(error).partition("\n")[0] for word in WAYS_OUT.split()):
        return REFUSED
    return f"poor words: {words_of(error)}"


def outcome(ours, expected, ranks_differ=False):
    """Return what became of a case, as one rank sees it: one of the three names, or what is wrong.

    An error of a single rank must end the launch: the others would wait for it.
    """
    try:
        wanted = expected()
        torchs_error = None
    except Exception as error:
        torchs_error = words_of(error)
    try:
        got = ours()
    except REFUSALS as error:
        if ranks_differ:
            raise
        if torchs_error is not None:
            return AS_TORCH
        return refusal(error)
    except Exception as error:
        return f"another error: {words_of(error)}"
    if torchs_error is not None:
        return f"accepted, where torch says {torchs_error}"
    for name, (own, theirs) in enumerate(zip(got, wanted, strict=True)):
        if own is None or theirs is None:
            same = own is theirs
        else:
            same = own.shape == theirs.shape and torch.allclose(
                own.double(), theirs.double(), rtol=1e-5, atol=1e-6
            )
        if not same:
            return f"wrong: number {name} is {own}, and {theirs} on one device"
    return RIGHT


# Weights and gradients of which a rank has a part.


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def data(rank=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))


def with_gradients(model):
    model(data()).square().mean().backward()
    return model


def of_one_device(action):
    model = with_gradients(layers())
    found = action(list(model.parameters()))
    return [*model.state_dict().values(), *numbers(found)]


def of_shards(action):
    model = with_gradients(FullyShardedDataParallel(layers()))
    found = action(list(model.parameters()))
    return [*model.state_dict().values(), *numbers(found)]


def of_slices(action):
    model = with_gradients(stage9_tensor.parallelize(layers()))
    found = action(list(model.parameters()))
    return [*stage9_tensor.restore(model).state_dict().values(), *numbers(found)]


def numbers(found):
    """Return what an action says of the whole, if it is a number."""
    if isinstance(found, torch.Tensor) and found.dim() == 0:
        return [found.detach().as_subclass(torch.Tensor)]
    return []


def present(parameters):
    """Return the parameters with a gradient: a rank may have none of the elements of the others."""
    return [parameter for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def each(change, parameters):
    """Change each parameter; a number that comes of it is added up."""
    total = None
    for parameter in present(parameters):
        found = change(parameter)
        if isinstance(found, torch.Tensor) and found.dim() == 0:
            total = found if total is None else total + found
    return total


def step(make, parameters):
    optimizer = make(parameters)
    for _ in range(2):
        optimizer.step()


def averaged_weights(parameters):
    """Put an exponential average of the weights in place of them."""
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    with torch.no_grad():
        kept = [parameter.clone() for parameter in parameters]
        average(kept, [parameter * 3 for parameter in parameters], 1)
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)


def halved_data(parameter):
    parameter.data = parameter.data * 0.5


def other_data(parameter):
    parameter.data = torch.zeros(3, 3)


def total_norm_of_gradients(parameters):
    return nn.utils.get_total_norm([parameter.grad for parameter in present(parameters)])


def norm_of_end_to_end(parameters):
    return nn.utils.parameters_to_vector(parameters).norm()


def multiply_all(parameters):
    torch._foreach_mul_([parameter.data for parameter in parameters], 0.5)


def sum_of_norms(parameters):
    return sum(torch._foreach_norm([parameter.data for parameter in parameters]))


def add_all_gradients(parameters):
    with_gradient = present(parameters)
    gradients_of_all = [parameter.grad for parameter in with_gradient]
    torch._foreach_add_([parameter.data for parameter in with_gradient], gradients_of_all)


def step_of_lbfgs(parameters):
    torch.optim.LBFGS(parameters).step(no_loss)


def no_loss():
    return torch.zeros(())


def step_of_muon(parameters):
    step(torch.optim.Muon, [parameter for parameter in parameters if parameter.dim() == 2])


# What is done to each parameter; a number that comes of it is compared.
ONE_BY_ONE = {
    "mul_": lambda p: p.mul_(0.5),
    "sub_ of the gradient": lambda p: p.sub_(p.grad, alpha=0.1),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "data.clamp_": lambda p: p.data.clamp_(-0.1, 0.1),
    "sign of the gradient": lambda p: p.add_(p.grad.sign(), alpha=0.01),
    "copy_ of itself": lambda p: p.copy_(p * 2),
    "zero_": torch.Tensor.zero_,
    "fill_": lambda p: p.fill_(0.3),
    "lerp_": lambda p: p.lerp_(torch.zeros_like(p), 0.1),
    "addcmul_": lambda p: p.addcmul_(p.grad, p.grad, value=0.1),
    "addcdiv_": lambda p: p.addcdiv_(p.grad, p.grad.abs() + 1, value=0.1),
    "where": lambda p: p.copy_(torch.where(p > 0, p, -p)),
    "a mask": lambda p: p.masked_fill_(p < 0, 0.0),
    "a mask as index": lambda p: p.__setitem__(p < 0, 0.0),
    "exp": lambda p: p.copy_(p.exp()),
    "pow": lambda p: p.copy_(p**2),
    "to float64 and back": lambda p: p.copy_(p.double().float()),
    "gradient to half": lambda p: p.grad.copy_(p.grad.half().float()),
    "data in place": halved_data,
    "data of another shape": other_data,
    "norm": torch.Tensor.norm,
    "norm of data": lambda p: p.data.norm(),
    "norm of the gradient": lambda p: p.grad.norm(),
    "linalg.norm": torch.linalg.norm,
    "vector_norm": lambda p: torch.linalg.vector_norm(p.detach()),
    "sum": torch.Tensor.sum,
    "abs().sum": lambda p: p.abs().sum(),
    "mean": torch.Tensor.mean,
    "max": torch.Tensor.max,
    "amin": torch.Tensor.amin,
    "std": torch.Tensor.std,
    "var": torch.Tensor.var,
    "prod": torch.Tensor.prod,
    "median": torch.Tensor.median,
    "dot": lambda p: torch.dot(p.reshape(-1), p.reshape(-1)),
    "p @ p.T": lambda p: (p @ p.T).sum(),
    "einsum": lambda p: torch.einsum("...i,...i->", p, p),
    "argmax": lambda p: p.argmax().float(),
    "count_nonzero": lambda p: torch.count_nonzero(p).float(),
    "isfinite().all": lambda p: p.isfinite().all().float(),
    "item of a sum": lambda p: p.copy_(p * p.sum().item()),
    "softmax": lambda p: p.copy_(p.softmax(-1)),
    "cumsum": lambda p: p.copy_(p.cumsum(0)),
    "sort": lambda p: p.copy_(p.sort(-1).values),
    "flip": lambda p: p.copy_(p.flip(0)),
    "roll": lambda p: p.copy_(p.roll(1, 0)),
    "a row": lambda p: p[0].fill_(0.0),
    "a range": lambda p: p[1:].fill_(0.0),
    "normalised": lambda p: p.div_(p.norm() + 1),
    "less its mean": lambda p: p.sub_(p.mean()),
    "layer_norm": lambda p: p.copy_(nn.functional.layer_norm(p, p.shape)),
    "quantised": lambda p: p.copy_((p / p.abs().max() * 127).round()),
    "top half": lambda p: p.mul_(p.abs() > p.abs().median()),
    "noise": lambda p: p.add_(torch.randn_like(p)),
    "normal_": torch.Tensor.normal_,
    "dropout": lambda p: p.copy_(nn.functional.dropout(p, 0.5)),
    "tolist": lambda p: p.fill_(len(p.tolist())),
    "numpy": lambda p: p.fill_(float(p.numpy().sum())),
    "init.constant_": lambda p: nn.init.constant_(p, 0.1),
    "init.zeros_": nn.init.zeros_,
    "init.uniform_": nn.init.uniform_,
    "init.normal_": nn.init.normal_,
    "init.trunc_normal_": nn.init.trunc_normal_,
    "init.sparse_": lambda p: nn.init.sparse_(p.view(len(p), -1), 0.5),
    "init.xavier_uniform_": lambda p: nn.init.xavier_uniform_(p.view(len(p), -1)),
    "init.kaiming_normal_": lambda p: nn.init.kaiming_normal_(p.view(len(p), -1)),
    "init.orthogonal_": lambda p: nn.init.orthogonal_(p.view(len(p), -1)),
}
WHOLE_LISTS = {
    "clip_grad_norm_": partial(nn.utils.clip_grad_norm_, max_norm=0.1),
    "clip_grad_norm_ of infinity": partial(
        nn.utils.clip_grad_norm_, max_norm=0.1, norm_type=float("inf")
    ),
    "clip_grad_value_": partial(nn.utils.clip_grad_value_, clip_value=0.01),
    "clip_grad_value_, foreach": partial(nn.utils.clip_grad_value_, clip_value=0.01, foreach=True),
    "get_total_norm": total_norm_of_gradients,
    "end to end": norm_of_end_to_end,
    "from a vector": partial(nn.utils.vector_to_parameters, torch.ones(58)),
    "_foreach_mul_": multiply_all,
    "_foreach_norm": sum_of_norms,
    "_foreach_add_ of gradients": add_all_gradients,
    "averaged weights": averaged_weights,
    "LBFGS": step_of_lbfgs,
    "Adafactor": partial(step, torch.optim.Adafactor),
    "Muon": step_of_muon,
    "SparseAdam": partial(step, torch.optim.SparseAdam),
}
OPTIMIZERS = """
    SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop
"""
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def weights():
    """Yield cases of parts: what is done, for shards and for slices."""
    actions = {name: partial(each, change) for name, change in ONE_BY_ONE.items()} | WHOLE_LISTS
    for name, foreach in product(OPTIMIZERS.split(), (False, True)):
        make = partial(getattr(torch.optim, name), lr=0.01, foreach=foreach)
        actions[f"{name}, foreach={foreach}"] = partial(step, make)
    for name in FUSED:
        make = partial(getattr(torch.optim, name), lr=0.01, fused=True)
        actions[f"{name}, fused"] = partial(step, make)
    for (name, action), ours in product(actions.items(), (of_shards, of_slices)):
        expected = partial(of_one_device, action)
        yield Case(f"{name} {ours.__name__}", partial(ours, action), expected)


# Split models.


def five_layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
        nn.Tanh(),
        nn.Linear(4, 6),
        nn.GELU(),
        nn.Linear(6, 4),
    )


class Doubling(nn.Linear):
    """A subclass that does something else."""

    def forward(self, inputs):
        return super().forward(inputs) * 2


class Mixing(nn.ReLU):
    """An activation that looks at all features."""

    def forward(self, inputs):
        return inputs.relu() - inputs.mean(-1, keepdim=True)


def hooked(model):
    model[0].register_forward_hook(lambda layer, inputs, outputs: outputs * 2)


def hooked_before(model):
    model[2].register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 1,))


def hooked_backward(model):
    model[2].register_full_backward_hook(lambda layer, before, after: (before[0] * 2,))


def hooked_weight(model):
    model[0].weight.register_hook(lambda gradient: gradient * 3)


def hooked_activation(model):
    model[1].register_forward_hook(lambda layer, inputs, outputs: outputs.cumsum(-1))


def frozen_first(model):
    model[0].requires_grad_(False)


def frozen_biases(model):
    for layer in model[::2]:
        layer.bias.requires_grad_(False)


def without_biases(model):
    model[0] = nn.Linear(4, 8, bias=False)
    model[2] = nn.Linear(8, 4, bias=False)
    torch.manual_seed(1)
    nn.init.normal_(model[0].weight)
    nn.init.normal_(model[2].weight)


def subclassed(model):
    model[0].__class__ = Doubling


def mixing(model):
    model[1] = Mixing()


def tied(model):
    model[6] = model[2] = nn.Linear(8, 4)
    model[4] = nn.Linear(4, 8)
    torch.manual_seed(1)
    for layer in (model[2], model[4]):
        nn.init.normal_(layer.weight)
        nn.init.zeros_(layer.bias)


def shared_activation(model):
    model[3] = model[5] = model[1]


def weight_norm(model):
    nn.utils.parametrizations.weight_norm(model[0])


def in_float64(model):
    model.double()


def narrow(model):
    """Fewer units than ranks: this pair stays whole."""
    model[4] = nn.Linear(4, 1)
    model[6] = nn.Linear(1, 4)
    torch.manual_seed(1)
    nn.init.normal_(model[4].weight)
    nn.init.normal_(model[6].weight)
    nn.init.zeros_(model[4].bias)
    nn.init.zeros_(model[6].bias)


def nothing(model):
    pass


CHANGES = [
    nothing,
    hooked,
    hooked_before,
    hooked_backward,
    hooked_weight,
    hooked_activation,
    frozen_first,
    frozen_biases,
    without_biases,
    subclassed,
    mixing,
    tied,
    shared_activation,
    weight_norm,
    in_float64,
    narrow,
]


def inputs_for(model, rank=0):
    return data(rank).to(next(model.parameters()).dtype)


def changed(change):
    model = five_layers()
    change(model)
    return model


def trained(model, optimizer):
    for number in range(3):
        optimizer.zero_grad()
        model(inputs_for(model, number)).square().mean().backward()
        optimizer.step()


def train_split(change):
    model = stage9_tensor.parallelize(changed(change))
    trained(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    return stage9_tensor.restore(model).state_dict().values()


def train_split_foreach(change):
    model = stage9_tensor.parallelize(changed(change))
    trained(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True))
    return stage9_tensor.restore(model).state_dict().values()


def train_alone(change, make=torch.optim.AdamW, **settings):
    model = changed(change)
    trained(model, make(model.parameters(), lr=0.05, **settings))
    return model.state_dict().values()


def copy_split(change):
    model = copy.deepcopy(stage9_tensor.parallelize(changed(change)))
    trained(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    return stage9_tensor.restore(model).state_dict().values()


def copy_alone(change):
    model = copy.deepcopy(changed(change))  # torch's copies have no hooks of weights.
    trained(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    return model.state_dict().values()


def average_split(change):
    model = stage9_tensor.parallelize(changed(change))
    average = torch.optim.swa_utils.AveragedModel(model)
    trained(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    average.update_parameters(model)
    return stage9_tensor.restore(average).module.state_dict().values()


def checkpointed_split(change):
    model = stage9_tensor.parallelize(changed(change))
    recompute = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number in range(3):
        optimizer.zero_grad()
        recompute(model, inputs_for(model, number)).square().mean().backward()
        optimizer.step()
    return stage9_tensor.restore(model).state_dict().values()


def clipped_split(change):
    model = stage9_tensor.parallelize(changed(change))
    model(inputs_for(model)).square().sum().backward()
    return [stage9_tensor.clip_grad_norm_(model, 0.01)]


def clipped_alone(change):
    model = changed(change)
    model(inputs_for(model)).square().sum().backward()
    return [nn.utils.clip_grad_norm_(model.parameters(), 0.01)]


def of_inputs_split(change):
    """Return the gradient of the inputs."""
    model = stage9_tensor.parallelize(changed(change))
    inputs = inputs_for(model).requires_grad_()
    model(inputs).square().sum().backward()
    return [inputs.grad]


def of_inputs_alone(change):
    model = changed(change)
    inputs = inputs_for(model).requires_grad_()
    model(inputs).square().sum().backward()
    return [inputs.grad]


def penalty(model):
    inputs = inputs_for(model).requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    gradient.square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def penalty_split(change):
    return penalty(stage9_tensor.parallelize(changed(change)))


def penalty_alone(change):
    return penalty(changed(change))


def momentum_alone(change):
    return train_alone(change, torch.optim.SGD, momentum=0.9)


# What is done with a split model, and with the same model on one device.
PAIRS = {
    "train": (train_split, train_alone),
    "train, foreach": (train_split_foreach, momentum_alone),
    "copy": (copy_split, copy_alone),
    "average": (average_split, train_alone),
    "checkpointing": (checkpointed_split, train_alone),
    "clip": (clipped_split, clipped_alone),
    "gradient of the inputs": (of_inputs_split, of_inputs_alone),
    "penalty": (penalty_split, penalty_alone),
}


def split():
    """Yield cases of stage 9: models with something odd, and what is done with them."""
    for change, (name, (ours, expected)) in product(CHANGES, PAIRS.items()):
        yield Case(f"{change.__name__}: {name}", partial(ours, change), partial(expected, change))


# Stages 3 to 7 beside torch's DistributedDataParallel.


class Net(nn.Module):
    """Layers a, b and c, of which `uses` says which this rank uses in which order."""

    def __init__(self, uses, parts):
        super().__init__()
        self.parts = parts
        self.uses = uses

    def forward(self, inputs):
        for name in self.uses:
            inputs = self.parts[name](inputs)
        return inputs


def parts():
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})


class Scale(nn.Module):
    """A parameter without dimensions, one without elements, and one of another dtype."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, inputs):
        return inputs * self.scale + self.empty.sum() + self.wide.float()


def replaced(name, make):
    members = parts()
    members[name] = make()
    return members


def frozen(name):
    members = parts()
    members[name].requires_grad_(False)
    return members


def tied_parts():
    members = parts()
    members["b"].weight = members["a"].weight
    return members


def strided_parts():
    members = parts()
    members["a"].weight.data = members["a"].weight.data.t().contiguous().t()
    return members


class Positions(nn.Module):
    """A table, of which each batch uses some rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(9, 4)

    def forward(self, inputs):
        return inputs + self.table(torch.arange(len(inputs)))


class Recipe(NamedTuple):
    """How to make a Net: which layers each of two ranks uses, and a function that makes them."""

    uses: list
    make: Callable

    def net(self, rank):
        return Net(self.uses[rank], self.make())


ALL = ["abc", "abc"]
NETS = {
    "all are used": Recipe(ALL, parts),
    "one is used by nobody": Recipe(["ab", "ab"], parts),
    "one is used by rank 1 alone": Recipe(["a", "abc"], parts),
    "each rank uses another": Recipe(["ab", "ac"], parts),
    "two are used by nobody": Recipe(["b", "b"], parts),
    "one is used twice": Recipe(["aabc", "aabc"], parts),
    "another order on each rank": Recipe(["abc", "cba"], parts),
    "one is frozen": Recipe(ALL, partial(frozen, "b")),
    "one is frozen, and not used": Recipe(["ac", "ac"], partial(frozen, "b")),
    "two are tied": Recipe(ALL, tied_parts),
    "turned memory": Recipe(ALL, strided_parts),
    "odd parameters": Recipe(ALL, partial(replaced, "b", Scale)),
    "odd parameters, not used": Recipe(["ac", "ac"], partial(replaced, "b", Scale)),
    "an embedding": Recipe(ALL, partial(replaced, "b", Positions)),
    "an output of ints is dropped": Recipe(ALL, partial(replaced, "b", nn.Identity)),
    "a norm of the batch": Recipe(ALL, partial(replaced, "b", partial(nn.BatchNorm1d, 4))),
}


def by_messages(average):
    """Return a function that takes steps of stage 3 or 4."""

    def run(model, rank):
        broadcast_parameters(model)
        return stepped(model, rank, average=average)

    return run


def by_wrapper(wrap):
    """Return a function that takes steps of a model in a wrapper that averages by itself."""

    def run(model, rank):
        return stepped(model, rank, forward=wrap(model))

    return run


def by_shards(model, rank):
    wrapped = FullyShardedDataParallel(model)
    stepped(wrapped, rank)
    return wrapped.restore().parameters()


def by_zero_1(model, rank):
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.5)
    return stepped(model, rank, optimizer=optimizer)


def stepped(model, rank, average=None, forward=None, optimizer=None):
    """Take three steps, by AdamW with weight decay unless told otherwise; return the parameters."""
    if forward is None:
        forward = model
    if optimizer is None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5)
    for number in range(3):
        optimizer.zero_grad()
        forward(data(10 * number + rank)).square().mean().backward()
        if average is not None:
            average(gradients(model))
        optimizer.step()
    return model.parameters()


STAGES = {
    "stage 3": by_messages(average_on_server),
    "stage 4": by_messages(average_on_ring),
    "stage 5": by_wrapper(BucketedDDP),
    "stage 6": by_wrapper(partial(DistributedDataParallel, find_unused_parameters=True)),
    "stage 6, views": by_wrapper(
        partial(DistributedDataParallel, find_unused_parameters=True, gradient_as_bucket_view=True)
    ),
    "stage 7": by_shards,
    "stage 7o": by_zero_1,
}


def run_on_rank(run, recipe):
    rank = dist.get_rank()
    return run(recipe.net(rank), rank)


def stages():
    """Yield cases of replicas: models that leave something out, in each stage."""
    torchs = by_wrapper(partial(TorchDDP, find_unused_parameters=True))
    for (model, recipe), (stage, run) in product(NETS.items(), STAGES.items()):
        ours = partial(run_on_rank, run, recipe)
        yield Case(f"{stage}: {model}", ours, partial(run_on_rank, torchs, recipe))


PARTS = {"weights": weights, "split": split, "stages": stages}


def all_of(part, names):
    """On a rank, return the outcome of each case with one of these names.

    Where ranks may have stopped at different points, the next cases could not begin: such a case
    has a launch of its own.
    """
    torch.set_num_threads(1)
    outcomes = {}
    for case in PARTS[part]():
        if case.name in names:
            outcomes[case.name] = outcome(case.ours, case.expected, ranks_differ=len(names) == 1)
    return outcomes


def report(part):
    """Return {case: outcome} of a part, by one launch, and one for each case of stage 5."""
    outcomes = {}
    names = [case.name for case in PARTS[part]()]
    alone = [name for name in names if part == "stages" and "stage 5" in name]
    together = [name for name in names if name not in alone]
    for chosen in [together, *([name] for name in alone)]:
        try:
            ranks = launch(all_of, part, chosen, world_size=2, timeout=300)
        except LaunchTimeout as error:
            outcomes.update(dict.fromkeys(chosen, f"hangs: {words_of(error)}"))
            continue
        except LaunchError as error:
            outcomes.update(dict.fromkeys(chosen, refusal(error)))
            continue
        for name in chosen:
            kinds = {rank[name] for rank in ranks}
            outcomes[name] = kinds.pop() if len(kinds) == 1 else f"ranks differ: {kinds}"
    return outcomes


# Launches, and what Slurm says.


class Speechless(Exception):
    """An exception that cannot say what it is."""

    def __str__(self):
        raise KeyboardInterrupt


class Unsendable:
    """A result that cannot be packed; `error` is what that raises."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def raising(error):
    raise error


def on_rank_1(function, *arguments):
    return function(*arguments) if dist.get_rank() == 1 else None


def close(stream):
    getattr(sys, stream).close()
    return 1


def replace(stream):
    setattr(sys, stream, io.StringIO())
    return 1


def leave(code):
    os._exit(code)


def end_by(number):
    os.kill(os.getpid(), number)


def too_deep():
    result = []
    for _ in range(100_000):
        result = [result]
    return result


def a_generator():
    return (number for number in (1, 2))


def an_open_file():
    return sys.stdin


def a_group():
    return dist.group.WORLD


ERRORS = (
    ValueError("x"),
    KeyError("x"),
    MemoryError(),
    RecursionError(),
    StopIteration(),
    GeneratorExit(),
    AssertionError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"),
    OSError(28, "No space left on device"),
    KeyboardInterrupt(),
    ConnectionError("mine"),
    TimeoutError("mine"),
    ValueError("\udcff\x00 \x1b[31m"),
    ValueError("x" * 100_000),
)


def cases_of_launches():
    """Return {name: Launched}."""
    cases = {
        "an exception that cannot speak": Launched(raising, [Speechless()], "Speechless"),
        "a very deep result": Launched(too_deep, [], "cannot be sent"),
        "a lambda": Launched(lambda: (lambda: 1)() + 1, [], [2, 2]),
        "a generator": Launched(a_generator, [], "cannot be sent"),
        "an open file": Launched(an_open_file, [], "cannot be sent"),
        "a group": Launched(a_group, [], "cannot be sent"),
        "a large number": Launched(pow, [10, 5000], [10**5000] * 2),
        "not a number": Launched(float, ["inf"], [float("inf")] * 2),
        "a group made twice": Launched(dist.init_process_group, ["gloo"], "leave out"),
        "input()": Launched(input, [], "EOF"),
        "breakpoint()": Launched(breakpoint, [], "cannot be used in a rank"),
    }
    for stream in ("stdin", "stdout", "stderr"):
        cases[f"closed {stream}"] = Launched(close, [stream], [1, 1])
    for stream in ("stdout", "stderr"):
        cases[f"replaced {stream}"] = Launched(replace, [stream], [1, 1])
    for error in ERRORS:
        kind = type(error).__name__
        cases[f"{kind}{error.args}"] = Launched(raising, [error], kind)
    for error in (ValueError("x"), MemoryError(), Speechless()):
        words = f"rank 1: {type(error).__name__}"
        cases[f"on {words}"] = Launched(on_rank_1, [raising, error], words)
    for code in (0, 1, 3, 255):
        cases[f"leaves with {code}"] = Launched(leave, [code], "without a result")
    for code in (0, 1, "words", None):
        cases[f"sys.exit({code!r})"] = Launched(sys.exit, [code], "sys.exit")
    for number in (1, 2, 3, 6, 9, 11, 15):
        cases[f"killed by signal {number}"] = Launched(end_by, [number], "killed: by SIG")
    for error in (ValueError("x"), KeyboardInterrupt(), SystemExit(3)):
        name = f"a result whose packing raises {type(error).__name__}"
        cases[name] = Launched(Unsendable, [error], "cannot be sent")
    return cases


SETTINGS = {
    "MANYRANKS_NETWORK": ["privat", "AUTO", "1", "no", " private"],
    "MANYRANKS_START": ["forkserver", "FORK", "1"],
}
WORLD_SIZES = [0, -1, 2.0, "2", 10**9, 10**30]
SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
}


def outcome_of(case):
    """Return what became of a launch."""
    try:
        got = launch(case.function, *case.arguments, world_size=2, timeout=60)
    except (LaunchError, ValueError, TypeError) as error:
        if isinstance(case.wanted, str) and case.wanted in str(error):
            return REFUSED
        return f"poor words: {words_of(error)}"
    return RIGHT if got == case.wanted else f"wrong: {str(got)[:200]}"


def refused(**settings):
    try:
        launch(os.getpid, **settings)
    except (ValueError, TypeError) as error:
        return refusal(error)
    return f"accepted: {settings}"


def launches():
    """Return {case: outcome} of launches."""
    outcomes = {}
    with redirect_stderr(io.StringIO()):
        for name, case in cases_of_launches().items():
            outcomes[name] = outcome_of(case)
        for size in WORLD_SIZES:
            outcomes[f"{size!r} ranks"] = refused(world_size=size)
        for name, values in SETTINGS.items():
            for value in values:
                os.environ[name] = value
                outcomes[f"{name}={value}"] = refused(world_size=2)
                del os.environ[name]
    ports = set()
    for step, restart in product(range(10), range(5)):
        said = {"SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(restart)}
        ports.add(from_slurm(SLURM | said)["MASTER_PORT"])
    outcomes["fifty steps of a job have fifty ports"] = RIGHT
    if len(ports) != 50:
        outcomes["fifty steps of a job have fifty ports"] = f"wrong: {len(ports)} ports"
    return outcomes


def main(*wanted):
    """Run the parts, and print what is neither right nor refused; return how many those are."""
    others = 0
    for part in wanted or [*PARTS, "launches"]:
        outcomes = launches() if part == "launches" else report(part)
        counts = Counter()
        for name, found in outcomes.items():
            good = found in (RIGHT, REFUSED, AS_TORCH)
            if not good:
                print(f"{part}, {name}: {found}", flush=True)
                found = "other"
            counts[found] += 1
        others += counts["other"]
        print(f"{part}: {len(outcomes)} cases, {dict(counts)}", flush=True)
    return others


if __name__ == "__main__":
    sys.exit(min(100, main(*sys.argv[1:])))
