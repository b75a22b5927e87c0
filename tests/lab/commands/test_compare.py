"""`compare` gives the same weights, bytes as the formulas say, and times as their ideals."""

import argparse
import errno
import json
import os
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ddp_course import Link, ladder, problems, stage3_paramserver, stage4_ring, wire
from ddp_course.base import files
from ddp_course.lab import cli, compare
from ddp_course.lab.folders import course_folder
from ddp_course.lab.measuring.results import VERSION, Comparison
from ddp_course.lab.showing.plots import compare_figure
from manyranks.errors import NotFiniteError, RankError

ALL = tuple(ladder.STAGES)
# These options take the processor and its memory as they are.
RAW = {
    "device_speed": "none",
    "link": None,
    "dtype": "float64",
}
NOT_COUNTED = ("1", "2", "6", "torch")
NEARLY = ("2", "8")  # The closed forms of these stages leave something out.


@pytest.fixture(
    scope="module", params=[3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4))]
)
def results(request):
    """All stages on a model whose gradient any of these world sizes divides."""
    return compare.run("digits", request.param, 3, ALL, **RAW, global_batch=24, bucket_cap_mb=25.0)


def test_all_stages_compute_the_same(results):
    assert [stage.stage for stage in results.stages] == list(ALL)
    single = results.stages[0].loss
    assert len(single) == 3
    assert len(set(single)) == 3
    for stage in results.stages:
        assert stage.max_abs_diff_vs_single < 1e-12
        assert stage.loss == pytest.approx(single, abs=1e-12)


def test_bytes_are_exactly_the_formula(results):
    K = results.world_size
    payload = results.gradient_bytes
    assert payload == 8 * results.parameters == 8 * 88_092
    stages = {stage.stage: stage for stage in results.stages}
    ring = 2 * (K - 1) * payload // K
    wanted = {
        "3": (K - 1) * payload,
        "4w": (K - 1) * payload,
        "4": ring,
        "5": ring,
        "7": 3 * (K - 1) * payload // K,
    }
    for key, stage in stages.items():
        # Shards are of equal size, so some of their elements belong to no tensor.
        padding = 0.001 if key == "7" else 0
        formula = (
            None if key in NOT_COUNTED else pytest.approx(stage.bytes_formula, rel=padding, abs=0)
        )
        assert stage.bytes_sent_max == formula, key
        assert key not in wanted or stage.bytes_formula == wanted[key], key
    assert (stages["8"].bytes_sent_max > 0) == (K > 1)
    assert stages["6"].bytes_formula == stages["torch"].bytes_formula == ring
    assert stages["3"].messages_max == 2 * (K - 1)
    assert stages["4"].messages_max == 4 * (K - 1)
    assert all(stages[key].messages_max is None for key in NOT_COUNTED)


def test_times_and_timelines_are_there(results):
    for stage in results.stages:
        assert stage.step_ms > 0
        ranks = 1 if stage.stage in ("1", "2") else results.world_size
        assert len(stage.timeline) == ranks
        for lane in stage.timeline:
            names = {name for name, *_ in lane}
            assert {"forward", "backward", "update"} <= names
            assert ("communication" in names) == (stage.stage not in ("1", "2"))
    waiting = {stage.stage: stage.communication_ms for stage in results.stages}
    assert waiting["1"] == 0
    assert waiting["2"] is None, "copies between threads are not timed"
    assert results.world_size == 1 or waiting["3"] > 0


