"""Pipelines: schedules are data, and all train as one device does, and as torch's own pipelines.

Also the bubble and the memory of each schedule, and what is refused.
"""

from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, weights
from refusals import Refusals
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_course import launch, problems, stage1_single, stage8_pipeline, wire
from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_course.stage8_pipeline import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pipeline,
    bubble,
    gpipe,
    home_ranks,
    interleaved,
    one_forward_one_backward,
    split,
    timetable,
    zero_bubble,
)
from manyranks.devices import Device
from manyranks.errors import RankError


def interleaved_zero_bubble(ranks, microbatches):
    return zero_bubble(ranks, microbatches, interleaved)


def wave(ranks, microbatches):
    """Return a schedule with two stages on each rank: one on the way there, one on the way back.

    So the last rank sends to itself.
    """
    every = range(microbatches)
    schedule = []
    for rank in range(ranks):
        there = rank
        back = 2 * ranks - 1 - rank
        forward = [Forward(m, stage) for m in every for stage in (there, back)]
        inputs = [BackwardInput(m, stage) for m in every for stage in (back, there)]
        weights = [BackwardWeight(m, stage) for m in every for stage in (there, back)]
        schedule.append(forward + inputs + weights)
    return schedule


SCHEDULES = [gpipe, one_forward_one_backward]
OTHER_SCHEDULES = [interleaved, zero_bubble, interleaved_zero_bubble, wave]
SHAPES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 7) for microbatches in (1, 2, 3, 8)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_take_the_time_and_leave_the_bubble_that_theory_says(schedule):
    for stages, microbatches in SHAPES:
        rows = timetable(schedule(stages, microbatches), forward=1, backward=2)
        length = max(end for row in rows for _, _, end in row)
        assert length == 3 * (microbatches + stages - 1)
        for row in rows:
            busy = sum(end - start for _, start, end in row)
            assert 1 - busy / length == pytest.approx(bubble(stages, microbatches))
            for (_, _, end), (_, start, _) in pairwise(row):
                assert end <= start, "two at once"


def length_of(schedule, **times):
    return max(end for row in timetable(schedule, **times) for _, _, end in row)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (3, 3), (3, 9), (4, 12)])
def test_interleaved_and_split_schedules_shrink_the_bubble(ranks, microbatches):
    """The unit is a forward pass through all stages of a rank: each rank works for 3 M of them.

    The bubble comes to that: so many units for each of the K-1 ranks at the ends.
    """
    half = {"forward": 0.5, "backward": 1.0}
    work = 3 * microbatches
    ends = ranks - 1
    assert length_of(one_forward_one_backward(ranks, microbatches)) == work + 3 * ends
    assert length_of(interleaved(ranks, microbatches), **half) == work + 1.5 * ends
    assert length_of(zero_bubble(ranks, microbatches)) == work + ends
    assert length_of(interleaved_zero_bubble(ranks, microbatches), **half) == work + 0.5 * ends
    assert 1 - work / (work + 1.5 * ends) == pytest.approx(bubble(ranks, microbatches, chunks=2))


def test_messages_and_uneven_stages_take_their_time():
    """One micro-batch goes there and back: every pass and every message is waited for."""
    times = {"forward": [1, 2, 3], "backward": [4, 5, 6], "message": [0.25, 0.5]}
    assert length_of(gpipe(3, 1), **times) == 21 + 2 * 0.75
    assert length_of(interleaved(1, 1, chunks=3), **times) == 21, "no message on one rank"
    assert length_of(gpipe(2, 4), forward=1, backward=1, message=10) == 4 + 2 * 4 * 10, (
        "one at a time"
    )
    late = length_of(gpipe(2, 1), forward=1, backward=1, message=10, latency=3)
    assert late == 4 + 2 * (10 + 3)


