"""`python -m benchmarks ddp` and `ring`: promises can be broken, the hidden share is right."""

from dataclasses import dataclass

import pytest

from benchmarks import ddp, ring
from ddp_course import launch
from manyranks.errors import EmulationError


@pytest.mark.parametrize("refuses", ["__init__", "check"])
def test_without_virtual_hosts_loopback_is_measured(monkeypatch, capsys, refuses):
    def refuse(*args, **kwargs):
        raise EmulationError("no hosts here")

    monkeypatch.setattr(ddp.Link, refuses, refuse)
    assert ddp.networks() == {"loopback": None}
    assert capsys.readouterr().out.count("no hosts here") == 1


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
