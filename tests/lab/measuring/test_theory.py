"""The closed forms, against themselves; test_timing.py has them against real collectives."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_course.lab.measuring import theory
from ddp_course.lab.measuring.theory import Costs

costs_strategy = st.builds(Costs, st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7))
bytes_strategy = st.floats(1, 1e9)


def test_textbook_numbers():
    """The numbers are calculated by hand for 8 MB over 4 ranks, 1 ms and 100 MB/s."""
    expected = {
        "parameter_server": 6 * (0.001 + 0.08),
        "whole_gradient_ring": 3 * (0.001 + 0.08),
        "ring": 6 * (0.001 + 0.02),
        "tree": 4 * (0.001 + 0.08),
        "halving_doubling": 4 * 0.001 + 1.5 * 0.08,
        "hierarchical": 6 * (0.001 + 0.02),
    }
    seconds = {name: theory.seconds(name, 8e6, 4, Costs(1e-3, 1e-8)) for name in expected}
    assert seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", theory.ALL_REDUCE)
@settings(max_examples=30, deadline=None)
@given(world_size=st.integers(2, 64), nbytes=bytes_strategy, costs=costs_strategy)
def test_no_all_reduce_beats_the_bandwidth_bound(name, world_size, nbytes, costs):
    """Each rank must send 2 (K-1)/K p bytes, or (K-1) p through the server's link.

    Source: Patarasuk and Yuan 2009.
    """
    bound = 2 * (world_size - 1) / world_size * nbytes * costs.beta
    assert theory.seconds(name, nbytes, world_size, costs) >= bound * (1 - 1e-12)
    assert theory.seconds(name, nbytes, 1, costs) == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 64), bytes_strategy, st.floats(1e-12, 1e-7))
def test_what_the_course_says_about_the_ring(world_size, nbytes, beta):
    seconds = {
        name: theory.seconds(name, nbytes, world_size, Costs(0.0, beta))
        for name in theory.ALL_REDUCE
    }
    assert seconds["parameter_server"] == pytest.approx(2 * seconds["whole_gradient_ring"])
    assert seconds["whole_gradient_ring"] == pytest.approx(world_size / 2 * seconds["ring"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.seconds("circle", 1, 2, Costs(0, 1)), 'unknown algorithm "circle"'),
        (lambda: theory.seconds("ring", -1, 2, Costs(0, 1)), "-1 bytes"),
        (lambda: theory.seconds("ring", math.nan, 2, Costs(0, 1)), "nan bytes"),
        (lambda: theory.seconds("ring", 1, 0, Costs(0, 1)), "world size is 0"),
        (lambda: theory.seconds("ring", 1, 2.5, Costs(0, 1)), "world size is 2.5"),
        (
            lambda: theory.seconds("hierarchical", 1, 6, Costs(0, 1), per_host=4),
            "do not fill hosts of 4",
        ),
        (lambda: Costs.of_link(0), "bits per second"),
    ],
)
def test_bad_input_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call()
