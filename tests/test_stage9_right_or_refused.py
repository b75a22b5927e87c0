"""What people do to a split model: it ends where one device ends, stays whole, or is refused."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
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


def trained(change, optimizer=OPTIMIZERS["sgd"], foreach=None):
    """Return the distance of a split model to one device after three steps, and whether it was
    split.
    """
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
    return gap(ours, one), is_split


def all_trained():
    results = {change.__name__: trained(change) for change in CHANGES}
    for name, optimizer in OPTIMIZERS.items():
        results[name] = trained(nothing, optimizer, foreach=True)
    return results


def test_a_split_model_ends_where_one_device_ends():
    for results in launch(all_trained, world_size=2):
        apart = {name: distance for name, (distance, _) in results.items() if distance > 1e-12}
        assert not apart
        assert all(is_split for _, is_split in results.values())


def averaged(kind, arguments):
    """Average gradients over the data axis of a mesh of two by two; return the distance to one
    device.
    """
    groups = mesh(data=2, tensor=2)
    ours = net()
    one = net()
    stage9_tensor.parallelize(ours, groups["tensor"])
    copies = [copy.deepcopy(ours), torch.optim.swa_utils.AveragedModel(ours)]
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
        norms = [0, 0]
        if kind is not ShardedOptimizer:
            norms = [stage9_tensor.clip_grad_norm_(ours, 0.1, groups["tensor"])]
            norms += [nn.utils.clip_grad_norm_(one.parameters(), 0.1)]
        else:
            optimizer.average()
        optimizer.step()
        expected.step()
        expected.zero_grad()
        ours.zero_grad()
        if kind is ShardedOptimizer:
            optimizer.zero_grad()
    for each in copies:
        stage9_tensor.restore(each)
    stage9_tensor.restore(ours)
    start = max(gap(copies[0], net()), gap(copies[1].module, net()))
    return gap(ours, one), abs(norms[0] - norms[1]), start


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
    for distance, norms, start in launch(averaged, kind, arguments, world_size=4):
        assert distance < 1e-12
        assert norms < 1e-12
        assert start == 0


def different_starts():
    """Ranks that made different models: all start from the first rank's."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    return gap(stage9_tensor.restore(stage9_tensor.parallelize(model)), first)


def test_all_ranks_start_from_the_first_ranks_weights():
    assert launch(different_starts, world_size=3) == [0, 0, 0]


