"""Records what one rank does in each step of its training.

record = Recording()
train(model, record.stamped(batches), lr)
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from manyranks import clocks
from manyranks.devices import Emulation, full_speed, rank_device

from ... import wire
from . import timeline

# The first steps are not timed: caches fill, connections open, and DDP lays out its buckets.
WARM_UP = 2
# On an emulated device so many steps are timed, as all take the same; the others run without it.
TIMED = 10


class Recording:
    """The beginnings and spans of a rank's training steps, and the traffic of the last one.

    On a GPU spans are recorded in every second step, and the other steps are timed: to record
    events takes time, too.
    """

    def __init__(self):
        self.began = []
        self.spans = []
        self.traffic = wire.Traffic()
        self.zero = 0.0  # the moment from which all times of this rank's clock count
        self.on_gpu = rank_device().type == "cuda"

    def stamped(self, batches: Iterable) -> Iterator:
        """Yield the batches, and note when each was asked for, and when the last step was over."""
        self.began.append(clocks.now())
        for number, batch in enumerate(batches):
            if Emulation.current is not None and number >= WARM_UP + TIMED:
                full_speed()
                yield batch
                continue
            context: AbstractContextManager[list] = nullcontext([])
            if not self.on_gpu or number % 2 == 1:
                context = timeline.recording()
            with wire.counting() as self.traffic, context as spans:
                yield batch
            self.spans.append(spans)
            self.began.append(clocks.now())

    def steps(self, with_spans: bool) -> list[int]:
        """Return the numbers of the steps after the warm-up, at least the last.

        On a GPU these are only the steps with spans, or only those that are timed.
        """
        last = len(self.spans) - 1
        numbers = list(range(min(WARM_UP, last), last + 1))
        if self.on_gpu:
            # On a GPU steps with an odd number have spans, and the others are timed.
            return [step for step in numbers if (step % 2 == 1) == with_spans] or [last]
        return numbers

    def seconds(self, step: int) -> float:
        """Return how many seconds a step took."""
        return timeline.between(self.began[step], self.began[step + 1])
