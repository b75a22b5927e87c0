"""Hostile use, in four tables: `python tests/soak/hostile.py [PART…]`, where a part is weights,
split, stages or launches.

Each case does to a sharded or split model, to a stage or to a launch what somebody may well do, and
does the same to torch's own classes, or on one device. It must be right, that is, end with the same
numbers, or be refused in words that say what to do. Prints every other outcome, and how many cases
ended how; the exit code is the number of the others.
"""

import copy
import io
import os
import sys
from collections import Counter
from contextlib import redirect_stderr
from functools import partial
from itertools import product

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


def words_of(error):
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def refusal(error):
    if any(word in str(error).partition("\n")[0] for word in WAYS_OUT.split()):
        return REFUSED
    return f"poor words: {words_of(error)}"


def outcome(ours, expected, ranks_differ=False):
    """Return what became of a case, as one rank sees it; anything else than the three names is
    wrong.

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


ONE_BY_ONE = {
    "mul_": lambda p: p.mul_(0.5),
    "sub_ of the gradient": lambda p: p.sub_(p.grad, alpha=0.1),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "data.clamp_": lambda p: p.data.clamp_(-0.1, 0.1),
    "sign of the gradient": lambda p: p.add_(p.grad.sign(), alpha=0.01),
    "copy_ of itself": lambda p: p.copy_(p * 2),
    "zero_": lambda p: p.zero_(),
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
    "norm": lambda p: p.norm(),
    "norm of data": lambda p: p.data.norm(),
    "norm of the gradient": lambda p: p.grad.norm(),
    "linalg.norm": lambda p: torch.linalg.norm(p),
    "vector_norm": lambda p: torch.linalg.vector_norm(p.detach()),
    "sum": lambda p: p.sum(),
    "abs().sum": lambda p: p.abs().sum(),
    "mean": lambda p: p.mean(),
    "max": lambda p: p.max(),
    "amin": lambda p: p.amin(),
    "std": lambda p: p.std(),
    "var": lambda p: p.var(),
    "prod": lambda p: p.prod(),
    "median": lambda p: p.median(),
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
    "normal_": lambda p: p.normal_(),
    "dropout": lambda p: p.copy_(nn.functional.dropout(p, 0.5)),
    "tolist": lambda p: p.fill_(len(p.tolist())),
    "numpy": lambda p: p.fill_(float(p.numpy().sum())),
    "init.constant_": lambda p: nn.init.constant_(p, 0.1),
    "init.zeros_": lambda p: nn.init.zeros_(p),
    "init.uniform_": lambda p: nn.init.uniform_(p),
    "init.normal_": lambda p: nn.init.normal_(p),
    "init.trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "init.sparse_": lambda p: nn.init.sparse_(p.view(len(p), -1), 0.5),
    "init.xavier_uniform_": lambda p: nn.init.xavier_uniform_(p.view(len(p), -1)),
    "init.kaiming_normal_": lambda p: nn.init.kaiming_normal_(p.view(len(p), -1)),
    "init.orthogonal_": lambda p: nn.init.orthogonal_(p.view(len(p), -1)),
}
WHOLE_LISTS = {
    "clip_grad_norm_": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
    "clip_grad_norm_ of infinity": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, float("inf")),
    "clip_grad_value_": lambda ps: nn.utils.clip_grad_value_(ps, 0.01),
    "clip_grad_value_, foreach": lambda ps: nn.utils.clip_grad_value_(ps, 0.01, foreach=True),
    "get_total_norm": lambda ps: nn.utils.get_total_norm([p.grad for p in present(ps)]),
    "end to end": lambda ps: nn.utils.parameters_to_vector(ps).norm(),
    "from a vector": lambda ps: nn.utils.vector_to_parameters(torch.ones(58), ps),
    "_foreach_mul_": lambda ps: torch._foreach_mul_([p.data for p in ps], 0.5),
    "_foreach_norm": lambda ps: sum(torch._foreach_norm([p.data for p in ps])),
    "_foreach_add_ of gradients": lambda ps: torch._foreach_add_(
        [p.data for p in present(ps)], [p.grad for p in present(ps)]
    ),
    "averaged weights": averaged_weights,
    "LBFGS": lambda ps: torch.optim.LBFGS(ps).step(lambda: torch.zeros(())),
    "Adafactor": lambda ps: step(torch.optim.Adafactor, ps),
    "Muon": lambda ps: step(torch.optim.Muon, [p for p in ps if p.dim() == 2]),
    "SparseAdam": lambda ps: step(torch.optim.SparseAdam, ps),
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
        yield f"{name} {ours.__name__}", partial(ours, action), partial(of_one_device, action)


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


def split():
    """Yield cases of stage 9: models with something odd, and what is done with them."""
    for change in CHANGES:
        name = change.__name__
        yield f"{name}: train", partial(train_split, change), partial(train_alone, change)
        yield (
            f"{name}: train, foreach",
            partial(train_split_foreach, change),
            partial(train_alone, change, torch.optim.SGD, momentum=0.9),
        )
        yield f"{name}: copy", partial(copy_split, change), partial(copy_alone, change)
        yield f"{name}: average", partial(average_split, change), partial(train_alone, change)
        yield (
            f"{name}: checkpointing",
            partial(checkpointed_split, change),
            partial(train_alone, change),
        )
        yield f"{name}: clip", partial(clipped_split, change), partial(clipped_alone, change)
        yield (
            f"{name}: gradient of the inputs",
            partial(of_inputs_split, change),
            partial(of_inputs_alone, change),
        )
        yield (
            f"{name}: penalty",
            lambda change=change: penalty(stage9_tensor.parallelize(changed(change))),
            lambda change=change: penalty(changed(change)),
        )


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


def replaced(name, layer):
    members = parts()
    members[name] = layer
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


NETS = {
    "all are used": lambda rank: Net("abc", parts()),
    "one is used by nobody": lambda rank: Net("ab", parts()),
    "one is used by rank 1 alone": lambda rank: Net(["a", "abc"][rank], parts()),
    "each rank uses another": lambda rank: Net(["ab", "ac"][rank], parts()),
    "two are used by nobody": lambda rank: Net("b", parts()),
    "one is used twice": lambda rank: Net("aabc", parts()),
    "another order on each rank": lambda rank: Net(["abc", "cba"][rank], parts()),
    "one is frozen": lambda rank: Net("abc", frozen("b")),
    "one is frozen, and not used": lambda rank: Net("ac", frozen("b")),
    "two are tied": lambda rank: Net("abc", tied_parts()),
    "turned memory": lambda rank: Net("abc", strided_parts()),
    "odd parameters": lambda rank: Net("abc", replaced("b", Scale())),
    "odd parameters, not used": lambda rank: Net("ac", replaced("b", Scale())),
    "an embedding": lambda rank: Net("abc", replaced("b", Positions())),
    "an output of ints is dropped": lambda rank: Net("abc", replaced("b", nn.Identity())),
    "a norm of the batch": lambda rank: Net("abc", replaced("b", nn.BatchNorm1d(4, affine=True))),
}


class Positions(nn.Module):
    """A table, of which each batch uses some rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(9, 4)

    def forward(self, inputs):
        return inputs + self.table(torch.arange(len(inputs)))