def after_an_average():
    """Copies and averages of a split model, and a model that was compiled after it was split."""
    ours = net()
    one = net()
    stage9_tensor.parallelize(ours)
    gaps = []
    for model in (ours, one):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        forward = torch.compile(model, backend="eager")
        for seed in range(3):
            inputs, targets = data(seed)
            cross_entropy(forward(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        gaps.append((model, average.module, copy.deepcopy(model)))
    for each in gaps[0]:
        stage9_tensor.restore(each)
    return [gap(a, b) for a, b in zip(*gaps, strict=True)]


def test_copies_averages_and_compiled_models_are_whole_again():
    for gaps in launch(after_an_average, world_size=2):
        assert max(gaps) < 1e-12, gaps


def split(change=nothing):
    model = net()
    change(model)
    return stage9_tensor.parallelize(model)


def each_linear(function):
    """Call `function` with each layer of a split model that is linear, then run the model."""
    model = split()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            function(layer)
    return model(data()[0])


def normalised(layer):
    layer.register_forward_hook(lambda layer, inputs, outputs: outputs / outputs.norm())


def linear_layers():
    """Return the outputs of a model whose linear layers are zeros, and how many those are."""
    outputs = each_linear(lambda layer: INIT.zeros_(layer.weight))
    return outputs.std(0).max().item(), sum(isinstance(m, nn.Linear) for m in split().modules())


def test_programs_that_walk_over_linear_layers_find_those_that_are_split():
    assert launch(linear_layers, world_size=2) == [(0.0, 4)] * 2


def with_gradients():
    model = split()
    cross_entropy(model(data()[0]), data()[1]).backward()
    return model


def penalty(wanted):
    """Take a gradient of gradients: `wanted` chooses that of the inputs or of the weights."""
    model = split()
    inputs = data()[0].requires_grad_()
    (gradient,) = torch.autograd.grad(
        model(inputs).square().sum(), wanted(model, inputs), create_graph=True
    )
    gradient.as_subclass(torch.Tensor).square().sum().backward()


def steps_before(optimizer, **settings):
    model = net()
    optimizer = optimizer(model.parameters(), lr=0.1, **settings)
    cross_entropy(model(data()[0]), data()[1]).backward()
    optimizer.step()
    stage9_tensor.parallelize(model)
    cross_entropy(model(data()[0]), data()[1]).backward()
    optimizer.step()


def exchanged():
    model = split()
    model[0].weight = nn.Parameter(torch.ones(4, 5).double())
    stage9_tensor.restore(model)


def trained_after(change):
    """A layer is changed after the split: the next forward pass and `restore` refuse it."""
    model = split()
    change(model[2])
    with pytest.raises(RuntimeError, match="exchanged, added or removed"):
        stage9_tensor.restore(model)
    model(data()[0])


def without_bias(layer):
    layer.bias = None


def with_a_scale(layer):
    layer.scale = nn.Parameter(torch.ones(6).double())


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


def others_that_compute_the_same():
    """Put in wrappers without weights, and another activation."""
    expected = net()(data()[0])
    compiled = partial(torch.compile, backend="eager")
    results = [put(place, compiled) for place in (0, 2, 4, 6)]
    results.append(put(3, lambda activation: nn.ReLU()))
    results.append(copy.deepcopy(split())(data()[0]))
    return [(result - expected).abs().max().item() for result in results]


def test_a_split_layer_may_be_wrapped_without_weights():
    for gaps in launch(others_that_compute_the_same, world_size=2):
        assert max(gaps) < 1e-12, gaps


def other_shapes():
    size = 6 + 2 * dist.get_rank()
    stage9_tensor.parallelize(nn.Sequential(nn.Linear(4, size), nn.ReLU(), nn.Linear(size, 4)))


def tensor_axis(wrap):
    wrap(split())


def torchs_over_the_tensor_axis():
    """Wrap a split model in torch's DDP, whose constructor finds slices of equal shapes, and
    nothing amiss.
    """
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    TORCHS(stage9_tensor.parallelize(model))(data()[0])


def clip_of_zero_1():
    model = split()
    group = mesh(data=2, tensor=1)["tensor"]
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, group=group, lr=0.1)
    cross_entropy(model(data()[0]), data()[1]).backward()
    optimizer.clip_grad_norm_(1.0)


def each_weight(function):
    """Call `function` with the first weight that is a slice."""
    model = with_gradients()
    return function(next(p for p in model.parameters() if isinstance(p, stage9_tensor.Slice)))


PART = "this rank has a part of the tensor only"
AXIS = "is split over ranks of this process group"
INIT = nn.init
WITH_STATE = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adagrad, {"fused": True}),
]
REFUSED = {
    "a gradient penalty": ("differentiate twice", lambda: penalty(lambda m, x: x)),
    "one of the weights": ("differentiate twice", lambda: penalty(lambda m, x: m[0].weight)),
    "one of a last bias": ("differentiate twice", lambda: penalty(lambda m, x: m[0].bias)),
    "DDP over the tensor axis": (AXIS, lambda: DistributedDataParallel(split())),
    "DDP that broadcasts nothing": (
        AXIS,
        lambda: DistributedDataParallel(split(), init_sync=False),
    ),
    "torch's DDP over it": (AXIS, torchs_over_the_tensor_axis),
    "stage 5 over it": (AXIS, lambda: BucketedDDP(split())),
    "ZeRO-1 over it": (AXIS, lambda: ShardedOptimizer(split().parameters(), torch.optim.SGD)),
    "FSDP around it": ("sharded already, or split", lambda: FullyShardedDataParallel(split())),
    "split twice": ("sharded already, or split", lambda: stage9_tensor.parallelize(split())),
    "compiled before": (
        "compiled already",
        lambda: stage9_tensor.parallelize(torch.compile(net(), backend="eager")),
    ),
    **{
        f"an optimizer with steps, {optimizer.__name__} {settings}": (
            "make the optimizer anew",
            partial(steps_before, optimizer, **settings),
        )
        for optimizer, settings in WITH_STATE
    },
    "a weight exchanged": ("was exchanged", exchanged),
    "a bias removed": ("the bias of a split layer", lambda: trained_after(without_bias)),
    "a parameter added": ("the scale of a split layer", lambda: trained_after(with_a_scale)),
    "an adapter of outputs": (
        "0 of Sequential was exchanged after the split",
        lambda: put(0, Adapter),
    ),
    "an adapter of inputs": (
        "2 of Sequential was exchanged after the split",
        lambda: put(2, Adapter),
    ),
    "softmax of a slice": ("1 of Sequential", lambda: put(1, lambda _: nn.Softmax(-1))),
    "a weight between": ("1 of Sequential", lambda: put(1, lambda _: nn.PReLU().double())),
    "a layer made anew": ("initialise a model before", lambda: split()[2].reset_parameters()),
    "converted": ("cannot be moved or converted", lambda: split().float()),
    "other shapes": ("all ranks must have the same model", other_shapes),
    "nothing to split": (
        "has no two linear layers",
        lambda: stage9_tensor.parallelize(nn.Sequential(nn.Linear(3, 3), nn.ReLU())),
    ),
    "all have hooks": (
        "has no two linear layers",
        lambda: split(lambda m: [layer.register_forward_hook(print) for layer in m]),
    ),
    "clipping by ZeRO-1": ("are parts in two ways", clip_of_zero_1),
    "other data": (
        "write values into it by copy_",
        lambda: each_weight(lambda w: setattr(w, "data", torch.ones(7, 5).double())),
    ),
    "the norm": (PART, lambda: each_weight(lambda w: w.norm())),
    "the gradient's norm": (PART, lambda: each_weight(lambda w: w.grad.norm())),
    "LARS": (PART, lambda: each_weight(lambda w: torch.linalg.vector_norm(w.detach()))),
    "kaiming": (PART, lambda: each_weight(INIT.kaiming_uniform_)),
    "xavier": (PART, lambda: each_weight(INIT.xavier_normal_)),
    "every linear layer drawn": (
        PART,
        lambda: each_linear(lambda layer: layer.weight.data.normal_(0, 0.02)),
    ),
    "a hook on a slice": ("a hook was added to 0 of Sequential", lambda: each_linear(normalised)),
    "orthogonal": (PART, lambda: each_weight(INIT.orthogonal_)),
    "eye": (PART, lambda: each_weight(INIT.eye_)),
    "truncated": (PART, lambda: each_weight(INIT.trunc_normal_)),
    "sparse": (PART, lambda: each_weight(lambda w: INIT.sparse_(w, 0.5))),
    "noise": (PART, lambda: each_weight(torch.randn_like)),
    "a row": (PART, lambda: each_weight(lambda w: w[0])),
    "a row written": (PART, lambda: each_weight(lambda w: w.data.__setitem__(0, 0.0))),
    "turned": (PART, lambda: each_weight(lambda w: w.T)),
    "softmax": (PART, lambda: each_weight(lambda w: w.softmax(0))),
    "the largest": (PART, lambda: each_weight(lambda w: w.max())),
    "finite": (PART, lambda: each_weight(lambda w: w.grad.isfinite().all())),
    "equal": (PART, lambda: each_weight(lambda w: torch.equal(w, w))),
    "as numbers": (PART, lambda: each_weight(lambda w: w.tolist())),
    "as an array": (PART, lambda: each_weight(lambda w: w.detach().numpy())),
    "spectral norm": (PART, lambda: each_weight(torch.linalg.svdvals)),
    "end to end": (
        PART,
        lambda: nn.utils.parameters_to_vector(with_gradients().parameters()).norm(),
    ),
    "a mesh of negative sizes": ("1 or more", lambda: mesh(data=-1, tensor=-2)),
    "a mesh of fractions": ("1 or more", lambda: mesh(data=1.0, tensor=2.0)),
    "a mesh of zero": ("1 or more", lambda: mesh(data=0, tensor=2)),
    "a negative number of ranks": (
        "1 or more",
        lambda: stage9_tensor.train(net(), [data()], 0.1, tensor=-1),
    ),
    "too many ranks": ("1 or more", lambda: stage9_tensor.train(net(), [data()], 0.1, tensor=4)),
    "a number that divides nothing": (
        "1 or more",
        lambda: stage9_tensor.train(net(), [data()], 0.1, tensor=2.5),
    ),
}


def all_refused():
    messages = {}
    for name, (_, refused) in REFUSED.items():
        try:
            refused()
            messages[name] = "nothing"
        except Exception as error:
            messages[name] = f"{type(error).__name__} {error}"
    return messages


def test_what_would_train_something_else_is_refused():
    for messages in launch(all_refused, world_size=2):
        assert {name: m for name, m in messages.items() if REFUSED[name][0] not in m} == {}
