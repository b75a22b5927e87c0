"""Traces of torch's profiler are read by steps: a published one, and small ones made here."""

import gzip
import json
import statistics
from itertools import pairwise

import pytest
import torch

from ddp_course import stage5_bucketed
from ddp_course.lab import show, simulate, traces


def test_the_two_a100s_reduce_the_buckets_of_stage_5():
    sizes = [numbers for numbers, _ in simulate.resnets.layers("resnet50")]
    parameters = [torch.empty(size, device="meta") for size in sizes]
    buckets = stage5_bucketed.assign_buckets(parameters)
    ours = [sum(map(torch.Tensor.numel, bucket)) for bucket in buckets]
    steps = traces.read()
    assert len(steps) == 3
    for step in steps:
        assert [reduced.numbers for reduced in step.reduced] == ours
        assert 1000 * step.seconds_in("compute") == pytest.approx(38.5, abs=0.3)
        assert 1000 * step.seconds == pytest.approx(222, abs=3)


def test_what_the_lessons_say_of_the_second_step():
    """Lessons 05, 06 and 11 say this in words."""
    step = traces.read()[1]
    kernels = [span for span in step.gpu if span.lane == "compute"]
    assert len(kernels) == 893
    assert 1e6 * statistics.median(span.seconds for span in kernels) == pytest.approx(16, abs=0.5)
    gaps = [after.start - before.end for before, after in pairwise(kernels)]
    assert 1e6 * statistics.median(gaps) == pytest.approx(105, abs=0.5)
    all_reduces = [reduced.span for reduced in step.reduced]
    beside = []
    for each in all_reduces:
        together = [span for span in kernels if span.start < each.end and each.start < span.end]
        beside.append(len(together))
    assert beside == [14, 17, 15, 11, 0]
    assert all(2 < 1000 * each.seconds < 2.7 for each in all_reduces)
    assert all_reduces[-1].start > max(
        span.end for span in step.processor if span.name == "backward"
    )


def event(category, name, start, duration, **more):
    args = {"args": more} if more else {}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, **args}


def write_trace(path, steps=True):
    """Write a trace of two steps, of 100 us each, and return its path.

    The second step's first kernel runs late, and one of the first step runs in its time.
    """
    sent = {"Collective name": "allreduce", "In msg nelems": 12}
    events = [
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 1040, 30),
        event("user_annotation", "Optimizer.step#SGD.step", 1080, 10),
        event("cuda_runtime", "cudaLaunchKernel", 1010, 1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 1050, 1, correlation=2),
        event("cuda_driver", "cuLaunchKernelEx", 1060, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 1085, 1, correlation=4),
        event("cuda_runtime", "cudaLaunchKernel", 1110, 1, correlation=5),
        event("kernel", "gemm", 1020, 10, correlation=1),
        event("kernel", "gemm", 1060, 20, correlation=2),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32", 1070, 40, correlation=3, **sent),
        event("kernel", "sgd", 1105, 5, correlation=4),
        event("kernel", "gemm", 1120, 5, correlation=5),
        {"ph": "M", "name": "process_name"},
    ]
    if steps:
        events.append(event("user_annotation", "ProfilerStep#7", 1000, 100))
        events.append(event("user_annotation", "ProfilerStep#8", 1100, 100))
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_trace_of_ones_own_is_read_by_the_step_that_launched_a_kernel(tmp_path):
    first, second = traces.read(write_trace(tmp_path / "mine.json"))
    names = [(span.name, span.lane) for span in first.gpu]
    assert names == [
        ("forward", "compute"),
        ("backward", "compute"),
        ("communication", "network"),
        ("update", "compute"),
    ]
    (reduced,) = first.reduced
    assert reduced.numbers == 12
    assert reduced.span.start == pytest.approx(70e-6)
    assert [span.name for span in first.processor] == ["backward", "update"]
    assert len(second.gpu) == 1
    assert second.seconds_in("compute") == pytest.approx(5e-6)


def test_without_marks_of_steps_the_whole_trace_is_one(tmp_path):
    path = write_trace(tmp_path / "mine.json", steps=False)
    (tmp_path / "mine.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    [step] = traces.read(tmp_path / "mine.json.gz")
    assert len(step.gpu) == 5


def test_a_trace_without_a_gpu_is_refused(tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"traceEvents": [event("cpu_op", "aten::add", 1, 2)]}))
    with pytest.raises(ValueError, match="profile on a GPU"):
        traces.read(path)


def test_the_figure_says_how_long_the_gpu_computes(tmp_path):
    assert show.trace(step=1).message.startswith("The GPU computes for 38 of 220 ms; 5 all-reduces")
    figure = show.trace(write_trace(tmp_path / "mine.json"), step=1)
    assert "0 all-reduces" in figure.message
    assert figure.png()