def test_a_gradient_and_an_activation_share_the_way_out_of_their_rank():
    """In 1F1B a gradient and an activation share the way out of the rank in the middle.

    It sends a gradient to the left, and a pass later an activation to the right, which leaves when
    the gradient has left.
    """
    rows = timetable(one_forward_one_backward(3, 3), forward=1, backward=2, message=3)
    [gradient] = [end for each, _, end in rows[1] if each == Backward(0, 1)]
    [activation] = [start for each, start, _ in rows[2] if each == Forward(2, 2)]
    assert activation == gradient + 3 + 3


def most_held(instructions):
    """Return the most micro-batches that a rank keeps at any moment of its `instructions`.

    A forward pass keeps one more. A backward pass releases one, and so does its second half, if it
    is in two halves.
    """
    changes = {"forward": 1, "backward": -1, "input": 0, "weight": -1}
    held = accumulate(changes[instruction.name] for instruction in instructions)
    return max(held, default=0)


def test_one_forward_one_backward_holds_fewer_microbatches():
    for ranks, microbatches in SHAPES:
        held = [most_held(rank) for rank in one_forward_one_backward(ranks, microbatches)]
        assert held == [min(ranks - rank, microbatches) for rank in range(ranks)]
        assert [most_held(rank) for rank in gpipe(ranks, microbatches)] == [microbatches] * ranks
        assert max(most_held(rank) for rank in zero_bubble(ranks, microbatches)) <= ranks


def drawn(schedule):
    """Return the rows of a schedule as the module's docstring draws them: a cell for each tick."""
    lines = []
    for row in timetable(schedule):
        cells = [". "] * 18
        for instruction, start, end in row:
            for tick in range(int(start), int(end)):
                cells[tick] = f"{instruction.letter}{instruction.microbatch}"
        lines.append(" ".join(cells).rstrip(". "))
    return lines


def test_the_table_in_the_docstring_is_what_the_code_does():
    table = []
    for line in stage8_pipeline.__doc__.splitlines():
        if line[19:20] in ("F", ".") and "F0" in line:
            table.append(line[19:])
    expected = []
    for schedule in (*SCHEDULES, zero_bubble):
        expected += drawn(schedule(3, 4))
    assert table == expected


def F(microbatch, stage=0):
    return Forward(microbatch, stage)


def B(microbatch, stage=0):
    return Backward(microbatch, stage)


HALF = BackwardInput(0, 0)


@pytest.mark.parametrize(
    "schedule, message",
    [
        ([[F(0), B(0), F(1)]], "micro-batch 1 runs forward at stage 0"),
        ([[F(0), B(0), HALF]], "runs forward and backward and input at stage 0"),
        ([[F(0), HALF]], "runs forward and input at stage 0"),
        ([[F(0, 1), B(0, 1)]], "runs nothing at stage 0"),
        (
            [[B(0), F(0)]],
            "runs backward and forward at stage 0; it must run forward and then backward",
        ),
        (
            [[F(0)], [B(0)]],
            "runs backward at stage 0; it must run forward and then backward on one rank",
        ),
        (
            [[F(0), B(0), F(1), B(1)], [F(0, 1), F(1, 1), B(0, 1), B(1, 1)]],
            "in a circle: rank 0 at",
        ),
    ],
)
def test_schedules_that_cannot_work_are_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        timetable(schedule)


