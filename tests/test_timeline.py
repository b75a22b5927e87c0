import time
from itertools import pairwise

import pytest
import torch

from ddp_course.measuring import timeline
from ddp_course.measuring.timeline import Span
from ddp_course.running import wire


def test_a_step_is_forward_backward_update():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with timeline.recording() as spans:
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    assert [span.name for span in spans] == ["forward", "backward", "update"] * 2
    assert all(span.seconds > 0 for span in spans)
    assert all(before.end <= after.start for before, after in pairwise(spans))


def test_nothing_is_left_behind():
    original = torch.Tensor.backward
    with timeline.recording() as spans:
        assert torch.Tensor.backward is not original
    torch.nn.Linear(2, 2)(torch.randn(1, 2)).sum().backward()
    assert torch.Tensor.backward is original
    assert spans == []


def test_an_exception_in_forward_does_not_confuse_the_next_one():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with timeline.recording() as spans:
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        model(torch.randn(3, 4))
    assert spans and spans[-1].name == "forward"


def test_communication_is_told_apart_by_thread_and_wait():
    import threading

    with timeline.recording() as spans:
        with wire.span("ring"):
            time.sleep(0.001)
        thread = threading.Thread(target=lambda: wire.tell("span", "ring", time.perf_counter()))
        thread.start()
        thread.join()
        wire.tell("span", "wait", time.perf_counter())
    assert [(s.name, s.lane) for s in spans] == [
        ("communication", "compute"),
        ("communication", "network"),
        ("wait", "compute"),
    ]


BUCKETED = [
    Span("forward", 0, 2),
    Span("communication", 3, 5, "network"),
    Span("communication", 5, 9, "network"),
    Span("wait", 7, 9),
    Span("backward", 2, 9),
]
BLOCKING = [Span("backward", 0, 4), Span("communication", 4, 7)]
TORCH = [Span("communication", 2, 4, "network"), Span("communication", 5, 8, "network"), Span("backward", 0, 8)]


@pytest.mark.parametrize(
    "spans, seconds", [(BUCKETED, 2), (BLOCKING, 3), (TORCH, 3), ([Span("backward", 0, 1)], 0), ([], 0)]
)
def test_exposed_communication(spans, seconds):
    assert timeline.exposed(spans) == seconds


@pytest.mark.parametrize("spans, share", [(BUCKETED, 4 / 6), (BLOCKING, 0), (TORCH, 2 / 5), ([], 0)])
def test_hidden_share(spans, share):
    assert timeline.hidden_share(spans) == pytest.approx(share)
