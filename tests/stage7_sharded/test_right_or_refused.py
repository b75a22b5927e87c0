"""What people do to a sharded model: it ends where one device ends, or is refused in plain
words.
"""

import copy
import dataclasses
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn import Linear, Sequential, Tanh, init, utils

from ddp_course import BucketedDDP, broadcast_parameters, launch
from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer


@dataclasses.dataclass
class Output:
    """What a block returns that is no tensor."""

    logits: torch.Tensor


class ReturnsAnObject(Linear):
    def forward(self, inputs):
        return Output(super().forward(getattr(inputs, "logits", inputs)))


class Embeds(torch.nn.Module):
    """A sparse embedding in front of a layer."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5, padding_idx=0, sparse=True)
        self.head = Linear(5, 5)

    def forward(self, inputs):
        return self.head(self.embedding((10 * inputs[:, 0].abs()).long() % 7))


MODELS = {
    "a block that returns an object": lambda: Sequential(
        ReturnsAnObject(5, 5), ReturnsAnObject(5, 5)
    ),
    "weight norm": lambda: Sequential(
        utils.parametrizations.weight_norm(Linear(5, 5)), Tanh(), Linear(5, 5)
    ),
    "weight norm of old": lambda: Sequential(
        utils.weight_norm(Linear(5, 5)), Tanh(), utils.weight_norm(Linear(5, 5))
    ),
    "spectral norm": lambda: Sequential(
        utils.parametrizations.spectral_norm(Linear(5, 5)), Linear(5, 5)
    ),
    "spectral norm of old": lambda: Sequential(utils.spectral_norm(Linear(5, 5)), Linear(5, 5)),
    "checkpointed blocks": lambda: Sequential(
        checkpoint_wrapper(Linear(5, 5)),
        Tanh(),
        checkpoint_wrapper(Linear(5, 5), CheckpointImpl.REENTRANT),
    ),
    "a sparse embedding": Embeds,
    "compiled": lambda: Sequential(Linear(5, 5), Tanh(), Linear(5, 5)),
    "decay of matrices alone": lambda: Sequential(Linear(5, 5), Tanh(), Linear(5, 5)),
}


def trained(name, sharded):
    """Return the state dict after three steps."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    forward = wrapper = FullyShardedDataParallel(model) if sharded else model
    if name == "compiled":
        forward = torch.compile(wrapper, backend="eager")
    groups = [
        {
            "params": [p for p in wrapper.parameters() if p.ndim > 1],
            "weight_decay": 0.1 * (name.startswith("decay")),
        },
        {"params": [p for p in wrapper.parameters() if p.ndim <= 1]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for inputs in torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)).double():
        outputs = forward(inputs[dist.get_rank() :: dist.get_world_size()] if sharded else inputs)
        getattr(outputs, "logits", outputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in wrapper.state_dict().items()}


def all_trained():
    apart = {}
    for name in MODELS:
        one = trained(name, False)
        ours = trained(name, True)
        assert list(one) == list(ours), name
        apart[name] = max((one[key] - ours[key]).abs().max().item() for key in one)
    return apart


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_model_ends_where_one_device_ends():
    for apart in launch(all_trained, world_size=2):
        assert max(apart.values()) < 1e-14, apart


