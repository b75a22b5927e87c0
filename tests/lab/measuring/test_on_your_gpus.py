"""The cells "On your GPUs": their sizes fit all stages, and they say what they measured."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_course.lab import on_your_gpus as measured
from ddp_course.lab import show
from ddp_course.lab.measuring import on_your_gpus
from ddp_course.problems import gpt_shape

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 16])
def test_every_size_has_layers_and_heads_for_all_ranks(world_size):
    sizes = list(on_your_gpus.sizes(world_size))
    assert len(sizes) > 5
    assert sizes == sorted(sizes)
    for size in sizes:
        layers, width = gpt_shape(size.parameters)
        assert layers + 2 >= world_size
        assert width // 32 >= world_size
        assert size.global_batch % (4 * world_size) == 0


def test_without_gpus_it_runs_on_the_processor_and_says_so(capsys):
    results = measured("3,torch")
    said = capsys.readouterr().out
    assert "No GPU" in said
    assert "another machine's" in said
    assert [stage.stage for stage in results.stages] == ["1", "3", "torch"]
    assert results.max_abs_diff < 1e-5
    assert results.emulated_device is None
    figure = show.compare_figure(results)
    assert results.measured_on == "this machine's processor"
    assert "one NVIDIA H200" in figure.alt
    assert "times as fast" not in figure.alt
    rows = json.loads((ROOT / "results" / "gpu.json").read_text())["parts"]["lessons"]["rows"]
    of_others = {row["stage"]: row["step_ms"] for row in rows}
    drawn = [bar.get_height() for bar in figure.axes[0].patches]
    assert drawn == pytest.approx([of_others[stage] for stage in ("1", "3", "torch")], abs=0.1)


STAGES = [
    SimpleNamespace(stage="1", name="single device", step_ms=60.0),
    SimpleNamespace(stage="3", name="parameter server", step_ms=78.0),
    SimpleNamespace(stage="5", name="bucketed DDP", step_ms=20.0),
]


@pytest.mark.parametrize(
    "gpus, slow",
    [
        (
            4,
            "4 GPUs take 1.3 times the time of one: this model is too small for them; with 13 times"
            " as many samples they would be 3 times as fast",
        ),
        (2, "4 ranks take 1.3 times the time of one: they share what one could use alone"),
    ],
)
def test_the_sentence_says_what_the_numbers_say(gpus, slow):
    results = SimpleNamespace(parameters=1000, global_batch=8, world_size=4, stages=STAGES)
    said = on_your_gpus.message(results, gpus)
    assert said.startswith("One device needs 60 ms for a step of 1,000 parameters and 8 samples")
    assert f"with parameter server {slow}" in said
    assert "are 3.0 times as fast as one" in said


@pytest.mark.parametrize("ranks, together_ms", [(2, 61.0), (4, 78.0), (8, 391.0)])
def test_a_batch_of_the_samples_that_are_needed_makes_the_gpus_as_fast_as_is_said(
    ranks, together_ms
):
    alone_ms = 60.0
    times = on_your_gpus.samples_needed(alone_ms, together_ms, ranks)
    messages_ms = together_ms - alone_ms / ranks

    def speed_up(more):
        return alone_ms * more / (alone_ms * more / ranks + messages_ms)

    assert speed_up(times - 1) < on_your_gpus.FAST_ENOUGH * ranks <= speed_up(times)


def test_devices_are_called_by_their_names():
    assert on_your_gpus.name_devices(["NVIDIA H100"] * 4, 4) == "4 × NVIDIA H100"
    assert on_your_gpus.name_devices(["NVIDIA T4"], 2) == "1 × NVIDIA T4, shared by 2 ranks"
    assert on_your_gpus.name_devices([], 2) == "this machine's processor"