def deep_model(seed=0, inplace=True):
    """Return eight layers with parameters, so that four ranks have two stages each.

    After each of them comes another one, and if `inplace`, some of these overwrite their input.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        linear = [torch.nn.Linear(a, b) for a, b in pairwise([13, 17, 11, 19, 7, 12, 13, 10, 9])]
        after = [torch.nn.Tanh(), torch.nn.ReLU(inplace)]
        layers = [module for n, layer in enumerate(linear) for module in (layer, after[n % 2])]
        return torch.nn.Sequential(*layers[:-1]).double()


class Trained(NamedTuple):
    """What training has made of a model, and the losses on the way."""

    weights: torch.Tensor
    losses: torch.Tensor


def trained_alone():
    model = deep_model()
    losses = stage1_single.train(model, tiny_batches(), 0.1)
    return Trained(weights(model), torch.tensor(losses, dtype=torch.float64))


def trained_in_microbatches(microbatches):
    """Return the weights of one device that adds up the gradients of the same micro-batches.

    A pipeline must equal it bit for bit.
    """
    model = deep_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in tiny_batches():
        optimizer.zero_grad()
        parts_of_inputs = inputs.tensor_split(microbatches)
        parts_of_targets = targets.tensor_split(microbatches)
        for x, y in zip(parts_of_inputs, parts_of_targets, strict=True):
            share = len(y) / len(targets)
            (cross_entropy(model(x), y) * share).backward()
        optimizer.step()
    return weights(model)


def pipelines():
    """Train with all schedules, and with even and uneven micro-batches; return each as Trained."""
    cases = [(schedule, microbatches) for schedule in SCHEDULES for microbatches in (1, 4, 5)]
    cases += [(schedule, 2 * dist.get_world_size()) for schedule in OTHER_SCHEDULES]
    cases += [(zero_bubble, 5)]
    results = {}
    for schedule, microbatches in cases:
        name = f"{schedule.__name__}, {microbatches} micro-batches"
        settings = {"microbatches": microbatches, "schedule": schedule}
        results[name] = trained(tiny_batches(), **settings)
        expected = trained_in_microbatches(microbatches)
        assert torch.equal(results[name].weights, expected), f"{name}: not the same additions"
    return results


def trained(batches, **settings):
    """Return what a pipeline becomes whose ranks begin with different weights."""
    model = deep_model(seed=dist.get_rank())
    losses = stage8_pipeline.train(model, batches, 0.1, **settings)
    return Trained(weights(model), torch.tensor(losses, dtype=torch.float64))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_pipeline_equals_one_device(world_size):
    expected = trained_alone()
    ranks = launch(pipelines, world_size=world_size)
    for results in ranks:
        for name, result in results.items():
            assert torch.equal(result.weights, ranks[0][name].weights), "ranks differ"
            assert (result.weights - expected.weights).abs().max() < 1e-14
            assert (result.losses - expected.losses).abs().max() < 1e-14


def on_a_grid(schedule):
    """Train two pipelines of two ranks, each with half of each batch."""
    return trained(tiny_batches(dist.get_rank() // 2, 2), stages=2, schedule=schedule)


@pytest.mark.parametrize("schedule", [one_forward_one_backward, interleaved])
def test_a_grid_of_pipelines_equals_one_device(schedule):
    expected = trained_alone()
    ranks = launch(on_a_grid, schedule, world_size=4)
    for result in ranks:
        assert torch.equal(result.weights, ranks[0].weights), "ranks differ"
        assert (result.weights - expected.weights).abs().max() < 1e-14
    mean_losses = (ranks[0].losses + ranks[2].losses) / 2
    assert (mean_losses - expected.losses).abs().max() < 1e-14


def torchs_order(torchs, ranks, microbatches):
    """Return what a schedule of torch lets the ranks do, as our instructions."""
    names = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}
    orders = []
    for rank in range(ranks):
        order = []
        for stage, kind, m, *_ in filter(None, torchs.pipeline_order[rank]):
            if kind.value in names:
                order.append(names[kind.value](m, stage))
        orders.append(order)
    return orders


class BesideTorch(NamedTuple):
    """How far our gradients are from torch's, and the losses: on the last stage's rank alone."""

    gap: float
    losses: list
    torchs_loss: float


def against_torch(schedule, name):
    """Take one step of torch's pipeline, one of ours, and one of ours in the order of torch's."""
    world_size = dist.get_world_size()
    inputs, targets = next(tiny_batches())
    homes = home_ranks(schedule(world_size, MICROBATCHES))
    torchs_parts = own_parts(homes)
    torchs = torchs_pipeline(name, torchs_parts, homes)
    torchs_losses = []
    own = stages_of_this_rank(homes)
    arguments = [inputs] if 0 in own else []
    at_the_end = {"target": targets, "losses": torchs_losses} if max(homes) in own else {}
    torchs.step(*arguments, **at_the_end)

    schedules = [schedule]
    if len(homes) > world_size:
        order = torchs_order(torchs, world_size, MICROBATCHES)
        schedules.append(lambda *_: order)
    losses = []
    gaps = []
    for each in schedules:
        parts = own_parts(homes)
        losses.append(Pipeline(parts, MICROBATCHES, each).step(inputs, targets))
        gaps.append(largest_gap(parts, torchs_parts))
    ours = [loss for loss in losses if loss is not None]
    return BesideTorch(max(gaps), ours, sum(map(float, torchs_losses)) / MICROBATCHES)


def stages_of_this_rank(homes):
    return [stage for stage in homes if homes[stage] == dist.get_rank()]


def own_parts(homes):
    """Return a new part of the model for each stage of this rank."""
    parts = split(list(deep_model(inplace=False)), len(homes))
    return [parts[stage] for stage in stages_of_this_rank(homes)]


def torchs_pipeline(name, parts, homes):
    """Return torch's schedule of this name, over these parts of this rank."""
    from torch.distributed import pipelining

    cpu = torch.device("cpu")
    stages = []
    for part, stage in zip(parts, stages_of_this_rank(homes), strict=True):
        stages.append(pipelining.PipelineStage(part, stage, len(homes), cpu))
    kind = getattr(pipelining, f"Schedule{name}")
    # torch's schedules take a list where a rank may have several stages.
    takes_list = len(homes) > dist.get_world_size() or "Zero" in name
    return kind(stages if takes_list else stages[0], MICROBATCHES, cross_entropy)


