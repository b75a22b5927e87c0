"""Sums that are looked at when the backward pass is over, as on a GPU.

Those that are looked at one by one are in test_faults.py.
"""

import pytest
import torch

from manyranks import finite
from manyranks.errors import NotFiniteError


def watched():
    """Return two layers whose gradients are noted as a GPU's are."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    sums = finite.SumsOfPass({parameter: name for name, parameter in model.named_parameters()})
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(sums.note)
    return model


def test_the_parameter_is_named_when_the_pass_is_over():
    model = watched()
    with pytest.raises(
        NotFiniteError, match=r"rank 0: the gradient of 1\.bias, and of 3 more parameters, has NaN"
    ):
        (model(torch.ones(3, 2)).sum() * float("nan")).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_pass_after_one_that_failed_is_looked_at_too():
    model = watched()
    handle = model[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(3, 2)).sum().backward()
    handle.remove()
    model(torch.ones(3, 2)).sum().backward()
    with pytest.raises(NotFiniteError, match="NaN"):
        model(torch.full((3, 2), float("inf"))).sum().backward()
    model.zero_grad()
    model(torch.ones(3, 2)).sum().backward()


def test_large_sums_of_small_dtypes_pass():
    parameter = torch.nn.Parameter(torch.ones(100, dtype=torch.float16))
    sums = finite.SumsOfPass({parameter: "weight"})
    parameter.register_post_accumulate_grad_hook(sums.note)
    # The sum of 100 of them does not fit into float16.
    (parameter * 60_000.0).sum(dtype=torch.float64).backward()
    assert not parameter.grad.sum().isfinite()
    assert parameter.grad.isfinite().all()
