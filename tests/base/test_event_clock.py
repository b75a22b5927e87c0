"""What is recorded on a GPU is when work ran, not when it was queued.

Here it is a GPU that only counts.
"""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ddp_course import launch, variants, wire
from ddp_course.lab.measuring import recording, timeline
from ddp_course.stage6_ddp import DistributedDataParallel
from manyranks.devices import rank_device

UNIT = 0.001  # seconds, and the milliseconds of CUDA events


class Counter:
    """A GPU with one stream: work is queued at once, and takes the time that it says."""

    def __init__(self):
        self.done = 0.0
        self.waited = 0
        self.caught_up = 0.0
        self.at = lambda: self.done

    def work(self, seconds):
        """Queue work."""
        self.done += seconds

    def synchronize(self, device=None):
        """Wait for everything."""
        self.waited += 1
        time.sleep((self.done - self.caught_up) * UNIT)
        self.caught_up = self.done

    def event(self, enable_timing):
        """Return a CUDA event."""
        assert enable_timing
        made = SimpleNamespace()
        made.record = lambda stream: setattr(made, "moment", stream())
        made.elapsed_time = lambda other: other.moment - made.moment
        return made


@pytest.fixture
def gpu(monkeypatch):
    """Such a GPU in place of CUDA."""
    counter = Counter()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: counter.at)
    monkeypatch.setattr(torch.cuda, "synchronize", counter.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", counter.event)
    monkeypatch.setattr(recording, "rank_device", lambda: torch.device("cuda", 0))
    return counter


class Working(torch.nn.Module):
    """A layer whose forward pass takes the GPU 2 ms, and its backward pass 4."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.weight.register_hook(lambda gradient: gpu.work(4))

    def forward(self, inputs):
        self.gpu.work(2)
        return inputs * self.weight


def train(gpu, batches, told):
    """Take steps of 2 ms forward and 4 ms backward.

    Communication starts in them and goes on for 1 ms more.
    """
    model = Working(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in batches:
        loss = model(inputs).sum()
        began = wire.now()
        loss.backward()
        wire.tell("span", "all_reduce", began, thread="communication")
        with wire.span("wait"):
            gpu.work(1)
        told.append(gpu.waited)
        with torch.no_grad():
            optimizer.step()


def test_spans_hold_the_work_and_nothing_waits_for_it(gpu):
    told = []
    with timeline.recording() as spans:
        train(gpu, [torch.ones(3)], told)
        before = gpu.waited
    assert wire.card.clock.device.type == "cpu", "nothing of the recording stays"
    lengths = {span.name: round(span.seconds / UNIT, 6) for span in spans}
    assert lengths == {"forward": 2, "backward": 4, "communication": 4, "wait": 1, "update": 0}
    # A rank waits for its GPU once at the beginning of the step, and once at its end.
    assert before == 1
    assert gpu.waited == 2
    starts = {span.name: span.start for span in spans}
    assert starts["backward"] - starts["forward"] == pytest.approx(2 * UNIT)
    assert starts["wait"] - starts["communication"] == pytest.approx(4 * UNIT)


def test_steps_are_timed_where_nothing_is_recorded(gpu):
    told = []
    record = recording.Recording()
    train(gpu, record.stamped([torch.ones(3)] * 6), told)
    # Steps 2, 4 and 6 are timed: the rank waits for the GPU at both ends of each.
    assert [later - sooner for sooner, later in pairwise(told)] == [1, 1, 1, 1, 1]
    assert record.steps(with_spans=False) == [2, 4]
    assert record.steps(with_spans=True) == [3, 5]
    for step in (3, 5):
        assert {span.name for span in record.spans[step]} >= {"forward", "backward", "wait"}


def test_what_gloo_does_ends_on_the_processor_and_what_nccl_does_on_the_gpu(gpu, monkeypatch):
    # The GPU works for an hour each time, and nobody waits for it.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hour = 3600 / UNIT
    with timeline.recording() as spans:
        for nccl in (False, True):
            monkeypatch.setattr(wire, "on_nccl", lambda tensor, group=None, nccl=nccl: nccl)
            began = wire.now()
            gpu.work(hour)
            wire.ended("all_reduce", began, torch.ones(1))
    by_gloo, by_nccl = (span.seconds / UNIT for span in spans)
    assert by_nccl == pytest.approx(hour)
    assert by_gloo < hour / 2


def test_the_sums_of_torchs_own_class_are_recorded(gpu, monkeypatch):
    def all_reduce(flat, async_op):
        gpu.work(2)
        future = torch.futures.Future()
        future.set_result([flat])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(wire, "on_nccl", lambda tensor, group=None: True)
    with timeline.recording() as spans:
        variants.observed_all_reduce(None, SimpleNamespace(buffer=lambda: torch.ones(3)))
    assert [span.seconds / UNIT for span in spans] == [pytest.approx(2)]


def kernels_and_spans():
    """On each rank, return a step of stage 6 as torch.profiler and as we see it, in seconds."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(2048, 2048), torch.nn.Tanh())]
    parallel = DistributedDataParallel(torch.nn.Sequential(*layers).to(rank_device()))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    inputs = torch.randn(4096, 2048, device=rank_device())
    for _ in range(4):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler, timeline.recording() as spans:
            parallel(inputs).square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA  # the profiler has the processor's calls to CUDA, too
    kernels = [
        e
        for e in profiler.profiler.kineto_results.events()
        if e.device_type() == on_gpu and e.duration_ns()
    ]
    sums = [event.duration_ns() / 1e9 for event in kernels if "nccl" in event.name().lower()]
    begin = min(e.start_ns() for e in kernels)
    end = max(e.start_ns() + e.duration_ns() for e in kernels)
    return (end - begin) / 1e9, sums, spans


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_lasts_as_long_as_for_torchs_profiler():
    for seconds, _, spans in launch(kernels_and_spans, world_size=1, device="cuda"):
        lasted = max(span.end for span in spans) - min(span.start for span in spans)
        assert lasted == pytest.approx(seconds, rel=0.05)


@pytest.mark.cuda
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="ranks share one GPU, and gloo carries their sums"
)
def test_communication_lasts_as_long_as_for_torchs_profiler():
    for _, sums, spans in launch(kernels_and_spans, world_size=2, device="cuda"):
        lasted = [span.seconds for span in spans if span.name == "communication"]
        assert sum(lasted) == pytest.approx(sum(sums), rel=0.05)
