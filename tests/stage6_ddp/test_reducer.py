"""The reducer: a graph that changes, who decides the layout, and ranks without data."""

import pytest
import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_course.stage6_ddp.buckets import MIB
from manyranks.errors import RankError


class Scale(torch.nn.Module):
    """A model with a single parameter."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return inputs * self.factor


class TwoOfThree(torch.nn.Module):
    """Three layers of one weight each, of which a pass uses those that it names, in that order."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict(
            {name: torch.nn.Linear(1, 1, bias=False) for name in "abc"}
        )

    def forward(self, inputs, names):
        for name in names:
            inputs = self.layers[name](inputs)
        return inputs


def changed():
    """A static graph that reaches a weight for the first time in its third iteration."""
    parallel = DistributedDataParallel(TwoOfThree(), static_graph=True)
    for names in ("ab", "ab", "abc"):
        parallel(torch.ones(1, 1), names).sum().backward()


def test_a_weight_that_a_static_graph_has_not_used_before_is_named():
    """The weight's gradient would be this rank's own."""
    with pytest.raises(
        RankError, match=r"training graph has changed in this iteration.* It is layers.c.weight"
    ):
        launch(changed, world_size=2)


def sizes_of_buckets(limits):
    """Return the sizes in bytes of the buckets after two passes.

    Each rank asks for another limit.
    """
    limit = limits[dist.get_rank()]
    parallel = DistributedDataParallel(TwoOfThree(), bucket_cap_mb=limit / MIB)
    for _ in range(2):
        parallel(torch.ones(1, 1), "abc").sum().backward()
    sizes = []
    for bucket in parallel.reducer.buckets:
        sizes.append(sum(parameter.nbytes for parameter in bucket.parameters))
    return sizes


def test_rank_0_says_how_large_buckets_are():
    """Parameters have 4 bytes."""
    assert launch(sizes_of_buckets, [8, 12], world_size=2) == [[8, 4], [8, 4]]


def without_data(settings, names):
    """Return the gradients of models of one and of three parameters, where only rank 0 has data.

    The weights of the second are returned, too.
    """
    found = []
    for model, arguments in ((Scale(), ()), (TwoOfThree(), (names,))):
        parallel = DistributedDataParallel(model, **settings)
        with parallel.join():
            for step in range(0 if dist.get_rank() else 3):
                parallel.zero_grad()
                parallel(torch.full((1, 1), step + 1.0), *arguments).sum().backward()
        gradients = []
        for parameter in model.parameters():
            gradients.append(None if parameter.grad is None else parameter.grad.item())
        found.append(gradients)
    return found, [weight.item() for weight in model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}])
def test_a_rank_may_have_no_data_at_all(settings):
    """A rank without data learns the buckets' order as the others do.

    What nobody uses has no gradient.
    """
    names = "ab" if "find_unused_parameters" in settings else "abc"
    (one, three), (a, b, c) = launch(without_data, settings, names, world_size=2)[0]
    assert one == [1.5]
    if names == "ab":
        assert three[:2] == pytest.approx([1.5 * b, 1.5 * a])
        assert three[2] is None
    else:
        assert three == pytest.approx([1.5 * b * c, 1.5 * a * c, 1.5 * a * b])
