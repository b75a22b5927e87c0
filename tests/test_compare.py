import csv
import errno
import json
import os

import pytest
import torch.distributed as dist

from ddp_course import compare, launch, stage3_paramserver
from ddp_course.running import files

ALL = ("1", "2", "3", "4w", "4", "5", "torch")


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def results(request):
    """All stages on a model whose gradient any of these world sizes divides."""
    return compare.run("digits", request.param, 3, ALL, "cpu", "float64", global_batch=24, bucket_cap_mb=25.0)


def test_all_stages_compute_the_same(results):
    assert [stage["stage"] for stage in results["stages"]] == list(ALL)
    single = results["stages"][0]["loss"]
    assert len(single) == 3 and len(set(single)) == 3
    for stage in results["stages"]:
        assert stage["max_abs_diff_vs_single"] < 1e-12
        assert stage["loss"] == pytest.approx(single, abs=1e-12)


def test_bytes_are_exactly_the_formula(results):
    world_size, payload = results["world_size"], results["gradient_bytes"]
    assert payload == 8 * results["parameters"] == 8 * 88_092
    expected = {"3": (world_size - 1) * payload, "4w": (world_size - 1) * payload}
    expected |= dict.fromkeys(("4", "5"), 2 * (world_size - 1) * payload // world_size)
    for stage in results["stages"]:
        wanted = expected.get(stage["stage"])
        assert stage["bytes_sent_max"] == stage["bytes_received_max"] == wanted
    messages = {stage["stage"]: stage["messages_max"] for stage in results["stages"]}
    assert messages["3"] == 2 * (world_size - 1) and messages["4"] == 4 * (world_size - 1)
    assert messages["1"] is messages["2"] is messages["torch"] is None


def test_times_and_timelines_are_there(results):
    for stage in results["stages"]:
        assert stage["step_ms"] > 0
        ranks = 1 if stage["stage"] in "12" else results["world_size"]
        assert len(stage["timeline"]) == ranks
        for lane in stage["timeline"]:
            names = {name for name, *_ in lane}
            assert {"forward", "backward", "update"} <= names
            assert ("communication" in names) == (stage["stage"] not in "12")
    waiting = {stage["stage"]: stage["communication_ms"] for stage in results["stages"]}
    assert waiting["1"] == 0 and waiting["2"] is None and waiting["3"] > 0


def test_results_are_saved_as_json_csv_and_figure(results, tmp_path):
    paths = compare.save(results, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["compare.json", "compare.csv", "compare.png"]
    assert json.loads(paths[0].read_text()) == json.loads(json.dumps(results))
    rows = list(csv.DictReader(paths[1].open()))
    assert [row["stage"] for row in rows] == list(ALL)
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["compare.csv", "compare.json", "compare.png"]
    assert all(stage["name"] in compare.table(results) for stage in results["stages"])


def without_division(model, batches, lr):
    """Stage 3 with the sum of the gradients where the mean should be."""

    def total(tensors):
        stage3_paramserver.average_on_server(tensors)
        for tensor in tensors:
            tensor.mul_(dist.get_world_size())

    return stage3_paramserver.train(model, batches, lr, total)


def test_wrong_weights_show_as_a_difference():
    job = compare._job("synthetic", 2, 3, "cpu", "float64")
    single = compare._measure("1", job, None, "cpu", None)["weights"]

    def run(trainer):
        compare.trainer = lambda *stage_and_devices: trainer
        return compare.train_and_measure("3", job, single, "cpu")["difference"]

    assert all(difference > 1e-6 for difference in launch(run, without_division, world_size=2))
    assert all(difference < 1e-12 for difference in launch(run, stage3_paramserver.train, world_size=2))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"world_size": 0}, "world size is 0"),
        ({"world_size": -2}, "world size is -2"),
        ({"steps": 0}, "steps is 0"),
        ({"stages": "1,9"}, "unknown stage '9'"),
        ({"stages": ""}, "unknown stage"),
        ({"problem": "mnist"}, 'unknown problem "mnist"'),
        ({"global_batch": 10, "world_size": 4}, "try 8"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb is 0"),
        ({"dtype": "int8"}, "choose float32 or float64"),
        ({"parameters": 5, "problem": "bytes"}, "out of range"),
        ({"parameters": 5}, "has one size"),
        ({"device": "tpu"}, "unknown device"),
        ({"device": "cuda:99"}, "GPUs"),
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


def test_the_timeline_is_that_of_a_typical_step():
    traffic = {"bytes_sent_max": 0, "bytes_received_max": 0, "messages_max": 0}
    rank = {"exposed_s": [0.0] * 3, "traffic": traffic, "loss": [0.0] * 3, "difference": 0.0, "evaluation": None}
    ranks = [
        {**rank, "step_s": seconds, "timelines": [[["forward", 0.0, second, "compute"]] for second in seconds]}
        for seconds in ([1.0, 5.0, 3.0], [2.0, 1.0, 9.0])  # the slowest rank counts: 2, 5, 9
    ]
    entry = compare.summed_up("4", ranks)
    assert entry["step_ms"] == 5000
    assert [lane[0][2] for lane in entry["timeline"]] == [5.0, 1.0]
