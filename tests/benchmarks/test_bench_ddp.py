"""`python -m benchmarks ddp` and `ring`: their promises can be broken, and the hidden share is what it says."""

from argparse import Namespace
from dataclasses import dataclass

import pytest

from benchmarks import ddp, ring, training
from ddp_course import launch
from ddp_course.errors import LinkError


def kept(promises):
    return [promise.record()["kept"] for promise in promises]


@pytest.mark.parametrize(
    "ratios, expected", [((0.9, 1.05), [True, True]), ((1.0, 1.05), [False, True]), ((0.5, 1.2), [True, False])]
)
def test_the_ring_is_judged_by_mean_and_worst(ratios, expected):
    assert kept(ring.promised([{"gloo": 2.0, "pipelined": 2.0 * ratio} for ratio in ratios])) == expected


@pytest.mark.parametrize(
    "ours, with_ring, expected",
    [
        ((0.96, 1.04), (0.9, 1.09), [True, True, True]),
        ((1.0, 1.04), (0.9, 0.9), [False, True, True]),
        ((0.9, 1.06), (0.9, 0.9), [True, False, True]),
        ((0.9, 0.9), (0.5, 1.11), [True, True, False]),
    ],
)
def test_steps_are_judged_by_mean_and_worst(ours, with_ring, expected):
    pairs = zip(ours, with_ring, strict=True)
    rows = [{"torch": 2.0, "ours": 2 * same, "ours, ring": 2 * ring} for same, ring in pairs]
    assert kept(ddp.promised_steps(rows)) == expected


def test_views_are_measured_in_both_orders_with_few_and_many_parameters(monkeypatch):
    asked = []

    def measured(function, model, repeats, order, as_view, world_size):
        asked.append((model, order, world_size))
        assert function is ddp.wrappers_in_turn and as_view
        return {"torch": 1.0, "ours": 1.1 if "encoder" in model else 0.9}

    monkeypatch.setattr(ddp, "on_cpu", measured)
    part = ddp.views_into_buckets(Namespace(repeats=1))
    assert len(set(asked)) == len(part.rows) == 8
    assert kept(part.promises) == [True, False]  # the mean of 0.9 and 1.1 is below 1, the slowest is not


def wrapped_encoder():
    medians = ddp.wrappers_in_turn("encoder, 48 small parameters", 1, ("torch", "ours"), True)
    return medians, [p.numel() for p in training.Encoder().parameters()]


def test_the_encoder_trains_with_both_wrappers():
    seconds, sizes = launch(wrapped_encoder, world_size=2, device="cpu")[0]
    assert seconds.keys() == {"torch", "ours"} and len(sizes) == 48 and max(sizes) <= 3 * 32 * 32


def test_two_orders_are_each_other_backwards():
    first, last = ddp.ORDERS[0], ddp.ORDERS[-1]
    assert first == last[::-1] and set(first) == set(ddp.WRAPPERS)


@pytest.mark.parametrize("refuses", ["__init__", "check"])
def test_without_virtual_hosts_loopback_is_measured(monkeypatch, capsys, refuses):
    def refuse(*args, **kwargs):
        raise LinkError("no hosts here")

    monkeypatch.setattr(ddp.Link, refuses, refuse)
    monkeypatch.setattr(ddp, "on_cpu", lambda *args, **settings: 0.1)  # how long the backward pass takes
    assert ddp.networks() == {"loopback": None}
    assert ddp.slow_link(None).rows == []
    assert capsys.readouterr().out.count("no hosts here") == 2


@dataclass
class Event:
    label: str
    start: int
    length: int

    def name(self):
        return self.label

    def start_ns(self):
        return self.start

    def duration_ns(self):
        return self.length


@pytest.mark.parametrize("start, share", [(0, 1.0), (60, 0.8), (95, 0.1), (100, 0.0), (150, 0.0)])
def test_hidden_share(start, share):
    backward = Event("autograd::engine::evaluate_function: AddmmBackward0", 0, 100)
    assert ddp.hidden_share([backward, Event("gloo:all_reduce", start, 50)]) == pytest.approx(share)


def test_a_wrong_sum_is_noticed():
    def run():
        with pytest.raises(ArithmeticError):
            ring.on_ones(lambda tensor: tensor, ring.torch.empty(8))

    launch(run, world_size=2)
