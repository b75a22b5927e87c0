"""Reads what a GPU did from a trace of torch's profiler: the course's own, or yours.

The course's own trace is of rank 0 of ResNet-50 under torch's DDP on two A100s, three steps.
Source: facebookresearch/HolisticTraceAnalysis, MIT licence, tests/data/nccl_parser_config.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .timeline import Span

TWO_A100S = Path(__file__).with_name("facts") / "resnet50_ddp_2xa100_rank0.json.gz"


class Reduced(NamedTuple):
    """An all-reduce of a trace, and how many numbers it sums."""

    span: Span
    numbers: int


@dataclass(frozen=True)
class Step:
    """One step of one rank, with times in seconds since it began on the processor.

    `gpu` has a span for each kernel, those of NCCL in the lane "network". `processor` has the
    passes as the processor's threads ran them. `reduced` has each all-reduce.
    """

    gpu: list[Span]
    processor: list[Span]
    reduced: list[Reduced]
    seconds: float

    def seconds_in(self, lane: str) -> float:
        """Return the seconds of all kernels of a lane: "compute" or "network"."""
        return sum(span.seconds for span in self.gpu if span.lane == lane)


def read(path: str | Path | None = None) -> list[Step]:
    """Return the steps of a trace, `.json` or `.json.gz`; without a path, of the two A100s.

    `torch.profiler.profile` with both activities, CPU and CUDA, and `export_chrome_trace` make such
    a file. Steps end where the profiler's `step()` was called; without these calls, all is one
    step. Raises ValueError if the trace has no kernel.
    """
    file = Path(path or TWO_A100S)
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    events = [event for event in json.loads(content)["traceEvents"] if event.get("ph") == "X"]
    if not any(event.get("cat") == "kernel" for event in events):
        raise ValueError(
            f"{file.name} has no kernels: profile on a GPU, with"
            " activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    steps = [event for event in events if _is(event, "user_annotation", "ProfilerStep#")]
    if steps:
        return [_step(events, event["ts"], _end(event)) for event in steps]
    begin = min(event["ts"] for event in events)
    return [_step(events, begin, max(map(_end, events)))]


def _step(events, begin, end):
    """Return the step of all that the processor began between `begin` and `end`.

    Both are in microseconds. The kernels that it launched may run after `end`.
    """
    events = [event for event in events if begin <= event["ts"]]
    processor = []
    launches = {}  # when the processor launched each kernel, by the number that both events have
    for event in events:
        if event["ts"] >= end:
            continue
        name = _pass_of(event)
        if name:
            processor.append(_span(event, name, begin))
        args = event.get("args", {})
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in args:
            launches[args["correlation"]] = (event["ts"] - begin) / 1e6
    gpu = []
    reduced = []
    for event in sorted(events, key=lambda event: event["ts"]):
        args = event.get("args", {})
        launch = launches.get(args.get("correlation"))
        if event.get("cat") != "kernel" or launch is None:
            continue
        if "nccl" in event["name"].lower():
            gpu.append(_span(event, "communication", begin, "network"))
            if args.get("Collective name") == "allreduce":
                reduced.append(Reduced(gpu[-1], args["In msg nelems"]))
        else:
            # A kernel belongs to the pass that launched it, or to the forward pass.
            names = [span.name for span in processor if span.start <= launch < span.end]
            name = names[0] if names else "forward"
            gpu.append(_span(event, name, begin))
    return Step(gpu, processor, reduced, (end - begin) / 1e6)


def _pass_of(event: dict[str, Any]) -> str:
    """Return the pass to which an event of the processor belongs, or ""."""
    if _is(event, "cpu_op", "autograd::engine::evaluate_function"):
        return "backward"
    if _is(event, "user_annotation", "Optimizer.step"):
        return "update"
    annotated = event.get("cat") == "user_annotation" and event["name"].endswith(".forward")
    return "forward" if annotated else ""


def _is(event: dict[str, Any], category: str, beginning: str) -> bool:
    """Return whether an event is of this category, and its name has this beginning."""
    return event.get("cat") == category and event["name"].startswith(beginning)


def _end(event):
    return event["ts"] + event["dur"]


def _span(event, name, begin, lane="compute"):
    """Return the span of an event, in seconds from `begin`."""
    start = (event["ts"] - begin) / 1e6
    return Span(name, start, start + event["dur"] / 1e6, lane)
