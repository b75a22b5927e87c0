"""What people do to a sharded model: it ends where one device ends, or is refused in words."""

import copy
import dataclasses
from datetime import timedelta
from functools import partial, wraps

import pytest
import torch
import torch.distributed as dist
from refusals import Refusals
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


MODELS = {}


def trained_in_both_ways(make):
    """Note a function that makes a model, which is trained on one device and sharded."""
    MODELS[make.__name__] = make
    return make


@trained_in_both_ways
def a_block_that_returns_an_object():
    return Sequential(ReturnsAnObject(5, 5), ReturnsAnObject(5, 5))


@trained_in_both_ways
def weight_norm():
    normed = utils.parametrizations.weight_norm(Linear(5, 5))
    return Sequential(normed, Tanh(), Linear(5, 5))


@trained_in_both_ways
def weight_norm_of_old():
    return Sequential(utils.weight_norm(Linear(5, 5)), Tanh(), utils.weight_norm(Linear(5, 5)))


@trained_in_both_ways
def spectral_norm():
    return Sequential(utils.parametrizations.spectral_norm(Linear(5, 5)), Linear(5, 5))


@trained_in_both_ways
def spectral_norm_of_old():
    return Sequential(utils.spectral_norm(Linear(5, 5)), Linear(5, 5))


@trained_in_both_ways
def checkpointed_blocks():
    reentrant = checkpoint_wrapper(Linear(5, 5), CheckpointImpl.REENTRANT)
    return Sequential(checkpoint_wrapper(Linear(5, 5)), Tanh(), reentrant)


@trained_in_both_ways
def a_sparse_embedding():
    return Embeds()


@trained_in_both_ways
def compiled():
    return Sequential(Linear(5, 5), Tanh(), Linear(5, 5))


@trained_in_both_ways
def decay_of_matrices_alone():
    return Sequential(Linear(5, 5), Tanh(), Linear(5, 5))


def trained(name, sharded):
    """Return the state dict after three steps."""
    torch.manual_seed(0)
    wrapper = MODELS[name]().double()
    share = slice(None)
    if sharded:
        wrapper = FullyShardedDataParallel(wrapper)
        share = slice(dist.get_rank(), None, dist.get_world_size())
    forward = wrapper
    if name == "compiled":
        forward = torch.compile(wrapper, backend="eager")
    matrices = [parameter for parameter in wrapper.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in wrapper.parameters() if parameter.ndim <= 1]
    decay = 0.1 if name == "decay_of_matrices_alone" else 0.0
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for inputs in torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)).double():
        outputs = forward(inputs[share])
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


INPUTS = torch.ones(2, 5)
SCALER = "GradScaler looks for infinite gradients on every rank for itself"
NO_GRAPH = "no loss leads to the shards"
ENDED = "has made the module an ordinary one"
MEMORY = "lies in other memory than when its optimizer was made"
ELSEWHERE = "is sharded, and whole only while its block computes"
PART = "this rank has a part of the tensor only"
REFUSALS = Refusals()
refused = REFUSALS.refused


def before_a_step_of_zero_1(change):
    """Return a function that takes a step of ZeRO-1, before which `change` is made."""

    @wraps(change)
    def attempt():
        model = Sequential(Linear(5, 5))
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        model(INPUTS).sum().backward()
        change(model, optimizer)
        optimizer.step()

    return attempt


def shards_a_block(hide):
    """Return a function that shards a model whose block does `hide` to its outputs."""

    class Hides(Linear):
        def forward(self, inputs):
            return hide(super().forward(inputs))

    @wraps(hide)
    def attempt():
        sharded(Sequential(Hides(5, 5)))

    return attempt


def sharded(model=None):
    """Return a small sharded model with gradients."""
    parallel = FullyShardedDataParallel(model or Sequential(Linear(5, 5), Tanh(), Linear(5, 5)))
    parallel(INPUTS).sum().backward()
    return parallel


def first_weight(parallel):
    return parallel.module[0].weight


