"""The timeline tells what each rank did, and how much communication the backward pass hid."""

import time
from itertools import pairwise

import pytest
import torch

from ddp_course import Device, Link, problems, stage2_dataparallel, wire
from ddp_course.lab.measuring import timeline
from ddp_course.lab.measuring.timeline import Span


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


def test_a_step_ends_with_its_update():
    names = ["forward", "backward", "update", "forward", "communication", "update", "forward"]
    spans = [Span(name, at, at + 1.0) for at, name in enumerate(names)]
    steps = timeline.by_step(spans)
    assert list(map(names_of, steps)) == [names[:3], names[3:6]]


def names_of(spans):
    return [span.name for span in spans]


def test_nothing_is_left_behind():
    original = torch.autograd.backward
    with timeline.recording() as spans:
        assert torch.autograd.backward is not original
    torch.nn.Linear(2, 2)(torch.randn(1, 2)).sum().backward()
    assert torch.autograd.backward is original
    assert spans == []


def test_an_exception_in_forward_does_not_confuse_the_next_one():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with timeline.recording() as spans:
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        model(torch.randn(3, 4))
    assert spans
    assert spans[-1].name == "forward"


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
TORCH = [
    Span("communication", 2, 4, "network"),
    Span("communication", 5, 8, "network"),
    Span("backward", 0, 8),
]


@pytest.mark.parametrize(
    "spans, seconds",
    [(BUCKETED, 2), (BLOCKING, 3), (TORCH, 3), ([Span("backward", 0, 1)], 0), ([], 0)],
)
def test_exposed_communication(spans, seconds):
    assert timeline.exposed(spans) == seconds


@pytest.mark.parametrize(
    "spans, share", [(BUCKETED, 4 / 6), (BLOCKING, 0), (TORCH, 2 / 5), ([], 0)]
)
def test_hidden_share(spans, share):
    assert timeline.hidden_share(spans) == pytest.approx(share)


def test_a_wait_that_nobody_told_of_begins_when_the_last_bucket_leaves():
    [lane] = timeline.laid_out(TORCH)
    assert [(span.name, span.start, span.end) for span in lane if span.lane == "compute"] == [
        ("backward", 0, 5),
        ("wait", 5, 8),
    ]
    assert [span for span in lane if span.lane == "network"] == TORCH[:2]


def test_nothing_is_drawn_twice():
    spans = [
        Span("forward", 0, 6),
        Span("communication", 1, 2),
        Span("wait", 1.5, 3),
        Span("backward", 6, 9),
    ]
    [lane] = timeline.laid_out(spans)
    expected = [
        ("forward", 0, 1),
        ("communication", 1, 2),
        ("wait", 2, 3),
        ("forward", 3, 6),
        ("backward", 6, 9),
    ]
    assert [(span.name, span.start, span.end) for span in lane] == expected
    assert timeline.exposed(spans) == 2


def test_each_device_of_a_process_has_a_lane():
    spans = [
        Span("forward", 0, 4),
        Span("forward", 1, 3, device=2),
        Span("backward", 5, 6, device=1),
    ]
    lanes = timeline.laid_out(spans)
    assert list(map(names_of, lanes)) == [["forward"], ["backward"], ["forward"]]
    assert timeline.laid_out([]) == [[]]


def test_spans_of_threads_belong_to_their_devices():
    model = problems.make("digits").model()
    link = Link("100Mbit")
    with Device("2GFLOP/s").emulate(link), timeline.recording() as spans:
        stage2_dataparallel.train(
            model, problems.make("digits").batches(12, 1), 0.1, ["cpu:0", "cpu:1", "cpu:2"]
        )
    lanes = timeline.laid_out(spans)
    first, *others = [set(names_of(lane)) for lane in lanes]
    assert others == [{"forward", "backward"}] * 2
    assert first - {"wait"} == {"forward", "backward", "communication", "update"}


def test_what_a_backend_did_in_a_thread_of_its_own_is_not_in_the_lane_of_whoever_noticed():
    with timeline.recording() as spans:
        wire.ended("all_reduce", time.perf_counter(), torch.ones(1))
    assert [span.lane for span in spans] == ["network"]


def test_the_master_waits_while_another_device_works():
    passes = [Span("backward", 0, 2), Span("backward", 0, 3, device=1)]
    spans = [*passes, Span("communication", 3, 5), Span("update", 6, 7)]
    first, second = timeline.laid_out(spans)
    assert [(span.name, span.start, span.end) for span in first] == [
        ("backward", 0, 2),
        ("wait", 2, 3),
        ("communication", 3, 5),
        ("update", 6, 7),
    ]
    assert [span.name for span in second] == ["backward"]
    assert timeline.exposed(spans) == 3
