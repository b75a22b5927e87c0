"""`python -m benchmarks links`: the rows that it writes, its verdicts, its table and its figure."""

import json

import pytest

from benchmarks import links as bench
from benchmarks.__main__ import main
from benchmarks.link_figure import link_figure
from ddp_course.running import virtual_hosts

KEYS = {"mode", "algorithm", "world_size", "bytes", "bandwidth_bits_s", "measured_s", "theory_s", "ratio"}


def row(algorithm="ring", ratio=1.0, mode="hosts", world_size=2, size=4 << 20, theory=0.2):
    """A made-up row of bench_links.json."""
    return {
        "mode": mode, "algorithm": algorithm, "world_size": world_size, "bytes": size, "bandwidth_bits_s": 2e8,
        "measured_s": theory * ratio, "theory_s": theory, "ratio": ratio, "calibrated_bits_s": 1.9e8,
    }  # fmt: skip


def accepted(rows):
    return all(promise.record()["kept"] for promise in bench.promised(rows))


@pytest.mark.parametrize("ratio, within", [(0.96, False), (0.97, True), (1.0, True), (1.12, True), (1.13, False)])
def test_ratios_are_judged(ratio, within):
    assert accepted([row(ratio=ratio), row(ratio=1.0, world_size=3)]) == within
    assert accepted([row(ratio=ratio, size=1 << 20)]), "small messages have latency, and are not judged"


@pytest.mark.parametrize("ours, within", [(1.04, True), (1.06, False)])
def test_the_ring_is_judged_against_gloo(ours, within):
    assert accepted([row(ratio=ours), row("gloo", 1.0), row("gloo", 0.5, world_size=3)]) == within


def test_gloo_itself_is_not_judged():
    assert bench.promised([row("gloo", 1.5)]) == []


def test_rows_measured_again_replace_earlier_ones():
    earlier = [row(ratio=1.5), row(ratio=1.2, world_size=3)]
    assert [known["ratio"] for known in bench.merge(earlier, [row(ratio=1.0)])] == [1.0, 1.2]
    assert bench.merge([], [row()]) == [row()]


def test_table_has_a_line_a_setting():
    first, second = bench.table([row(), row("gloo", 1.1), row("parameter_server", mode="wire", world_size=8)])
    assert first["ring"] == "200.0 ms (1.000)" and first["gloo"] == "220.0 ms (1.100)"
    assert second["link"].startswith("wire") and second["K"] == 8 and "gloo" not in second


def test_figure_draws_every_point_and_formula():
    rows = [
        row(name, ratio, mode, world_size, size)
        for mode in ("hosts", "wire")
        for name, ratio in (("parameter_server", 1.01), ("whole_gradient_ring", 1.0), ("ring", 1.1))
        for world_size in (2, 4)
        for size in (1 << 20, 4 << 20)
    ]
    picture = link_figure(rows)
    assert "1.00 to 1.10" in picture.message
    for axes in picture.axes:
        assert axes.get_xscale() == axes.get_yscale() == "log"
        points = [line for line in axes.lines if line.get_marker() in ("o", "^") and len(line.get_xdata())]
        formulas = [line for line in axes.lines if line.get_linestyle() in ("-", "--")]
        assert len(points) == len(formulas) == 6


def test_modes_that_are_forbidden_are_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(virtual_hosts, "allowed", lambda: {"reason": "not on this island", "latency": False})
    assert list(bench.usable_modes(["hosts", "wire"])) == ["wire"]
    assert "virtual hosts left out: not on this island" in capsys.readouterr().out


def test_the_command_measures_and_writes(tmp_path, capsys):
    options = "--modes wire --bandwidths 100Mbit --world-sizes 2 --sizes 512KiB --repeats 1"
    assert main(["links", *options.split(), "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench_links.json").read_text())["parts"]["links"]["rows"]
    assert [measured["algorithm"] for measured in rows] == ["parameter_server", "whole_gradient_ring", "ring"]
    for measured in rows:
        assert measured.keys() >= KEYS
        assert measured["ratio"] == pytest.approx(measured["measured_s"] / measured["theory_s"])
        assert measured["ratio"] > 0.9
    assert (tmp_path / "bench_links.png").read_bytes().startswith(b"\x89PNG")
    assert "parameter_server" in capsys.readouterr().out
