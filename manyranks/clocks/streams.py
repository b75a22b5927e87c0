"""Streams of an emulated device: the host issues work and runs ahead until it must wait.

A stream is one number: the moment from which on it is free. Its work is booked one piece after the
other, and the host's clock stands still meanwhile. A collective begins when its stream is free on
each member, and whoever waits for it holds up a stream, not the host. `installed` puts these
classes into `torch.cpu`, where code for any device looks for them on a processor.

The host waits where it would for a GPU: for a value (`loss.item()`), for `synchronize`, in a
barrier. Streams do not compete for the device's rate nor for its memory's bandwidth.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import torch_inside
from . import clock, events, recording

process: Any = SimpleNamespace(
    default=None,  # the stream of work that names none; None where the host waits for all work
    every=[],  # all streams of this process
    stepping=False,  # whether an optimizer's step runs
)


class Event:
    """A moment of a stream, as of when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.moment = 0

    def record(self, stream: "Stream | None" = None) -> None:
        """Note when the stream will have done all the work that it has got so far."""
        chosen = stream or current()
        self.moment = chosen.start()

    def wait(self, stream: "Stream | None" = None) -> None:
        """Have a stream wait for this event."""
        (stream or current()).wait_event(self)

    def query(self) -> bool:
        """Return whether the moment has come for the host; a "no" takes 10 microseconds."""
        return clock.ask(self.moment <= clock.moment())

    def synchronize(self) -> None:
        """Have the host wait until this event's moment."""
        clock.own().advance(self.moment)  # type: ignore[union-attr]

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this event to a later one."""
        return (end_event.moment - self.moment) / 1e9


class Stream:
    """Work of the device that is done in the order in which it was issued."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.free_at = 0
        self.number = len(process.every)
        process.every.append(self)

    def start(self) -> int:
        """Return the moment at which work that the host issues now can begin."""
        return max(self.free_at, clock.moment())

    def reach(self, moment: int) -> None:
        """Let the stream be busy until `moment`."""
        self.free_at = max(self.free_at, moment)

    def wait_event(self, event: Event) -> None:
        """Begin nothing more before the event's moment."""
        self.reach(event.moment)

    def wait_stream(self, stream: "Stream") -> None:
        """Begin nothing more before another stream has done the work that it has got so far."""
        self.reach(stream.free_at)

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that is recorded now."""
        recorded = event or Event()
        recorded.record(self)
        return recorded

    def synchronize(self) -> None:
        """Have the host wait for the stream."""
        clock.own().advance(self.free_at)  # type: ignore[union-attr]

    def query(self) -> bool:
        """Return whether the stream has done all its work by now; a "no" takes 10 microseconds."""
        return clock.ask(self.free_at <= clock.moment())

    def __enter__(self):
        self.context = stream(self)
        self.context.__enter__()
        return self

    def __exit__(self, *exception):
        self.context.__exit__(*exception)


def are_on() -> bool:
    """Return whether this process's device has streams, and this thread a clock."""
    return process.default is not None and clock.own() is not None


def current(device: Any = None) -> Stream:
    """Return this thread's stream."""
    return clock.local.stream or process.default


@contextmanager
def stream(chosen: Stream | None) -> Iterator[Stream | None]:
    """Send this thread's work to the `chosen` stream within this block; None changes nothing."""
    before = clock.local.stream
    clock.local.stream = chosen or before
    try:
        yield chosen
    finally:
        clock.local.stream = before


def synchronize(device: Any = None) -> None:
    """Have the host wait for all streams."""
    if are_on():
        clock.own().advance(max(each.free_at for each in process.every))  # type: ignore[union-attr]


def wait_for_value() -> None:
    """Have the host wait for this thread's stream, since it asks for a value of a tensor.

    While an optimizer steps it does not: the counts of steps are tensors of the host.
    """
    if are_on() and not process.stepping:
        current().synchronize()


def at_its_start(act: Any, *args: Any) -> Any:
    """Return `act(…)`, which announces a message or a collective at the moment when it can begin.

    Where the device has streams, that is when this thread's stream is free.
    """
    if not are_on():
        return act(*args)
    own_clock: Any = clock.own()
    host = own_clock.moment
    own_clock.moment = current().start()
    try:
        return act(*args)
    finally:
        own_clock.moment = host


def end_of(ticket: events.Ticket) -> int:
    """Return when a message or a collective ends, and let this thread's stream wait for it.

    The host learns that moment, and its own clock stands still.
    """
    place = clock.own().place  # type: ignore[union-attr]
    place.stands = 1
    try:
        events.stand_until_booked(ticket)
    finally:
        place.stands = 0
    end: Any = ticket.end  # It is known now.
    events.drop(ticket)
    return end


def book(start: int, end: int) -> None:
    """Let this thread's stream compute from `start` to `end`."""
    chosen = current()
    chosen.reach(end)
    recording.note_operation(chosen.number, start, end)


# These stand for the names of `torch.cpu` and of `torch.cuda`.
FUNCTIONS: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "current_stream": current,
    "stream": stream,
    "StreamContext": stream,
    "synchronize": synchronize,
}


@contextmanager
def installed() -> Iterator[None]:
    """Give the device of this process streams, which `torch.cpu` hands out, within this block."""
    process.every.clear()
    process.default = Stream()
    with ExitStack() as stack:
        stack.enter_context(torch_inside.replaced(torch.cpu, **FUNCTIONS))
        # No operation of torch shows that these two methods are called.
        for name in ("tolist", "numpy"):
            stack.enter_context(torch_inside.around(torch.Tensor, name, after_waiting))
        before = register_optimizer_step_pre_hook(note_step(True))
        after = register_optimizer_step_post_hook(note_step(False))
        stack.callback(before.remove)
        stack.callback(after.remove)
        try:
            yield
        finally:
            process.default = None


def after_waiting(run: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `run(…)`, which takes values out of a tensor, once the host has waited for them."""
    wait_for_value()
    return run(*args, **kwargs)


def note_step(stepping: bool) -> Any:
    """Return a hook that notes whether an optimizer's step runs."""

    def hook(*_: Any) -> None:
        process.stepping = stepping

    return hook
