"""Whose time counts: a thread's clock with a made-up processor."""

from types import SimpleNamespace

import pytest

from ddp_course.running.devices import clock
from ddp_course.running.devices.clock import Clock, ThreadClock


@pytest.fixture
def machine(monkeypatch):
    """A clock on the wall, the seconds that this thread has computed, and those it stood in
    line.
    """
    state = SimpleNamespace(wall=100.0, computed=1.0, queued=0.0)

    def pass_time(seconds):
        state.wall += seconds

    monkeypatch.setattr(clock.time, "perf_counter", lambda: state.wall)
    monkeypatch.setattr(clock.time, "thread_time", lambda: state.computed)
    monkeypatch.setattr(clock.time, "sleep", pass_time)
    monkeypatch.setattr(ThreadClock, "in_line", lambda self: state.queued)

    def work(seconds, in_line=0.0):
        state.computed += seconds
        state.queued += in_line
        state.wall += seconds + in_line

    state.work, state.wait = work, pass_time
    return state


def operation(thread, machine, device, seconds, real, in_line=0.0):
    """One operation of `seconds` device time that really takes `real`."""
    thread.catch_up()
    thread.real(machine.work, (real, in_line), {})
    thread.reach(device.book(thread.now, seconds))


def test_a_device_takes_its_time_whatever_the_arithmetic_takes(machine):
    thread, device = ThreadClock(), Clock()
    for _ in range(10):
        operation(thread, machine, device, 0.1, 0.02)
    assert machine.wall == pytest.approx(101.0) and device.busy == pytest.approx(1.0)


@pytest.mark.parametrize("lost", [{"real": 0.25}, {"real": 0.05, "in_line": 0.2}])
def test_what_the_processor_could_not_keep_up_with_is_caught_up(machine, lost):
    thread, device = ThreadClock(), Clock()
    operation(thread, machine, device, 0.1, **lost)
    assert machine.wall == pytest.approx(100.25) and thread.behind == pytest.approx(0.15)
    for _ in range(9):
        operation(thread, machine, device, 0.1, 0.02)
    assert machine.wall == pytest.approx(101.0) and thread.behind == pytest.approx(0.0)


def test_waiting_leaves_the_device_idle(machine):
    thread, device = ThreadClock(), Clock()
    operation(thread, machine, device, 0.1, 0.02)
    machine.wait(0.5)
    operation(thread, machine, device, 0.1, 0.02)
    assert machine.wall == pytest.approx(100.7) and device.busy == pytest.approx(0.2)


@pytest.mark.parametrize("waited, behind", [(0.5, 0.0), (0.001, 0.2)])
def test_a_wait_for_another_rank_makes_up_for_what_was_lost_and_a_lock_does_not(
    machine, waited, behind
):
    thread, device = ThreadClock(), Clock()
    operation(thread, machine, device, 0.1, 0.3)
    machine.wait(waited)
    thread.catch_up()
    assert thread.behind == pytest.approx(behind)


def test_a_queue_hides_a_little_python_and_no_more(machine):
    thread, device = ThreadClock(), Clock()
    operation(thread, machine, device, 0.1, 0.02)
    machine.work(0.002)
    operation(thread, machine, device, 0.1, 0.02)
    assert machine.wall == pytest.approx(100.2)
    machine.work(1.0)  # an import, say
    operation(thread, machine, device, 0.1, 0.02)
    assert machine.wall == pytest.approx(101.3, abs=clock.HIDDEN)
