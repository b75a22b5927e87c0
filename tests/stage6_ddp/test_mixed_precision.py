"""What is cast by `mixed_precision`, and what is not.

Bytes and gradients are looked at in test_stage6_ddp.py.
"""

import pytest
import torch
from torch.nn.functional import linear
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from ddp_course.stage6_ddp.mixed_precision import LowPrecision

KEPT = {"kept.weight", "kept.bias", "kept_buffer"}


class Mixed(torch.nn.Module):
    """Layers, an integer parameter and buffers, some of which are to be left alone.

    It notes the dtypes that it met.
    """

    def __init__(self):
        super().__init__()
        self.cast = torch.nn.Linear(3, 3)
        self.kept = torch.nn.Linear(3, 3)
        self.order = torch.nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
        self.register_buffer("moving", torch.ones(3))
        self.register_buffer("kept_buffer", torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs, *, places, scale):
        self.met = [
            t.dtype for t in (inputs, places, scale, self.cast.weight, self.kept.weight, self.order)
        ]
        return self.kept(self.cast(inputs)[:, self.order].to(self.kept.weight.dtype)) * scale


def run(**wanted):
    """Return the model, and what it met."""
    model = Mixed()
    low = LowPrecision(_MixedPrecision(**wanted), model, KEPT)
    low(torch.ones(2, 3), places=torch.arange(2), scale=torch.ones(1))
    return model, low, model.met


def test_floating_point_weights_and_inputs_are_cast():
    low = torch.bfloat16
    full = torch.float32
    whole = torch.int64
    assert run(param_dtype=low)[2] == [low, whole, low, low, full, whole]
    assert run(reduce_dtype=low)[2] == [full, whole, full, full, full, whole]


def test_buffers_are_cast_for_good():
    for wanted, moving in ((torch.float64, torch.float64), (None, torch.float32)):
        model, _, _ = run(param_dtype=torch.bfloat16, buffer_dtype=wanted)
        assert model.moving.dtype == moving
        assert model.moving.tolist() == [1, 1, 1]
        assert (model.kept_buffer.dtype, model.count.dtype) == (torch.float32, torch.int64)


class Checkpointed(torch.nn.Module):
    """Its second layer is computed again in the backward pass, by its weights; `again` says how."""

    def __init__(self, again):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.again = again

    def last(self, inputs):
        return linear(inputs, self.second.weight, self.second.bias).relu()

    def forward(self, inputs):
        inputs = self.first(inputs)
        if self.again is None:
            return self.last(inputs)
        return checkpoint(self.last, inputs, use_reentrant=self.again)


def gradients(again, failing=False):
    model = Checkpointed(again)
    low = LowPrecision(_MixedPrecision(param_dtype=torch.bfloat16), model, ())
    outputs = low(torch.arange(6.0).view(2, 3))
    if failing:
        outputs.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            outputs.sum().backward()
        outputs = low(torch.arange(6.0).view(2, 3))
    outputs.sum().backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    return [parameter.grad.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("failing", [True, False])
def test_what_is_computed_again_is_in_few_bits_too(again, failing):
    assert gradients(again, failing) == gradients(None)
