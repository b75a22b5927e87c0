"""What one rank did in each step of its training.

record = Recording()
train(model, record.stamped(batches), lr)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from ..running import clocks, wire
from ..running.devices import Emulation, full_speed, rank_device
from . import timeline

# The first steps are not timed: caches fill, connections open, and DDP lays out its buckets.
WARM_UP = 2
# So many are timed on an emulated device, where all take the same; the others run without it.
TIMED = 10


class Recording:
    """When each step of one rank's training began, the spans of each, and the traffic of the last
    one.

    On a GPU spans are recorded in every second step, and the other steps are timed: recording
    events takes time, too.
    """

    def __init__(self):
        self.began = []
        self.spans = []
        self.traffic = wire.Traffic()
        self.zero = 0.0  # All times of this rank's clock count from this moment.
        self.on_gpu = rank_device().type == "cuda"

    def stamped(self, batches: Iterable) -> Iterator:
        """Yield the batches, noting when each was asked for, and when the last step was over."""
        self.began.append(clocks.now())
        for number, batch in enumerate(batches):
            if Emulation.current is not None and number >= WARM_UP + TIMED:
                full_speed()
                yield batch
                continue
            drawn = not self.on_gpu or number % 2 == 1
            step: AbstractContextManager[list] = timeline.recording() if drawn else nullcontext([])
            with wire.counting() as self.traffic, step as spans:
                yield batch
            self.spans.append(spans)
            self.began.append(clocks.now())

    def steps(self, drawn: bool) -> list[int]:
        """Numbers of the steps after the warm-up, at least the last; on a GPU only those that are
        `drawn`, or timed.
        """
        numbers = range(min(WARM_UP, len(self.spans) - 1), len(self.spans))
        if self.on_gpu:
            return [number for number in numbers if number % 2 == drawn] or [numbers[-1]]
        return list(numbers)

    def seconds(self, step: int) -> float:
        """How long a step took."""
        return timeline.between(self.began[step], self.began[step + 1])
