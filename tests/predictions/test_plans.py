"""Which way of training for which machine: as the published winners chose, and the simplest within
a tenth.
"""

import pytest

from ddp_predictions import plans, predict

MEGATRON = {"nics": 8, "bandwidth": "200Gbit"}
TORCHTITAN = {"nics": 8, "bandwidth": "400Gbit", "samples": 2, "context": 8192, "gpu": "H100"}
RESNET = {
    "nics": 4,
    "bandwidth": "100Gbit",
    "samples": 32,
    "context": 160,
    "gpu": "V100",
}  # 6 P x 160 flops a picture


@pytest.mark.parametrize("gpus", [384, 768, 1536])
def test_megatron_is_split_three_ways(gpus):
    chosen, reason, every = plans.decide(174.6, 80, gpus, samples=1536 // gpus, **MEGATRON)
    assert chosen.name.count(" x ") == 2, "tensor, pipeline and data"
    sharded = next(plan for plan in every if plan.name.startswith("fully sharded"))
    assert sharded.fits and sharded.step_s > 1.3 * chosen.step_s
    assert ("beyond what was checked" in reason) == (gpus > 768)


@pytest.mark.parametrize("gpus", [8, 16, 32, 64, 128])
def test_llama_8b_is_fully_sharded_on_h100s(gpus):
    chosen, reason, _ = plans.decide(8, 80, gpus, **TORCHTITAN)
    assert chosen.name.startswith("fully sharded") and "beyond" not in reason


@pytest.mark.parametrize("gpus", [2, 8, 16])
def test_resnet_50_takes_ddp(gpus):
    assert plans.decide(0.0256, 16, gpus, **RESNET)[0].name == "DDP"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ((0.1, 24, 1, "100Gbit"), "one device"),
        ((0.3, 24, 8, "100Gbit"), "DDP"),
        ((3, 80, 8, "1Gbit", 1), "8 pipeline"),  # an all-reduce would take 84 s
        ((3, 40, 8, "100Gbit"), "fully sharded"),
        ((30, 80, 64, "1Gbit"), "8 tensor x 8 pipeline"),
    ],
)
def test_choices(case, expected):
    chosen, reason, every = plans.decide(*case)
    assert chosen.name == expected, [(plan.name, plan.memory_gb, plan.step_s) for plan in every]
    assert chosen.fits and "s per step" in reason


def test_scoreboard_and_chart_have_one_number_for_one_question():
    rows = {
        (row["plan"], row["gpus"]): row
        for row in predict.zero3_and_3d().rows
        if row["parameters"] == "174.6B"
    }
    for gpus in (384, 768, 1536):
        _, _, every = plans.decide(174.6, 80, gpus, samples=1536 // gpus, **MEGATRON)
        sharded = next(plan for plan in every if plan.name.startswith("fully sharded"))
        flops = 4.51e18  # of the step, by the authors' formula
        assert flops / gpus / sharded.step_s / 1e12 == pytest.approx(
            rows["ZeRO-3", gpus]["predicted"], rel=0.01
        )


def test_where_nothing_fits_it_says_what_would_be_needed():
    chosen, reason, every = plans.decide(400, 24, 8, "100Gbit")
    assert chosen is None and "take more devices" in reason and not any(plan.fits for plan in every)


@pytest.mark.parametrize("devices", [2, 8, 64])
@pytest.mark.parametrize("bandwidth", ["1Gbit", "100Gbit"])
def test_the_choice_fits_and_nothing_simpler_is_nearly_as_fast(devices, bandwidth):
    for billions in (0.1, 1, 7, 70):
        chosen, _, every = plans.decide(billions, 80, devices, bandwidth)
        fitting = [plan for plan in every if plan.fits]
        assert (chosen is None) == (not fitting)
        if chosen:
            near = [
                plan
                for plan in fitting
                if plan.step_s <= 1.1 * min(other.step_s for other in fitting)
            ]
            assert chosen in near and chosen.complexity == min(plan.complexity for plan in near)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": 12}, "12 devices do not fill hosts of 8"),
        ({"billions": -1}, "billions is -1; it must be more than 0"),
        ({"samples": 0}, "samples is 0"),
        ({"gpu": "TPU"}, 'no datasheet of "TPU"; choose one of V100, A100, H100'),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(change, words):
    setting = {"billions": 1, "memory_gb": 80, "devices": 16, "bandwidth": "10Gbit"} | change
    with pytest.raises(ValueError, match=words):
        plans.decide(**setting)


def test_numbers_are_readable():
    texts = [plans.readable(value) for value in (0.0294, 2.94, 9.96, 184.0, 3460.0)]
    assert texts == ["0.029", "2.9", "10", "184", "3,460"]
