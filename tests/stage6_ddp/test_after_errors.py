"""After an exception, stages 5 and 6 work correctly or refuse.

Cases are: where it happens x on which ranks x the stage. A rank that catches its error and goes on
must never train alone: its next passes give the gradients of one device on the whole batch, or
raise; whoever waits for a rank that has given up is told, at the latest, by the timeout.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_course import launch
from ddp_course.stage4_ring import ring_all_reduce
from ddp_course.stage5_bucketed import BucketedDDP
from ddp_course.stage6_ddp import DistributedDataParallel
from manyranks.errors import LaunchError

STAGES = {
    "5": lambda model: BucketedDDP(model, 0.0001),
    "6": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.0001),
    "6 ring": lambda model: DistributedDataParallel(
        model, bucket_cap_mb=0.0001, all_reduce=ring_all_reduce
    ),
    "6 views": lambda model: DistributedDataParallel(
        model, bucket_cap_mb=0.0001, gradient_as_bucket_view=True
    ),
}
WORKS = "works"
REFUSES = "refuses"


def explode(*_, **__):
    raise ZeroDivisionError("in the experiment")


def inputs(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + step))


def fail_once(parallel, model, where):
    """Run one pass that ends with an exception at `where`."""
    if where == "forward":
        handle = model[1].register_forward_pre_hook(explode)
    elif where == "first of backward":
        handle = model[2].register_full_backward_hook(explode)
    elif where == "middle of backward":
        handle = model[0].weight.register_hook(explode)
    else:
        handle = None
        parallel.all_reduce = explode
    try:
        parallel(inputs(dist.get_rank(), 0)).square().sum().backward()
    except (ZeroDivisionError, RuntimeError):
        return
    finally:
        if handle:
            handle.remove()
        else:
            parallel.all_reduce = ring_all_reduce
    raise AssertionError("nothing was raised")


def afterwards(stage, where, failing):
    """Return what three passes after the exception were like on this rank, with the words.

    They are "works" or "refuses".
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    parallel = STAGES[stage](model)
    parallel(inputs(dist.get_rank(), 9)).square().sum().backward()
    if dist.get_rank() in failing:
        fail_once(parallel, model, where)
    told = []
    for step in range(1, 4):
        model.zero_grad()
        try:
            parallel(inputs(dist.get_rank(), step)).square().sum().backward()
        except RuntimeError as error:
            return REFUSES, str(error), told
        shares = [alone(model, rank, step) for rank in range(dist.get_world_size())]
        error = (
            (
                torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                - sum(shares) / len(shares)
            )
            .abs()
            .max()
        )
        told.append(error.item())
    return WORKS, "", told


def alone(model, rank, step):
    twin = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    twin.load_state_dict(model.state_dict())
    twin(inputs(rank, step)).square().sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in twin.parameters()])


TABLE = [
    ("5", "forward", WORKS),
    ("5", "first of backward", WORKS),
    ("5", "middle of backward", REFUSES),
    ("5", "all-reduce", REFUSES),
    ("6", "forward", WORKS),
    ("6", "first of backward", REFUSES),
    ("6", "middle of backward", REFUSES),
    ("6 ring", "middle of backward", REFUSES),
    ("6 views", "middle of backward", REFUSES),
]


@pytest.mark.parametrize("stage, where, expected", TABLE)
def test_after_an_exception_on_all_ranks(stage, where, expected):
    for outcome, words, errors in launch(
        afterwards, stage, where, (0, 1), world_size=2, timeout=60
    ):
        assert outcome == expected, words
        assert all(error < 1e-5 for error in errors)
        if outcome == REFUSES:
            assert any(
                text in words
                for text in (
                    "cut short by an exception",
                    "failed before",
                    "Expected to have finished",
                )
            )


@pytest.mark.parametrize("stage", ["5", "6", "6 ring"])
def test_after_an_exception_on_one_rank_nobody_trains_alone(stage):
    """Rank 1 refuses its next pass and ends; rank 0, which waits for it, ends with it."""

    def run():
        outcome, words, errors = afterwards(stage, "middle of backward", (1,))
        if outcome == REFUSES:
            raise RuntimeError(f"refused: {words}")
        return errors

    with pytest.raises(LaunchError) as caught:
        launch(run, world_size=2)
    assert "refused" in str(caught.value)
    assert launch(dist.get_rank, world_size=2) == [0, 1], "the next launch is not affected"


def evaluate_on_rank_0():
    """Train for two steps, and evaluate a model with buffers on rank 0 alone between them."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
    for step in range(2):
        model(inputs(dist.get_rank(), step)).sum().backward()
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(inputs(0, step))


def test_an_evaluation_on_rank_0_alone_is_told():
    with pytest.raises(LaunchError, match=r"for an evaluation on one rank, call its module"):
        launch(evaluate_on_rank_0, world_size=2)
