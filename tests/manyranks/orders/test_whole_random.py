"""`every_order` blames no right random program, and finds each planted race.

The programs have threads, futures, receives from any rank, NumPy and layers.
"""

import pytest
import whole_programs

from manyranks import every_order

RANKS = 2
FOUND = ("touched too early", "overwritten too early")


def verdict_on(numbers):
    """Return the verdict on programs that are right, all of them in one launch."""
    programs = [whole_programs.draw_program(number) for number in numbers]
    return every_order(whole_programs.play_all, programs, world_size=RANKS)


def missed_races(numbers):
    """Plant a race into each program, and return the verdicts on those in which none is found."""
    missed = {}
    for number in numbers:
        program = whole_programs.plant(whole_programs.draw_program(number), number)
        verdict = every_order(whole_programs.play_all, [program], world_size=RANKS)
        if verdict.kind not in FOUND:
            missed[number] = f"{program}: {verdict}"
    return missed


def test_ten_random_programs_are_not_blamed():
    verdict = verdict_on(range(10))
    assert verdict.ok, verdict


def test_three_planted_races_are_found():
    assert not missed_races(range(3))


@pytest.mark.weekly
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_random_programs_are_not_blamed(first):
    verdict = verdict_on(range(first, first + 50))
    assert verdict.ok, verdict


@pytest.mark.weekly
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_planted_races_are_found(first):
    assert not missed_races(range(first, first + 50))
