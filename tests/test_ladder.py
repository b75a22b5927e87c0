"""The promises about the stages' code itself: how little changes from stage to stage."""

import difflib
import inspect
from itertools import pairwise
from pathlib import Path

import pytest

from ddp_course import (
    ladder,
    stage1_single,
    stage2_dataparallel,
    stage3_paramserver,
    stage4_ring,
    stage5_bucketed,
)

STAGES = [stage1_single, stage2_dataparallel, stage3_paramserver, stage4_ring, stage5_bucketed]


def train_lines(module):
    """The code of `train`, without its docstring."""
    lines = inspect.getsource(module.train).splitlines()
    return [line for line in lines if not line.strip().startswith('"""')]


def changed(before, after):
    """Lines that a diff of the two shows as removed or added, whichever is more."""
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
        assert stage.key == key and stage.name and stage.idea and stage.time
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