def largest_gap(parts, torchs_parts):
    """Return the largest distance between the gradients of our parts and of torch's."""
    ours = torch.nn.ModuleList(parts).parameters()
    torchs = torch.nn.ModuleList(torchs_parts).parameters()
    return max(
        (mine.grad.as_subclass(torch.Tensor) - other.grad).abs().max().item()
        for mine, other in zip(ours, torchs, strict=True)
    )


MICROBATCHES = 6
TORCHS = [
    (gpipe, "GPipe"),
    (one_forward_one_backward, "1F1B"),
    (interleaved, "Interleaved1F1B"),
    (interleaved_zero_bubble, "InterleavedZeroBubble"),
    (wave, "ZBVZeroBubble"),
]


@pytest.mark.parametrize("schedule, name", TORCHS)
def test_it_agrees_with_torchs_pipelining(schedule, name):
    ranks = launch(against_torch, schedule, name, world_size=3)
    assert max(rank.gap for rank in ranks) < 1e-15
    (last,) = [rank for rank in ranks if rank.losses]
    assert last.losses == pytest.approx([last.torchs_loss] * len(last.losses), abs=1e-14)


def batch_norm():
    """Return the running means of our pipeline and of torch's.

    torch's is told the shapes: otherwise it would try one micro-batch to find them.
    """
    from torch.distributed import pipelining

    rank = dist.get_rank()
    inputs, targets = next(tiny_batches())
    parts = [
        torch.nn.Sequential(torch.nn.Linear(13, 13), torch.nn.BatchNorm1d(13)).double()
        for _ in range(2)
    ]
    parts[1].load_state_dict(parts[0].state_dict())
    Pipeline(parts[0], 4).step(inputs, targets)
    shape = inputs[:6].clone().requires_grad_()
    stage = pipelining.PipelineStage(
        parts[1], rank, 2, torch.device("cpu"), input_args=shape, output_args=shape
    )
    torchs = pipelining.Schedule1F1B(stage, 4, cross_entropy)
    if rank == 0:
        torchs.step(inputs)
    else:
        torchs.step(target=targets, losses=[])
    return [part[1].running_mean for part in parts]


