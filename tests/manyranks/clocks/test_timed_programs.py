"""Random programs of futures, groups, threads, timers and event loops take the moments of a model
that knows no turns.
"""

import pytest
from timed_programs import BANDWIDTH, LATENCY, WORLD_SIZE, draw_program, model, play_all

from manyranks import Link, launch

LINK = Link(f"{BANDWIDTH}bit", f"{LATENCY / 1e12}s")


def compare(numbers):
    """Run programs in one launch, and hold all that their ranks see against the model."""
    programs = [draw_program(number) for number in numbers]
    by_rank = launch(play_all, programs, world_size=WORLD_SIZE, link=LINK)
    for number, program, *seen in zip(numbers, programs, *by_rank, strict=True):
        for rank, (expected, found) in enumerate(zip(model(program), seen, strict=True)):
            different = sorted(set(expected) ^ set(found))
            assert not different, f"program {number}, rank {rank}: {different[:4]}"


def test_random_programs_take_the_moments_of_the_model():
    compare(range(10))


@pytest.mark.weekly
@pytest.mark.parametrize("first", range(10, 1010, 50))
def test_a_thousand_random_programs_take_the_moments_of_the_model(first):
    compare(range(first, first + 50))
