"""What a rank was doing when: forward, backward, communication, waiting, update.

Nothing in the stages is written for this. While a recording runs, torch's own hooks report modules and
optimizers, `Tensor.backward` is wrapped, and the wire reports collectives.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from unittest.mock import patch

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..running import wire


@dataclass(frozen=True)
class Span:
    """`name` is forward, backward, communication, wait or update; times in seconds of `time.perf_counter`.

    `lane` is "compute" for the thread that trains and "network" for a communication thread beside it. A wait lies
    inside a backward pass: the part of the communication that the pass could not hide.
    """

    name: str
    start: float
    end: float
    lane: str = "compute"

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start


@contextmanager
def recording() -> Iterator[list[Span]]:
    """Record the spans of this process, from the calling thread and from communication: `with recording() as spans`.

    On CUDA every edge of a span waits for the device, so that the span holds the work and not only its launch;
    that slows the step down, and the overlap it shows is a lower bound.
    """
    spans: list[Span] = []
    with ExitStack() as stack:
        for hook in _module_hooks(spans) + _optimizer_hooks(spans):
            stack.callback(hook.remove)
        stack.enter_context(patch.object(torch.Tensor, "backward", _timed_backward(spans)))
        stack.enter_context(wire.observing(_communication(spans)))
        yield spans


def exposed(spans: list[Span]) -> float:
    """Seconds of communication that were not hidden behind compute in one step.

    Communication in the training thread counts whole, and so do waits. Where something else waits (torch's DDP
    waits in C++), the rest of the backward pass after the last bucket was launched stands in for it.
    """
    communication = [span for span in spans if span.name == "communication"]
    blocking = [span for span in spans if span.name == "wait"] + [s for s in communication if s.lane == "compute"]
    if blocking:
        return sum(span.seconds for span in blocking)
    backward = [span for span in spans if span.name == "backward"]
    if not communication or not backward:
        return 0.0
    return max(0.0, backward[-1].end - max(span.start for span in communication))


def hidden_share(spans: list[Span]) -> float:
    """Share (0 to 1) of the communication time during which the backward pass was computing."""
    communication = [span for span in spans if span.name == "communication"]
    total = sum(span.seconds for span in communication)
    computing_until = max((span.end for span in spans if span.name == "backward"), default=0.0) - exposed(spans)
    computing_from = min((span.start for span in spans if span.name == "backward"), default=0.0)
    hidden = sum(max(0.0, min(s.end, computing_until) - max(s.start, computing_from)) for s in communication)
    return hidden / total if total else 0.0


def _now():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()


def _module_hooks(spans):
    """Time the outermost module call of this thread; the modules inside it, and in other threads, are part of it."""
    me, depth, started = threading.get_ident(), [0], [0.0]

    def before(module, inputs):
        if threading.get_ident() == me:
            depth[0] += 1
            if depth[0] == 1:
                started[0] = _now()

    def after(module, inputs, outputs):
        if threading.get_ident() == me:
            depth[0] -= 1
            if depth[0] == 0:
                spans.append(Span("forward", started[0], _now()))

    return [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]


def _optimizer_hooks(spans):
    started = [0.0]

    def before(optimizer, args, kwargs):
        started[0] = _now()

    def after(optimizer, args, kwargs):
        spans.append(Span("update", started[0], _now()))

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def _timed_backward(spans):
    original = torch.Tensor.backward

    def backward(self, *args, **kwargs):
        start = _now()
        try:
            return original(self, *args, **kwargs)
        finally:
            spans.append(Span("backward", start, _now()))

    return backward


def _communication(spans):
    here = threading.current_thread().name

    def observe(event):
        if event.kind == "span":
            name = "wait" if event.name == "wait" else "communication"
            spans.append(Span(name, event.start, event.end, "compute" if event.thread == here else "network"))

    return observe
