"""What people do to a split model: it ends where one device ends, stays whole, or is refused."""

import copy
from functools import partial, wraps
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from refusals import Refusals
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_course import launch, stage9_tensor
from ddp_course.mesh import mesh
from ddp_course.stage5_bucketed import BucketedDDP
from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer

TORCHS = nn.parallel.DistributedDataParallel


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 6)]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(6, 3)).double()


def data(seed=1, samples=8):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 5, generator=generator).double()
    return inputs, torch.randint(3, (samples,), generator=generator)


def frozen(model):
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)


def doubled(model):
    model[0].register_forward_hook(lambda layer, inputs, outputs: 2 * outputs)


def prepared(model):
    model[2].register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 1,))


def weighed(model):
    model[0].weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))


def mixing(model):
    model[1].register_forward_hook(lambda layer, inputs, outputs: outputs.softmax(-1))


class Softmax(nn.Tanh):
    def forward(self, inputs):
        return inputs.softmax(-1)


def subclass(model):
    model[1] = Softmax()


def shared_activation(model):
    model[3] = model[1]


def nothing(model):
    pass


CHANGES = [nothing, frozen, doubled, prepared, weighed, mixing, subclass, shared_activation]
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True, amsgrad=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "rmsprop foreach": partial(torch.optim.RMSprop, lr=0.1, foreach=True, centered=True),
    "adagrad foreach": partial(torch.optim.Adagrad, lr=0.1, foreach=True),
    "radam foreach": partial(torch.optim.RAdam, lr=0.1, foreach=True),
    "nadam foreach": partial(torch.optim.NAdam, lr=0.1, foreach=True),
    "rprop foreach": partial(torch.optim.Rprop, lr=0.1, foreach=True),
    "adadelta": partial(torch.optim.Adadelta, lr=0.1, foreach=True),
    "adamax": partial(torch.optim.Adamax, lr=0.1, foreach=True),
    "asgd": partial(torch.optim.ASGD, lr=0.1, foreach=True),
}


def clipped(model, foreach):
    nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=foreach)


