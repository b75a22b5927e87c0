"""`python -m benchmarks links`: the rows that it writes, its verdicts, its table and its figure."""

import json

import pytest

from benchmarks import links as bench
from benchmarks.__main__ import main
from manyranks.hosts import virtual_hosts

KEYS = {
    "mode",
    "algorithm",
    "world_size",
    "bytes",
    "bandwidth_bits_s",
    "measured_s",
    "theory_s",
    "ratio",
}


def test_modes_that_are_forbidden_are_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(virtual_hosts, "forbidden_by", lambda: "not on this island")
    assert list(bench.usable_modes(["hosts", "virtual"])) == ["virtual"]
    assert "virtual hosts left out: not on this island" in capsys.readouterr().out


def test_the_command_measures_and_writes(tmp_path, capsys):
    options = "--modes virtual --bandwidths 100Mbit --world-sizes 2 --sizes 1 --repeats 1"
    assert main(["links", *options.split(), "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench_links.json").read_text())["parts"]["links"]["rows"]
    assert [measured["algorithm"] for measured in rows] == [
        "parameter_server",
        "whole_gradient_ring",
        "ring",
        "gloo",
    ]
    for measured in rows:
        assert measured.keys() >= KEYS
        assert measured["ratio"] == pytest.approx(measured["measured_s"] / measured["theory_s"])
        assert measured["ratio"] > 0.9
    assert (tmp_path / "bench_links.png").read_bytes().startswith(b"\x89PNG")
    assert "parameter_server" in capsys.readouterr().out
