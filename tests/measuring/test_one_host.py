"""NCCL inside one host: rings packed onto wires, a fit to few GPUs, predictions committed before the truth is seen."""

import json
from pathlib import Path

import pytest

from ddp_course.measuring.simulate import one_host

COMMITTED = Path(__file__).resolve().parents[2] / "results" / "nccl_in_one_host.json"


@pytest.fixture(scope="module")
def found():
    return one_host.predictions()


def test_rings_fit_on_the_wires_of_small_hosts():
    pair, triangle = {(0, 1): 3}, {(0, 1): 1, (1, 2): 1, (0, 2): 1}
    assert one_host.most_rings(2, pair) == 3
    assert one_host.most_rings(3, triangle) == 2, "one in each direction"
    assert one_host.most_rings(3, {(0, 1): 2, (0, 2): 1}) == 1, "no ring along wires: back through GPU 0"
    assert one_host.most_rings(3, triangle | {(0, 1): 9}) == 2, "the weakest pair decides"


def test_wires_explain_why_more_v100s_are_faster(found):
    assert [found["rings"][count] for count in (2, 3, 4)] == [1, 2, 4]
    assert all(sum(n for pair, n in one_host.V100_WIRES.items() if gpu in pair) == 6 for gpu in range(8))
    wire = found["parameters"]["V100"]["wire_us_mib"]
    assert one_host.MIB / wire / 1e3 == pytest.approx(22, rel=0.1)  # GB/s; 25 is what one wire can carry


def test_the_fit_follows_the_published_times_and_a_model_without_wires_does_not(found, monkeypatch):
    assert max(found["error"].values()) < 0.2
    monkeypatch.setattr(one_host, "most_rings", lambda gpus: 1)
    assert one_host.predictions(())["error"]["V100"] > 0.5


def test_committed_predictions_are_those_of_the_model(found):
    """To write them anew: json.dumps(one_host.predictions()["rows"], indent=1)."""
    committed = json.loads(COMMITTED.read_text())
    assert [{**row, "predicted_us": None} for row in committed] == [{**r, "predicted_us": None} for r in found["rows"]]
    assert [r["predicted_us"] for r in committed] == pytest.approx([r["predicted_us"] for r in found["rows"]], rel=1e-3)
    assert {(row["gpu"], row["K"]) for row in committed} == {(g, k) for g in one_host.GPUS for k in (5, 6, 7, 8)}