def by_messages(average):
    """Take steps of stage 3 or 4, with an optimizer that decays weights."""

    def run(model, rank):
        broadcast_parameters(model)
        return stepped(model, rank, lambda: average(gradients(model)))

    return run


def by_wrapper(wrap):
    def run(model, rank):
        wrapped = wrap(model)
        return stepped(model, rank, lambda: None, wrapped)

    return run


def by_shards(model, rank):
    wrapped = FullyShardedDataParallel(model)
    stepped(wrapped, rank, lambda: None)
    return wrapped.restore().parameters()


def by_zero_1(model, rank):
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.5)
    return stepped(model, rank, lambda: None, optimizer=optimizer)


def stepped(model, rank, average, wrapped=None, optimizer=None):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5)
    for number in range(3):
        optimizer.zero_grad()
        (wrapped or model)(data(10 * number + rank)).square().mean().backward()
        average()
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


def stages():
    """Yield cases of replicas: models that leave something out, in each stage."""
    torchs = by_wrapper(partial(TorchDDP, find_unused_parameters=True))
    for (model, make), (stage, run) in product(NETS.items(), STAGES.items()):
        yield (
            f"{stage}: {model}",
            lambda run=run, make=make: run(make(dist.get_rank()), dist.get_rank()),
            lambda make=make: torchs(make(dist.get_rank()), dist.get_rank()),
        )


