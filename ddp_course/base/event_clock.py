"""A clock that tells when work ran on a device, and not when it was queued.

On a GPU the beginning and the end of work are CUDA events, which are read once all are over. To
record an event takes microseconds and waits for nothing, so a step keeps its pace and its overlap.
"""

from typing import Any

import torch

from manyranks.clocks import now as perf_counter


class EventClock:
    """Marks moments in the work of `device`, and tells later when they were.

    On the CPU, where work is done when a call returns, a mark is a time in seconds of
    `time.perf_counter`. On a GPU a mark is a pair of a device and an event on the calling thread's
    current stream of that device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        # Each GPU has a first event, and the time of `time.perf_counter` at which it happened.
        self.first_events: dict[torch.device, tuple[torch.cuda.Event, float]] = {}
        self.now()

    def now(self, device: torch.device | None = None) -> Any:
        """Mark this moment.

        On a GPU, mark the end of all work queued so far on the current stream of `device`.
        """
        if self.device.type == "cpu":
            return perf_counter()
        device = device or self.device
        if device not in self.first_events:
            # The first event must mark this very moment.
            torch.cuda.synchronize(device)
            self.first_events[device] = event(device), perf_counter()
        return device, event(device)

    def finish(self) -> None:
        """Wait until all marked work is over."""
        for device in self.first_events:
            torch.cuda.synchronize(device)

    def seconds(self, mark: Any) -> float:
        """Return the moment of a mark in seconds of `time.perf_counter`.

        `finish` must have been called.
        """
        # A plain number marks work of the processor or of gloo.
        if isinstance(mark, float):
            return mark
        device, marked_event = mark
        first_event, seconds = self.first_events[device]
        milliseconds = first_event.elapsed_time(marked_event)
        return seconds + milliseconds / 1000


def event(device: torch.device) -> torch.cuda.Event:
    """Return a new event, recorded on the current stream of `device`."""
    new_event = torch.cuda.Event(enable_timing=True)
    new_event.record(torch.cuda.current_stream(device))
    return new_event
