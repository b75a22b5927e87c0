"""Problems: shares that make up one batch, models that learn, and sizes to choose."""

import numpy as np
import pytest
import torch
from oracles import weights
from torch.utils.data import DistributedSampler

from ddp_course import problems, stage1_single


@pytest.mark.parametrize("name", problems.NAMES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_k_shares_make_up_the_very_batch_of_one_device(name, world_size):
    problem = small(name)
    whole = list(problem.batches(24, 5, seed=3))
    shares = [
        list(problem.batches(24, 5, seed=3, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len(whole) == 5
    for step, (inputs, targets) in enumerate(whole):
        inputs_of_shares, targets_of_shares = zip(*(share[step] for share in shares), strict=True)
        assert torch.equal(interleaved(inputs_of_shares), inputs)
        assert torch.equal(interleaved(targets_of_shares), targets)


def small(name):
    if name == "bytes":
        return problems.make(name, parameters=20_000)
    return problems.make(name)


def interleaved(parts):
    """Return one tensor whose samples come from the parts in turn, as ranks take theirs."""
    together = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        together[rank :: len(parts)] = part
    return together


def test_batches_depend_on_seed_and_step_only():
    problem = small("digits")
    first = [inputs for inputs, _ in problem.batches(96, 40, seed=1)]
    again = [inputs for inputs, _ in problem.batches(96, 40, seed=1, start=13)]
    assert len(again) == 40 - 13
    other = [inputs for inputs, _ in problem.batches(96, 40, seed=2)]
    assert all(map(torch.equal, first[13:], again)), "resuming changes the data"
    assert not torch.equal(first[0], other[0])
    per_epoch = len(problem.targets) // 96
    assert not torch.equal(first[0], first[per_epoch]), "epochs must be shuffled anew"


@pytest.mark.parametrize("size", [24, 25, 3, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shard_is_the_distributed_sampler(size, world_size):
    for epoch in (0, 3):
        for rank in range(world_size):
            theirs = DistributedSampler(range(size), world_size, rank, seed=5)
            theirs.set_epoch(epoch)
            ours = problems.shard(size, rank, world_size, epoch, 5)
            assert ours.tolist() == list(theirs)


def test_a_batch_that_does_not_come_out_even_is_refused():
    with pytest.raises(ValueError, match="cannot share a batch of 25 equally; try 24"):
        next(small("digits").batches(25, 1, world_size=4))


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="is more than the 1437 samples"):
        next(small("digits").batches(5000, 1))


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    problem = problems.make("digits")
    theirs = load_digits()
    images = ((torch.cat([problem.inputs, problem.test_inputs]).reshape(-1, 64) + 0.8) * 6).round()
    labels = torch.cat([problem.targets, problem.test_targets])
    ours = torch.cat([labels[:, None], images], 1).long().tolist()
    expected = np.column_stack([theirs.target, theirs.data]).astype(int).tolist()
    assert sorted(ours) == sorted(expected)


def test_digits_are_learnt():
    problem = problems.make("digits")
    model = problem.model()
    before = problem.evaluate(model)["accuracy"]
    stage1_single.train(model, problem.batches(problem.global_batch, 48), problem.learning_rate)
    assert before < 0.3
    assert problem.evaluate(model)["accuracy"] > 0.95
    assert model.training


def test_bytes_are_learnt():
    problem = small("bytes")
    model = problem.model()
    before = problem.evaluate(model)["bits_per_byte"]
    stage1_single.train(model, problem.batches(32, 60), problem.learning_rate)
    assert before == pytest.approx(8, abs=0.3)
    assert problem.evaluate(model)["bits_per_byte"] < 5
    assert problem.sample(model, "import ", 20).startswith("import ")
    assert len(problem.sample(model, "", 0)) == 0


def test_the_target_of_a_byte_is_the_next_one():
    inputs, targets = next(small("bytes").batches(4, 1))
    assert inputs.shape == targets.shape == (4, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.min() >= 0
    assert inputs.max() < 256


def test_attention_does_not_see_the_future():
    model = small("bytes").model().eval()
    text = torch.randint(256, (1, 64))
    changed = text.clone()
    changed[0, 40] = (text[0, 40] + 1) % 256
    difference = (model(text) - model(changed)).abs().amax(1)[0]
    assert difference[:40].max() == 0
    assert difference[40:].min() > 0


@pytest.mark.parametrize("wanted", [20_000, 300_000, 1_000_000, 10_000_000, 100_000_000])
def test_the_size_of_the_gpt_can_be_chosen(wanted):
    layers, width = problems.gpt_shape(wanted)
    with torch.device("meta"):
        model = problems.ByteGPT(layers, width, 64)
    # A layer is a large part of the smallest model, so its size cannot be met as closely.
    tolerance = 0.15 if wanted > 20_000 else 0.6
    assert number_of_parameters(model) == pytest.approx(wanted, rel=tolerance)


def number_of_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_synthetic_has_the_parameters_asked_for():
    for wanted in (2**16, 2**20, 2**22):
        model = problems.make("synthetic", parameters=wanted).model()
        assert number_of_parameters(model) == wanted


@pytest.mark.parametrize("name", problems.NAMES)
def test_weights_come_from_the_seed_and_leave_the_random_state_alone(name):
    problem = small(name)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = weights(problem.model(1))
    same = weights(problem.model(1))
    other = weights(problem.model(2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
