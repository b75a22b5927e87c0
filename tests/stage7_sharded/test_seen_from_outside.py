"""What code outside sees of a sharded model is what it sees of an ordinary one."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import BatchNorm1d, Dropout, Embedding, Linear, Module, Sequential, Tanh

from ddp_course import launch
from ddp_course.stage7_sharded import FullyShardedDataParallel


def model():
    torch.manual_seed(0)
    return Sequential(
        Linear(5, 5), BatchNorm1d(5), Dropout(0.5), Sequential(Linear(5, 3), Tanh())
    ).double()


class Around(Module):
    """A model with another one inside, and a layer of its own; tied to nothing."""

    def __init__(self, body):
        super().__init__()
        self.scale = Linear(3, 3).double()
        self.body = body

    def forward(self, inputs):
        return self.scale(self.body(inputs))


def still_statistics(wrapped):
    for layer in wrapped.modules():
        if isinstance(layer, BatchNorm1d):
            layer.eval()


def no_dropout(wrapped):
    for layer in wrapped.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0


def by_apply(wrapped):
    wrapped.apply(lambda layer: setattr(layer, "p", 0.25) if hasattr(layer, "p") else None)
    wrapped.apply(lambda layer: layer.weight.data.fill_(0.1) if hasattr(layer, "weight") else None)


def constants(wrapped):
    with torch.no_grad():
        for layer in wrapped.modules():
            if isinstance(layer, Linear):
                torch.nn.init.zeros_(layer.bias)
                torch.nn.init.constant_(layer.weight, 0.2)


def pruned(wrapped):
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter[parameter.abs() < 0.2] = 0.0
            parameter.mul_(parameter.sign().clamp(min=-0.5))


def moved_buffers(wrapped):
    for buffer in wrapped.buffers():
        buffer.add_(1)


def signs(wrapped):
    for parameter in wrapped.parameters():
        if parameter.grad is not None:
            parameter.grad.sign_().nan_to_num_()


CHANGES = [still_statistics, no_dropout, by_apply, constants, pruned, moved_buffers, signs]


def after_a_change(change, fully_sharded):
    """Return the state after `change`, and after two steps; all ranks have the same data."""
    wrapped = FullyShardedDataParallel(model()) if fully_sharded else model()
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    torch.manual_seed(3)
    for inputs in torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)).double():
        wrapped(inputs).square().sum().backward()
        change(wrapped)
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.state_dict()


def differences():
    """Return {change: how far a sharded model is from an ordinary one}."""
    gaps = {}
    for change in CHANGES:
        expected = after_a_change(change, False)
        state = after_a_change(change, True)
        assert list(expected) == list(state), change
        gaps[change.__name__] = max(
            (expected[name].double() - state[name].double()).abs().max().item() for name in state
        )
    return gaps


def test_loops_over_modules_parameters_and_buffers_do_what_they_do_on_one_device():
    for gaps in launch(differences, world_size=2):
        assert max(gaps.values()) < 1e-12, gaps


def what_is_seen():
    """Return the names of modules, parameters and buffers, wrapped and not.

    Those of a model around them are returned, too.
    """
    plain = model()
    wrapped = FullyShardedDataParallel(model())
    outer = Around(FullyShardedDataParallel(model()))
    kinds = [[type(layer).__name__ for layer in plain.modules()]]
    kinds.append([type(layer).__name__ for layer in wrapped.modules()])
    names = [list(dict(each.named_parameters())) for each in (plain, wrapped.module, outer)]
    buffers = [list(dict(each.named_buffers())) for each in (plain, wrapped.module)]
    elements = torch.tensor(sum(p.numel() for p in wrapped.parameters()))
    dist.all_reduce(elements)
    same = elements.item() == sum(p.numel() for p in plain.parameters())
    whole = list(outer.state_dict()) == list(Around(model()).state_dict())
    fits = Around(model()).load_state_dict(outer.state_dict())
    return kinds, names, buffers, same, whole, str(fits)


def test_modules_parameters_and_buffers_are_seen_through_the_wrapper():
    for kinds, names, buffers, same, whole, fits in launch(what_is_seen, world_size=3):
        assert kinds[1] == ["FullyShardedDataParallel", *kinds[0]]
        assert names[1] == names[0]
        assert buffers[0] == buffers[1]
        assert names[2] == ["scale.weight", "scale.bias", *(f"body.module.{n}" for n in names[0])]
        assert same
        assert whole
        assert fits == "<All keys matched successfully>"


class Tied(Module):
    """One weight in two layers of two blocks, and a sparse layer that half of the ranks use."""

    def __init__(self):
        super().__init__()
        self.embedding = Embedding(5, 5)
        self.blocks = Sequential(Linear(5, 5), Tanh(), Linear(5, 5, bias=False))
        self.blocks[2].weight = self.embedding.weight

    def forward(self, inputs):
        return self.blocks(self.embedding(inputs))


def tied():
    """Return the distance to one device after three steps, with an error in between.

    There is an evaluation in between, too.
    """
    torch.manual_seed(0)
    ours = Tied().double()
    one = Tied().double()
    one.load_state_dict(ours.state_dict())
    wrapped = FullyShardedDataParallel(ours)
    for each in (wrapped, one):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
        for step in range(3):
            with pytest.raises(IndexError):
                each(torch.tensor([9]))
            inputs = (torch.arange(8) + step) % 5
            if each is wrapped:
                inputs = inputs[dist.get_rank() :: dist.get_world_size()]
            each(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = wrapped.restore()
    alike = whole.blocks[2].weight is whole.embedding.weight
    same = [
        (a - b).abs().max().item()
        for a, b in zip(whole.parameters(), one.parameters(), strict=True)
    ]
    return alike, type(whole.embedding.weight) is torch.nn.Parameter, max(same)


def test_a_tied_weight_is_one_shard_and_one_parameter_again():
    for alike, ordinary, gap in launch(tied, world_size=2):
        assert alike
        assert ordinary
        assert gap < 1e-14