def made_too_early():
    """Return an optimizer of a model that was sharded later."""
    model = Sequential(Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded(model)
    return optimizer


@refused(ELSEWHERE)
def step_of_an_optimizer_from_before():
    made_too_early().step()


@refused(ELSEWHERE)
def zero_grad_of_an_optimizer_from_before():
    made_too_early().zero_grad()


@refused("write values into it by copy_")
def vector_to_parameters():
    utils.vector_to_parameters(torch.ones(60), sharded().parameters())


@refused("write values into it by copy_")
def other_data():
    first_weight(sharded()).data = torch.ones(5, 5)


@refused("write values into it by copy_")
def averaged_data():
    first_weight(sharded()).data = 0.5 * first_weight(sharded())


@refused(PART)
def apply():
    sharded().apply(draw_weight)


def draw_weight(layer):
    if hasattr(layer, "weight"):
        init.xavier_normal_(layer.weight)


@refused("call state_dict() of its wrapper")
def models_state():
    sharded().module.state_dict()


@refused("call state_dict() of its wrapper")
def state_of_a_block():
    sharded().module[0].state_dict()


@refused("size mismatch for 0.weight")
def loading_into_the_model():
    sharded().module.load_state_dict({"0.weight": torch.ones(5, 5)}, strict=False)


@refused("before it is wrapped")
def loading_into_a_model_around_it():
    Sequential(sharded()).load_state_dict({}, strict=False)


@refused(PART)
def clipping_the_model():
    utils.clip_grad_norm_(sharded().module.parameters(), 1.0)


@refused("changed after wrapping")
def freezing_a_layer():
    parallel = sharded()
    parallel.module[0].requires_grad_(False)
    parallel(INPUTS)


@refused("exchanged, added or removed")
def layer_exchanged():
    parallel = sharded()
    parallel.module[1] = Linear(5, 5)
    parallel(INPUTS)


@refused("exchanged, added or removed")
def layer_appended():
    parallel = sharded()
    parallel.module.append(Linear(5, 5))
    parallel(INPUTS)


@refused("exchanged, added or removed")
def parameter_exchanged():
    parallel = sharded()
    parallel.module[0].bias = torch.nn.Parameter(torch.ones(5))
    parallel(INPUTS)


@refused(PART)
def penalty_on_the_norms():
    sum(parameter.norm() for parameter in sharded().parameters())


@refused(PART)
def largest_norm():
    for parameter in sharded().parameters():
        parameter.data.mul_((0.3 / parameter.norm()).clamp(max=1))


@refused(PART)
def hook_before_ours():
    parallel = sharded()
    parallel.module[0].register_forward_pre_hook(look_at_the_weight, prepend=True)
    parallel(INPUTS)


def look_at_the_weight(layer, inputs):
    layer.weight.sum()


class ByItsParts(torch.nn.Module):
    """Calls the layers of a block, not the block."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Sequential(Linear(5, 5), Tanh())])

    def forward(self, inputs):
        return self.blocks[0][0](inputs)


@refused("name those that are called in `blocks`")
def block_by_its_parts():
    sharded(ByItsParts())


class KeepsANorm(Linear):
    """Keeps something for the loss that it does not return."""

    def forward(self, inputs):
        self.norm = self.weight.square().sum()
        return super().forward(inputs).detach()


@refused("0.weight got a gradient, but not by way of what")
def weight_without_its_block():
    parallel = FullyShardedDataParallel(Sequential(KeepsANorm(5, 5), Linear(5, 5)))
    (parallel(INPUTS).sum() + parallel.module[0].norm).backward()


@refused("no trainable parameters")
def nothing_to_train():
    sharded(Linear(5, 5).requires_grad_(False))


@refused("be a submodule")
def strangers_block():
    FullyShardedDataParallel(Linear(5, 5), blocks=[Linear(5, 5)])


@refused("of several dtypes")
def block_of_two_dtypes():
    sharded(Sequential(Sequential(Linear(5, 5), Linear(5, 5).double())))


@refused(NO_GRAPH)
def backward_with_inputs():
    parallel = sharded()
    parallel(INPUTS).sum().backward(inputs=list(parallel.parameters()))


@refused(NO_GRAPH)
def backward_with_one_input():
    parallel = sharded()
    first_shard, *_ = parallel.parameters()
    torch.autograd.backward([parallel(INPUTS).sum()], inputs=first_shard)


@refused(NO_GRAPH)
def autograd_grad():
    parallel = sharded()
    torch.autograd.grad(parallel(INPUTS).sum(), list(parallel.parameters()))


@refused(NO_GRAPH)
def autograd_grad_of_zeros():
    parallel = sharded()
    shards = list(parallel.parameters())
    torch.autograd.grad(parallel(INPUTS).sum(), shards, materialize_grads=True)


@refused("never be called")
def hook_on_a_shard():
    next(sharded().parameters()).register_hook(print)


@refused("sharded already")
def shared_layer():
    sharded(Sequential(sharded().module[0], Linear(5, 5)))


@refused("are shards")
def zero_1_of_shards():
    ShardedOptimizer(sharded().parameters(), torch.optim.SGD)


@refused("averages gradients itself")
def stage_3_gives_all_ranks_one_shard():
    broadcast_parameters(sharded())


@refused("averages gradients itself")
def stage_5_around_it():
    BucketedDDP(sharded())


@refused("averages gradients itself")
def stage_6_around_it():
    DistributedDataParallel(sharded(), init_sync=False)


@refused("a gradient")
def torchs_ddp_around_it():
    torch.nn.parallel.DistributedDataParallel(sharded())


@refused("compiled already")
def compiled_before():
    sharded(Sequential(torch.compile(Linear(5, 5), backend="eager")))


@refused("sharded already")
def wrapped_twice():
    sharded(sharded())


@refused("before it is wrapped")
def loading():
    sharded().load_state_dict(Linear(5, 5).state_dict())


@refused("cannot be moved or converted")
def converted():
    sharded().float()


@refused("cannot be copied or pickled")
def copied():
    copy.deepcopy(sharded())


@refused("create_graph=True would need")
def penalty():
    sharded()(INPUTS).sum().backward(create_graph=True)


@refused("optimizer has other parameters")
def strangers_optimizer():
    sharded().optimizer_state_dict(torch.optim.SGD(Linear(5, 5).parameters()))


@refused("changed after wrapping")
def frozen_later():
    parallel = sharded()
    next(parallel.parameters()).requires_grad_(False)
    parallel(INPUTS)


@refused(ENDED)
def restored():
    parallel = sharded()
    parallel.restore()
    parallel(INPUTS)


@refused(ENDED)
def saved_when_restored():
    parallel = sharded()
    parallel.restore()
    parallel.state_dict()


@refused("changed since the forward pass")
def stale_graph():
    parallel = sharded()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    loss = parallel(INPUTS).sum()
    optimizer.step()
    loss.backward()


@refused(MEMORY)
@before_a_step_of_zero_1
def zero_1_converted_there_and_back(model, optimizer):
    model.zero_grad()
    model.double().float()


@refused(MEMORY)
@before_a_step_of_zero_1
def zero_1_other_values_by_data(model, optimizer):
    for parameter in model.parameters():
        parameter.data = 0.9 * parameter.data


@refused(MEMORY)
@before_a_step_of_zero_1
def zero_1_vector_to_parameters(model, optimizer):
    utils.vector_to_parameters(torch.ones(30), model.parameters())


@refused(MEMORY)
@before_a_step_of_zero_1
def zero_1_another_optimizer(model, optimizer):
    ShardedOptimizer(model.parameters(), torch.optim.SGD)


@refused("those clipped before have not been used")
@before_a_step_of_zero_1
def zero_1_clipped_and_forgotten(model, optimizer):
    optimizer.clip_grad_norm_(1.0)
    model.zero_grad()
    model(INPUTS).sum().backward()


@refused("norm_type is 0")
@before_a_step_of_zero_1
def zero_1_a_norm_of_order_0(model, optimizer):
    optimizer.clip_grad_norm_(1.0, 0)


@refused("norm_type is -1")
@before_a_step_of_zero_1
def zero_1_a_norm_of_no_order(model, optimizer):
    optimizer.clip_grad_norm_(1.0, -1)


@refused("doesn't match the size of optimizer's group")
def zero_1_other_groups():
    load_the_state_of_others((5, 5))


@refused("is invalid for input of size 2")
def zero_1_other_sizes():
    load_the_state_of_others((2,), (5,))


def load_the_state_of_others(*shapes):
    """Load the state of an optimizer of other parameters, which have these shapes."""
    strangers = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    other = torch.optim.Adam(strangers)
    sum(stranger.sum() for stranger in strangers).backward()
    other.step()
    ShardedOptimizer(Linear(5, 5).parameters(), torch.optim.Adam).load_state_dict(
        other.state_dict()
    )


@refused("laid out already")
@before_a_step_of_zero_1
def zero_1_more_parameters(model, optimizer):
    optimizer.add_param_group({"params": Linear(5, 5).parameters()})


@refused("has had other parameters since the optimizer was made")
@before_a_step_of_zero_1
def zero_1_other_parameters(model, optimizer):
    # This is how load_state_dict(…, assign=True) leaves a model.
    model.zero_grad()
    other_values = {name: value + 0.1 for name, value in model.state_dict().items()}
    model.load_state_dict(other_values, assign=True)
    model(INPUTS).sum().backward()


@refused("backward() comes before step()")
@before_a_step_of_zero_1
def zero_1_before_any_backward(model, optimizer):
    model.zero_grad()


@refused(SCALER)
def grad_scaler():
    scaler, optimizer = scaled_backward()
    scaler.step(optimizer)


@refused(SCALER)
def grad_scaler_that_unscales():
    scaler, optimizer = scaled_backward()
    scaler.unscale_(optimizer)


def scaled_backward():
    """Return a GradScaler after a backward pass, and the optimizer of its shards."""
    parallel = FullyShardedDataParallel(Sequential(Linear(5, 5)))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parallel(INPUTS).sum()).backward()
    return scaler, optimizer


@refused(SCALER)
def zero_1_a_grad_scaler():
    model = Linear(5, 5)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(INPUTS).sum()).backward()
    scaler.step(optimizer)


class Hidden:
    """An object that tensors hide in."""

    def __init__(self, outputs):
        self.outputs = outputs


@refused("returns a Hidden in which no tensor")
@shards_a_block
def plain_object(outputs):
    return Hidden(outputs)


@refused("no tensor is found")
@shards_a_block
def object_in_a_list(outputs):
    return [Hidden(outputs)]


@refused("no tensor is found")
@shards_a_block
def nothing_returned(outputs):
    return None


@refused("no tensor is found")
@shards_a_block
def function_returned(outputs):
    def later():
        return outputs

    return later


@refused("0.weight was changed after")
def frozen_later_by_its_name():
    frozen_later()


@refused("wrapping: 0.weight")
def exchanged_later_by_its_name():
    parallel = sharded()
    parallel.module[0].weight = torch.nn.Parameter(torch.ones(5, 5))
    parallel(INPUTS)


@refused(PART)
def lbfgs():
    step_by(torch.optim.LBFGS)


@refused(PART)
def adafactor():
    step_by(torch.optim.Adafactor)


@refused(PART)
def muon():
    step_by(torch.optim.Muon)


def step_by(kind):
    """Take a step with an optimizer of this kind."""
    parallel = sharded(Sequential(Linear(5, 5, bias=False)))

    def loss():
        return parallel(INPUTS).sum()

    kind(parallel.parameters()).step(loss)


@refused("cannot work on shards")
def zero_1_of_lbfgs():
    ShardedOptimizer([Linear(5, 5).weight], torch.optim.LBFGS)


@refused("cannot work on shards")
def zero_1_of_muon():
    ShardedOptimizer([Linear(5, 5).weight], torch.optim.Muon)


@refused("all ranks must have the same model")
def other_shapes():
    sharded(Sequential(Linear(5, 5 + dist.get_rank())))


@refused("all ranks must have the same model")
def zero_1_of_other_shapes():
    ShardedOptimizer(Linear(5, 5 + dist.get_rank()).parameters(), torch.optim.SGD)


def test_what_would_train_nothing_or_something_else_is_refused():
    for messages in launch(REFUSALS.messages, world_size=2):
        REFUSALS.assert_told(messages)


def impatient_group():
    dist.barrier()  # The group waits for no rank that still imports.
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
