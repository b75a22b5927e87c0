"""Virtual time against the closed forms, and its committed report."""

import json
from pathlib import Path

import pytest

from benchmarks import virtual_time
from manyranks import links

REPORT = Path(__file__).parents[2] / "results" / "virtual_time.json"


@pytest.mark.slow
def test_steps_are_their_closed_forms():
    """The other stages are in tests/lab/commands/test_compare.py."""
    rows = virtual_time.beside_closed_forms(4, ("4w", "6", "7o", "7", "9", "2", "8"))
    for row in rows:
        assert abs(row["step/closed form - 1"]) <= row["bound"], row
    assert {row["stage"]: row["bound"] for row in rows}["7o"] == virtual_time.EQUAL


def test_the_report_has_every_stage_and_keeps_its_promises():
    parts = json.loads(REPORT.read_text())["parts"]
    rows = {(row["stage"], row["world_size"]) for row in parts["exact"]["rows"]}
    assert rows == {(s, k) for s in virtual_time.STAGES for k in virtual_time.WORLD_SIZES}
    for row in parts["exact"]["rows"]:
        assert abs(row["step/closed form - 1"]) <= row["bound"], row
    assert len(parts["same_bits"]["rows"]) == 21
    assert len({row["sha256"] for row in parts["same_bits"]["rows"]}) == 1


def test_the_page_has_the_steps_of_the_report():
    rows = json.loads(REPORT.read_text())["parts"]["exact"]["rows"]
    page = (REPORT.parents[1] / "docs" / "VIRTUAL_TIME.md").read_text()
    for stage in virtual_time.STAGES:
        [line] = [line for line in page.splitlines() if line.startswith(f"| {stage} |")]
        cells = line.split("|")[2:-1]
        steps = [row["step_ms"] for row in rows if row["stage"] == stage]
        assert [cell.split()[0] for cell in cells] == [f"{step:.3f}" for step in steps]


@pytest.mark.weekly
@pytest.mark.parametrize("way", ["beside four busy processes", "sleeps before locks", "spawned"])
def test_nothing_disturbs_a_bit(way):
    report = json.loads(REPORT.read_text())["parts"]["same_bits"]["rows"]
    assert virtual_time.hash_under(way) == report[0]["sha256"]


@pytest.mark.weekly
@pytest.mark.skipif(links.available()["hosts"], reason="needs virtual hosts")
def test_real_time_on_virtual_hosts_is_virtual_time():
    """The machine must be quiet: sockets are real, and devices sleep."""
    for promise in virtual_time.hosts(None).promises:
        assert promise.at_least <= promise.value <= promise.at_most, promise
