"""Predictions: the constants are those of a fit, rows are met, and what cannot be is named."""

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks import predictions, published
from benchmarks import scoreboard as tables_anew
from ddp_course import Device, stage8_pipeline
from ddp_course.lab import cli
from ddp_course.lab.measuring import facts
from ddp_predictions import figures, frozen, scoreboard
from ddp_predictions.answers import predict
from ddp_predictions.runs import read_run
from ddp_predictions.transformers import memory_gb, step
from manyranks import presets

TABLE = Path(facts.__file__).parent / "transformer_throughput.csv"
LLAMA = {"model": "llama-3.1-8b", "gpu": "H100-80GB", "gpus": 64, "accumulate": 2}


@pytest.mark.parametrize("column", ["today", "of_2021"])
def test_frozen_constants_are_those_of_a_fit(column):
    free = predictions.TODAY if column == "today" else predictions.OF_2021
    pairs = predictions.today() if column == "today" else predictions.gpts()
    fitted = predictions.fit_transformer(pairs, free, column)
    for name in free:
        assert frozen.constants(column)[name] == pytest.approx(fitted[name], rel=0.02), name


def test_other_frozen_numbers_are_those_of_a_fit():
    assert frozen.numbers("protocols") == pytest.approx(
        predictions.fit_protocols(facts.rows("nccl_ring_a100x8_sizes")), rel=0.02
    )
    assert frozen.numbers("ZeRO-3 of 2021") == pytest.approx(predictions.fit_zero3(), rel=0.02)


def test_models_left_out_of_the_fit_are_foretold():
    errors = abs(predictions.left_out_models())
    assert median(errors) < 0.045
    assert scoreboard.LEFT_OUT["transformer_throughput"] == pytest.approx(median(errors), abs=2e-3)


def test_three_ways_need_the_bytes_per_weight():
    """Today's runs do not, so the ablation looks at both eras."""
    rows = [row for row in facts.rows(published.ZERO3) if row["plan"] == "PTD"]
    lacking = predictions.fit_transformer(
        predictions.gpts(), predictions.OF_2021, "of_2021", predictions.WITHOUT["moved"]
    )
    honest = [published.megatron_tflops(row) / row["tflops_per_gpu"] - 1 for row in rows]
    spoilt = [
        published.megatron_tflops(row, values=lacking) / row["tflops_per_gpu"] - 1 for row in rows
    ]
    assert max(map(abs, honest)) < 0.02
    assert min(map(abs, spoilt)) > 0.03


def test_no_fit_sees_the_runs_on_1536_gpus(monkeypatch):
    for row in tables_anew.zero3_and_3d().rows:
        if row["gpus"] == 1536 and row["parameters"] == "174.6B":
            assert row["measured"] in (44, 141)
            assert not row["calibrated"]
            assert abs(row["error"]) < 0.09
    honest = predictions.fit_zero3()
    other = [dict(row) for row in facts.rows(published.ZERO3)]
    for row in other:
        if row["gpus"] == 1536:
            row["tflops_per_gpu"] = 1.0
    monkeypatch.setattr(facts, "rows", lambda name: other)
    assert predictions.fit_zero3() == pytest.approx(honest)


def test_runs_of_today_need_their_terms():
    """As a control, the errors are twice as large without attention's own rate."""
    pairs = predictions.today()
    values = frozen.constants()
    honest = median(abs(predictions.misses(pairs, values)))
    spoilt = median(abs(predictions.misses(pairs, values | {"attend": values["matmul"]})))
    assert honest < 0.03
    assert spoilt > 1.5 * honest


def test_the_committed_scoreboard_is_that_of_the_models():
    """`make bench ARGS=predictions` writes the committed one anew."""
    committed = scoreboard.scoreboard()
    for old, new in zip(committed, tables_anew.scoreboard(), strict=True):
        assert old.name == new.name
        assert old.fitted == new.fitted
        predicted = [row["predicted"] for row in new.rows]
        assert [row["predicted"] for row in old.rows] == pytest.approx(predicted, rel=2e-3)