def test_batch_norm_keeps_the_statistics_of_torchs_pipeline():
    for ours, torchs in launch(batch_norm, world_size=2):
        assert (ours - torchs).abs().max() < 1e-15
        assert ours.abs().max() > 1e-3


def transformer():
    """Train a transformer in a pipeline and alone; fail unless both end alike."""
    problem = problems.make("bytes", parameters=60_000, context=16, dtype=torch.float64)
    model = problem.model()
    losses = stage8_pipeline.train(model, problem.batches(8, 2), 0.1)
    one = problem.model()
    expected = stage1_single.train(one, problem.batches(8, 2), 0.1)
    inputs, _ = next(problem.batches(8, 1))
    whole = torch.nn.Sequential(*one.layers())(inputs)
    assert torch.equal(whole, one(inputs)), "the layers are not the model"
    assert (weights(model) - weights(one)).abs().max() < 1e-12
    assert losses == pytest.approx(expected, abs=1e-12)


def test_a_transformer_in_a_pipeline():
    launch(transformer, world_size=2)


def traffic_of_a_step(schedule):
    stages = [torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 2)]
    pipeline = Pipeline(stages[dist.get_rank()], 4, schedule)
    batch = torch.randn(10, 5), torch.randint(2, (10,))
    pipeline.step(*batch)
    with wire.counting() as traffic:
        pipeline.step(*batch)
    return traffic, pipeline.most_kept


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_activations_and_their_gradients_travel(schedule):
    ranks = launch(traffic_of_a_step, schedule, world_size=3)
    traffic = [counts for counts, _ in ranks]
    nbytes = [10 * 7 * 4, 10 * (7 + 3) * 4, 10 * 3 * 4]
    assert [counts.bytes_sent for counts in traffic] == nbytes
    assert [counts.bytes_received for counts in traffic] == nbytes
    assert [counts.messages_sent for counts in traffic] == [4, 8, 4]
    most_kept = [4, 4, 4] if schedule is gpipe else [3, 2, 1]
    assert [kept for _, kept in ranks] == most_kept


def saved_bytes(schedule):
    """Return the most bytes that autograd kept for the backward pass at any moment of a step."""
    held = 0
    most = 0

    class Kept:
        """A tensor that counts for as long as autograd keeps it."""

        def __init__(self, tensor):
            nonlocal held, most
            self.tensor = tensor
            held += tensor.nbytes
            most = max(most, held)

        def __del__(self):
            nonlocal held
            held -= self.tensor.nbytes

    stage = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh())
    pipeline = Pipeline(stage, 8, schedule, loss=lambda outputs, targets: outputs.mean())
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        pipeline.step(torch.ones(8, 1000).requires_grad_(), torch.zeros(8))
    return most


def test_activation_memory_of_both_schedules():
    each = 2 * 1000 * 4  # two layers keep their output, one sample a micro-batch
    assert launch(saved_bytes, gpipe, world_size=3) == [8 * each] * 3
    assert launch(saved_bytes, one_forward_one_backward, world_size=3) == [
        3 * each,
        2 * each,
        1 * each,
    ]


def test_split_is_even_and_leaves_no_rank_without_parameters():
    layers = list(deep_model())
    for stages in (1, 2, 3, 4, 5):
        parts = split(layers, stages)
        assert [layer for part in parts for layer in part] == layers
        for part in parts:
            assert sum(parameter.numel() for parameter in part.parameters()) > 0
    equal = [torch.nn.Linear(4, 4) for _ in range(8)]
    assert [len(part) for part in split(equal, 4)] == [2, 2, 2, 2]
    assert [len(part) for part in split(equal[:2], 2)] == [1, 1]
    odd = [torch.nn.PReLU(parameters) for parameters in (5, 1, 1, 9, 1)]
    lengths = [len(part) for part in split(odd, 3)]
    assert lengths == [1, 2, 2], "25 + 4 + 100 is the least sum of squares"