def test_results_are_saved_as_json_and_figure(results, tmp_path):
    paths = compare.save(results, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["compare.json", "compare.png"]
    assert Comparison.from_json(paths[0].read_text()) == results
    written = json.loads(paths[0].read_text())
    assert written["version"] == VERSION
    assert written["stages"][0]["step_ms"] > 0
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert sorted(paths[0].parent.iterdir()) == paths
    assert all(stage.name in compare.table(results).text for stage in results.stages)


def without_division(model, batches, lr):
    """Train as stage 3 does, with the sum of the gradients where the mean should be."""

    def total(tensors):
        stage3_paramserver.average_on_server(tensors)
        for tensor in tensors:
            tensor.mul_(dist.get_world_size())

    return stage3_paramserver.train(model, batches, lr, total)


def imaginary(train):
    """Return a stage that nobody has heard of, with the loop `train`."""
    return ladder.Stage(
        "9",
        "imaginary",
        "adds nothing",
        "stage9_imaginary",
        train=train,
        colour="#123456",
        time="0",
        counted=True,
        bytes_sent=ladder.on_server,
    )


def test_wrong_weights_show_as_a_difference(monkeypatch):
    monkeypatch.setitem(ladder.STAGES, "9", imaginary(without_division))
    results = compare.run("synthetic", 2, 3, "3,9", **RAW)
    right, wrong = (stage.max_abs_diff_vs_single for stage in results.stages)
    assert right < 1e-12
    assert wrong > 1e-6


def test_a_loss_that_is_no_number_is_told_and_not_written():
    with pytest.raises(
        NotFiniteError, match=r"single device is no longer a number .* smaller --lr"
    ):
        compare.run("synthetic", 1, 40, "1", device_speed="none", lr=1e12)
    own = {"far off": loop(average_far_off)}
    with pytest.raises(NotFiniteError, match=r"far off is no .* its weights differ from step 1 on"):
        compare.run("digits", 2, 8, "1", **RAW, global_batch=24, yours=own)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"world_size": 0}, "world size is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"stages": "1,10"}, "unknown stage '10'"),
        ({"stages": ""}, "unknown stage"),
        ({"problem": "mnist"}, 'unknown problem "mnist"'),
        ({"global_batch": 10, "world_size": 4}, "try 8"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb is 0"),
        ({"dtype": "int8"}, "choose float32 or float64"),
        ({"parameters": 5, "problem": "bytes"}, "out of range"),
        ({"parameters": 5}, "cannot be chosen for digits"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"device": "tpu"}, "unknown device"),
        ({"device": "cuda:99"}, "GPUs"),
        ({"device_speed": "fast"}, "cannot read the rate"),
        ({"device_speed": "0GFLOP/s"}, "more than zero"),
        ({"link": "soon"}, "cannot read the bandwidth"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        compare.run(**settings)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "compare.json"
    files.replace_file(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left"):
        files.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["compare.json"]


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match="cannot write to the folder"):
        files.writable_folder(tmp_path / "file" / "results")


# On emulated devices


@pytest.fixture(scope="module")
def on_devices():
    """Shared by the tests below."""
    return compared()


def compared(stages=ALL, link="100Mbit"):
    """Compare stages on two ranks, for six steps in virtual time."""
    return compare.run(
        "digits", 2, 6, stages, link=link, device_speed="3GFLOP/s", bucket_cap_mb=0.1
    )


def test_stages_are_held_against_their_ideals(on_devices):
    p = on_devices.gradient_bytes
    b = 100e6 / 8
    single = on_devices.stages[0].ideal_ms
    assert single == pytest.approx(1000 * on_devices.emulated_device["rate"] ** -1 * 783_834_624)
    ideal = {stage.stage: stage.ideal_ms for stage in on_devices.stages}
    assert ideal["3"] == pytest.approx(single / 2 + 2000 * p / b)
    copied = 4 * 96 * (64 + 2 * 10)  # a shard's inputs, outputs, and gradients of the outputs
    assert ideal["2"] == pytest.approx(ideal["3"] + 1000 * copied / b)
    assert ideal["4"] == ideal["4w"] == pytest.approx(single / 2 + 1000 * p / b)
    bitmap = 4 * len(list(problems.make("digits").model().parameters()))
    assert ideal["7o"] == pytest.approx(ideal["4"] + 1000 * bitmap / b, rel=1e-12)
    assert ideal["5"] == ideal["6"] == ideal["torch"]
    assert single / 2 < ideal["5"] < ideal["4"]
    for stage in on_devices.stages:
        assert stage.device == "3 GFLOP/s"
        assert stage.speed_up == pytest.approx(on_devices.stages[0].step_ms / stage.step_ms)
        bound = 5e-4 if stage.stage in NEARLY else 1e-9
        assert stage.step_ms == pytest.approx(stage.ideal_ms, rel=bound), stage.name
        assert len(stage.loss) == 6
        assert stage.max_abs_diff_vs_single < 1e-4


class NotSlowed(Link):
    """A link that carries far more than it says."""

    def prepare(self, world_size):
        """In the launch's agent: the caller, who derives the ideal, knows nothing of it."""
        self.bandwidth = 1e10
        super().prepare(world_size)


def test_a_link_that_is_not_slowed_is_found_out():
    """This is the negative control of `step_ms == ideal_ms`."""
    ring = compared("1,4", NotSlowed("100Mbit")).stages[1]
    assert ring.step_ms < 0.95 * ring.ideal_ms


def drawn(lane, *names):
    """Return the milliseconds of the spans with these names in the upper half of a lane."""
    return 1000 * sum(
        end - start for name, start, end, where in lane if name in names and where == "compute"
    )


def test_what_is_drawn_is_what_the_bars_say(on_devices):
    assert differing(on_devices) == []


def test_the_complete_class_hides_as_much_as_torchs(on_devices):
    exposed = {stage.stage: stage.communication_ms for stage in on_devices.stages}
    assert exposed["6"] == pytest.approx(exposed["torch"])
    assert exposed["6"] > 0.1


def test_a_span_that_is_missing_shows(on_devices):
    """This is the negative control of the test that spans fill a step."""
    stages = []
    for stage in on_devices.stages:
        lanes = [sorted(lane, key=lambda span: span[1] - span[2])[1:] for lane in stage.timeline]
        stages.append(replace(stage, timeline=lanes))
    assert len(differing(replace(on_devices, stages=stages))) == len(stages)


def differing(results):
    """Return the keys of stages of which more than a twentieth is drawn otherwise than it is.

    It is not drawn, or drawn twice, or drawn as something else.
    """
    keys = []
    for stage in results.stages:
        lanes = stage.timeline
        devices = 1 if stage.stage == "1" else 2
        assert len(lanes) == devices
        blocking = max(drawn(lane, "communication", "wait") for lane in lanes)
        busiest = max(
            drawn(lane, "forward", "backward", "update", "communication", "wait") for lane in lanes
        )
        upper = []
        for lane in lanes:
            upper.append(
                sorted((start, end) for _, start, end, where in lane if where == "compute")
            )
        apart = all(
            end <= begin + 1e-9 for lane in upper for (_, end), (begin, _) in pairwise(lane)
        )
        same = blocking == pytest.approx(stage.communication_ms, rel=0.05, abs=0.01)
        if not (apart and same and busiest == pytest.approx(stage.step_ms, rel=0.05)):
            keys.append(stage.stage)
    return keys


@pytest.mark.parametrize("gpus, ranks", [(0, 4), (1, 2), (2, 2), (4, 4), (6, 4), (8, 8)])
def test_the_default_number_of_ranks_is_that_of_the_gpus(monkeypatch, gpus, ranks):
    monkeypatch.setattr(compare, "usable_gpus", lambda: gpus)
    parser = argparse.ArgumentParser()
    compare.add_options(parser)
    assert parser.parse_args([]).world_size == ranks


def loop(average):
    """Return the loop of a learner's stage; `average(gradients, step)` has what is theirs."""

    def train(model, batches, lr):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        losses = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            average([parameter.grad for parameter in model.parameters()], len(losses))
            optimizer.step()
            losses.append(loss.item())
        return losses

    return train


def average_by_torch(gradients, step):
    for gradient in gradients:
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)


