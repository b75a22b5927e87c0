"""Random programs with threads, futures, any source, NumPy and layers: `every_order` blames none
that is right, and proves none that has a race.
"""

import pytest
import whole_programs

from manyranks import every_order

RANKS = 2
FOUND = ("touched too early", "overwritten too early")


def none_is_blamed(numbers):
    """Programs that are right, all of them in one launch."""
    programs = [whole_programs.draw_program(number) for number in numbers]
    verdict = every_order(whole_programs.play_all, programs, world_size=RANKS)
    assert verdict.ok, verdict


def all_are_found(numbers):
    """Programs with a planted race, each in a launch of its own."""
    for number in numbers:
        program = whole_programs.plant(whole_programs.draw_program(number), number)
        verdict = every_order(whole_programs.play_all, [program], world_size=RANKS)
        assert verdict.kind in FOUND, f"program {number}, {program}: {verdict}"


def test_forty_random_programs_are_not_blamed():
    none_is_blamed(range(40))


def test_three_planted_races_are_found():
    all_are_found(range(3))


@pytest.mark.weekly
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_random_programs_are_not_blamed(first):
    none_is_blamed(range(first, first + 50))


@pytest.mark.weekly
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_planted_races_are_found(first):
    all_are_found(range(first, first + 50))
