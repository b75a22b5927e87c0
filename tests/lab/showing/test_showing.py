"""Figures, sketches, sources and widgets: what they show is right, and can be read."""

import ast
import io
import json
import subprocess
import time
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from ddp_course import stage1_single, stage4_ring, stage5_bucketed
from ddp_course.lab import show, simulate, theory
from ddp_course.lab.commands.lab import STYLE
from ddp_course.lab.measuring.results import Comparison, StageResult
from ddp_course.lab.showing import order_plot, plots, simulator_plots, sketches, widgets
from ddp_predictions import answers
from manyranks.clocks.stalls import Line
from manyranks.errors import Awaited
from manyranks.orders.verdict import Event, judge

SMALLEST_FONT = 9  # In points: smaller letters cannot be read where a notebook shows the figure.


NAMES = {
    "1": "single device",
    "2": "DataParallel",
    "3": "parameter server",
    "4w": "whole-gradient ring",
    "4": "ring",
    "5": "bucketed DDP",
    "torch": "torch's DDP",
}
SPANS = [
    ["forward", 0, 0.002, "compute"],
    ["backward", 0.002, 0.01, "compute"],
    ["wait", 0.008, 0.01, "compute"],
    ["communication", 0.004, 0.01, "network"],
    ["update", 0.01, 0.011, "compute"],
]
GRADIENT_BYTES = 337_000


def stage_result(stage, place, world_size):
    """Return what a comparison has of a stage; `place` is its place in the table."""
    of_one_process = stage in ("1", "2")
    lanes = 1 if of_one_process else world_size
    # torch's class sends by itself, where nobody counts.
    sent = GRADIENT_BYTES * (1 + place)
    if of_one_process or stage == "torch":
        sent = None
    return StageResult(
        stage=stage,
        name=NAMES[stage],
        step_ms=10.0 + 7 * place,
        communication_ms=3.0 * place,
        bytes_sent_max=sent,
        bytes_received_max=sent,
        messages_max=6,
        speed_up=1.0 + place,
        bytes_formula=None if of_one_process else GRADIENT_BYTES,
        loss=[2.3 / (1 + step) for step in range(12)],
        max_abs_diff_vs_single=1e-7 * place,
        evaluation=None,
        timeline=[SPANS] * lanes,
    )


def compare_results(stages=tuple(NAMES), world_size=4):
    """Return a comparison of these stages."""
    results = []
    for place, stage in enumerate(stages):
        results.append(stage_result(stage, place, world_size))
    return Comparison(
        world_size=world_size,
        steps=12,
        dtype="float32",
        global_batch=192,
        torch="2",
        device="cpu",
        backend="gloo",
        problem="digits",
        parameters=GRADIENT_BYTES // 4,
        gradient_bytes=GRADIENT_BYTES,
        emulated_device=None,
        link={"bandwidth_bits_s": 2e8, "mode": "hosts"},
        stages=results,
    )


def bucket_explorer(measured):
    layers = tuple(simulate.Layer(str(i), 0.002, 0.004, 100_000) for i in range(8))
    return widgets.bucket_explorer(
        simulate.Profile(layers),
        4,
        simulate.Network(theory.Costs(3e-4, 4e-8)),
        measured,
        (0.06, 0.25, 0.5),
    )


def overwritten():
    """Return what `every_order` says where rank 0 overwrites what it sends."""
    line = Line("ring.py", 9, "leaving.append(wire.isend(chunks[(rank + 1 - step) % size], right))")
    touched = Line("ring.py", 13, "x")
    sent = Awaited("send", (1,))
    received = Awaited("receive", (0,))
    summed = Awaited("collective", (0, 1), "all_reduce")
    events = [
        Event(0.002, 0, "post", "to send to rank 1", [line], sent),
        Event(0.002, 1, "post", "to receive from rank 0", [line], received),
        Event(0.003, 0, "post", "for ranks [0, 1] in all_reduce", [line], summed),
        Event(0.004, 0, "wait", "for ranks [0, 1] in all_reduce", [line], summed),
        Event(0.004, 0, "overwritten too early", "zero_ overwrites", [line, touched]),
        Event(0.005, 1, "wait", "to receive from rank 0", [line], received),
        Event(0.005, 1, "deadlock", "all wait", []),
    ]
    return judge(events, [], 1, "")


