"""The norm of gradients that no rank has whole: as on one device, and torch's own function refuses."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model, weights
from torch.nn.functional import cross_entropy

from ddp_course import launch
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer
from ddp_course.stage7_sharded.clipping import Part, clip_grad_norm_
from ddp_course.stage8_pipeline import Pipeline, split

NORMS = [(0.3, 2.0), (0.05, math.inf), (2.0, 1.0), (1e6, 2.0)]


def clipped_training(way, max_norm, norm_type):
    """Norms of every step, and the weights, of one way to train with AdamW."""
    model, alone = tiny_model(), way == "alone"
    batches = tiny_batches() if alone or way == "pipeline" else tiny_batches(dist.get_rank(), dist.get_world_size())
    if way == "fully sharded":
        forward = clipper = FullyShardedDataParallel(model)
        optimizer = torch.optim.AdamW(forward.parameters(), lr=0.01)
    elif way == "ZeRO-1":
        forward, optimizer = model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        clipper = optimizer
    elif way == "pipeline":
        part = split(list(model), dist.get_world_size())[dist.get_rank()]
        clipper, optimizer = Pipeline(part), torch.optim.AdamW(part.parameters(), lr=0.01)
    else:
        forward, optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        if way == "pipeline":
            clipper.step(inputs, targets)
        else:
            cross_entropy(forward(inputs), targets).backward()
        kind = () if norm_type == 2.0 else (norm_type,)  # the default, as torch's
        if alone:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, *kind).item())
        else:
            norms.append(clipper.clip_grad_norm_(max_norm, *kind).item())
        optimizer.step()
    return torch.tensor(norms), whole_weights(way, model, forward if way == "fully sharded" else None)


def whole_weights(way, model, parallel):
    if way == "pipeline":
        mine = torch.zeros_like(weights(model))
        sizes, rank = [p.numel() for p in model.parameters()], dist.get_rank()
        parts = split(list(model), dist.get_world_size())
        owned = {id(p) for p in parts[rank].parameters()}
        for piece, parameter in zip(mine.split(sizes), model.parameters(), strict=True):
            if id(parameter) in owned:
                piece.copy_(parameter.detach().reshape(-1))
        dist.all_reduce(mine)
        return mine
    return weights(parallel.restore() if parallel else model)


def every_norm(way):
    return [clipped_training(way, *norm) for norm in NORMS]


@pytest.mark.parametrize("way", ["ZeRO-1", "fully sharded", "pipeline"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_is_that_of_one_device(way, world_size):
    [expected] = launch(every_norm, "alone", world_size=1)
    for rank in launch(every_norm, way, world_size=world_size):
        for (norms, result), (right_norms, right) in zip(rank, expected, strict=True):
            assert (norms / right_norms - 1).abs().max() < 1e-9
            assert (result - right).abs().max() < 1e-9
    assert not torch.equal(expected[0][1], expected[-1][1]), "clipping changed nothing, so the test proves nothing"


def asked(way):
    """What asking for the norm of one rank's gradients gives, in several ways."""
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
    questions = {
        "clip": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip foreach": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
        "norm": lambda: gradient.norm(),
        "vector norm": lambda: torch.linalg.vector_norm(gradient),
        "foreach norm": lambda: torch._foreach_norm([gradient]),
        "scaler": lambda: scaler.unscale_(optimizer),
        "squares": lambda: gradient.square().sum(),
        "dot": lambda: gradient.flatten().dot(gradient.flatten()),
        "renorm": lambda: torch.renorm(gradient, 2, 0, 1.0),
        "after a product": lambda: (gradient * 2).norm(),
        "finite": lambda: torch.isfinite(gradient).all(),
        "end to end": lambda: torch.cat([gradient.view(-1), gradient.view(-1)]).norm(),
    }
    if way == "ZeRO-1":
        questions["values"] = lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        questions["signs"] = lambda: gradient.sign_()
    answers = {}
    for name, question in questions.items():
        try:
            answers[name] = question()
        except RuntimeError as error:
            answers[name] = str(error)
    harmless = [str(gradient), len(gradient), gradient.as_subclass(torch.Tensor).norm()]
    optimizer.step()
    return answers, len(harmless)


