"""Virtual time against the closed forms, stage by stage."""

import pytest

from benchmarks import virtual_time


@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_are_their_closed_forms(world_size):
    """The other stages are in tests/commands/test_compare.py."""
    rows = virtual_time.beside_closed_forms(world_size, ("4w", "6", "7o", "7", "9", "2", "8"))
    for row in rows:
        assert abs(row["step/closed form - 1"]) <= row["bound"], row
    assert {row["stage"]: row["bound"] for row in rows}["7o"] == virtual_time.EQUAL