def all_pictures():
    """Yield the picture that each figure function draws of typical arguments."""
    yield "compare", plots.compare_figure(compare_results())
    yield "compare two", plots.compare_figure(compare_results(("1", "4"), 2))
    yield "timeline", plots.timeline_figure([[["forward", 1.0, 1.1, "compute"]]] * 4, "one step")
    yield (
        "curves",
        plots.curves(
            {"a": ([1, 2, 4], [1.0, 2.0, 3.0])}, "x", "y", "t", theory={"b": ([1, 4], [1, 4])}
        ),
    )
    yield "log", plots.curves({"a": ([1, 10, 1000], [1.0, 20.0, 3000.0])}, "x", "y", "t", log="xy")
    yield "bars", plots.bars({"a": 1.0, "b": 2.0}, "y", "t", theory={"a": 1.1}, kind="measured")
    yield "images", plots.images(torch.rand(8, 1, 8, 8), list(range(8)), "digits")
    for step in (0, 3, 6):
        yield f"ring {step}", sketches.ring_step(4, step)
    yield "every order", order_plot.timeline(overwritten())
    yield "alpha beta", widgets.alpha_beta_explorer().picture()
    yield "bucket cap", bucket_explorer({0.05: 60.0, 0.5: 80.0}).picture()


@pytest.mark.parametrize(
    ("name", "picture"), [pytest.param(*pair, id=pair[0]) for pair in all_pictures()]
)
def test_every_figure_can_be_read(name, picture):
    picture.png()
    texts = [
        text for text in picture.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    assert texts, f"{name} has no text"
    too_small = [text.get_text() for text in texts if text.get_fontsize() < SMALLEST_FONT]
    assert too_small == []
    assert picture.message, f"{name} claims nothing"
    assert "\n" not in picture.message, "the message is one line"
    assert picture.message in picture.alt, "the alternative text says less"
    assert picture.kind in picture.alt, "the alternative text says less"
    assert overlapping(picture) == [], f"overlapping labels in {name}"


def test_a_verdict_draws_what_nobody_has_waited_for_and_where_the_rank_stops():
    axes = order_plot.timeline(overwritten()).axes[0]
    bars = axes.collections
    spans = {round(bar.get_paths()[0].get_extents().x0): bar.get_hatch() for bar in bars[:2]}
    assert spans == {2: "////", 3: None}
    [cross] = [line for line in axes.lines if line.get_marker() == "x"]
    assert cross.get_xdata() == [4.0]
    posted, touched = axes.get_xlabel().splitlines()[1:]
    assert posted.startswith("▨ not waited for: rank 0, ring.py line 9: leaving")
    assert touched == "× rank 0, ring.py line 13: x"


def test_lines_of_unlike_results_are_of_no_certain_rank_and_stop_none():
    events = [
        Event(0.001, 0, "doubt", "several threads", [Line("z.py", 1, "thread.start()")]),
        Event(0.002, 1, "doubt", "asks", [Line("a.py", 2, "work.is_completed()")]),
        Event(0.003, 0, "post", "to send", [Line("z.py", 3, "send")], Awaited("send", (1,))),
    ]
    axes = order_plot.timeline(judge(events, [1, 2], 2, "")).axes[0]
    below = axes.get_xlabel().splitlines()[1:]
    assert below == ["a.py line 2: work.is_completed()", "z.py line 1: thread.start()"]


def test_a_verdict_is_drawn_in_a_notebook_and_printed_in_a_terminal(monkeypatch, capsys):
    order_plot.verdict(overwritten())
    assert "4.000 ms  rank 0: overwritten too early  (ring.py line 13)" in capsys.readouterr().out
    displayed = []
    monkeypatch.setattr(order_plot, "get_ipython", lambda: SimpleNamespace(kernel="of a notebook"))
    monkeypatch.setattr(order_plot, "display", displayed.append)
    order_plot.verdict(overwritten())
    assert [type(picture) for picture in displayed] == [plots.Picture]
    assert capsys.readouterr().out == ""


def test_the_scaling_figure_has_a_circle_where_scaling_ends_if_that_is_inside_of_it():
    steps = {}
    for name, step_s in (("ring", {1: 1.0, 2: 1.0, 4: 1.1, 8: 2.0}), ("tree", {1: 1.0, 2: 1.05})):
        steps[name] = [
            simulate.Step(ranks, each, 1.0, 0.0, (), ()) for ranks, each in step_s.items()
        ]
    ring, circle, tree, limit = simulator_plots.scaling_figure(steps).axes[0].lines
    assert list(ring.get_ydata()) == pytest.approx([100, 100, 100 / 1.1, 50])
    assert (list(circle.get_xdata()), circle.get_markersize()) == ([4], 11)
    assert list(circle.get_ydata()) == pytest.approx([100 / 1.1])
    assert list(tree.get_xdata()) == [1, 2]
    assert set(limit.get_ydata()) == {90}


@pytest.mark.parametrize("slow", [30.0, 300.0])
def test_the_bucket_figure_shows_every_point_whole(slow):
    below = bucket_explorer({0.1: slow}).picture().axes[1]
    highest = max(height for line in below.lines[:2] for height in line.get_ydata())
    assert highest >= slow
    assert below.get_ylim()[1] > 1.05 * highest


def overlapping(picture):
    """Return the pairs of texts of an axis whose boxes share more than a pixel or two.

    Texts are ticks, labels and the title.
    """
    canvas = FigureCanvasAgg(picture)
    with plots.style():
        canvas.draw()
    renderer = canvas.get_renderer()
    pairs = []
    for axes in picture.axes:
        texts = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            texts += [
                tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high
            ]
        texts = axes.texts + [text for text in texts if axes.axison]
        texts = [text for text in texts if text.get_text() and text.get_visible()]
        boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
        for (left, a), (right, b) in combinations(boxes, 2):
            width = min(a.x1, b.x1) - max(a.x0, b.x0)
            height = min(a.y1, b.y1) - max(a.y0, b.y0)
            if width > 1.5 and height > 1.5:
                pairs.append((left, right))
    return pairs


def test_lines_of_theory_are_told_from_what_was_measured():
    series = {"a": ([1, 2], [1.0, 2.0])}
    theory = {"b": ([1, 2], [1.0, 2.0])}
    assert plots.curves(series, "x", "y", "t", theory=theory).kind == "measured; lines derived"
    assert plots.curves(series, "x", "y", "t").kind == "measured"
    assert (
        plots.curves(series, "x", "y", "t", theory=theory, kind="measured; simulated").kind
        == "measured; simulated"
    )
    assert (
        plots.bars({"a": 1.0}, "y", "t", theory={"a": 1.1}, kind="counted").kind
        == "counted; lines derived"
    )


def test_the_overlap_check_sees_an_overlap():
    with plots.panels(width=2, height=2) as (picture, axes):
        axes.set_xticks([0, 0.1, 0.2], ["a long label", "another long label", "and a third"])
    picture.png()
    assert overlapping(picture)


def test_comparison_message_is_computed():
    message = plots.comparison_message(compare_results())
    assert "from one device's by at most 6e-07" in message
    assert "3.0 (server)" in message
    assert "6.0 (buckets) times" in message


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_ring_states_end_complete_and_pass_through_one_chunk_a_rank(world_size):
    states = sketches.ring_states(world_size)
    everyone = frozenset(range(world_size))
    assert len(states) == 2 * (world_size - 1) + 1
    half = states[world_size - 1]
    for rank in everyone:
        assert half[rank].index(everyone) == (rank + 1) % world_size
    assert sum(chunk == everyone for rank in half for chunk in rank) == world_size
    assert all(chunk == everyone for rank in states[-1] for chunk in rank)


def test_ring_schedule_is_that_of_the_stage():
    """Play the real reduce_scatter and allgather with a recording wire; compare chunk by chunk."""
    from unittest.mock import patch

    for rank in range(4):
        sent = []
        chunks = [torch.full((1,), float(index)) for index in range(4)]

        def record(outgoing, *_, sent=sent, chunks=chunks):
            sent.append(next(index for index, chunk in enumerate(chunks) if chunk is outgoing))

        ring = patch.object(
            stage4_ring.wire, "neighbours", return_value=(rank, 4, (rank - 1) % 4, (rank + 1) % 4)
        )
        with ring, patch.object(stage4_ring.wire, "exchange", record):
            stage4_ring.reduce_scatter(chunks)
            stage4_ring.allgather(chunks)
        assert sent == [chunks[rank] for _, chunks in sketches.ring_schedule(4)]


def test_source_and_diff_are_live():
    assert "optimizer.zero_grad()" in repr(show.source(stage1_single.train))
    folded = show.source(stage1_single.train, click="Write <it> first")._repr_html_()
    assert folded.startswith("<details><summary>Write &lt;it&gt; first</summary>")
    assert "zero_grad" in folded
    assert "<details>" not in show.source(stage1_single.train)._repr_html_()
    diff = show.diff(stage1_single.train, stage5_bucketed.train)
    assert "+     parallel = BucketedDDP(model" in repr(diff)
    assert 2 <= changed(diff) <= 10
    assert "<div" in diff._repr_html_()
    assert "&lt;" not in show.diff("a", "b")._repr_html_()
    assert "&lt;b&gt;" in show.diff("<b>", "c")._repr_html_()
    assert changed(show.diff(stage1_single.train, stage1_single.train)) == 0


def changed(diff):
    """Return how many lines were added or taken away."""
    return sum(line[0] in "+-" for line in repr(diff).splitlines())


def test_prediction_is_kept_and_shown_beside_the_measurement(capsys):
    prediction = show.predict("how many?", [1, 2, 4])
    prediction.reveal("2.2", 2)
    prediction.buttons.value = 2
    prediction.reveal("2.2", 2)
    prediction.buttons.value = 4
    prediction.reveal("2.2", 2)
    prediction.reveal("2.2", 2, "counted", {4: "Two of the four wait."})
    prediction.buttons.value = 1
    prediction.reveal("2.2", 2, "counted", {4: "Two of the four wait."})
    said = [ast.literal_eval(line)["text/plain"] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "The answer: 2.2 (measured).",
        "You guessed 2, which is right. The answer: 2.2 (measured).",
        "You guessed 4. The answer: 2.2 (measured).",
        "You guessed 4. The answer: 2.2 (counted). Two of the four wait.",
        "You guessed 1. The answer: 2.2 (counted).",
    ]
    with pytest.raises(ValueError, match="not among"):
        prediction.reveal("2.2", 3)


@pytest.mark.parametrize(("value", "expected"), [(0.2, 1), (1.3, 1), (1.6, 2), (3.0, 4), (100, 4)])
def test_nearest_answer(value, expected):
    assert widgets.nearest(value, [1, 2, 4]) == expected


def explorers():
    return {
        "ring": (widgets.ring_stepper(4), "step", 3),
        "alpha beta": (widgets.alpha_beta_explorer(), "latency", "10ms"),
        "buckets": (bucket_explorer({0.1: 50.0}), "row", 0),
        "pipeline": (widgets.pipeline_explorer(), "microbatches", 2),
    }


@pytest.mark.parametrize("name", ["ring", "alpha beta", "buckets", "pipeline"])
def test_sliders_redraw_and_leave_a_picture_and_a_recipe_without_widgets(name):
    explorer, control, value = explorers()[name]
    before = bytes(explorer.image.value)
    bundle, metadata = explorer._repr_mimebundle_()
    assert "image/png" in bundle
    assert bundle["text/plain"] == explorer.caption
    assert len(metadata["image/png"]["alt"]) > 20
    again = widgets.rebuild(json.loads(json.dumps(bundle[widgets.MIME])))
    assert again.image.value == before, "the site makes another one of what is stored"
    assert again.alt == explorer.alt, "the site makes another one of what is stored"
    explorer.controls[control].value = value
    assert bytes(explorer.image.value) != before, "the figure did not change"
    size = Image.open(io.BytesIO(explorer.image.value)).size
    assert (
        int(explorer.image.width),
        int(explorer.image.height),
    ) == size, "the page jumps while the figure loads"


def test_with_the_widgets_of_colab_outputs_have_words_and_pictures_too(monkeypatch):
    """Those of ipywidgets 7 display themselves, and do not know mime bundles."""
    monkeypatch.setattr(ipywidgets.Widget, "_ipython_display_", lambda self: None, raising=False)
    monkeypatch.delattr(ipywidgets.Widget, "_repr_mimebundle_")
    shown = {}
    for made in (widgets.ring_stepper(4), show.predict("how many?", [1, 2]), show.questions(4)):
        shown[type(made).__name__], _ = DisplayFormatter().format(made)
    assert all("application/vnd.jupyter.widget-view+json" in each for each in shown.values())
    assert "chunks complete" in shown["Explorer"]["text/plain"]
    assert "image/png" in shown["Explorer"]
    assert shown["Prediction"]["text/plain"].startswith("how many?")
    assert "( )" in shown["Opening"]["text/plain"]


def test_a_slider_says_that_it_draws_once_that_takes_long_and_no_longer(monkeypatch):
    made = []
    said = []

    def draw(place):
        deadline = time.monotonic() + 180
        while place == 1 and not made[0].state.value and time.monotonic() < deadline:
            time.sleep(0.01)
        if place > 0:  # With 0 it is being made.
            said.append(made[0].state.value)
        if place == 3:
            raise ValueError("nothing to draw")
        return show.bars({"a": place}, "ms", "A bar", kind="derived")

    position = widgets.choice("place", 0, [0, 1, 2, 3])
    made.append(widgets.Explorer(draw, "nowhere:draw", place=position))
    position.value = 1  # Its figure is not drawn before something is said.
    assert said == ["<i>drawing …</i>"]
    assert made[0].state.value == ""
    with monkeypatch.context() as patched:
        patched.setattr(widgets, "LAG_SECONDS", 60)  # The next figure takes no minute.
        position.value = 2
    assert said[1:] == [""]
    with pytest.raises(ValueError, match="nothing to draw"):
        position.value = 3
    assert made[0].state.value == "", "a figure that failed is still being drawn"


def test_ring_stepper_follows_the_number_of_ranks():
    stepper = widgets.ring_stepper(4)
    stepper.controls["step"].value = 6
    stepper.controls["world_size"].value = 2
    assert stepper.controls["step"].max == 2
    assert stepper.controls["step"].value == 2
    assert "4 of 4 chunks complete" in stepper.message.value


def test_command_runs_our_programs_only(capsys):
    assert show.command('python -c "print(6 * 7)"') == [0]
    assert "42" in capsys.readouterr().out
    with pytest.raises(ValueError, match="not one of"):
        show.command("rm -r x")


def test_a_command_names_the_courses_folders_by_words(capsys):
    code = '"import os, sys; print(*map(os.path.exists, sys.argv[1:]))"'
    show.command(f"python -c {code} LESSONS/13_fsdp.py CLINIC/stacks.py FOLDER FOLDER/none")
    assert "True True True False" in capsys.readouterr().out


def test_the_central_explorer_agrees_with_the_comparison_and_its_winners_change_places():
    from ddp_course.lab import compare

    results = compare.run("digits", world_size=2, steps=1, stages="1,3,5")
    figure = widgets.strategies_explorer(world_size=2).picture()
    names = [
        label.get_text().replace("-\n", "-").replace("\n", " ")
        for label in figure.axes[0].get_xticklabels()
    ]
    heights = dict(zip(names, [bar.get_height() for bar in figure.axes[0].patches], strict=False))
    single, *others = results.stages
    for stage in others:
        assert heights[stage.name] == pytest.approx(single.ideal_ms / stage.ideal_ms, rel=0.05)
    slow, fast = (
        widgets.strategies_explorer(share=share).picture().message for share in (200, 0.5)
    )
    assert "none is faster" in slow
    assert "none is faster" not in fast
    many = widgets.strategies_explorer(world_size=8, share=200).picture()
    assert "no pipeline" in many.message
    assert "no pipeline" not in slow
    assert "0.0" not in [text.get_text() for text in many.axes[0].texts], "a bar that says nothing"


def test_a_command_that_lasts_too_long_is_ended(capsys, tmp_path):
    lasts_long = f"import time; time.sleep(60); open('{tmp_path}/end', 'w')"
    with pytest.raises(subprocess.TimeoutExpired):
        show.command(f'python -c "{lasts_long}"', timeout=2)
    assert not (tmp_path / "end").exists()
    assert "at most" in capsys.readouterr().err  # a bar counts the seconds


WHITE = (1.0, 1.0, 1.0)
MARKS = {
    **{f"stage {key}": colour for key, colour in plots.STAGE_COLOURS.items()},
    **{f"rank {rank}": colour for rank, colour in enumerate(sketches.RANK_COLOURS)},
    **plots.SPAN_COLOURS,
    **sketches.PASSES,
    **order_plot.COLOURS,
    "collective": order_plot.COLLECTIVE,
    "fault": order_plot.FAULT,
    **simulator_plots.ALGORITHM_COLOURS,
    **answers.COLOURS,
    **{f"line {colour}": colour for colour in plots.SETTINGS["axes.prop_cycle"].by_key()["color"]},
}


def in_the_dark(colour):
    """Return what the filter of the lab and of the site makes of a colour.

    It is inverted by 93 percent, and its hue turned back by half a circle (W3C, Filter Effects).
    """
    inverted = np.array([0.93 * (1 - part) + 0.07 * part for part in colour])
    turned = 2 * np.array([[0.213, 0.715, 0.072]] * 3) - np.eye(3)
    return (turned @ inverted).clip(0, 1)


def brightness(colour):
    colour = np.asarray(colour)
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return np.dot([0.2126, 0.7152, 0.0722], linear)


def contrast(one, other):
    """Return the contrast of two colours by WCAG 2, from 1 to 21."""
    dark, light = sorted([brightness(one), brightness(other)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("name", "colour"), MARKS.items(), ids=list(MARKS))
def test_every_mark_can_be_seen_on_paper_and_in_the_dark(name, colour):
    shade = to_rgb(colour)
    assert contrast(shade, WHITE) >= 3
    assert contrast(in_the_dark(shade), in_the_dark(WHITE)) >= 3


@pytest.mark.parametrize("colour", sketches.RANK_COLOURS)
def test_the_letters_on_a_rank_can_be_read_on_paper_and_in_the_dark(colour):
    shade = to_rgb(colour)
    assert contrast(shade, WHITE) >= 4.5
    assert contrast(in_the_dark(shade), in_the_dark(WHITE)) >= 4.5


def test_lab_and_site_turn_figures_dark_by_the_filter_that_is_tested():
    css = Path(__file__).parents[3] / "authoring" / "web" / "assets" / "course.css"
    for text in (STYLE, css.read_text()):
        assert "filter: invert(.93) hue-rotate(180deg);" in text