def test_a_step_worked_out_by_hand():
    fields = {"layers": 4, "hidden": 1024, "heads": 16, "seq": 512, "vocab": 1, "gpu": "A100"}
    run, _ = read_run(fields | {"gpus": 8, "micro_batch": 2, "precision": "bf16 pure"})
    rates = {"matmul": 0.5, "attend": 0.25, "inside": 0.5, "outside": 0.5, "shows": 0.0}
    rest = dict.fromkeys(("touched", "launch", "shard", "score", "moved", "logit", "hop"), 0.0)
    parts = step(run, None, rates | rest).parts
    weights = 12 * 1024**2
    words = 6 * 1024 * 1024 / (0.5 * 312e12)
    assert parts["products"] == pytest.approx(4 * 6 * weights * 1024 / (0.5 * 312e12) + words)
    attention = 3.5 * 2 * 512 * 1024 * 1024 / (0.25 * 312e12)
    assert parts["attention"] == pytest.approx(4 * attention)
    forward = 2 * weights * 1024 / (0.5 * 312e12) + attention / 3.5
    ring = 7 / 8 * 2 * weights / (0.5 * 300e9)
    backward = 2 * forward + 0.5 * attention / 3.5
    shown = max(0, ring - forward) + max(0, 2 * ring - backward)
    assert parts["sending that shows"] == pytest.approx(4 * shown)
    piped = step(replace(run, pipeline=4, way="ddp"), None, rates | rest)
    handed = 4 * 1024 * 1024 / (0.5 * 300e9)
    assert piped.parts["bubble"] == pytest.approx(3 * (forward + backward + handed) + handed)


def test_memory_worked_out_by_hand():
    run, _ = read_run(LLAMA)
    kept = memory_gb(run)
    assert kept["weights, gradients, optimizer"] == pytest.approx(16 * 8.03 / 64, rel=0.01)
    assert kept["activations"] == pytest.approx(32 * 32 * 4096 * 8192 / 1e9)
    run.recompute = 1.0
    assert memory_gb(run)["activations"] == pytest.approx(3 / 32 * kept["activations"], rel=0.01)


def test_the_answer_says_what_bounds_and_what_is_assumed():
    answer = predict(**LLAMA)
    words = answer.words()
    for part in ("tokens/s per GPU", "MFU 4", "at least 4", "of 80 GB", "Assumed: ", "products"):
        assert part in words
    assert answer.bound == "products"
    assert answer.fits
    slow = predict(**LLAMA, network=100)
    assert slow.bound == "the network"
    assert slow.step_s > 3 * answer.step_s
    assert slow.savings["the network"] > 0.4
    assert "<pre>" in answer._repr_html_()
    assert answer.figure().png().startswith(b"\x89PNG")
    assert "DOES NOT FIT" in predict(**LLAMA | {"micro_batch": 64}).words()


def test_everything_that_is_assumed_is_told():
    _, assumed = read_run({"model": "gpt2", "gpu": "H100", "gpus": 16})
    expected = "way fsdp; precision bf16 mixed; 8 GPUs per host; micro-batches of 1 sequence; "
    expected += "tensor 1; pipeline 1; nothing recomputed; reduce bytes 4; attention fused; "
    expected += "kernels compiled; overlap yes; 1 micro-batch per step; 3,200 Gbit/s per host; "
    assert "; ".join(assumed) == f"{expected}NVLink H100 inside a host"
    given = {"way": "ddp", "precision": "bf16 pure", "gpus_per_host": 8, "micro_batch": 2}
    given |= {"tensor": 1, "pipeline": 1, "recompute": "full", "reduce_bytes": 2}
    given |= {"attention": "fused", "kernels": "eager", "overlap": "no", "accumulate": 2}
    given |= {"network": 100, "inside": "PCIe 4"}
    assert read_run({"model": "gpt2", "gpu": "H100", "gpus": 16} | given)[1] == []


def test_emulated_devices_and_links_share_the_tables_of_predictions():
    """A number of a datasheet stands once: what emulates and what foretells read the same entry."""
    for name in ("A100-40GB", "A100-80GB", "H100-80GB", "L40S"):
        device = Device(name)
        machine = read_run({"model": "gpt2", "gpu": name, "gpus": 8})[0].machine
        assert (device.rate, device.memory) == pytest.approx((machine.peak, machine.memory))
        link = presets.LINKS[presets.ACCELERATORS[presets.ALIASES.get(name, name)].link]
        assert machine.nvlink == link.bandwidth / 8
    for name, link in presets.LINKS.items():
        run, _ = read_run({"model": "gpt2", "gpu": "H100", "gpus": 8, "inside": name})
        assert 8 * run.machine.nvlink == pytest.approx(link.bandwidth)
        assert link.source


