"""`every_order` finds what no operation shows, and says of what it cannot tell."""

import hidden
import pytest

from manyranks import every_order

EARLY = "touched too early"
OVERWRITTEN = "overwritten too early"


def first_of_each_day(programs):
    """Return the programs as parameters: the first one runs each day, the others each week."""
    first, *others = programs
    return [first, *(pytest.param(each, marks=pytest.mark.weekly) for each in others)]


def name_of(program):
    return getattr(program, "__name__", None)


@pytest.mark.parametrize(
    "program",
    [
        program
        for kind in (hidden.WRITES, hidden.READS, hidden.MEMORY)
        for program in first_of_each_day(kind)
    ],
    ids=name_of,
)
def test_a_fault_that_no_operation_shows_is_found_in_one_run(program):
    verdict = every_order(program, world_size=2)
    assert (verdict.ok, verdict.runs) == (False, 1), verdict
    assert verdict.kind in (EARLY, OVERWRITTEN), verdict
    assert all(line.startswith("hidden.py line ") for line in verdict.lines), verdict.lines


@pytest.mark.parametrize("program", first_of_each_day(hidden.DOUBTS), ids=name_of)
def test_what_one_run_cannot_see_is_said_with_its_line(program):
    verdict = every_order(program, world_size=2)
    assert (verdict.ok, verdict.runs) == (True, 21), verdict
    assert "cannot tell" in verdict.proof
    assert f"{hidden.DOUBTS[program]}" in verdict.proof
    assert "(hidden.py line " in verdict.proof


def test_what_differs_from_run_to_run_is_not_blamed_but_named():
    verdict = every_order(hidden.right_with_a_thread, world_size=2)
    assert verdict.ok, verdict
    assert "not comparable" in verdict.proof
    for name in ("runs", "nothing", "now"):
        assert f"result[0]['{name}']" in verdict.proof, verdict.proof
    assert "drawn" not in verdict.proof
    assert "object" not in verdict.proof


def test_what_touches_no_memory_on_its_way_is_proved_right_in_one_run():
    verdict = every_order(hidden.right_in_one_run, world_size=2)
    assert (verdict.ok, verdict.runs) == (True, 1), verdict


def test_questions_and_receives_from_any_rank_are_not_blamed():
    verdict = every_order(hidden.right_where_it_asks, world_size=2)
    assert (verdict.ok, verdict.runs) == (True, 21), verdict
    assert "threads" not in verdict.proof


@pytest.mark.parametrize("program", first_of_each_day(hidden.HIDDEN), ids=name_of)
def test_a_race_that_a_text_would_not_show_is_found(program):
    verdict = every_order(program, world_size=2)
    assert (verdict.ok, verdict.kind) == (False, "unlike results"), verdict
