"""Explorers are made again from what is written into the notebook, and draw the same pictures."""

import json

import pytest

from ddp_course import simulate, theory
from ddp_course.measuring import plans
from ddp_course.showing import recipes, widgets


def made():
    layers = tuple(simulate.Layer(str(i), 0.002, 0.004, 100_000) for i in range(8))
    network = simulate.Network(theory.Costs.of_link(2e8, 3e-4))
    return {
        "ring": widgets.ring_stepper(3),
        "alpha beta": widgets.alpha_beta_explorer(latency="1ms"),
        "buckets": widgets.bucket_explorer(simulate.Profile(layers), 4, network, {0.1: 50.0}),
        "decision": widgets.decision_chart(plans.decide, devices=64),
        "pipeline": widgets.pipeline_explorer(3, microbatches=2),
    }


@pytest.mark.parametrize("name", ["ring", "alpha beta", "buckets", "decision", "pipeline"])
def test_an_explorer_is_made_again_from_json(name):
    first = made()[name]
    bundle, _ = first._repr_mimebundle_()
    second = recipes.again(json.loads(json.dumps(bundle[recipes.MIME])))
    assert second.image.value == first.image.value and second.alt == first.alt
    assert {key: control.value for key, control in second.controls.items()} == {
        key: control.value for key, control in first.controls.items()
    }


def test_values_come_back_as_they_were():
    things = (1, 2.5, None, "x", {0.25: (1, 2)}, theory.Costs(1.0, 2.0), theory.seconds)
    assert recipes.decoded(json.loads(json.dumps(recipes.encoded(things)))) == things


def test_what_has_no_name_makes_no_recipe():
    explorer = recipes.explorer(lambda draw: widgets.Explorer(draw))(lambda: widgets.sketches.ring(2))
    assert explorer.recipe is None and recipes.MIME not in explorer._repr_mimebundle_()[0]
    with pytest.raises(ValueError, match="only what the course defines"):
        recipes.decoded({"name": "os:system"})


def test_a_prediction_says_what_was_asked_and_what_was_right():
    prediction = widgets.predict("how many?", [1, 2, 4])
    assert prediction._repr_mimebundle_()[recipes.MIME] == {"question": "how many?", "answers": ["1", "2", "4"]}
    revealed = widgets.Revealed("you did not guess; measured: 2.2", 1, "2.2")
    assert revealed._repr_mimebundle_()[recipes.MIME] == {"right": 1, "measured": "2.2"}
