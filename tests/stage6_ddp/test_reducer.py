"""The reducer's odd moments: one parameter only, passes that break off or never end, and who decides the layout."""

import pytest
import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.stage6_ddp import DistributedDataParallel

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


def unfinished():
    """The words of the layout and of the next pass, and whether the module ran in it, after a pass without an end."""
    ran, model = [], torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    model.forward = lambda inputs: (ran.append("ran"), model[0](inputs))[1]
    parallel = DistributedDataParallel(model)
    parallel(torch.ones(1, 2)).sum().backward()
    words = []
    for attempt in (parallel.bucket_layout, lambda: parallel(torch.ones(1, 2))):
        with pytest.raises(RuntimeError) as caught:
            attempt()
        words.append(str(caught.value))
    return words, ran


def test_a_pass_without_an_end_is_told_before_the_next_computes():
    for words, ran in launch(unfinished, world_size=2):
        assert all("Expected to have finished reduction in the prior iteration" in text for text in words)
        assert all("1.weight, 1.bias" in text for text in words)
        assert ran == ["ran"]
