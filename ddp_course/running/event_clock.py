"""When work ran on a device, not when it was queued: on a GPU every edge is a CUDA event, read once all are over.

Recording an event takes microseconds and waits for nothing, so the step keeps its pace and its overlap.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

Mark = tuple[torch.device, torch.cuda.Event]


def clock_of(device: torch.device) -> EventClock | HostClock:
    """The clock for what `device` does."""
    return EventClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """The clock of the CPU, where work is done when the call returns: a mark is seconds of `time.perf_counter`."""

    def now(self, device: torch.device | None = None) -> Any:
        """Return this moment."""
        return perf_counter()

    def finish(self) -> None:
        """Return at once: all that was marked is over."""

    def seconds(self, mark: Any) -> float:
        """Return the mark itself."""
        return mark


class EventClock(HostClock):
    """Marks moments on the current stream of the thread that asks, and tells later when they were."""

    def __init__(self, device: torch.device | None = None):
        self.beginnings: dict[torch.device, tuple[torch.cuda.Event, float]] = {}
        self.now(device)

    def now(self, device: torch.device | None = None) -> Mark:
        """Mark the end of all that the current stream of `device` (default: the thread's own) has been given."""
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        if device not in self.beginnings:
            torch.cuda.synchronize(device)  # the first event is to mark this very moment
            self.beginnings[device] = marked(device), perf_counter()
        return device, marked(device)

    def finish(self) -> None:
        """Wait until all that was marked is over."""
        for device in self.beginnings:
            torch.cuda.synchronize(device)

    def seconds(self, mark: Any) -> float:
        """The moment of a `Mark` in seconds of `time.perf_counter`; after `finish`."""
        if isinstance(mark, float):  # no stream did the work, but gloo: these are such seconds already
            return mark
        device, event = mark
        beginning, seconds = self.beginnings[device]
        return seconds + beginning.elapsed_time(event) / 1000


def marked(device: torch.device) -> torch.cuda.Event:
    """A new event, recorded on the current stream of `device`."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
