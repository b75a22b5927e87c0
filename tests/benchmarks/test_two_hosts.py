"""The part of `python -m benchmarks launch` on two hosts: what it makes of its runs, and where it cannot run."""

import argparse

import pytest

from benchmarks import launch, two_hosts

ARGS = argparse.Namespace(repeats=3)


@pytest.mark.parametrize("ours, kept", [(1.05, True), (1.2, False)])
def test_medians_of_both_ways_are_compared(monkeypatch, ours, kept):
    found = {"torchrun": [(0.9, 7.0), (1.0, 8.0), (9.0, 9.0)], "sh": [(ours, 2.0), (ours, 1.0), (9.0, 3.0)]}
    monkeypatch.setattr(two_hosts, "available", lambda: {"hosts": None})
    monkeypatch.setattr(two_hosts, "on_hosts", lambda command: found[command[0]].pop(0))
    part = launch.BENCHMARK.parts["hosts"](ARGS)
    assert part.rows == [
        {"way": "torchrun", "job_s": 1.0, "from_start_s": 8.0},
        {"way": "launch", "job_s": ours, "from_start_s": 2.0},
    ]
    assert [promise.record()["kept"] for promise in part.promises] == [kept]


def test_where_virtual_hosts_are_refused_it_says_so(monkeypatch):
    monkeypatch.setattr(two_hosts, "available", lambda: {"hosts": "not here"})
    assert two_hosts.compare(ARGS).rows == [{"way": "two hosts", "refused": "not here"}]