def test_every_table_of_the_scoreboard_names_its_source_and_licence():
    for table in scoreboard.scoreboard():
        assert "Licence: " in facts.SOURCES[table.name], table.name
    efa = facts.SOURCES["nccl_efa_two_hosts_a100"]
    assert "aws-samples" in efa
    assert "not stated by that text" in efa


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[-1]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.mark.parametrize("name", ["transformer_throughput", published.GPT])
def test_a_table_gains_columns(tmp_path, capsys, name):
    source = TABLE.parent / f"{name}.csv"
    assert cli.main(["predict", str(source), "--out", str(tmp_path / "out.csv")]) == 0
    assert "median error of" in capsys.readouterr().err
    filled = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert len(filled) == len(facts.rows(name))
    assert median(abs(float(row["error"])) for row in filled) < 0.03
    assert all(float(row["predicted_tokens_per_s_per_gpu"]) > 0 for row in filled)
    without = list(csv.DictReader(source.open()))
    for row in without:
        for measured in ("tokens_per_s_per_gpu", published.GPT_MS):
            row.pop(measured, None)
    assert cli.main(["predict", write(tmp_path / "in.csv", without)]) == 0
    again = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["step_s"] for row in again] == [row["step_s"] for row in filled]
    assert "error" not in again[0]


def test_a_gpu_that_nobody_knows_ends_no_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(presets, "ACCELERATORS", dict(presets.ACCELERATORS))
    rows = list(csv.DictReader(TABLE.open()))[:3]
    rows[1]["gpu"] = "H100-96GB-500W"
    command = ["predict", write(tmp_path / "in.csv", rows)]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    first, unknown, last = csv.DictReader(printed.out.splitlines())
    assert first["step_s"]
    assert last["step_s"]
    assert not unknown["step_s"]
    assert unknown["gpu"] == "H100-96GB-500W"
    assert not first["not foretold"]
    assert '--accelerator "H100-96GB-500W=FLOP/s,bytes/s"' in unknown["not foretold"]
    assert "line 3;" in printed.err
    assert cli.main(["predict", write(tmp_path / "unknown.csv", [rows[1]])]) == 0
    assert "H100-96GB-500W" in capsys.readouterr().out
    taught = "H100-96GB-500W=989TFLOP/s,2.4TB/s,96GB,NVLink H100,3200Gbit"
    assert cli.main([*command, "--accelerator", taught]) == 0
    printed = capsys.readouterr()
    _, known, _ = csv.DictReader(printed.out.splitlines())
    assert float(known["step_s"]) > 0
    assert "not foretold" not in known
    assert cli.main([*command, "--accelerator", "X1=fast"]) == 2
    assert "X1=500TFLOP/s,2TB/s" in capsys.readouterr().err


def test_a_config_of_hugging_face_is_read(tmp_path, capsys):
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    config |= {"vocab_size": 128256, "hidden_act": "silu", "max_position_embeddings": 131072}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = ["--gpu", "H100-80GB", "--gpus", "64", "--accumulate", "2"]
    assert cli.main(["predict", "--config", str(path), *options]) == 0
    ours = capsys.readouterr().out.splitlines()
    assert ours[1:3] == predict(**LLAMA).words().splitlines()[1:3]
    path.write_text("[]")
    assert cli.main(["predict", "--config", str(path), *options]) == 2
    assert "is no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": 3}, "3 x 128 x 1 ways are 384 GPUs"),
        ({"layers": -96}, '"layers" is -96; it must be a whole number'),
        ({"hidden": "wide"}, "is wide; it must be a whole number"),
        ({"pp": 128, "dp": 1}, "128 stages for 80 layers"),
        ({"sharding": "magic"}, '"sharding" is magic; choose one of ddp'),
        ({"gpus": 12, "dp": 12}, "they do not fill hosts of 8"),
        ({"network_gbit_per_host": "fast"}, '"network_gbit_per_host" is fast; give Gbit/s'),
        ({"network_gbit_per_host": "nan"}, '"network_gbit_per_host" is nan'),
        ({"tokens_per_s_per_gpu": -3}, "a number above 0 was expected"),
        ({"hidden": 8190}, "does not divide evenly"),
        ({"precision": "fp8"}, '"precision" is fp8; choose one of bf16 mixed, bf16 pure'),
        ({"num_local_experts": 8}, '"num_local_experts" is 8; layers of experts'),
    ],
)
def test_settings_that_cannot_be_end_with_one_line(tmp_path, capsys, change, words):
    rows = list(csv.DictReader(TABLE.open()))[:2]
    rows[1] = rows[0] | change
    target = tmp_path / "out.csv"
    command = ["predict", write(tmp_path / "in.csv", rows), "--out", str(target)]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "line 3" in error
    assert words in error
    assert error.count("\n") == 1
    assert not target.exists(), "nothing is written half"


