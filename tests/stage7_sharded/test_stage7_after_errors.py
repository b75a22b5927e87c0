"""After an exception the next call works, or it refuses and says why; no rank trains alone.

Here the training loop of one rank catches the exception, drops the gradients and goes on. The case
that all ranks catch one alike is among the random programs.
"""

import re
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model
from torch.nn.functional import cross_entropy
from traps import Boom, Trap

from ddp_course import launch
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer
from ddp_course.stage8_pipeline import Pipeline, split
from manyranks import flight_recorder
from manyranks.errors import LaunchTimeout, RankError


def trapped():
    """Return a net with a trap in its middle, and the trap."""
    model = tiny_model()
    trap = Trap()
    return torch.nn.Sequential(*list(model)[:3], trap, *list(model)[3:]), trap


def train(stage, place):
    """Train; in the second step something goes wrong at `place` on rank 1.

    It catches that and goes on.
    """
    model, trap = trapped()
    forward = FullyShardedDataParallel(model) if stage == "7" else model
    kind = (
        partial(ShardedOptimizer, optimizer_cls=torch.optim.SGD)
        if stage == "7o"
        else torch.optim.SGD
    )
    optimizer = kind(forward.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(
        tiny_batches(dist.get_rank(), dist.get_world_size())
    ):
        trap.place = place if number == 1 and dist.get_rank() == 1 else None
        with suppress(Boom):
            cross_entropy(forward(inputs), targets).backward()
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_one_rank_fails_and_nobody_trains_alone(place):
    """The rank that failed is a collective behind.

    Its next one is compared with the others' before it is sent.
    """
    with pytest.raises((RankError, LaunchTimeout)) as raised:
        launch(train, "7", place, world_size=2, timeout=20)
    if isinstance(raised.value, RankError):
        assert raised.value.type_name == "MismatchError"
        assert re.search(
            r"(gather|average) of block \d, (forward|backward) \d", raised.value.message
        ), "which pass"


def outside_launch():
    """Return what is said where nobody compares the ranks' collectives, as under torchrun.

    Rank 1 fails between two blocks of the same size, and goes on.
    """
    flight_recorder._own.memory = None  # The recorder would find the difference first.
    dist.barrier()  # The group waits for no rank that still imports.
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]).double()
    trap = Trap()
    parallel = FullyShardedDataParallel(
        torch.nn.Sequential(*model[:2], trap, *model[2:]),
        process_group=dist.new_group(timeout=timedelta(seconds=4)),
    )
    for step in range(3):
        trap.place = "forward" if (step, dist.get_rank()) == (1, 1) else None
        try:
            parallel(torch.ones(2, 4).double()).sum().backward()
        except Boom:
            continue
        except Exception as error:
            return str(error)
    return "no error"


def test_a_rank_that_left_out_an_update_does_not_get_through():
    """An optimizer cannot know that a step was left out.

    The ranks that made it wait for one more, and are told.
    """
    with pytest.raises((RankError, LaunchTimeout), match=r"rank 1|connection"):
        launch(train, "7o", "forward", world_size=2, timeout=10)


def test_outside_launch_messages_of_two_blocks_do_not_mix():
    messages = launch(outside_launch, world_size=2)
    for message in messages:
        assert re.search(r"[Tt]imed out|closed|before", message), message


def update_fails(ranks):
    """Raise in the update itself, between reduce-scatter and allgather.

    Then take another step, and a state dict.
    """
    model = tiny_model()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    said = []
    right = optimizer.local.step
    for number, (inputs, targets) in enumerate(
        tiny_batches(dist.get_rank(), dist.get_world_size(), steps=3)
    ):
        cross_entropy(model(inputs), targets).backward()
        optimizer.local.step = explode if number == 1 and dist.get_rank() in ranks else right
        try:
            optimizer.step()
        except (Boom, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    for call in (optimizer.state_dict, lambda: optimizer.clip_grad_norm_(1.0)):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    return said


def explode():
    raise Boom("no update")


def test_an_optimizer_whose_step_broke_off_refuses_to_go_on():
    for first, *later in launch(update_fails, (0, 1), world_size=2):
        assert first == "Boom: no update"
        assert len(later) == 3
        assert all("has failed before (Boom" in text for text in later)


def pipelined(place, ranks, anew):
    """Make three steps with one pipeline, or with a new one each if `anew`.

    In the second step something goes wrong at `place` on `ranks`, and is caught.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    part = split(list(tiny_model()), world_size)[rank]
    trap = Trap()
    pipeline = Pipeline(torch.nn.Sequential(*part, trap), 4)
    for number, (inputs, targets) in enumerate(tiny_batches(steps=3)):
        trap.place = place if number == 1 and rank in ranks else None
        if anew:
            pipeline = Pipeline(torch.nn.Sequential(*part, trap), 4)
        with suppress(Boom):
            pipeline.step(inputs, targets)


@pytest.mark.parametrize(
    "place, ranks, anew",
    [*product(("forward", "backward"), [(0,), (1,), (0, 1)], [False]), ("backward", (0, 1), True)],
)
def test_a_pipeline_refuses_to_go_on_after_a_broken_step(place, ranks, anew):
    """The ranks that did not fail wait for messages that never come.

    The wait ends when one that refuses has ended.
    """
    with pytest.raises(RankError, match=r"has failed before \(Boom") as raised:
        launch(pipelined, place, ranks, anew, world_size=2)
    assert raised.value.rank in ranks


def broken_then_backward():
    """Make two graphs, of which the first fails in its backward pass.

    The second is asked for without a forward pass in between.
    """
    model, trap = trapped()
    parallel = FullyShardedDataParallel(model)
    inputs, targets = next(tiny_batches(dist.get_rank(), dist.get_world_size()))
    trap.place = "backward"
    broken = cross_entropy(parallel(inputs), targets)
    trap.place = None
    whole = cross_entropy(parallel(inputs), targets)
    said = []
    for loss in (broken, whole):
        try:
            loss.backward()
        except (Boom, RuntimeError) as error:
            said.append(str(error))
    cross_entropy(parallel(inputs), targets).backward()
    state = dict(parallel.state_dict())
    gradients = []
    for shard in parallel.parameters():
        gradients.append(None if shard.grad is None else shard.grad.clone())
    return said, state, gradients


def test_a_second_backward_after_a_broken_one_refuses_until_a_forward_pass():
    for said, state, gradients in launch(broken_then_backward, world_size=2):
        assert said[0] == ""
        assert "a backward pass began before another had ended" in said[1]
        untrained, _ = trapped()
        for name, tensor in untrained.state_dict().items():
            assert torch.equal(state[name], tensor)
        assert any(gradient is not None for gradient in gradients)
