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
    monkeypatch.setattr(virtual_hosts, "forbidden_by", lambda: "not on this island")
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