def average_by_hand(gradients, step):
    _, _, left, right = wire.neighbours()
    for gradient in gradients:
        incoming = torch.empty_like(gradient)
        wire.exchange(gradient, right, incoming, left)
        gradient += incoming
        gradient /= 2


def average_far_off(gradients, step):
    for gradient in gradients:
        gradient *= 1e20


def average_once(gradients, step):
    if step == 0:
        stage4_ring.average_on_ring(gradients)


def test_a_stage_of_ones_own_stands_beside_the_others_and_is_told_where_it_goes_wrong():
    own = {
        "by torch": loop(average_by_torch),
        "by hand": loop(average_by_hand),
        "only once": loop(average_once),
    }
    results = compare.run("digits", 2, 4, "4", global_batch=24, yours=own)
    [ring, right, by_hand, wrong] = results.stages
    labels = [each.label for each in results.stages]
    assert labels == ["4 ring", "by torch", "by hand", "only once"]
    assert right.differs_from_step is None
    assert right.max_abs_diff_vs_single < 1e-6
    # A step takes what the ring's takes, and what is not computing is waiting.
    assert right.step_ms == pytest.approx(ring.step_ms, rel=0.01)
    assert right.communication_ms == pytest.approx(ring.communication_ms, rel=0.02)
    assert right.bytes_sent_max is None
    # What is sent on the course's wire is drawn as the ring's communication is.
    assert drawn(by_hand.timeline[0], "communication") > 0
    assert drawn(by_hand.timeline[0], "wait") == 0
    assert wrong.differs_from_step == 2
    assert wrong.max_abs_diff_vs_single > 1e-3
    assert "from step 2 on" in str(compare.table(results))
    figure = compare_figure(results)
    assert "only once trains something else" in figure.axes[0].get_title("left")
    # A speed of what trains something else is worth nothing.
    assert "(by hand) times as fast as one device" in figure.alt
    assert "(only once)" not in figure.alt
    assert Comparison.from_json(results.to_json()).stages == results.stages


