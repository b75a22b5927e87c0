"""NCCL inside one host: rings packed onto wires, and a fit to few GPUs."""

import pytest

from benchmarks import predictions
from ddp_course.lab.measuring import facts
from ddp_predictions import one_host


def worst(gpu):
    numbers = predictions.fit_host(gpu)
    rows = [row for row in facts.rows("nccl_all_reduce_in_one_host") if row["gpu"] == gpu]
    return max(abs(one_host.all_reduce_us(row, numbers) / row["microseconds"] - 1) for row in rows)


@pytest.mark.parametrize(
    ("gpus", "wires", "rings"),
    [
        (2, {(0, 1): 3}, 3),
        (3, {(0, 1): 1, (1, 2): 1, (0, 2): 1}, 2),  # There is one ring in each direction.
        # No ring goes along wires alone: this one returns through GPU 0.
        (3, {(0, 1): 2, (0, 2): 1}, 1),
        (3, {(0, 1): 9, (1, 2): 1, (0, 2): 1}, 2),  # The weakest pair decides.
    ],
)
def test_rings_fit_on_the_wires_of_small_hosts(monkeypatch, gpus, wires, rings):
    monkeypatch.setattr(predictions, "V100_WIRES", wires)
    assert predictions.packed_rings(gpus) == rings


def test_wires_explain_why_more_v100s_are_faster():
    assert [one_host.rings(count) for count in (2, 3, 4)] == [1, 2, 4]
    assert predictions.packed_rings(4) == one_host.rings(4)
    for gpu in range(8):
        assert sum(n for pair, n in predictions.V100_WIRES.items() if gpu in pair) == 6
    _, _, wire_us_mib, _ = one_host.fitted("V100")
    # GB/s; 25 is what one wire can carry.
    assert 2**20 / wire_us_mib / 1e3 == pytest.approx(22, rel=0.1)


def test_the_fit_follows_the_published_times_and_a_model_without_wires_does_not(monkeypatch):
    assert worst("A100") < 0.2
    assert worst("V100") < 0.2
    monkeypatch.setattr(one_host, "rings", lambda gpus: 1)
    assert worst("V100") > 0.5
