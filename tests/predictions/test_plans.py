"""Which way of training for which machine: what fits, the simplest within 5 %, and the score."""

import pytest

from ddp_predictions import plans
from ddp_predictions.answers import USABLE


def test_the_choice_fits_and_nothing_simpler_is_nearly_as_fast():
    decision = plans.decide(model="llama-2-7b", gpu="A100-80GB", gpus=16, batch=64)
    chosen = decision.chosen
    assert chosen.memory_gb <= USABLE * chosen.capacity_gb
    runs = plans.settings(chosen.run, 64)
    fitting = [each for each in map(plans.answer_of, runs) if each.memory_gb <= USABLE * 80]
    assert len(fitting) == decision.fitting
    fastest = min(each.step_s for each in fitting)
    near = [each for each in fitting if each.step_s <= 1.05 * fastest]
    assert chosen.step_s <= 1.05 * fastest
    assert plans.complexity(chosen.run) == min(plans.complexity(each.run) for each in near)
    assert len(decision.others) == 3
    assert "next: " in decision.words()


def test_every_setting_does_the_same_work_on_all_gpus():
    decision = plans.decide(model="gpt2", gpu="A100-40GB", gpus=8, batch=64)
    runs = list(plans.settings(decision.chosen.run, 64))
    assert len(runs) > 100
    assert {run.micro_batch * run.accumulate * run.data for run in runs} == {64}
    assert all(run.data * run.tensor * run.pipeline == 8 for run in runs)


def test_where_nothing_fits_it_says_what_would_be_needed():
    decision = plans.decide(model="gpt-3-175b", gpu="RTX 4090", gpus=8, batch=8)
    assert decision.chosen is None
    assert "none of" in decision.words()
    assert "GB per GPU; take more" in decision.words()


@pytest.mark.parametrize("batch", [0, -8, 7])
def test_a_batch_that_cannot_be_is_refused(batch):
    with pytest.raises(ValueError, match='"batch" is'):
        plans.decide(model="gpt2", gpu="H100", gpus=8, layers=13, heads=12, batch=batch)


def test_the_model_chooses_better_than_a_blind_choice():
    honest = plans.score()
    assert honest.groups == 4
    assert honest.kept > 0.98 > honest.blind_kept
    assert honest.within == 1 > honest.blind_within


def test_the_score_falls_where_the_model_prefers_what_is_slow(monkeypatch):
    """As a control, the model thinks that recomputing costs less than nothing."""
    monkeypatch.setattr(plans, "tokens_per_s", lambda run, seconds: run.recompute)
    assert plans.score().kept < 0.9
