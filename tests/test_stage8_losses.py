"""Losses that are no mean over samples: a pipeline ends where one process does, or refuses.

It says what to do.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from ddp_course import launch
from ddp_course.stage8_pipeline import Pipeline, gpipe, one_forward_one_backward, zero_bubble

CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.5, 2.0], dtype=torch.float64)
MASKED = torch.tensor([0, -100, 2, 3, 1, -100, -100, -100])
FULL = torch.tensor([0, 1, 2, 3, 1, 1, 0, 2])
PADDED = torch.tensor([0, 3, 2, 3, 1, 1, 1, 1])
THIRD = torch.tensor([0, 3, 2, 3, 1, 1, 0, 2])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def contrastive(outputs, targets):
    """Compare each sample with all others, which a micro-batch does not have."""
    scores = normalize(outputs, dim=1) @ normalize(outputs.detach().flip(0), dim=1).T
    return cross_entropy(scores, torch.arange(len(outputs)))


def weighted(outputs, targets):
    return cross_entropy(outputs, targets, weight=CLASS_WEIGHTS)


def padded(outputs, targets):
    return cross_entropy(outputs, targets, ignore_index=1)


def summed(outputs, targets):
    return cross_entropy(outputs, targets, reduction="sum")


def root(outputs, targets):
    return cross_entropy(outputs, targets).sqrt()


def class_weight_of(targets):
    return CLASS_WEIGHTS[targets].sum()


# A case is (loss, targets, number of micro-batches, weights, whether a pipeline can do it).
CASES = {
    "plain": (cross_entropy, FULL, 4, len, True),
    "plain, uneven": (cross_entropy, FULL, 3, len, True),
    "masked": (cross_entropy, MASKED, 4, len, False),
    "masked, one of them wholly": (cross_entropy, MASKED, 2, len, False),
    "masked, with weights": (cross_entropy, MASKED, 4, lambda t: (t != -100).sum(), True),
    "masked wholly, with weights": (cross_entropy, MASKED, 8, lambda t: (t != -100).sum(), True),
    "padded": (padded, PADDED, 4, len, False),
    "a third padded, with weights": (padded, THIRD, 4, lambda t: (t != 1).sum(), True),
    "padded, with weights": (padded, PADDED, 4, lambda t: (t != 1).sum(), True),
    "class weights": (weighted, FULL, 4, len, False),
    "class weights, with weights": (weighted, FULL, 4, class_weight_of, True),
    "summed": (summed, FULL, 4, len, False),
    "summed, with weights": (summed, FULL, 4, lambda _: 1, True),
    "contrastive": (contrastive, FULL, 4, len, False),
    "contrastive, at once": (contrastive, FULL, 1, len, True),
    "a root": (root, FULL, 4, len, False),
    "wrong weights": (cross_entropy, FULL, 4, lambda _: 1, False),
}


def batch():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()


def outcome(case, schedule):
    """Return "right", what is wrong with the loss or a gradient, or the words of the refusal."""
    loss, targets, microbatches, weights, _ = CASES[case]
    one = net()
    expected = loss(one(batch()), targets)
    expected.backward()
    model = net()
    start = 2 * dist.get_rank()
    own = [[0, 1], [2]][dist.get_rank()]
    stage = nn.Sequential(*[model[number] for number in own])
    group = dist.new_group()
    pipeline = Pipeline(stage, microbatches, schedule, loss, group, weights)
    try:
        got = pipeline.step(batch(), targets)
    except ValueError as error:
        return str(error)
    if got is not None and abs(got - expected.item()) > 1e-9:
        return f"wrong: {got} for {expected.item()}"
    gradient = model[start].weight.grad.as_subclass(torch.Tensor)
    return "right" if torch.allclose(gradient, one[start].weight.grad) else "wrong gradient"


def outcomes():
    """Return the outcome of each case by each schedule."""
    told = {}
    for case in CASES:
        for schedule in (one_forward_one_backward, gpipe, zero_bubble):
            told[case, schedule.__name__] = outcome(case, schedule)
    return told


def test_the_loss_is_the_whole_batchs_or_refused():
    _, last = launch(outcomes, world_size=2)
    for (case, schedule), words in last.items():
        if CASES[case][-1]:
            assert words == "right", (case, schedule, words)
        else:
            assert "weights=" in words, (case, schedule, words)


def masked_later():
    """Take a step with all targets, and one in which some are left out."""
    stage = net()[:2] if dist.get_rank() == 0 else net()[2:]
    pipeline = Pipeline(stage, 2)
    losses = [pipeline.step(batch(), FULL)]
    try:
        losses.append(pipeline.step(batch(), MASKED))
    except ValueError as error:
        return str(error)
    return losses


def test_targets_that_are_left_out_later_are_seen():
    assert "weights=" in launch(masked_later, world_size=2)[1]


def padded_later():
    """The first two batches have no padding, which is a number like all others."""
    stage = net()[:2] if dist.get_rank() == 0 else net()[2:]
    pipeline = Pipeline(stage, 2, loss=padded)
    for targets in (FULL * 0, FULL * 0, PADDED, PADDED):
        try:
            pipeline.step(batch(), targets)
        except ValueError as error:
            return pipeline.steps, str(error)
    return "not seen"


def test_padding_that_comes_later_is_seen():
    steps, words = launch(padded_later, world_size=2)[1]
    assert steps == 4
    assert "weights=" in words


def regression():
    stage = net()[:2] if dist.get_rank() == 0 else net()[2:]
    return Pipeline(stage, 3, loss=mse_loss).step(batch(), batch())


def test_a_regression_is_a_mean_over_samples():
    expected = mse_loss(net()(batch()), batch()).item()
    assert abs(launch(regression, world_size=2)[1] - expected) < 1e-12