@pytest.mark.parametrize(
    "own, words",
    [
        (lambda model, batches, lr: None, "forgot returned None; train.* the loss of each, 2 num"),
        (lambda model, batches, lr: [0.5], r"forgot returned \[0.5\]; train.* go through all"),
    ],
)
def test_what_a_stage_of_ones_own_must_return_is_said(own, words):
    with pytest.raises(RankError, match=words):
        compare.run("digits", 2, 2, "1", global_batch=24, yours={"forgot": own})
    with pytest.raises(ValueError, match=r"it must be a function train\(model, batches, lr\)"):
        compare.run("digits", 2, 2, "1", yours={"forgot": own(None, None, None)})


# A model of one's own

MINE = """
import torch
from torch import nn
from beside import WIDTH

def make():
    inputs = torch.randn(96, WIDTH)
    return {
        "model": nn.Linear(WIDTH, 3),
        "data": (inputs, inputs @ torch.randn(WIDTH, 3)),
        "loss": nn.functional.mse_loss,
        "optimizer": torch.optim.AdamW,
    }

def misnamed(): return {**make(), "optimiser": 1}
def unfinished(): pass
def needs_more(size): pass
def broken(): return nope
def unlike(): return {**make(), "model": nn.Linear(2, 3)}
def no_loss(): return {**make(), "loss": lambda outputs, targets: None}
def takes_a_dict():
    samples = [({"image": torch.ones(5)}, torch.ones(3))] * 96
    return {**make(), "data": samples}
class TwoOutputs(nn.Linear):
    def forward(self, inputs): return super().forward(inputs), inputs
def two_outputs():
    def loss(outputs, targets): return nn.functional.mse_loss(outputs[0], targets)
    return {**make(), "model": TwoOutputs(WIDTH, 3), "loss": loss}
def no_class(): return {**make(), "optimizer": 0.1}
def uneven(): return {**make(), "data": (torch.ones(3, 5), torch.ones(2, 3))}
def for_classes(): return {name: part for name, part in make().items() if name != "loss"}
def multiplies_nothing():
    classes = torch.arange(10)
    return {"model": nn.Embedding(10, 10), "data": (classes, classes)}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("WIDTH = 5")
    (tmp_path / "wrong.py").write_text("def make(:")
    (tmp_path / "script.py").write_text("import sys\nsys.exit()")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    return tmp_path


def test_a_model_of_ones_own_is_compared_with_its_data_loss_and_optimizer(mine):
    steps = 3
    first = compare.run(model="mine.py:make", world_size=2, steps=steps, stages="1,4,torch")
    assert first.problem == "mine.py:make"
    assert first.parameters == 18
    assert first.max_abs_diff < 1e-6
    for stage in first.stages[:2]:
        assert stage.step_ms == pytest.approx(stage.ideal_ms, rel=1e-3)

    # One device with the same weights and batches, by torch alone.
    torch.manual_seed(0)
    inputs = torch.randn(96, 5)
    model = torch.nn.Linear(5, 3)
    targets = inputs @ torch.randn(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        # An epoch of one batch of 64 each: the second batch of an epoch is not whole.
        order = problems.shard(96, 0, 1, epoch=step)[:64]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[order]), targets[order])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert first.stages[0].loss == pytest.approx(losses)
    # Only a cross entropy is in nats.
    assert compare_figure(first).axes[0].get_ylabel() == "loss"


def test_the_page_about_a_model_of_ones_own_has_one_that_runs(mine):
    page = (course_folder("docs") / "YOUR_MODEL.md").read_text()
    [code] = re.findall("```python\n(.*?)```", page, re.DOTALL)
    (mine / "page.py").write_text(code)
    results = compare.run(model="page.py:make", lr=0.01, global_batch=96, world_size=2, steps=2)
    assert results.max_abs_diff < 1e-6


def test_a_changed_file_is_read_anew_and_a_function_needs_no_file(mine, tmp_path):
    settings = {"world_size": 2, "steps": 2, "stages": "1"}
    with_five = compare.run(model="mine.py:make", **settings)
    (tmp_path / "mine.py").write_text(MINE.replace("WIDTH, 3", "5, 30"))
    wider = compare.run(model="mine.py:make", **settings)
    assert [with_five.parameters, wider.parameters] == [18, 180]

    def make():
        return {"model": torch.nn.Linear(4, 2), "data": (torch.ones(8, 4), torch.ones(8).long())}

    results = compare.run(model=make, **settings)
    assert results.problem == "make"
    assert results.global_batch == 8


@pytest.mark.parametrize(
    "model, words",
    [
        ("mine.py", r'"mine.py" must be FILE.py:FUNCTION, such as mine.py:make'),
        ("mine:make", "must be FILE.py:FUNCTION"),
        ("gone.py:make", 'cannot read "gone.py" in .*No such file'),
        ("binary.py:make", "no text in UTF-8"),
        ("mine.py:mak", "no function mak is there; it has make"),
        ("mine.py:WIDTH", "no function WIDTH is there; it has make, misnamed"),
        ("wrong.py:make", "wrong.py:make, line 1: SyntaxError"),
        ("script.py:make", "line 2 ends the program"),
        ("mine.py:misnamed", "perhaps loss and optimizer, and returned: .*optimiser"),
        ("mine.py:unfinished", "must return a dict with model and data.* returned: NoneType"),
        ("mine.py:needs_more", "TypeError: needs_more.. missing 1"),
        ("mine.py:broken", "mine.py:broken, line 18: NameError: name 'nope'"),
        ("mine.py:unlike", r"cannot be multiplied .2x5 and 2x3. \(in a first step on 2 samples"),
        ("mine.py:no_loss", "the loss must be a tensor with one number, and is None"),
        ("mine.py:takes_a_dict", "an input must be one tensor, and is a dict"),
        ("mine.py:two_outputs", "what the model returns must be one tensor, and is a tuple"),
        ("mine.py:no_class", "optimizer is of type float; it must be a class such as"),
        ("mine.py:uneven", r"data must be \(inputs, targets\), as many of each"),
        ("mine.py:for_classes", "cross entropy needs classes as targets"),
        ("mine.py:multiplies_nothing", "multiplies no matrices.*--device-speed none"),
    ],
)
def test_what_a_model_of_ones_own_must_be_is_said_in_one_line(mine, model, words):
    with pytest.raises(ValueError, match=words) as caught:
        compare.run(model=model, world_size=2, steps=2)
    assert "\n" not in str(caught.value)


def test_a_model_of_ones_own_has_its_own_data_and_size(mine, capsys):
    with pytest.raises(ValueError, match='"parameters" cannot be chosen for a model of your own'):
        compare.run(model="mine.py:make", world_size=2, parameters=5)
    assert cli.main(["compare", "--model", "mine.py:make", "--problem", "digits"]) == 2
    assert "leave --problem out" in capsys.readouterr().err


def test_the_table_says_what_the_agreement_is_worth(on_devices):
    table = compare.table(on_devices)
    assert "--real-sockets" in table.text
    assert "--real-sockets" in table.html
    assert "on real" not in table.text
    measured = [replace(stage, on_sockets=1.05) for stage in on_devices.stages]
    assert "on real sockets: a step" in compare.table(replace(on_devices, stages=measured)).text