@pytest.mark.parametrize("way", ["ZeRO-1", "fully sharded"])
def test_nobody_takes_the_norm_of_a_part_for_that_of_the_whole(way):
    for answers, _ in launch(asked, way, world_size=2):
        refused = {name for name, answer in answers.items() if "To clip, call clip_grad_norm_" in str(answer)}
        assert refused == set(answers), answers
    [(answers, _)] = launch(asked, way, world_size=1)
    assert not any("To clip" in str(answer) for answer in answers.values()), "one rank has the whole"


def refused_in_a_pipeline():
    pipeline = Pipeline(torch.nn.Linear(3, 3))
    pipeline.step(torch.ones(4, 3), torch.zeros(4).long())
    torch.nn.utils.clip_grad_norm_(pipeline.module.parameters(), 1.0)


def test_a_stage_of_a_pipeline_has_no_norm_of_its_own():
    with pytest.raises(Exception, match="a part of the gradient only"):
        launch(refused_in_a_pipeline, world_size=2)
    launch(refused_in_a_pipeline, world_size=1)


def forgotten_gradients(model_forgets):
    """Clip, see a norm that is too large, skip the step; then train on."""
    model = tiny_model()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    batches = list(tiny_batches(dist.get_rank(), dist.get_world_size()))
    for number, (inputs, targets) in enumerate(batches):
        cross_entropy(model(inputs), targets).backward()
        optimizer.clip_grad_norm_(1e9)
        if number == 1:
            (model if model_forgets else optimizer).zero_grad()
            continue
        optimizer.step()
    return weights(model)


def test_gradients_that_were_averaged_and_dropped_do_not_come_back():
    expected = tiny_model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(tiny_batches()):
        optimizer.zero_grad()
        cross_entropy(expected(inputs), targets).backward()
        if number != 1:
            optimizer.step()
    for result in launch(forgotten_gradients, False, world_size=2):
        assert (result - weights(expected)).abs().max() < 1e-14
    with pytest.raises(Exception, match="those clipped before have not been used"):
        launch(forgotten_gradients, True, world_size=2)


def test_a_copy_of_a_guarded_gradient_is_guarded_too_and_a_file_has_an_ordinary_tensor():
    gradient = Part.mark(torch.arange(3.0), world_size=2)
    twin = copy.deepcopy(gradient)
    assert type(twin) is Part and twin.data_ptr() != gradient.data_ptr() and twin.tolist() == [0, 1, 2]
    loaded = pickle.loads(pickle.dumps(gradient))
    assert type(loaded) is torch.Tensor and loaded.tolist() == [0, 1, 2]


HUGE = [torch.full((2,), 3e25), torch.full((3,), 4e25 + 1e25j)]  # whose squares are too large for float32


def norm_of_huge_gradients():
    mine = torch.nn.Parameter(torch.zeros_like(HUGE[dist.get_rank()]))
    mine.grad = HUGE[dist.get_rank()].clone()
    return clip_grad_norm_([mine], 1.0).item(), mine.grad


def test_squares_are_added_up_in_double_precision():
    expected = math.sqrt(2 * 9e50 + 3 * (16e50 + 1e50))
    for (norm, clipped), gradient in zip(launch(norm_of_huge_gradients, world_size=2), HUGE, strict=True):
        assert abs(norm / expected - 1) < 1e-6 and torch.allclose(clipped, gradient / expected)


@pytest.mark.parametrize("order", [0.0, -1.0, math.nan])
def test_a_norm_of_no_positive_order_is_refused(order):
    with pytest.raises(ValueError, match="it must be a positive number, or infinity"):
        clip_grad_norm_([], 1.0, order)
