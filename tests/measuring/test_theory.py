"""The closed forms: against the published algorithms played message by message, and against themselves."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_course.measuring import theory
from ddp_course.measuring.simulate import Network, play
from ddp_course.measuring.simulate.algorithms import PROGRAMS
from ddp_course.measuring.theory import Costs, Measurement

costs_strategy = st.builds(
    Costs, st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7), st.one_of(st.just(0.0), st.floats(1e-12, 1e-8))
)
bytes_strategy = st.floats(1, 1e9)
names = pytest.mark.parametrize("name", theory.ALL_REDUCE)


@names
@settings(max_examples=25, deadline=None)
@given(world_size=st.integers(1, 13), nbytes=bytes_strategy, costs=costs_strategy)
def test_formula_equals_the_algorithm_played_message_by_message(name, world_size, nbytes, costs):
    played = play(name, nbytes, world_size, Network(costs)) if world_size > 1 else 0.0
    assert theory.seconds(name, nbytes, world_size, costs) == pytest.approx(played, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), bytes_strategy, costs_strategy, costs_strategy)
def test_hierarchical_ring_equals_messages_on_a_shared_host_link(hosts, per_host, nbytes, costs, local):
    local = local._replace(gamma=costs.gamma)
    formula = theory.seconds("hierarchical_ring", nbytes, hosts * per_host, costs, local=local, per_host=per_host)
    if hosts * per_host > 1:
        played = play("hierarchical_ring", nbytes, hosts * per_host, Network(costs, local, per_host))
        assert formula == pytest.approx(played, rel=1e-9)


def test_the_comparison_can_fail():
    """Control: other algorithms' messages do not come out at a formula's seconds."""
    costs = Costs(1e-4, 1e-8, 1e-9)
    for name in theory.ALL_REDUCE:
        strangers = [play(other, 1e6, 6, Network(costs)) for other in PROGRAMS if other != name]
        formula = theory.seconds(name, 1e6, 6, costs)
        equal = [seconds for seconds in strangers if seconds == pytest.approx(formula, rel=1e-9)]
        twins = {"ring", "hierarchical_ring"}  # on hosts of one rank these are the same
        assert len(equal) == (1 if name in twins else 0)


def test_textbook_numbers():
    """Hand-calculated: 8 MB over 4 ranks, 1 ms, 100 MB/s."""
    costs = Costs(1e-3, 1e-8)
    expected = {
        "parameter_server": 6 * (0.001 + 0.08),
        "whole_gradient_ring": 3 * (0.001 + 0.08),
        "ring": 6 * (0.001 + 0.02),
        "tree": 4 * (0.001 + 0.08),
        "halving_doubling": 4 * 0.001 + 1.5 * 0.08,
        "hierarchical_ring": 6 * (0.001 + 0.02),
        "duplex_server": 3 * (17 * (0.001 + 0.08 / 16)),
    }
    found = {name: theory.seconds(name, 8e6, 4, costs) for name in theory.ALL_REDUCE}
    assert found == pytest.approx(expected, rel=1e-12)


@names
@settings(max_examples=30, deadline=None)
@given(world_size=st.integers(2, 64), nbytes=bytes_strategy, costs=costs_strategy)
def test_no_all_reduce_beats_the_bandwidth_bound(name, world_size, nbytes, costs):
    """Each rank must send 2 (K-1)/K p bytes, or (K-1) p through the server's link (Patarasuk and Yuan 2009)."""
    bound = 2 * (world_size - 1) / world_size * nbytes * costs.beta
    assert theory.seconds(name, nbytes, world_size, costs) >= bound * (1 - 1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 64), bytes_strategy, costs_strategy)
def test_what_the_course_says_about_the_ring(world_size, nbytes, costs):
    free = costs._replace(alpha=0.0, gamma=0.0)
    seconds = {name: theory.seconds(name, nbytes, world_size, free) for name in theory.ALL_REDUCE}
    assert seconds["parameter_server"] == pytest.approx(2 * seconds["whole_gradient_ring"])
    assert seconds["whole_gradient_ring"] == pytest.approx(world_size / 2 * seconds["ring"])
    many = theory.seconds("duplex_server", nbytes, world_size, free, pieces=10_000)
    assert many == pytest.approx(seconds["parameter_server"] / 2, rel=1e-3)


def timings(costs, names=("ring", "message"), noise=(1.0,)):
    sizes = [2**k for k in range(10, 25, 2)]
    rows = [Measurement(name, size, 4, theory.FORMS[name](size, 4, costs)) for name in names for size in sizes]
    return [row._replace(seconds=row.seconds * noise[i % len(noise)]) for i, row in enumerate(rows)]


@settings(max_examples=30, deadline=None)
@given(costs=costs_strategy)
def test_fit_finds_the_costs_that_made_the_timings(costs):
    found = theory.fit(timings(costs), gamma=costs.gamma)
    assert found.alpha == pytest.approx(costs.alpha, rel=1e-5, abs=1e-15)
    assert found.beta == pytest.approx(costs.beta, rel=1e-5)
    with_gamma = theory.fit(timings(costs, ("ring", "message", "tree")), gamma="fit")
    assert with_gamma.costs == pytest.approx(costs, rel=1e-3, abs=1e-13)


def test_standard_errors_grow_with_the_noise_and_cover_the_truth():
    costs = Costs(1e-4, 1e-8)
    exact, noisy = theory.fit(timings(costs)), theory.fit(timings(costs, noise=(1.05, 0.97, 0.95, 1.04, 0.99)))
    assert exact.beta_error < 1e-6 * exact.beta
    assert 0 < noisy.beta_error < 0.1 * noisy.beta
    assert abs(noisy.beta - costs.beta) < 4 * noisy.beta_error
    assert abs(noisy.alpha - costs.alpha) < 4 * noisy.alpha_error
    two = theory.fit(timings(costs)[:2])
    assert math.isinf(two.alpha_error) and two.beta == pytest.approx(costs.beta)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.seconds("circle", 1, 2, Costs(0, 1)), 'unknown algorithm "circle"'),
        (lambda: theory.seconds("ring", -1, 2, Costs(0, 1)), "-1 bytes"),
        (lambda: theory.seconds("ring", math.nan, 2, Costs(0, 1)), "nan bytes"),
        (lambda: theory.seconds("ring", 1, 0, Costs(0, 1)), "world size is 0"),
        (lambda: theory.seconds("ring", 1, -3, Costs(0, 1)), "world size is -3"),
        (lambda: theory.seconds("ring", 1, 2.5, Costs(0, 1)), "world size is 2.5"),
        (lambda: theory.seconds("hierarchical_ring", 1, 6, Costs(0, 1), per_host=4), "do not fill hosts of 4"),
        (lambda: Costs.of_link(0), "bits per second"),
        (lambda: theory.fit([]), "cannot tell 2 unknowns apart"),
        (lambda: theory.fit([("ring", 1e6, 2, 0.1)] * 5), "vary the bytes"),
        (lambda: theory.fit([("ring", 1e6, 2, 0.2), ("ring", 2e6, 2, 0.1)]), "do not grow"),
        (lambda: theory.fit([("ring", 1e6, 2, 0.0), ("ring", 2e6, 2, 0.1)]), "0.0 seconds"),
        (lambda: theory.fit([("ring", 1e6, 1, 0.1), ("ring", 2e6, 2, 0.1)]), "2 or more"),
    ],
)
def test_bad_input_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_one_rank_needs_no_time():
    assert all(theory.seconds(name, 1e6, 1, Costs(1, 1, 1)) == 0 for name in theory.ALL_REDUCE)
