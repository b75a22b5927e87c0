"""Programs beside formulas: the program computes what the formula counts, and rows are kept."""

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks import rehearsals
from ddp_predictions import scoreboard
from ddp_predictions.runs import read_run
from manyranks import Device
from manyranks.devices.device import Reach
from manyranks.rehearsal import Request, rehearse

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "seq": 32, "micro_batch": 2}


@pytest.mark.parametrize("kind", ["GPT", "Llama"])
def test_the_program_computes_what_the_formula_counts(kind):
    fields = {"gpu": "A100", "gpus": 2, "ff": 256, "recompute": "full", **SMALL}
    if kind == "Llama":
        fields |= {"gated": "yes", "kv_heads": 2, "ff": 128, "recompute": "selective"}
    run, _ = read_run(fields)
    # Attention is counted with all scores: 2 products forward, 5 backward.
    attention = 4 * run.seq * run.hidden * run.tokens
    forward = 2 * run.weights * run.tokens + attention
    again = run.recompute * forward
    if kind == "Llama":
        # What is run again stops before its last product: its outputs are there.
        again -= run.recompute * 2 * run.ff * run.hidden * run.tokens
    backward = 4 * run.weights * run.tokens + 2.5 * attention + again
    flops = run.layers * (forward + backward) + 6 * run.vocab * run.hidden * run.tokens
    device = Device("1TFLOP/s", streams=True)
    request = Request(2, device, sizes_only=True, fold=True)
    words = rehearsals.arguments(run, run.layers, accumulate=2)
    report = rehearse(rehearsals.PROGRAM, words, request)
    assert report.summary()["computing_s"] == pytest.approx(2 * flops / 1e12, rel=1e-6)


def test_a_run_becomes_a_request():
    run, _ = read_run({"model": "mpt-7b", "gpu": "A100-40GB", "gpus": 16, "micro_batch": 16})
    numbers = {"matmul": 0.75, "attend": 0.3, "launch": 3e-3}
    numbers |= {"inside": 0.5, "outside": 0.8, "hop": 1e-5}
    request = rehearsals.request_of(run, numbers, kernels=100)
    assert request.device.reach == pytest.approx(Reach(0.75, 0.6, 1.0, 30e-6))
    assert request.emulated.inside == pytest.approx(0.5 * 8 * 300e9)
    assert request.emulated.bandwidth == pytest.approx(0.8 * 1600e9)
    assert (request.hosts, request.per_host, request.fold) == (2, 8, True)


def test_published_rows_stand_beside_formula_and_rehearsal():
    rows = scoreboard.rehearsed()
    report = json.loads((ROOT / "results" / "bench_rehearsals.json").read_text())
    kept = [row for part in report["parts"].values() for row in part["rows"]]
    assert [row["rehearsal"] for row in rows] == [row["rehearsal"] for row in kept]
    assert {row["device"] for row in rows} == {"virtual"}
    rehearsable = [run for run, _ in rehearsals.today() if rehearsals.can_be_rehearsed(run)]
    known = {(row["model"], row["seq"], row["gpus"]) for row in rows}
    assert {(run.model, run.seq, run.gpus) for run in rehearsable} <= known
    assert {"InternLM-7B", "llama-3.1-8b"} <= {row["model"] for row in rows}
    for way in ("formula", "rehearsal"):
        assert median(abs(row[way] / row["measured"] - 1) for row in rows) < 0.1