def gap(ours, one):
    pairs = zip(ours.parameters(), one.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


class Trained(NamedTuple):
    """How far a model that may have been split ends from one device."""

    distance: float
    is_split: bool


def trained(change, optimizer=OPTIMIZERS["sgd"], foreach=None):
    """Return what became of a split model in three steps, beside one device."""
    ours = net()
    one = net()
    for model in (ours, one):
        change(model)
    stage9_tensor.parallelize(ours)
    is_split = any(isinstance(each, stage9_tensor.SplitLinear) for each in ours.modules())
    for model in (ours, one):
        own = optimizer([p for p in model.parameters() if p.requires_grad])
        for seed in range(3):
            own.zero_grad()
            inputs, targets = data(seed)
            cross_entropy(model(inputs), targets).backward()
            clipped(model, foreach)
            own.step()
    stage9_tensor.restore(ours)
    return Trained(gap(ours, one), is_split)


def all_trained():
    results = {change.__name__: trained(change) for change in CHANGES}
    for name, optimizer in OPTIMIZERS.items():
        results[name] = trained(nothing, optimizer, foreach=True)
    return results


def test_a_split_model_ends_where_one_device_ends():
    for results in launch(all_trained, world_size=2):
        for name, result in results.items():
            assert result.distance < 1e-12, name
            assert result.is_split, name


class Averaged(NamedTuple):
    """How far a split model ends from one device, and its norm, and copies from before."""

    distance: float
    norm_distance: float
    distance_of_copies: float


def averaged(kind, arguments):
    """Average gradients over the data axis of a mesh of two by two, in three steps."""
    groups = mesh(data=2, tensor=2)
    ours = net()
    one = net()
    stage9_tensor.parallelize(ours, groups["tensor"])
    copied = copy.deepcopy(ours)
    average = torch.optim.swa_utils.AveragedModel(ours)
    if kind is ShardedOptimizer:
        forward = ours
        optimizer = kind(ours.parameters(), torch.optim.SGD, group=groups["data"], lr=0.1)
    else:
        forward = kind(ours, process_group=groups["data"], **arguments)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    expected = torch.optim.SGD(one.parameters(), lr=0.1)
    for seed in range(3):
        inputs, targets = data(seed)
        mine = slice(dist.get_rank() // 2, None, 2)
        cross_entropy(forward(inputs[mine]), targets[mine]).backward()
        cross_entropy(one(inputs), targets).backward()
        if kind is ShardedOptimizer:
            # It averages when it steps, or before, if it is asked to.
            optimizer.average()
            norm_distance = 0.0
        else:
            norm = stage9_tensor.clip_grad_norm_(ours, 0.1, groups["tensor"])
            norm_distance = abs(norm - nn.utils.clip_grad_norm_(one.parameters(), 0.1))
        optimizer.step()
        expected.step()
        expected.zero_grad()
        ours.zero_grad()
        optimizer.zero_grad()
    for each in (ours, copied, average):
        stage9_tensor.restore(each)
    distance_of_copies = max(gap(copied, net()), gap(average.module, net()))
    return Averaged(gap(ours, one), norm_distance, distance_of_copies)


@pytest.mark.parametrize(
    "kind, arguments",
    [
        (DistributedDataParallel, {}),
        (DistributedDataParallel, {"gradient_as_bucket_view": True}),
        (TORCHS, {}),
        (BucketedDDP, {}),
        (ShardedOptimizer, {}),
    ],
)
def test_other_stages_average_over_the_data_axis(kind, arguments):
    for rank in launch(averaged, kind, arguments, world_size=4):
        assert rank.distance < 1e-12
        assert rank.norm_distance < 1e-12
        assert rank.distance_of_copies == 0


def different_starts():
    """Split a model that differs from rank to rank; return how far it is from the first rank's."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    return gap(stage9_tensor.restore(stage9_tensor.parallelize(model)), first)


def test_all_ranks_start_from_the_first_ranks_weights():
    assert launch(different_starts, world_size=3) == [0, 0, 0]


def after_an_average():
    """Return how far a split model, its average and its copy are from those of one device."""
    ours = model_average_and_copy(split())
    expected = model_average_and_copy(net())
    for model in ours:
        stage9_tensor.restore(model)
    return [gap(model, one) for model, one in zip(ours, expected, strict=True)]


def model_average_and_copy(model):
    """Train a model that is compiled; return it, its exponential average, and a copy."""
    averaging = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=averaging)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    forward = torch.compile(model, backend="eager")
    for seed in range(3):
        inputs, targets = data(seed)
        cross_entropy(forward(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return [model, average.module, copy.deepcopy(model)]


def test_copies_averages_and_compiled_models_are_whole_again():
    for gaps in launch(after_an_average, world_size=2):
        assert max(gaps) < 1e-12, gaps


def split():
    return stage9_tensor.parallelize(net())


def linear_layers(model):
    """Return the layers of a model that are linear, among them those that are split."""
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


def filled_with_zeros():
    """Return the largest spread of the outputs after each linear layer's weight became zero."""
    model = split()
    layers = linear_layers(model)
    assert len(layers) == 4
    for layer in layers:
        nn.init.zeros_(layer.weight)
    return model(data()[0]).std(0).max().item()


def test_programs_that_walk_over_linear_layers_find_those_that_are_split():
    assert launch(filled_with_zeros, world_size=2) == [0.0] * 2


def with_gradients():
    model = split()
    cross_entropy(model(data()[0]), data()[1]).backward()
    return model


class Adapter(nn.Module):
    """A layer with a low-rank adapter, whose sizes are those of the layer's weight."""

    def __init__(self, layer):
        super().__init__()
        outputs, inputs = layer.weight.shape
        self.layer = layer
        self.adapter = nn.Sequential(nn.Linear(inputs, 2), nn.Linear(2, outputs)).double()

    def forward(self, x):
        return self.layer(x) + self.adapter(x)


def put(place, make):
    """Put what `make` returns for a member of a split model in its place, and run the model."""
    model = split()
    model[place] = make(model[place])
    return model(data()[0])


def another_relu(activation):
    return nn.ReLU()


def others_that_compute_the_same():
    """Put in wrappers without weights, and another activation."""
    expected = net()(data()[0])
    compiled = partial(torch.compile, backend="eager")
    results = [put(place, compiled) for place in (0, 2, 4, 6)]
    results.append(put(3, another_relu))
    results.append(copy.deepcopy(split())(data()[0]))
    return [(result - expected).abs().max().item() for result in results]


def test_a_split_layer_may_be_wrapped_without_weights():
    for gaps in launch(others_that_compute_the_same, world_size=2):
        assert max(gaps) < 1e-12, gaps


PART = "this rank has a part of the tensor only"
AXIS = "is split over ranks of this process group"
REFUSALS = Refusals()
refused = REFUSALS.refused


def does_to_a_slice(action):
    """Return a function that calls `action` with a weight that is a slice and has a gradient."""

    @wraps(action)
    def attempt():
        parameters = with_gradients().parameters()
        action(next(each for each in parameters if isinstance(each, stage9_tensor.Slice)))

    return attempt


def changes_a_layer(change):
    """Return a function that changes a layer after the split.

    `restore` must refuse that, and so must the next forward pass.
    """

    @wraps(change)
    def attempt():
        model = split()
        change(model[2])
        with pytest.raises(RuntimeError, match="exchanged, added or removed"):
            stage9_tensor.restore(model)
        model(data()[0])

    return attempt


@refused("differentiate twice")
def penalty_of_inputs():
    model = split()
    inputs = data()[0].requires_grad_()
    penalise(model(inputs), inputs)


@refused("differentiate twice")
def penalty_of_weights():
    model = split()
    penalise(model(data()[0]), model[0].weight)


@refused("differentiate twice")
def penalty_of_a_bias():
    model = split()
    penalise(model(data()[0]), model[0].bias)


def penalise(outputs, wanted):
    """Take a gradient of the gradient of `wanted`."""
    (gradient,) = torch.autograd.grad(outputs.square().sum(), wanted, create_graph=True)
    gradient.as_subclass(torch.Tensor).square().sum().backward()


@refused(AXIS)
def ddp_over_the_tensor_axis():
    DistributedDataParallel(split())


@refused(AXIS)
def ddp_that_broadcasts_nothing():
    DistributedDataParallel(split(), init_sync=False)


@refused(AXIS)
def torchs_ddp_over_it():
    # The constructor of torch's class finds slices of equal shapes, and nothing amiss.
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    TORCHS(stage9_tensor.parallelize(model))(data()[0])


@refused(AXIS)
def stage_5_over_it():
    BucketedDDP(split())


@refused(AXIS)
def zero_1_over_it():
    ShardedOptimizer(split().parameters(), torch.optim.SGD)


@refused("sharded already, or split")
def fsdp_around_it():
    FullyShardedDataParallel(split())


@refused("sharded already, or split")
def split_twice():
    stage9_tensor.parallelize(split())


@refused("compiled already")
def compiled_before():
    stage9_tensor.parallelize(torch.compile(net(), backend="eager"))


def steps_before(optimizer, **settings):
    """Split a model whose optimizer has taken a step, and take another one."""
    model = net()
    optimizer = optimizer(model.parameters(), lr=0.1, **settings)
    cross_entropy(model(data()[0]), data()[1]).backward()
    optimizer.step()
    stage9_tensor.parallelize(model)
    cross_entropy(model(data()[0]), data()[1]).backward()
    optimizer.step()


@refused("make the optimizer anew")
def adam_with_steps():
    steps_before(torch.optim.Adam)


@refused("make the optimizer anew")
def adam_with_steps_foreach():
    steps_before(torch.optim.Adam, foreach=True)


@refused("make the optimizer anew")
def adam_with_steps_fused():
    steps_before(torch.optim.Adam, fused=True)


@refused("make the optimizer anew")
def sgd_with_steps_fused():
    steps_before(torch.optim.SGD, momentum=0.9, fused=True)


@refused("make the optimizer anew")
def adagrad_with_steps_fused():
    steps_before(torch.optim.Adagrad, fused=True)


@refused("was exchanged")
def weight_exchanged():
    model = split()
    model[0].weight = nn.Parameter(torch.ones(4, 5).double())
    stage9_tensor.restore(model)


@refused("the bias of a split layer")
@changes_a_layer
def bias_removed(layer):
    layer.bias = None


@refused("the scale of a split layer")
@changes_a_layer
def parameter_added(layer):
    layer.scale = nn.Parameter(torch.ones(6).double())


@refused("0 of Sequential was exchanged after the split")
def adapter_of_outputs():
    put(0, Adapter)


@refused("2 of Sequential was exchanged after the split")
def adapter_of_inputs():
    put(2, Adapter)


@refused("1 of Sequential")
def softmax_of_a_slice():
    model = split()
    model[1] = nn.Softmax(-1)
    model(data()[0])


@refused("1 of Sequential")
def weight_between():
    model = split()
    model[1] = nn.PReLU().double()
    model(data()[0])


@refused("initialise a model before")
def layer_made_anew():
    split()[2].reset_parameters()


@refused("cannot be moved or converted")
def converted():
    split().float()


@refused("all ranks must have the same model")
def other_shapes():
    size = 6 + 2 * dist.get_rank()
    stage9_tensor.parallelize(nn.Sequential(nn.Linear(4, size), nn.ReLU(), nn.Linear(size, 4)))


@refused("has no two linear layers")
def nothing_to_split():
    stage9_tensor.parallelize(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


@refused("has no two linear layers")
def all_have_hooks():
    model = net()
    for layer in model:
        layer.register_forward_hook(print)
    stage9_tensor.parallelize(model)


@refused("are parts in two ways")
def clipping_by_zero_1():
    model = split()
    group = mesh(data=2, tensor=1)["tensor"]
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, group=group, lr=0.1)
    cross_entropy(model(data()[0]), data()[1]).backward()
    optimizer.clip_grad_norm_(1.0)


@refused("write values into it by copy_")
@does_to_a_slice
def other_data(weight):
    weight.data = torch.ones(7, 5).double()


@refused(PART)
@does_to_a_slice
def norm(weight):
    weight.norm()


@refused(PART)
@does_to_a_slice
def gradients_norm(weight):
    weight.grad.norm()


@refused(PART)
@does_to_a_slice
def lars(weight):
    torch.linalg.vector_norm(weight.detach())


for initialise in (
    nn.init.kaiming_uniform_,
    nn.init.xavier_normal_,
    nn.init.orthogonal_,
    nn.init.eye_,
    nn.init.trunc_normal_,
):
    refused(PART)(does_to_a_slice(initialise))


@refused(PART)
def every_linear_layer_drawn():
    for layer in linear_layers(split()):
        layer.weight.data.normal_(0, 0.02)


@refused("a hook was added to 0 of Sequential")
def hook_on_a_slice():
    model = split()
    for layer in linear_layers(model):
        layer.register_forward_hook(normalised)
    model(data()[0])


def normalised(layer, inputs, outputs):
    return outputs / outputs.norm()


@refused(PART)
@does_to_a_slice
def sparse(weight):
    nn.init.sparse_(weight, 0.5)


@refused(PART)
@does_to_a_slice
def noise(weight):
    torch.randn_like(weight)


@refused(PART)
@does_to_a_slice
def row(weight):
    return weight[0]


@refused(PART)
@does_to_a_slice
def row_written(weight):
    weight.data[0] = 0.0


@refused(PART)
@does_to_a_slice
def turned(weight):
    return weight.T


@refused(PART)
@does_to_a_slice
def softmax(weight):
    weight.softmax(0)


@refused(PART)
@does_to_a_slice
def largest(weight):
    weight.max()


@refused(PART)
@does_to_a_slice
def finite(weight):
    weight.grad.isfinite().all()


@refused(PART)
@does_to_a_slice
def equal(weight):
    torch.equal(weight, weight)


@refused(PART)
@does_to_a_slice
def as_numbers(weight):
    weight.tolist()


@refused(PART)
@does_to_a_slice
def as_an_array(weight):
    weight.detach().numpy()


@refused(PART)
@does_to_a_slice
def spectral_norm(weight):
    torch.linalg.svdvals(weight)


@refused(PART)
def end_to_end():
    nn.utils.parameters_to_vector(with_gradients().parameters()).norm()


@refused("1 or more")
def mesh_of_negative_sizes():
    mesh(data=-1, tensor=-2)


@refused("1 or more")
def mesh_of_fractions():
    mesh(data=1.0, tensor=2.0)


@refused("1 or more")
def mesh_of_zero():
    mesh(data=0, tensor=2)


@refused("1 or more")
def negative_number_of_ranks():
    stage9_tensor.train(net(), [data()], 0.1, tensor=-1)


@refused("1 or more")
def too_many_ranks():
    stage9_tensor.train(net(), [data()], 0.1, tensor=4)


@refused("1 or more")
def number_that_divides_nothing():
    stage9_tensor.train(net(), [data()], 0.1, tensor=2.5)


def test_what_would_train_something_else_is_refused():
    for messages in launch(REFUSALS.messages, world_size=2):
        REFUSALS.assert_told(messages)
