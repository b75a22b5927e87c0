"""What all benchmarks share: turns in changing order, the slowest rank, promises, reports."""

import argparse
import json
import time

import pytest
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import Benchmark, Part, Promise
from ddp_course import launch


def test_ways_take_turns_in_changing_order():
    order = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in ("a", "b", "c")}
    assert harness.take_turns(ways, repeats=3) == {"a": [1, 6, 9], "b": [2, 5, 7], "c": [3, 4, 8]}
    assert "".join(order) == "abccbabca"
    assert {
        len(seconds) for seconds in harness.take_turns(ways, repeats=1, warm_up=2).values()
    } == {1}
    assert len(order) == 18, "three turns of three, twice"


def of_ranks():
    def sleep():
        time.sleep(0.05 * dist.get_rank())

    ranks = harness.medians({"a": lambda: float(dist.get_rank())}, repeats=3)["a"]
    return (
        ranks,
        harness.slowest(dist.get_rank()),
        harness.medians({"sleep": harness.timed(sleep)}, 1)["sleep"],
    )


def test_the_slowest_rank_counts():
    for median, slowest, slept in launch(of_ranks, world_size=3):
        assert median == slowest == 2.0
        assert slept >= 0.1


@pytest.mark.parametrize("value, kept", [(0.9, False), (1.0, True), (2.0, True), (2.1, False)])
def test_promises_have_two_bounds(value, kept):
    promise = Promise("a ratio", value, at_most=2.0, at_least=1.0).record()
    assert promise["kept"] is kept
    line = harness.verdict(promise)
    assert line.startswith("kept: a ratio" if kept else "NOT KEPT: a ratio")
    assert "at least 1, at most 2" in line


@pytest.fixture
def measure(tmp_path):
    """Run a made-up benchmark of three parts: (exit code, the x of each part in its report)."""

    def run(*options, value=1.0):
        parts = {
            name: lambda args: Part([{"x": value}], [Promise("x", value, at_most=1.5)])
            for name in "abc"
        }
        made_up = Benchmark("made_up", "a test", parts, repeats=4, on_request=("c",))
        code = made_up.run(made_up.parser().parse_args(["--out", str(tmp_path), *options]))
        report = json.loads((tmp_path / "bench_made_up.json").read_text())
        assert report["benchmark"] == "made_up"
        assert report["machine"]["cores"] > 0
        return code, {name: part["rows"][0]["x"] for name, part in report["parts"].items()}

    return run


def test_what_is_not_measured_again_is_kept_and_judged(measure, capsys, monkeypatch):
    assert measure() == (0, {"a": 1.0, "b": 1.0})
    assert measure("--only", "b", value=2.0) == (1, {"a": 1.0, "b": 2.0})
    assert "NOT KEPT: x: 2 (at most 1.5)" in capsys.readouterr().out
    assert measure("--only", "c") == (1, {"a": 1.0, "b": 2.0, "c": 1.0})
    assert measure() == (0, {"a": 1.0, "b": 1.0, "c": 1.0})
    monkeypatch.setattr(harness, "machine", lambda: {"cores": 128})
    assert measure("--only", "a") == (0, {"a": 1.0}), "numbers of two machines in one report"


def test_zero_repeats_are_refused(measure):
    with pytest.raises(ValueError, match="0 repeats measure nothing"):
        measure("--repeats", "0")


def test_a_report_is_written_part_by_part(tmp_path):
    def fail(args):
        raise RuntimeError

    interrupted = Benchmark("made_up", "a test", {"a": lambda args: Part([{"x": 1}]), "b": fail})
    with pytest.raises(RuntimeError):
        interrupted.run(argparse.Namespace(out=tmp_path))
    assert list(json.loads((tmp_path / "bench_made_up.json").read_text())["parts"]) == ["a"]
