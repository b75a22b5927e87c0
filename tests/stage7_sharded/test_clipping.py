"""The norm of gradients that no rank has whole: torch's own function refuses.

The random programs compare ours.
"""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model
from torch.nn.functional import cross_entropy

from ddp_course import launch
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer


class Asked(NamedTuple):
    """A rank's sharded model after a backward pass: what questions about gradients are put to."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    gradient: torch.Tensor
    scaler: torch.amp.GradScaler


def clip(asked):
    torch.nn.utils.clip_grad_norm_(asked.model.parameters(), 1.0)


def clip_foreach(asked):
    torch.nn.utils.clip_grad_norm_(asked.model.parameters(), 1.0, foreach=True)


def norm(asked):
    asked.gradient.norm()


def vector_norm(asked):
    torch.linalg.vector_norm(asked.gradient)


def foreach_norm(asked):
    torch._foreach_norm([asked.gradient])


def unscale(asked):
    asked.scaler.unscale_(asked.optimizer)


def squares(asked):
    asked.gradient.square().sum()


def dot(asked):
    asked.gradient.flatten().dot(asked.gradient.flatten())


def renorm(asked):
    torch.renorm(asked.gradient, 2, 0, 1.0)


def after_a_product(asked):
    (asked.gradient * 2).norm()


def finite(asked):
    torch.isfinite(asked.gradient).all()


def end_to_end(asked):
    torch.cat([asked.gradient.view(-1), asked.gradient.view(-1)]).norm()


def clip_values(asked):
    torch.nn.utils.clip_grad_value_(asked.model.parameters(), 0.1)


def signs(asked):
    asked.gradient.sign_()


QUESTIONS = [
    clip,
    clip_foreach,
    norm,
    vector_norm,
    foreach_norm,
    unscale,
    squares,
    dot,
    renorm,
    after_a_product,
    finite,
    end_to_end,
]
OF_ZERO_1 = [clip_values, signs]


def answers(way, questions):
    """Return what each question is told, by name; None if it is answered."""
    model = tiny_model()
    if way == "fully sharded":
        model = FullyShardedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    inputs, targets = next(tiny_batches(dist.get_rank(), dist.get_world_size()))
    (cross_entropy(model(inputs), targets) * 2.0**16).backward()
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    asked = Asked(model, optimizer, gradient, scaler)
    told = {}
    for question in questions:
        try:
            told[question.__name__] = question(asked)
        except RuntimeError as error:
            told[question.__name__] = str(error)
    # These are harmless, and so is a step.
    assert str(gradient)
    assert len(gradient)
    assert gradient.as_subclass(torch.Tensor).norm() > 0
    optimizer.step()
    return told


@pytest.mark.parametrize(
    "way, questions", [("ZeRO-1", QUESTIONS + OF_ZERO_1), ("fully sharded", QUESTIONS)]
)
def test_nobody_takes_the_norm_of_a_part_for_that_of_the_whole(way, questions):
    for told in launch(answers, way, questions, world_size=2):
        assert "GradScaler looks for infinite gradients" in told.pop("unscale")
        for name, words in told.items():
            assert "To clip, call clip_grad_norm_" in str(words), name