def test_nonsense_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "empty.csv").write_text("")
    commands = (
        [str(tmp_path / "empty.csv")],
        [str(tmp_path)],
        [str(TABLE), "--gpus", "8"],
        ["--model", "moon-7b", "--gpu", "H100", "--gpus", "8"],
        ["--model", "gpt2", "--gpus", "8"],
    )
    for command in commands:
        assert cli.main(["predict", *command]) == 2
    errors = capsys.readouterr().err.splitlines()
    words = ("no lines", "cannot read", "do not go together", '"model" is moon-7b', '"gpu" is')
    assert len(errors) == 5
    assert all(word in error for word, error in zip(words, errors, strict=True)), errors


def test_results_are_written_only_where_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["predict"]) == 0
    assert not list(tmp_path.iterdir())
    assert cli.main(["predict", "--out", "mine"]) == 0
    assert len(list((tmp_path / "mine").iterdir())) == 3
    page = (tmp_path / "mine" / "predictions.md").read_text()
    assert re.search(r"^\| transformer_throughput +\| +102 \|", page, re.M)
    assert "Largest misses" in page
    assert "disagree with their neighbours" in page
    assert page.count("Licence: ") == len(scoreboard.scoreboard())
    assert "step_s" in page
    assert "memory_gb" in page
    assert "| blind  | 35%" in page


def test_the_figure_says_how_far_off_we_are():
    rows = [row for table in scoreboard.scoreboard() for row in table.rows]
    picture = figures.predictions_figure(rows)
    assert "rows that no fit saw" in picture.message
    assert picture.png().startswith(b"\x89PNG")


def test_predicting_needs_no_scipy():
    code = "import sys; sys.modules['scipy'] = None; from ddp_predictions.answers import predict; "
    code += "predict(model='gpt2', gpu='H100', gpus=8)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks, micro_batches", [(4, 8), (8, 24)])
def test_what_schedules_idle_is_what_stage_8_plays(ranks, micro_batches):
    """A pass forward takes 1, backward 2, half of it gradients of weights; messages nothing."""
    plain = stage8_pipeline.one_forward_one_backward(ranks, micro_batches)
    schedules = {
        "1F1B": (plain, 1),
        "1F1B-I": (stage8_pipeline.interleaved(ranks, micro_batches, 2), 2),
        "ZB-1p": (stage8_pipeline.zero_bubble(ranks, micro_batches), 1),
    }
    for order, (schedule, chunks) in schedules.items():
        rows = stage8_pipeline.timetable(schedule, 1 / chunks, 2 / chunks)
        idle = max(row[-1][2] for row in rows) / 3 - micro_batches
        expected = published.idle_stages(order, ranks, chunks, 1 / 3, 1.0)
        assert idle == pytest.approx(expected), order


def test_a_run_that_does_not_fit_is_told_what_would():
    small = {"model": "llama-3.1-70b", "gpu": "H100-80GB", "gpus": 64}
    words = predict(**small).words()
    assert "IT DOES NOT FIT" in words
    assert "Try recompute=full" in words
    assert "Try" not in predict(**small, recompute="full").words()


def test_a_network_that_no_table_has_is_not_foretold_with_confidence():
    usual = predict(**LLAMA).words()
    slow = predict(**LLAMA, network=400).words()
    assert "which no fit saw" in usual
    assert "nothing like this was checked" in slow
