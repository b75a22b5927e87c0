"""Records when a rank was in a forward pass, a backward pass, communication, a wait, an update.

Nothing in the stages is written for this. While a recording runs, calls of modules and
`torch.autograd.backward` are wrapped, torch's own hooks report optimizers, and the wire reports
collectives.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from manyranks.devices import device_number
from manyranks.torch_inside import around

from ... import wire
from ...base.event_clock import EventClock

# During spans of these names in its compute lane a device computes nothing.
BLOCKING = ("communication", "wait")
# Where spans of one device overlap, the one whose name comes first here counts.
ON_TOP = (*BLOCKING, "update", "backward", "forward")


class Span(NamedTuple):
    """A time in which a rank did one thing, in seconds of `time.perf_counter`.

    `name` is "forward", "backward", "communication", "wait" or "update". `lane` is "compute" for a
    thread that trains, and "network" for a communication thread beside it. A wait is inside a
    backward pass: it is the communication that the pass could not hide. `device` is the number of
    the device in this process: 0, except in stage 2, whose threads drive several.
    """

    name: str
    start: float
    end: float
    lane: str = "compute"
    device: int = 0

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return self.end - self.start


def between(start: float, end: float) -> float:
    """Return the seconds from one moment to another, rounded to virtual time's unit, picoseconds.

    Otherwise the last bits of a step would depend on the moment at which it began.
    """
    return round(end - start, 12)


@contextmanager
def recording() -> Iterator[list[Span]]:
    """Record the spans of all threads of this process: `with recording() as spans`.

    On CUDA a span begins and ends with events, which are read when the recording ends: they say
    when work ran, not when it was queued.
    """
    recorder = Recorder()
    on_gpu = torch.cuda.is_initialized()
    clock = EventClock(
        torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    )
    with ExitStack() as stack:
        stack.enter_context(around(torch.nn.Module, "__call__", recorder.forward))
        stack.enter_context(around(torch.autograd, "backward", recorder.backward))
        stack.callback(register_optimizer_step_pre_hook(recorder.before_update).remove)
        stack.callback(register_optimizer_step_post_hook(recorder.after_update).remove)
        stack.enter_context(wire.observing(recorder.communication, clock))
        yield recorder.spans
    clock.finish()
    spans = [
        span._replace(start=clock.seconds(span.start), end=clock.seconds(span.end))
        for span in recorder.spans
    ]
    recorder.spans[:] = spans


class Recorder:
    """Notes the `spans` of a process; the thread that makes the recorder drives device 0."""

    def __init__(self):
        self.spans = []
        self.thread = threading.current_thread()
        self.inside = threading.local()

    @contextmanager
    def span(self, name: str, tensor: Any) -> Iterator[None]:
        """Note a span for this block, on the device of `tensor`, or on device 0 without one."""
        gpu = tensor.device if tensor is not None and tensor.is_cuda else None
        on_first = tensor is None or threading.current_thread() is self.thread
        number = 0 if on_first else device_number(tensor)
        start = wire.now(gpu)
        try:
            yield
        finally:
            self.spans.append(Span(name, start, wire.now(gpu), device=number))

    def forward(self, run: Callable, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Note the outermost call of a module in each thread; it includes those inside it."""
        if getattr(self.inside, "a_call", False):
            return run(module, *args, **kwargs)
        self.inside.a_call = True
        try:
            with self.span("forward", next(module.parameters(), None)):
                return run(module, *args, **kwargs)
        finally:
            self.inside.a_call = False

    def backward(self, run: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, and note it."""
        outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        with self.span("backward", outputs[0]):
            run(outputs, *args, **kwargs)

    def before_update(self, *_: Any) -> None:
        """Remember when an optimizer begins."""
        self.update_start = wire.now()

    def after_update(self, *_: Any) -> None:
        """Note that an optimizer has made its update."""
        self.spans.append(Span("update", self.update_start, wire.now()))

    def communication(self, event: wire.Event) -> None:
        """Note a collective, or that this thread waited for one."""
        if event.kind == "span":
            name = "wait" if event.name == "wait" else "communication"
            lane = "compute" if event.thread == self.thread.name else "network"
            self.spans.append(Span(name, event.start, event.end, lane))


def by_step(spans: list[Span]) -> list[list[Span]]:
    """Return the spans of each step of a recording; a step ends with its update."""
    ends = [span.end for span in spans if span.name == "update"]
    steps = []
    for begin, end in pairwise([float("-inf"), *ends]):
        steps.append([span for span in spans if begin <= span.start < end])
    return steps


def laid_out(spans: Iterable[Span]) -> list[list[Span]]:
    """Return the spans of one step as lanes to draw, one per device, without overlaps.

    Where spans of a device overlap, communication counts before waiting, and both before the pass
    around them. Waits are added that no hook notes: torch's DDP waits in C++, from the moment when
    its last gradient is done and its last bucket leaves; and in stage 2 the master waits while its
    own device is done and another is not.
    """
    spans_of = defaultdict(list)
    for span in _with_waits(list(spans)):
        spans_of[span.device].append(span)
    devices = range(max(spans_of, default=0) + 1)
    master, *others = [_without_overlap(spans_of[device]) for device in devices]
    return [_with_masters_waits(master, others), *others]


def exposed(spans: Iterable[Span]) -> float:
    """Return the seconds of communication that compute did not hide in one step.

    Communication in the training thread counts in full, and so do waits. If there are several
    devices, only the first counts.
    """
    return sum(
        between(span.start, span.end)
        for span in laid_out(spans)[0]
        if span.lane == "compute" and span.name in BLOCKING
    )


def _with_masters_waits(master, others):
    """Return the spans of stage 2's master, with waits in gaps in which another device works."""
    spans_of_others = [span for spans in others for span in spans]
    waits = []
    for before, after in pairwise(master):
        gap = Span("wait", before.end, after.start)
        busy = any(span.start < gap.end and gap.start < span.end for span in spans_of_others)
        if gap.seconds > 0 and busy:
            waits.append(gap)
    if not waits:
        return master
    return sorted([*master, *waits], key=lambda span: span.start)


def _with_waits(spans):
    """Return the spans, with the wait at the end of a backward pass if it was not recorded."""
    passes = [span for span in spans if span.name == "backward" and span.device == 0]
    messages = [span for span in spans if span.name == "communication" and span.lane == "network"]
    # In virtual time autograd waits for a future just before the reducer's own wait, which then
    # takes no time.
    has_wait = any(
        span.name in BLOCKING and span.lane == "compute" and span.seconds > 0 for span in spans
    )
    if has_wait or not passes or not messages:
        return spans
    last_departure = max(span.start for span in messages)
    end = passes[-1].end
    if not passes[-1].start < last_departure < end:
        return spans
    return [*spans, Span("wait", last_departure, end)]


def _without_overlap(spans):
    """Return the spans of one device, without overlap in its compute lane.

    Spans of that lane are cut where another one counts; those of the network are unchanged.
    """
    computing = [span for span in spans if span.lane == "compute"]
    pieces = []
    edges = {edge for span in computing for edge in (span.start, span.end)}
    for start, end in pairwise(sorted(edges)):
        covering = [span for span in computing if span.start <= start and end <= span.end]
        if not covering:
            continue
        top = min(covering, key=lambda span: ON_TOP.index(span.name))
        if pieces and pieces[-1].name == top.name and pieces[-1].end == start:
            pieces[-1] = pieces[-1]._replace(end=end)
        else:
            pieces.append(top._replace(start=start, end=end))
    return pieces + [span for span in spans if span.lane == "network"]


def hidden_share(spans: list[Span]) -> float:
    """Return the share (0 to 1) of communication during which the backward pass was computing."""
    passes = [span for span in spans if span.name == "backward"]
    communication = [span for span in spans if span.name == "communication"]
    total = sum(span.seconds for span in communication)
    if not passes or not total:
        return 0.0
    begin = min(span.start for span in passes)
    # The communication that is not hidden is at the end of the pass, as a wait inside of it.
    end = max(span.end for span in passes) - exposed(spans)
    hidden = 0.0
    for span in communication:
        hidden += max(0.0, min(span.end, end) - max(span.start, begin))
    return hidden / total
