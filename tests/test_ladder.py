"""The promises about the stages' code itself: how little changes from stage to stage."""

import difflib
import inspect
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.optim import AdamW

from ddp_course import (
    ladder,
    stage1_single,
    stage2_dataparallel,
    stage3_paramserver,
    stage4_ring,
    stage5_bucketed,
)
from manyranks import RankError, launch

STAGES = [stage1_single, stage2_dataparallel, stage3_paramserver, stage4_ring, stage5_bucketed]


def train_lines(module):
    """Return the code of `train`, without its docstring."""
    lines = inspect.getsource(module.train).splitlines()
    return [line for line in lines if not line.strip().startswith('"""')]


def changed(before, after):
    """Return how many lines a diff of the two shows as removed or added, whichever is more."""
    marks = [line[0] for line in difflib.ndiff(before, after)]
    return max(marks.count("-"), marks.count("+"))


@pytest.mark.parametrize("before, after", list(pairwise(STAGES)))
def test_neighbours_differ_in_at_most_8_lines(before, after):
    assert 0 < changed(train_lines(before), train_lines(after)) <= 8


def test_from_3_to_4_only_the_sum_changes():
    server = "\n".join(train_lines(stage3_paramserver))
    assert server.replace("average_on_server", "average_on_ring") == "\n".join(
        train_lines(stage4_ring)
    )
    assert server.count("average_on_server") == 1


def test_the_whole_idea_is_read_in_half_an_hour():
    texts = [Path(stage.__file__).read_text() for stage in STAGES]
    assert sum(len(text.splitlines()) for text in texts) <= 600


def test_every_rung_is_whole_and_what_it_names_is_there():
    for key, stage in ladder.STAGES.items():
        assert stage.key == key
        assert stage.name
        assert stage.idea
        assert stage.time
        assert callable(stage.trainer({}))
    assert len({stage.colour for stage in ladder.STAGES.values()}) == len(ladder.STAGES)
    assert {f"stage{number}" for number in range(1, 10)} == {
        module.split("_")[0] for module in ladder.MODULES
    }
    with pytest.raises(ValueError, match="unknown stage '10'; choose among 1, 2, 3"):
        ladder.find("10")


def test_all_public_functions_of_the_stages_have_docstrings():
    for stage in STAGES:
        for name, member in vars(stage).items():
            if (
                inspect.isfunction(member)
                and member.__module__ == stage.__name__
                and not name.startswith("_")
            ):
                assert member.__doc__, f"{stage.__name__}.{name}"


def trained_by(key, loss, optimizer, targets):
    """On a rank, return the weights after two steps of a stage, and the losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    stage = ladder.STAGES[key]
    rank, size = (dist.get_rank(), dist.get_world_size()) if stage.splits_batch else (0, 1)
    inputs = torch.arange(48.0).reshape(8, 6).sin()
    batch = inputs[rank::size], targets(inputs)[rank::size]
    options = {"loss": loss, "optimizer": optimizer} if loss else {}
    losses = stage.trainer({"devices": ["cpu", "cpu"]})(model, [batch] * 2, 0.1, **options)
    return torch.nn.utils.parameters_to_vector(model.parameters()), losses


def squares(inputs):
    return inputs.square().sum(1, keepdim=True)


def classes(inputs):
    return torch.zeros(len(inputs), dtype=torch.long)


OWN = [key for key in ladder.STAGES if key not in ("torch", "1")]


def all_trained(*settings):
    return {key: trained_by(key, *settings) for key in OWN}


def test_every_stage_takes_a_loss_and_an_optimizer():
    alone, losses = launch(trained_by, "1", mse_loss, AdamW, squares, world_size=1)[0]
    assert losses[1] < losses[0]
    for by_stage in launch(all_trained, mse_loss, AdamW, squares, world_size=2):
        for key, (weights, _) in by_stage.items():
            torch.testing.assert_close(weights, alone, rtol=0, atol=1e-5, msg=f"stage {key}")


def refusals(targets):
    """On a rank, return what each stage says of these targets."""
    words = {}
    for key in [key for key in OWN if key != "8"]:
        try:
            trained_by(key, None, None, targets)
        except ValueError as error:
            words[key] = str(error)
    return words


@pytest.mark.parametrize("targets", [squares, classes])
def test_targets_that_do_not_fit_are_refused_by_every_stage(targets):
    for words in launch(refusals, targets, world_size=2):
        assert words.keys() == set(OWN) - {"8"}
        assert all("cross entropy needs classes as targets" in each for each in words.values())
    # Only the last stage of a pipeline knows the targets.
    with pytest.raises(RankError, match="rank 1: ValueError: cross entropy needs classes"):
        launch(trained_by, "8", None, None, targets, world_size=2)
