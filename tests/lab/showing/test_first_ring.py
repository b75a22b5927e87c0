"""The first ring that a learner writes: each wrong one gets words of its own."""

import pytest
import torch

from ddp_course import wire
from ddp_course.lab import show


def a_ring(step):
    """Return a ring whose two lines are `step(tensor, incoming)`.

    It returns what is sent next.
    """

    def ring(tensor):
        _, world_size, left, right = wire.neighbours()
        outgoing = tensor.clone()
        for _ in range(world_size - 1):
            incoming = torch.empty_like(tensor)
            wire.exchange(outgoing, right, incoming, left)
            outgoing = step(tensor, outgoing, incoming)

    return ring


def unfilled(tensor):
    _, world_size, left, right = wire.neighbours()
    outgoing = tensor.clone()
    for _ in range(world_size - 1):
        incoming = torch.empty_like(tensor)
        wire.exchange(outgoing, right, incoming, left)
        ...  # your turn: two lines


def only_adds(tensor, outgoing, incoming):
    tensor += incoming
    return outgoing


def after_the_loop(tensor):
    _, world_size, left, right = wire.neighbours()
    for _ in range(world_size - 1):
        incoming = torch.empty_like(tensor)
        wire.exchange(tensor.clone(), right, incoming, left)
    tensor += incoming


def only_passes_on(tensor, outgoing, incoming):
    return incoming


def sends_the_sum(tensor, outgoing, incoming):
    tensor += incoming
    return tensor


def adds_twice(tensor, outgoing, incoming):
    tensor.add_(incoming, alpha=2)
    return incoming


WRONG = {
    "not written yet": unfilled,
    "came in three times": a_ring(only_adds),
    "Both lines belong in the loop": after_the_loop,
    "Nothing was added": a_ring(only_passes_on),
    "The whole sum was sent on": a_ring(sends_the_sum),
    "Each number has to come by once": a_ring(adds_twice),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_ring_is_told_what_is_wrong(words, capsys):
    assert show.first_ring(WRONG[words]) is None
    said = capsys.readouterr().out
    assert [each for each in WRONG if each in said] == [words], said


def test_what_is_no_sum_at_all_is_not_the_sum(capsys):
    assert show.first_ring(lambda tensor: tensor.fill_(float("nan"))) is None
    assert "Not the sum yet" in capsys.readouterr().out