PARTS = {"weights": weights, "split": split, "stages": stages}


def all_of(part, names):
    """On a rank, return the outcome of each case. Where ranks may have stopped at different
    points, the next cases could not begin: such a case has a launch of its own.
    """
    torch.set_num_threads(1)
    return {
        name: outcome(ours, expected, ranks_differ=len(names) == 1)
        for name, ours, expected in PARTS[part]()
        if name in names
    }


def report(part):
    """Return {case: outcome} of a part, by one launch, and by one launch for each case that
    broke it.
    """
    outcomes = {}
    names = [name for name, _, _ in PARTS[part]()]
    alone = [name for name in names if part == "stages" and "stage 5" in name]
    together = [name for name in names if name not in alone]
    for chosen in [together, *([name] for name in alone)]:
        try:
            ranks = launch(all_of, part, chosen, world_size=2, timeout=300)
        except LaunchTimeout as error:
            outcomes.update({name: f"hangs: {words_of(error)}" for name in chosen})
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


# What is launched, and what the launch returns, or the words of its error.
LAUNCHES = {
    **{f"closed {s}": (close, [s], [1, 1]) for s in ("stdin", "stdout", "stderr")},
    **{f"replaced {s}": (replace, [s], [1, 1]) for s in ("stdout", "stderr")},
    **{
        f"{type(error).__name__}{error.args}": (raising, [error], type(error).__name__)
        for error in (
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
    },
    "an exception that cannot speak": (raising, [Speechless()], "Speechless"),
    **{
        f"rank 1 alone, {type(error).__name__}": (
            on_rank_1,
            [raising, error],
            f"rank 1: {type(error).__name__}",
        )
        for error in (ValueError("x"), MemoryError(), Speechless())
    },
    **{f"leaves with {code}": (leave, [code], "without a result") for code in (0, 1, 3, 255)},
    **{f"sys.exit({code!r})": (sys.exit, [code], "sys.exit") for code in (0, 1, "words", None)},
    **{
        f"killed by signal {number}": (end_by, [number], "killed: by SIG")
        for number in (1, 2, 3, 6, 9, 11, 15)
    },
    "a very deep result": (too_deep, [], "cannot be sent"),
    "a lambda": (lambda: (lambda: 1)() + 1, [], [2, 2]),
    "a generator": (lambda: (x for x in (1, 2)), [], "cannot be sent"),
    "an open file": (lambda: sys.stdin, [], "cannot be sent"),
    "a group": (lambda: dist.group.WORLD, [], "cannot be sent"),
    "a result that cannot be packed": (
        lambda: Unsendable(ValueError("x")),
        [],
        "cannot be sent",
    ),
    "a result that interrupts": (lambda: Unsendable(KeyboardInterrupt()), [], "cannot be sent"),
    "a result that exits": (lambda: Unsendable(SystemExit(3)), [], "cannot be sent"),
    "a large number": (lambda: 10**5000, [], [10**5000] * 2),
    "not a number": (lambda: float("inf"), [], [float("inf")] * 2),
    "a group made twice": (dist.init_process_group, ["gloo"], "leave out"),
    "input()": (input, [], "EOF"),
    "breakpoint()": (breakpoint, [], "cannot be used in a rank"),
}
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


def launched(function, arguments, wanted):
    try:
        got = launch(function, *arguments, world_size=2, timeout=60)
    except (LaunchError, ValueError, TypeError) as error:
        if isinstance(wanted, str) and wanted in str(error):
            return REFUSED
        return f"poor words: {words_of(error)}"
    return RIGHT if got == wanted else f"wrong: {str(got)[:200]}"


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
        for name, (function, arguments, wanted) in LAUNCHES.items():
            outcomes[name] = launched(function, arguments, wanted)
        for size in WORLD_SIZES:
            outcomes[f"{size!r} ranks"] = refused(world_size=size)
        for name, values in SETTINGS.items():
            for value in values:
                os.environ[name] = value
                outcomes[f"{name}={value}"] = refused(world_size=2)
                del os.environ[name]
    ports = {
        from_slurm({**SLURM, "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(restart)})[
            "MASTER_PORT"
        ]
        for step, restart in product(range(10), range(5))
    }
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
