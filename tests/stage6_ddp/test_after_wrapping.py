"""What people do to a model after it is wrapped.

Stage 6 averages every gradient all the same, or names the parameter that it would not average.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ddp_course import launch
from ddp_course.stage5_bucketed import BucketedDDP
from ddp_course.stage6_ddp import DistributedDataParallel
from manyranks.errors import RankError


def net():
    """Return three layers, of which the last has a frozen bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[4].bias.requires_grad_(False)
    return model.double()


def batch():
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double()


def share():
    return batch().chunk(dist.get_world_size())[dist.get_rank()]


class LowRankLayer(nn.Module):
    """A layer with an adapter, as LoRA adds it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.ones(layer.in_features, 2).double())
        self.b = nn.Parameter(torch.ones(2, layer.out_features).double())

    def forward(self, x):
        return self.layer(x) + x @ self.a @ self.b


def assign(model, _):
    """Load other weights, which take the places of the parameters."""
    model.load_state_dict({k: v + 0.1 for k, v in net().state_dict().items()}, assign=True)


def other_weight(model, _):
    """Put another parameter in the place of a weight."""
    model[2].weight = nn.Parameter(model[2].weight.detach() + 0.1)


def other_layer(model, _):
    """Put a copy in the place of a layer."""
    model[2] = copy.deepcopy(model[2])


def layer_more(model, _):
    """Append a layer."""
    model.append(nn.Linear(4, 4).double())


def layer_less(model, _):
    """Remove a layer and the activation before it."""
    del model[3:5]


def adapter(model, _):
    """Wrap a layer with a low-rank adapter, and freeze it."""
    model[2] = LowRankLayer(model[2])


def weight_norm(model, _):
    """Normalise a weight by a parametrization, which makes two parameters of it."""
    parametrizations.weight_norm(model[2])


def weight_norm_of_old(model, _):
    """Normalise a weight by the older function, whose names are others."""
    torch.nn.utils.weight_norm(model[2])


def tied(model, _):
    """Share one bias between two layers, beside a new weight."""
    model[4].bias = model[4].bias
    model[2].weight = nn.Parameter(model[2].weight.detach())
    model[2].bias = model[0].bias


def swapped(model, _):
    """Swap a weight for another tensor by torch, which keeps the object."""
    other = nn.Parameter(model[2].weight.detach() + 0.1)
    torch.utils.swap_tensors(model[2].weight, other)


def unfrozen(model, _):
    model[4].bias.requires_grad_(True)


def frozen(model, _):
    model[2].weight.requires_grad_(False)


def other_weight_on_one_rank(model, wrapper):
    if dist.get_rank() == 1:
        other_weight(model, wrapper)


def emptied(model, _):
    """Give the model new memory, and load other weights into it."""
    model.to_empty(device="cpu")
    model.load_state_dict({k: v + 0.1 for k, v in net().state_dict().items()})


def compiled(model, wrapper):
    wrapper.module = torch.compile(model, backend="eager")


def called_by_hand(model, wrapper):
    """Call the model past the wrapper's own forward pass."""
    wrapper.forward = lambda x: model(x)


def part_called_by_hand(model, wrapper):
    """Call the layers one by one, past the wrapper's own forward pass."""
    wrapper.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))))


def other_data(model, _):
    """Give each parameter another tensor as its data."""
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1


def converted(model, _):
    """A parameter is converted and converted back: nothing but its accumulator is another one."""
    model[2].float().double()


def other_memory(model, _):
    with torch.no_grad():
        model[2].weight.set_(model[2].weight + 0.1)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def parametrized(model, _):
    """The parameter stays, with another name, and other memory."""
    parametrize.register_parametrization(model[2], "weight", Symmetric())


def all_frozen_and_unfrozen(model, wrapper):
    """Freeze all for a pass of which only the inputs get a gradient, and undo that."""
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(False)
    given = share().requires_grad_()
    wrapper(given).sum().backward()
    assert given.grad is not None
    for parameter, each in zip(model.parameters(), wanted, strict=True):
        parameter.requires_grad_(each)


# A change is refused by this name, or followed if there is None.
CHANGES = {
    assign: "0.weight",
    other_weight: "2.weight",
    other_layer: "2.weight",
    layer_more: "5.weight",
    layer_less: "4.weight",
    adapter: "2.a",
    weight_norm: "2.parametrizations.weight.original0",
    weight_norm_of_old: "2.weight_g",
    tied: "2.weight",
    unfrozen: "4.bias",
    frozen: "2.weight",
    swapped: "weakref",
    converted: "2.weight, 2.bias",
    other_memory: "2.weight",
    parametrized: "2.weight",
    called_by_hand: "weight",
    part_called_by_hand: "weight",
    emptied: None,
    other_data: None,
    compiled: None,
    all_frozen_and_unfrozen: None,
}
# These wrappers follow a change that the others refuse: what is unused may be frozen or removed,
# and stage 5's hooks are on the parameters, whoever calls the model.
FOLLOWED = {
    ("6 unused", "frozen"),
    ("6 unused", "layer_less"),
    ("5", "called_by_hand"),
    ("5", "part_called_by_hand"),
    ("5", "converted"),
    ("5", "other_memory"),
    ("5", "parametrized"),
}
WRAPPERS = {
    "6": DistributedDataParallel,
    "6 unused": lambda model, **group: DistributedDataParallel(
        model, find_unused_parameters=True, **group
    ),
    "6 static": lambda model, **group: DistributedDataParallel(model, static_graph=True, **group),
    "5": BucketedDDP,
}


def outcome(change, wrap):
    """Return the words of the refusal, or "averaged", or "wrong"."""
    model = net()
    wrapper = wrap(model, process_group=dist.new_group())
    wrapper(share()).square().mean().backward()
    model.zero_grad()
    try:
        change(model, wrapper)
        wrapper(share()).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = torch.autograd.grad(model(batch()).square().mean(), trained)
    right = all(torch.allclose(p.grad, grad) for p, grad in zip(trained, whole, strict=True))
    return "averaged" if right else "wrong"


def outcome_raised():
    words = outcome(other_weight_on_one_rank, DistributedDataParallel)
    if "weight" in words:
        raise RuntimeError(words)


def outcomes():
    told = {}
    for name, wrap in WRAPPERS.items():
        for change in CHANGES:
            told[name, change.__name__] = outcome(change, wrap)
    return told


def test_other_parameters_are_followed_or_named():
    by_rank = launch(outcomes, world_size=2)
    names_refused = {change.__name__: name for change, name in CHANGES.items()}
    for told in by_rank:
        for case, words in told.items():
            _, change = case
            if names_refused[change] is None or case in FOLLOWED:
                assert words == "averaged", (case, words)
            else:
                assert names_refused[change] in words or "weakref" in words, (case, words)


def test_a_change_on_one_rank_ends_all():
    with pytest.raises(RankError, match=r"2\.weight"):
        launch(outcome_raised, world_size=2)


def outcome_of_another_dtype():
    model = net()
    wrapper = DistributedDataParallel(model, process_group=dist.new_group())
    model[2].float()
    try:
        wrapper(share())
    except RuntimeError as error:
        return str(error)


def test_a_forward_pass_names_what_has_another_dtype():
    for words in launch(outcome_of_another_dtype, world_size=2):
        assert "converted after wrapping: 2.weight, 2.bias. " in words