class ByItsParts(torch.nn.Module):
    """Calls the layers of a block, not the block."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Sequential(Linear(5, 5), Tanh())])

    def forward(self, inputs):
        return self.blocks[0][0](inputs)


INPUTS = torch.ones(2, 5)


def sharded(model=None):
    """Return a small sharded model with gradients."""
    parallel = FullyShardedDataParallel(model or Sequential(Linear(5, 5), Tanh(), Linear(5, 5)))
    parallel(INPUTS).sum().backward()
    return parallel


def by_optimizer(kind):
    parallel = sharded(Sequential(Linear(5, 5, bias=False)))
    kind(parallel.parameters()).step(lambda: parallel(INPUTS).sum())


def made_too_early():
    model = Sequential(Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded(model)
    return optimizer


class KeepsANorm(Linear):
    """Keeps something for the loss that it does not return."""

    def forward(self, inputs):
        self.norm = self.weight.square().sum()
        return super().forward(inputs).detach()


def without_its_block():
    parallel = FullyShardedDataParallel(Sequential(KeepsANorm(5, 5), Linear(5, 5)))
    (parallel(INPUTS).sum() + parallel.module[0].norm).backward()


def after(change, call=lambda parallel: parallel(INPUTS)):
    """Change a wrapper, then call it."""
    change(parallel := sharded())
    call(parallel)


def zero_1(change, kind=torch.optim.Adam):
    """Take one step of ZeRO-1, before which its model was changed."""
    model = Sequential(Linear(5, 5))
    optimizer = ShardedOptimizer(model.parameters(), kind, lr=0.1)
    model(INPUTS).sum().backward()
    change(model, optimizer)
    optimizer.step()


def converted(model, optimizer):
    model.zero_grad()
    model.double().float()


def other_values(model, optimizer):
    for parameter in model.parameters():
        parameter.data = 0.9 * parameter.data


def clipped_and_forgotten(model, optimizer):
    optimizer.clip_grad_norm_(1.0)
    model.zero_grad()
    model(INPUTS).sum().backward()


def stale_graph():
    parallel = sharded()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    loss = parallel(INPUTS).sum()
    optimizer.step()
    loss.backward()


def other_state(*shapes):
    """Load the state of an optimizer of other parameters."""
    strangers = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    other = torch.optim.Adam(strangers)
    sum(stranger.sum() for stranger in strangers).backward()
    other.step()
    zero_1(lambda model, optimizer: optimizer.load_state_dict(other.state_dict()))


def first(parallel):
    return parallel.module[0].weight


def exchanged(model, optimizer):
    """As load_state_dict(…, assign=True) leaves a model."""
    model.zero_grad()
    model.load_state_dict({n: v + 0.1 for n, v in model.state_dict().items()}, assign=True)
    model(INPUTS).sum().backward()


def frozen_later():
    parallel = sharded()
    next(parallel.parameters()).requires_grad_(False)
    parallel(INPUTS)


def exchanged_later():
    parallel = sharded()
    parallel.module[0].weight = torch.nn.Parameter(torch.ones(5, 5))
    parallel(INPUTS)


def by_sgd(parallel):
    return torch.optim.SGD(parallel.parameters(), lr=0.1)


def scaled(make, method="step"):
    """Take a step with a GradScaler."""
    parallel = FullyShardedDataParallel(Sequential(Linear(5, 5)))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parallel(INPUTS).sum()).backward()
    getattr(scaler, method)(make(parallel))


def scaled_zero_1():
    model = Linear(5, 5)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(INPUTS).sum()).backward()
    scaler.step(optimizer)


def asked(differentiate):
    """Ask for gradients of the shards."""
    parallel = sharded()
    differentiate(parallel(INPUTS).sum(), [*parallel.parameters()])


class Hidden:
    """An object that tensors hide in."""

    def __init__(self, y):
        self.y = y


def hides(wrap):
    """Return a model whose block hides its outputs."""

    class Hides(Linear):
        def forward(self, x):
            return wrap(super().forward(x))

    return Sequential(Hides(5, 5))


SCALER = "GradScaler looks for infinite gradients on every rank for itself"
NO_GRAPH = "no loss leads to the shards"
ENDED = "has made the module an ordinary one"
MEMORY = "lies in other memory than when its optimizer was made"
ELSEWHERE = "is sharded, and whole only while its block computes"
PART = "this rank has a part of the tensor only"
REFUSED = {
    "an optimizer from before": (ELSEWHERE, lambda: made_too_early().step()),
    "its zero_grad": (ELSEWHERE, lambda: made_too_early().zero_grad()),
    "vector_to_parameters": (
        "write values into it by copy_",
        lambda: utils.vector_to_parameters(torch.ones(60), sharded().parameters()),
    ),
    "other data": (
        "write values into it by copy_",
        lambda: setattr(first(sharded()), "data", torch.ones(5, 5)),
    ),
    "averaged data": (
        "write values into it by copy_",
        lambda: setattr(first(sharded()), "data", 0.5 * first(sharded())),
    ),
    "apply": (
        PART,
        lambda: sharded().apply(
            lambda layer: init.xavier_normal_(getattr(layer, "weight", INPUTS))
        ),
    ),
    "the model's state": (
        "call state_dict() of its wrapper",
        lambda: sharded().module.state_dict(),
    ),
    "the state of a block": (
        "call state_dict() of its wrapper",
        lambda: sharded().module[0].state_dict(),
    ),
    "loading into the model": (
        "size mismatch for 0.weight",
        lambda: sharded().module.load_state_dict({"0.weight": torch.ones(5, 5)}, strict=False),
    ),
    "loading into a model around it": (
        "before it is wrapped",
        lambda: Sequential(sharded()).load_state_dict({}, strict=False),
    ),
    "clipping the model": (
        PART,
        lambda: utils.clip_grad_norm_(sharded().module.parameters(), 1.0),
    ),
    "freezing a layer": (
        "changed after wrapping",
        lambda: after(lambda p: p.module[0].requires_grad_(False)),
    ),
    "a layer exchanged": (
        "exchanged, added or removed",
        lambda: after(lambda p: setattr(p.module, "1", Linear(5, 5))),
    ),
    "a layer appended": (
        "exchanged, added or removed",
        lambda: after(lambda p: p.module.append(Linear(5, 5))),
    ),
    "a parameter exchanged": (
        "exchanged, added or removed",
        lambda: after(lambda p: setattr(p.module[0], "bias", torch.nn.Parameter(torch.ones(5)))),
    ),
    "a penalty on the norms": (
        PART,
        lambda: sum(p.norm() for p in sharded().parameters()),
    ),
    "the largest norm": (
        PART,
        lambda: [p.data.mul_((0.3 / p.norm()).clamp(max=1)) for p in sharded().parameters()],
    ),
    "a hook before ours": (
        PART,
        lambda: [
            (parallel := sharded())
            .module[0]
            .register_forward_pre_hook(lambda m, _: m.weight.sum(), prepend=True),
            parallel(INPUTS),
        ],
    ),
    "a block by its parts": (
        "name those that are called in `blocks`",
        lambda: sharded(ByItsParts()),
    ),
    "a weight without its block": (
        "0.weight got a gradient, but not by way of what",
        without_its_block,
    ),
    "nothing to train": (
        "no trainable parameters",
        lambda: sharded(Linear(5, 5).requires_grad_(False)),
    ),
    "a stranger's block": (
        "be a submodule",
        lambda: FullyShardedDataParallel(Linear(5, 5), blocks=[Linear(5, 5)]),
    ),
    "a block of two dtypes": (
        "of several dtypes",
        lambda: sharded(Sequential(Sequential(Linear(5, 5), Linear(5, 5).double()))),
    ),
    "backward with inputs": (
        NO_GRAPH,
        lambda: asked(lambda loss, shards: loss.backward(inputs=shards)),
    ),
    "backward with one input": (
        NO_GRAPH,
        lambda: asked(lambda loss, shards: torch.autograd.backward([loss], inputs=shards[0])),
    ),
    "autograd.grad": (NO_GRAPH, lambda: asked(torch.autograd.grad)),
    "autograd.grad of zeros": (
        NO_GRAPH,
        lambda: asked(partial(torch.autograd.grad, materialize_grads=True)),
    ),
    "a hook on a shard": (
        "never be called",
        lambda: next(sharded().parameters()).register_hook(print),
    ),
    "a shared layer": (
        "sharded already",
        lambda: sharded(Sequential(sharded().module[0], Linear(5, 5))),
    ),
    "ZeRO-1 of shards": (
        "are shards",
        lambda: ShardedOptimizer(sharded().parameters(), torch.optim.SGD),
    ),
    "stage 3 gives all ranks one shard": (
        "averages gradients itself",
        lambda: broadcast_parameters(sharded()),
    ),
    "stage 5 around it": ("averages gradients itself", lambda: BucketedDDP(sharded())),
    "stage 6 around it": (
        "averages gradients itself",
        lambda: DistributedDataParallel(sharded(), init_sync=False),
    ),
    "torch's DDP around it": (
        "a gradient",
        lambda: torch.nn.parallel.DistributedDataParallel(sharded()),
    ),
    "compiled before": (
        "compiled already",
        lambda: sharded(Sequential(torch.compile(Linear(5, 5), backend="eager"))),
    ),
    "wrapped twice": ("sharded already", lambda: sharded(sharded())),
    "loading": (
        "before it is wrapped",
        lambda: sharded().load_state_dict(Linear(5, 5).state_dict()),
    ),
    "converted": ("cannot be moved or converted", lambda: sharded().float()),
    "copied": ("cannot be copied or pickled", lambda: copy.deepcopy(sharded())),
    "penalty": (
        "create_graph=True would need",
        lambda: sharded()(INPUTS).sum().backward(create_graph=True),
    ),
    "a stranger's optimizer": (
        "optimizer has other parameters",
        lambda: sharded().optimizer_state_dict(torch.optim.SGD(Linear(5, 5).parameters())),
    ),
    "frozen later": (
        "changed after wrapping",
        lambda: after(lambda p: next(p.parameters()).requires_grad_(False)),
    ),
    "restored": (ENDED, lambda: after(lambda p: p.restore())),
    "saved when restored": (ENDED, lambda: after(lambda p: p.restore(), lambda p: p.state_dict())),
    "a stale graph": ("changed since the forward pass", stale_graph),
    "ZeRO-1, converted there and back": (MEMORY, lambda: zero_1(converted)),
    "ZeRO-1, other values by data": (MEMORY, lambda: zero_1(other_values)),
    "ZeRO-1, vector_to_parameters": (
        MEMORY,
        lambda: zero_1(
            lambda model, _: utils.vector_to_parameters(torch.ones(30), model.parameters())
        ),
    ),
    "ZeRO-1, another optimizer": (
        MEMORY,
        lambda: zero_1(lambda model, _: ShardedOptimizer(model.parameters(), torch.optim.SGD)),
    ),
    "ZeRO-1, clipped and forgotten": (
        "those clipped before have not been used",
        lambda: zero_1(clipped_and_forgotten),
    ),
    "ZeRO-1, a norm of order 0": (
        "norm_type is 0",
        lambda: zero_1(lambda _, own: own.clip_grad_norm_(1.0, 0)),
    ),
    "ZeRO-1, a norm of no order": (
        "norm_type is -1",
        lambda: zero_1(lambda _, own: own.clip_grad_norm_(1.0, -1)),
    ),
    "ZeRO-1, other groups": (
        "doesn't match the size of optimizer's group",
        lambda: other_state((5, 5)),
    ),
    "ZeRO-1, other sizes": ("is invalid for input of size 2", lambda: other_state((2,), (5,))),
    "ZeRO-1, more parameters": (
        "laid out already",
        lambda: zero_1(lambda _, own: own.add_param_group({"params": Linear(5, 5).parameters()})),
    ),
    "ZeRO-1, other parameters": (
        "has had other parameters since the optimizer was made",
        lambda: zero_1(exchanged),
    ),
    "ZeRO-1, before any backward": (
        "backward() comes before step()",
        lambda: zero_1(lambda model, _: model.zero_grad()),
    ),
    "a GradScaler": (SCALER, lambda: scaled(by_sgd)),
    "a GradScaler that unscales": (SCALER, lambda: scaled(by_sgd, "unscale_")),
    "ZeRO-1, a GradScaler": (SCALER, scaled_zero_1),
    "a plain object": ("returns a Hidden in which no tensor", lambda: sharded(hides(Hidden))),
    "an object in a list": ("no tensor is found", lambda: sharded(hides(lambda y: [Hidden(y)]))),
    "nothing returned": ("no tensor is found", lambda: sharded(hides(lambda y: None))),
    "a function returned": ("no tensor is found", lambda: sharded(hides(lambda y: lambda: y))),
    "frozen later, by its name": ("0.weight was changed after", frozen_later),
    "exchanged later, by its name": ("wrapping: 0.weight", exchanged_later),
    "LBFGS": (PART, lambda: by_optimizer(torch.optim.LBFGS)),
    "Adafactor": (PART, lambda: by_optimizer(torch.optim.Adafactor)),
    "Muon": (PART, lambda: by_optimizer(torch.optim.Muon)),
    "ZeRO-1 of LBFGS": (
        "cannot work on shards",
        lambda: ShardedOptimizer([Linear(5, 5).weight], torch.optim.LBFGS),
    ),
    "ZeRO-1 of Muon": (
        "cannot work on shards",
        lambda: ShardedOptimizer([Linear(5, 5).weight], torch.optim.Muon),
    ),
    "other shapes": (
        "all ranks must have the same model",
        lambda: sharded(Sequential(Linear(5, 5 + dist.get_rank()))),
    ),
    "ZeRO-1 of other shapes": (
        "all ranks must have the same model",
        lambda: ShardedOptimizer(Linear(5, 5 + dist.get_rank()).parameters(), torch.optim.SGD),
    ),
}


def all_refused():
    messages = {}
    for name, (_, refused) in REFUSED.items():
        try:
            refused()
            messages[name] = "nothing"
        except (RuntimeError, ValueError, TypeError) as error:
            messages[name] = str(error)
    return messages


def test_what_would_train_nothing_or_something_else_is_refused():
    for messages in launch(all_refused, world_size=2):
        assert {name: m for name, m in messages.items() if REFUSED[name][0] not in m} == {}


def impatient_group():
    return dist.new_group(timeout=timedelta(seconds=2))


def whole_state(group):
    return FullyShardedDataParallel(Linear(5, 5), process_group=group).state_dict


def whole_state_of_an_optimizer(group):
    parallel = FullyShardedDataParallel(Linear(5, 5), process_group=group)
    return partial(parallel.optimizer_state_dict, torch.optim.Adam(parallel.parameters()))


def state_of_zero_1(group):
    parameters = Linear(5, 5).parameters()
    return ShardedOptimizer(parameters, torch.optim.Adam, group=group).state_dict


def evaluation(group):
    parallel = FullyShardedDataParallel(Linear(5, 5), process_group=group)
    return partial(torch.no_grad()(parallel), INPUTS)


def evaluation_with_graphs(group):
    parallel = FullyShardedDataParallel(Linear(5, 5), process_group=group)
    return partial(parallel.eval(), INPUTS)


def a_pass(group):
    parallel = FullyShardedDataParallel(Linear(5, 5), process_group=group)
    return partial(parallel.train(), INPUTS)


# Each makes a call that needs all ranks of a group.
TOGETHER = {
    "state_dict": whole_state,
    "optimizer_state_dict": whole_state_of_an_optimizer,
    "evaluation": evaluation,
    "evaluation with graphs": evaluation_with_graphs,
    "ZeRO-1": state_of_zero_1,
    "a pass": a_pass,
}


def alone():
    """Return what rank 0 is told when it comes alone to what all ranks do together."""
    calls = {what: make(impatient_group()) for what, make in TOGETHER.items()}
    messages = {}
    if dist.get_rank() != 0:
        return messages
    for what, call in calls.items():
        with pytest.raises(RuntimeError) as raised:
            call()
        messages[what] = str(raised.value)
    return messages


def test_who_comes_alone_is_told_who_is_missing():
    messages, *_ = launch(alone, world_size=3)
    assert "rank 2 has not come to this recv" in messages.pop("a pass")
    for what, message in messages.items():
        assert "needs all ranks together" in message, (what, message)
        assert "Ranks 1, 2 failed" in message, (what, message)