def test_models_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="8 layers with parameters cannot be split over 9 ranks"):
        split(list(deep_model()), 9)
    with pytest.raises(
        ValueError,
        match="2 layers with parameters cannot be split over 3 ranks; use at most 2 ranks",
    ):
        split([torch.nn.PReLU(), torch.nn.Tanh(), torch.nn.PReLU()], 3)
    shared = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="share a parameter"):
        split([shared, torch.nn.Linear(3, 3), torch.nn.Sequential(shared)], 2)
    norms = [torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)]
    norms[1].running_mean = norms[0].running_mean
    with pytest.raises(ValueError, match="share a parameter or a buffer"):
        split(norms, 2)
    with pytest.raises(ValueError, match="Linear is neither"):
        stage8_pipeline.layers_of(shared)


LAYER = torch.nn.Linear(2, 2)
BATCH = torch.ones(3, 2), torch.zeros(3).long()
REFUSALS = Refusals()
refused = REFUSALS.refused


@refused("microbatches is 0; it must be a whole number, 1 or more")
def no_microbatches():
    Pipeline(LAYER, 0)


@refused("microbatches is '4'; it must be a whole number")
def words_for_microbatches():
    Pipeline(LAYER, "4")


@refused("microbatches is None; it must be a whole number")
def none_for_microbatches():
    Pipeline(LAYER, None)


@refused("microbatches is 2.5; it must be a whole number")
def half_a_microbatch():
    Pipeline(LAYER, 2.5)


@refused("3 inputs and 3 targets cannot be cut into 4 micro-batches")
def too_few_samples():
    Pipeline(LAYER, 4).step(*BATCH)


@refused("3 inputs and 5 targets cannot be cut into 2 micro-batches")
def more_targets_than_inputs():
    Pipeline(LAYER, 2).step(BATCH[0], torch.zeros(5).long())


@refused("3 micro-batches cannot go around 2 ranks")
def odd_round():
    Pipeline([LAYER] * 2, 3, interleaved)


@refused("in this schedule, but 1 modules")
def too_few_modules():
    Pipeline(LAYER, 2, interleaved)


@refused("at stage 0; it must run")
def schedule_without_an_end():
    Pipeline(LAYER, 2, lambda *_: [[F(0), B(0), F(1)]] * 2)


@refused("a stage contains DistributedDataParallel")
def wrapper_in_a_stage():
    Pipeline(DistributedDataParallel(LAYER), 2)


@refused("2 ranks cannot form a mesh of {'data': 0, 'pipeline': 3}")
def more_stages_than_ranks():
    stage8_pipeline.train(deep_model(), [], 0.1, stages=3)


def test_bad_settings_are_refused():
    for messages in launch(REFUSALS.messages, world_size=2):
        REFUSALS.assert_told(messages)


def loss_of_each_sample():
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    Pipeline(LAYER, 2, loss=loss).step(torch.ones(4, 2), torch.zeros(4).long())


def test_a_loss_of_each_sample_is_refused():
    with pytest.raises(RankError, match=r"shape \(2,\); a pipeline needs one number, the mean"):
        launch(loss_of_each_sample, world_size=2)


class Returns(torch.nn.Module):
    """A layer that returns `function` of its outputs."""

    def __init__(self, function):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.function = function

    def forward(self, inputs):
        return self.function(self.layer(inputs[:, :3]))


def a_tuple(outputs):
    return outputs, outputs


def whole_numbers(outputs):
    return outputs.int()


class OtherShapes:
    """Returns another number of columns with each call on rank 0."""

    def __init__(self):
        self.columns = 0

    def __call__(self, outputs):
        self.columns += 1
        return outputs[:, : self.columns] if dist.get_rank() == 0 else outputs


