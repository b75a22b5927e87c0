"""A few of the random programs for stages 7, 7o and 8.

There are thousands of them in tests/soak/programs78.py.
"""

import pytest
from soak import programs78

from ddp_course.stage7_sharded import flat

EVERY_DAY = [("7", (2, 3)), ("7o", (4, 3)), ("8", (3,))]
SOMETIMES = [("7", (4, 2)), ("7o", (1, 2)), ("8", (2,))]


@pytest.mark.parametrize(
    "stage, world_sizes",
    [*EVERY_DAY, *(pytest.param(*change, marks=pytest.mark.slow) for change in SOMETIMES)],
)
def test_programs_end_where_one_device_ends(stage, world_sizes):
    assert programs78.failures(stage, world_sizes, range(8)) == []


@pytest.mark.parametrize("stage", ["7", pytest.param("7o", marks=pytest.mark.slow)])
def test_a_fault_is_found(stage, monkeypatch):
    play_all = programs78.play_all
    monkeypatch.setattr(programs78, "play_all", lambda *arguments: faulty(play_all, *arguments))
    assert len(programs78.failures(stage, (2, 2), range(4))) >= 3


def faulty(play_all, *arguments):
    """Sum in place of averaging, as the control."""
    take = flat.Flat.put_gradient
    flat.Flat.put_gradient = lambda self, parameter: (
        parameter.grad.mul_(len(self.chunks)),
        take(self, parameter),
    )
    return play_all(*arguments)
