"""Which way of training for which machine: numbers are those of the formulas, the choice is the simplest fast one."""

import pytest

from ddp_course.measuring import plans, theory


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ((0.3, 24, 8, "100Gbit"), "DDP"),
        ((0.1, 24, 1, "100Gbit"), "one device"),
        ((3, 80, 8, "100Gbit"), "DDP"),  # all in one host
        ((3, 80, 8, "1Gbit", 1), "8-stage pipeline"),  # an all-reduce would take 168 s
        ((3, 49, 8, "100Gbit"), "ZeRO-1"),
        ((3, 40, 8, "100Gbit"), "fully sharded"),
        ((7, 80, 64, "400Gbit"), "fully sharded"),
        ((7, 80, 64, "100Gbit"), "8-stage pipeline x 8 replicas"),
    ],
)
def test_choices(case, expected):
    chosen, reason, every = plans.decide(*case)
    assert chosen.name == expected, [(p.name, p.memory_gb, p.step_s) for p in every]
    assert chosen.fits and "s a step" in reason


@pytest.mark.parametrize(
    ("case", "words"), [((400, 24, 8, "100Gbit"), "even split"), ((7, 24, 1, "1Gbit"), "even split")]
)
def test_where_nothing_fits_it_says_what_would_be_needed(case, words):
    chosen, reason, every = plans.decide(*case)
    assert chosen is None and words in reason and not any(plan.fits for plan in every)


@pytest.mark.parametrize("devices", [2, 8, 64])
@pytest.mark.parametrize("bandwidth", ["1Gbit", "100Gbit"])
@pytest.mark.parametrize("memory_gb", [24, 80])
def test_the_choice_fits_and_nothing_simpler_is_nearly_as_fast(devices, bandwidth, memory_gb):
    for billions in (0.1, 1, 7, 70):
        chosen, _, every = plans.decide(billions, memory_gb, devices, bandwidth)
        fitting = [plan for plan in every if plan.fits]
        assert (chosen is None) == (not fitting)
        if chosen:
            assert chosen.step_s <= 1.1 * min(plan.step_s for plan in fitting)
            before = fitting[: fitting.index(chosen)]
            assert all(plan.step_s > 1.1 * min(p.step_s for p in fitting) for plan in before)


def test_times_and_memory_are_those_of_the_closed_forms():
    _, _, every = plans.decide(1, 80, 4, "10Gbit", per_host=1)
    by_name = {plan.name: plan for plan in every}
    ring = theory.seconds("ring", 4e9, 4, theory.Costs.of_link(10e9))
    compute = 6 * 1e9 * 4 * 2048 / plans.FLOPS
    assert by_name["DDP"].waiting_s == pytest.approx(ring - compute * 2 / 3)
    assert by_name["ZeRO-1"].step_s == by_name["DDP"].step_s
    assert by_name["fully sharded"].waiting_s == pytest.approx(1.5 * ring - compute)
    saved = by_name["DDP"].memory_gb - by_name["ZeRO-1"].memory_gb
    assert saved == pytest.approx(8 * (1 - 1 / 4))  # GB of Adam's state
    assert by_name["4-stage pipeline"].waiting_s >= compute * 3 / 16 * (1 - 1e-9)


def test_an_explored_host_that_cannot_be_filled_is_refused_in_words():
    with pytest.raises(ValueError, match="12 devices do not fill hosts of 8"):
        plans.decide(1, 80, 12, "10Gbit")