def passed_on(function):
    Pipeline(Returns(function), 2).step(torch.ones(4, 3), torch.zeros(4).long())


@pytest.mark.parametrize(
    "function, words",
    [
        (a_tuple, r"stage 0 on rank 0 returns \('tuple',\), but only one tensor"),
        (
            whole_numbers,
            (
                r"returns \(torch.int32, torch.Size\(\[3\]\)\), but only one tensor of"
                r" floating-point numbers"
            ),
        ),
        (OtherShapes(), "of the same dtype and shape for each micro-batch"),
    ],
)
def test_what_cannot_be_passed_on_is_said(function, words):
    with pytest.raises(RankError, match=words):
        launch(passed_on, function, world_size=2)


def batches_that_differ(samples):
    rank = dist.get_rank()
    model = torch.nn.Linear(3, 3)
    Pipeline(model, 2).step(torch.ones(samples[rank], 3), torch.zeros(samples[rank]).long())


def test_ranks_with_batches_of_other_sizes_are_told():
    with pytest.raises(RankError, match="a pipeline's step with a batch of float32") as raised:
        launch(batches_that_differ, (4, 6), world_size=2)
    assert "[4, 3] on rank 0" in raised.value.message
    assert "[6, 3] on rank 1" in raised.value.message


def lbfgs():
    """Step a pipeline with an optimizer that looks at all gradients.

    A rank has those of one stage only.
    """
    stage = torch.nn.Linear(3, 3)
    pipeline = Pipeline(stage, 2)
    optimizer = torch.optim.LBFGS(stage.parameters())
    optimizer.step(lambda: pipeline.step(torch.ones(4, 3), torch.zeros(4).long()) or 0.0)


def test_an_optimizer_that_looks_at_all_gradients_is_refused():
    with pytest.raises(RankError, match="this rank has a part of the tensor only"):
        launch(lbfgs, world_size=2)


def shapes_from_step_to_step():
    """Batches of other sizes and sequence lengths, one after the other, the same for all ranks."""
    pipeline = Pipeline(torch.nn.Linear(3, 3), 2, loss=lambda outputs, targets: outputs.mean())
    return [
        pipeline.step(torch.ones(n, length, 3), torch.zeros(n))
        for n, length in [(4, 5), (7, 2), (2, 9)]
    ]


def test_batches_may_change_from_step_to_step():
    assert None not in launch(shapes_from_step_to_step, world_size=2)[1]


def on_cuda():
    from ddp_course import rank_device

    model = deep_model(seed=dist.get_rank()).to(rank_device())
    batches = [(x.to(rank_device()), y.to(rank_device())) for x, y in tiny_batches()]
    losses = stage8_pipeline.train(model, batches, 0.1)
    return Trained(weights(model).cpu(), torch.tensor(losses, dtype=torch.float64))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    expected = trained_alone()
    for result in launch(on_cuda, world_size=2, device="cuda"):
        assert (result.weights - expected.weights).abs().max() < 1e-12
        assert (result.losses - expected.losses).abs().max() < 1e-12


def gradients_of_two_steps(emulated):
    """Return the gradients that two steps leave; on an emulated device operations are looked at."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    pipeline = Pipeline(split(layers, 2)[dist.get_rank()], 2, loss=nn.functional.mse_loss)
    device = Device("1GFLOP/s", "1GB/s").emulate(sleep=False) if emulated else nullcontext()
    with device:
        for _ in range(2):
            pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
    return [p.grad.as_subclass(torch.Tensor) for p in pipeline.module.parameters()]


def test_gradients_add_up_over_steps_on_emulated_devices_too():
    for ours, theirs in zip(
        launch(gradients_of_two_steps, True, world_size=2),
        launch(gradients_of_two_steps, False, world_size=2),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
