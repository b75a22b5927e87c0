"""The reducer's odd moments: one parameter only, passes that break off or never end, and who decides the layout."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.errors import RankError
from ddp_course.stage6_ddp import DistributedDataParallel, reducer

SETTINGS = {
    "default": {},
    "auto": {"bucket_cap_mb": "auto"},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


class Scale(torch.nn.Module):
    """A model with a single parameter, whose backward pass may break off before its gradient is there."""

    def __init__(self):
        super().__init__()
        self.factor, self.breaks = torch.nn.Parameter(torch.ones(1)), False

    def forward(self, inputs):
        product = inputs * self.factor
        if self.breaks:
            product.register_hook(explode)
        return product


def explode(_):
    raise ZeroDivisionError("in the experiment")


def gradient(parallel, value):
    """That of a pass in which this rank's share has the gradient `value`."""
    parallel.zero_grad()
    parallel(torch.tensor([float(value)])).sum().backward()
    return parallel.module.factor.grad.item()


def passes(broken):
    """For each setting the gradients of three passes, where that of `broken`, 0, 1, 2 or None, is tried twice."""
    found = {}
    for name, settings in SETTINGS.items():
        parallel = DistributedDataParallel(Scale(), **settings)
        found[name] = []
        for step in range(3):
            if step == broken:
                parallel.module.breaks = True
                with pytest.raises(ZeroDivisionError):
                    gradient(parallel, 7)
                parallel.module.breaks = False
            found[name].append(gradient(parallel, dist.get_rank() + step))
    return found


@pytest.mark.parametrize("broken", [None, 0, 1, 2])
def test_a_model_of_one_parameter(broken):
    """Nothing stays of a pass that broke off before the first gradient was there, be it the first, which is special."""
    assert launch(passes, broken, world_size=2, timeout=60) == [{name: [0.5, 1.5, 2.5] for name in SETTINGS}] * 2


class TwoOfThree(torch.nn.Module):
    """Three layers of one weight each, of which a pass uses those that it names, in that order."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in "abc"})

    def forward(self, inputs, names):
        for name in names:
            inputs = self.layers[name](inputs)
        return inputs


def unfinished(settings):
    """What attempts to go on after a pass without an end were told, and how often the module ran."""
    parallel, ran = DistributedDataParallel(TwoOfThree(), **settings), []
    parallel.module.layers["a"].register_forward_hook(lambda *_: ran.append("ran"))
    if settings:  # the first pass counts, and may leave layers out
        parallel.module.layers["a"].weight.register_hook(explode)
        with pytest.raises(ZeroDivisionError):
            parallel(torch.ones(1, 1), "abc").sum().backward()
    else:
        parallel(torch.ones(1, 1), "ab").sum().backward()
    words = []
    layout = [[f"layers.{name}.weight"] for name in "abc"]
    for attempt in (
        parallel.bucket_layout,
        lambda: parallel.load_bucket_layout(layout),
        lambda: parallel(torch.ones(1, 1), "ab"),
    ):
        with pytest.raises(RuntimeError) as caught:
            attempt()
        words.append(str(caught.value))
    return words, len(ran)


@pytest.mark.parametrize("settings, missing", [({}, "layers.c"), ({"static_graph": True}, "layers.a")])
def test_a_pass_without_an_end_is_told_before_anything_else(settings, missing):
    for rank, (words, ran) in enumerate(launch(unfinished, settings, world_size=2)):
        assert all("Expected to have finished reduction in the prior iteration" in text for text in words)
        assert all(f"did not receive grad for rank {rank}: {missing}.weight\n" in text for text in words)
        assert ran == 1, "it was told after the forward pass"


def in_two_parts(as_view):
    """Gradients of a static graph's first iteration, of two parts, and of one more backward pass through both."""
    parallel = DistributedDataParallel(Scale(), static_graph=True, gradient_as_bucket_view=as_view)
    mine, factor = dist.get_rank() + 1.0, parallel.module.factor
    loss = parallel(torch.tensor([mine])).sum() + parallel(torch.tensor([mine])).sum()
    loss.backward(retain_graph=True)
    found = [factor.grad.item()]
    loss.backward()
    return [*found, factor.grad.item()]


@pytest.mark.parametrize("as_view", [False, True])
def test_the_first_pass_of_a_static_graph_may_have_parts_and_is_averaged_once(as_view):
    """As with any graph, what a second backward pass adds stays on its rank."""
    assert launch(in_two_parts, as_view, world_size=2) == [[3, 3 + 2], [3, 3 + 4]]


def changed():
    """A static graph that reaches a weight for the first time in its third iteration."""
    parallel = DistributedDataParallel(TwoOfThree(), static_graph=True)
    for names in ("ab", "ab", "abc"):
        parallel(torch.ones(1, 1), names).sum().backward()


def test_a_weight_that_a_static_graph_has_not_used_before_is_named():
    """Its gradient would be this rank's own."""
    with pytest.raises(RankError, match=r"training graph has changed in this iteration.* It is layers.c.weight"):
        launch(changed, world_size=2)


def laid_out(limits):
    """The sizes of the buckets that "auto" makes of `limits`, and the layout that was loaded, each after two passes."""
    found = []
    for layout in (None, [["layers.b.weight"], ["layers.c.weight", "layers.a.weight"]]):
        parallel = DistributedDataParallel(TwoOfThree(), bucket_cap_mb="auto")
        parallel.load_bucket_layout(layout)
        with patch.object(reducer, "best_limits", lambda *_: limits[dist.get_rank()]):
            for _ in range(2):
                parallel(torch.ones(1, 1), "abc").sum().backward()
        sizes = [4 * len(names) for names in parallel.bucket_layout()]
        found.append(sizes if layout is None else parallel.bucket_layout())
    return found


def test_rank_0_says_how_large_buckets_are_and_a_layout_that_was_loaded_stays():
    """Parameters have 4 bytes."""
    for sizes, loaded in launch(laid_out, [[4, 8], [12, 12]], world_size=2):
        assert sizes == [4, 8]
        assert loaded == [["layers.b.weight"], ["layers.c.weight", "layers.a.weight"]]


def without_data(settings, names):
    """Gradients of models of one and of three parameters, where only rank 0 has data; and the weights of the second."""
    found = []
    for model, arguments in ((Scale(), ()), (TwoOfThree(), (names,))):
        parallel = DistributedDataParallel(model, **settings)
        with parallel.join():
            for step in range(0 if dist.get_rank() else 3):
                parallel.zero_grad()
                parallel(torch.full((1, 1), step + 1.0), *arguments).sum().backward()
        found.append([None if p.grad is None else p.grad.item() for p in model.parameters()])
    return found, [weight.item() for weight in model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": "auto"}])
def test_a_rank_may_have_no_data_at_all(settings):
    """It learns the buckets' order as the others do, and what nobody uses has no gradient."""
    names = "ab" if "find_unused_parameters" in settings else "abc"
    (one, three), (a, b, c) = launch(without_data, settings, names, world_size=2, timeout=60)[0]
    assert one == [1.5]
    expected = [1.5 * b, 1.5 * a, None] if names == "ab" else [1.5 * b * c, 1.5 * a * c, 1.5 * a * b]
    assert three == [value if value is None else pytest.approx(value) for value in expected]
