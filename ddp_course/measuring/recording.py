"""What one rank did in each step of its training, and what the records of all ranks sum up to.

record = Recording()
train(model, record.stamped(batches), lr)
summarise(stage, reports)           one stage's entry in the comparison: the slowest and the busiest
                                    rank count
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from ..ladder import Stage
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
        self.began, self.spans, self.traffic = [], [], wire.Traffic()
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
        return [n for n in numbers if not self.on_gpu or n % 2 == drawn] or [numbers[-1]]

    def seconds(self, step: int) -> float:
        """How long a step took."""
        return self.began[step + 1] - self.began[step]


def summarise(stage: Stage, ranks: list[dict]) -> dict:
    """The entry of a stage in the results, from what each of its ranks reports; the slowest and the
    busiest count.

    Timeline and communication are those of a typical step: the one whose time is nearest to the
    median. The timeline has a lane for each device, in rank order, of [name, start, end, lane] in
    seconds from the first rank's start.
    """
    records = [rank["record"] for rank in ranks]
    timed, drawn = (
        {step: max(record.seconds(step) for record in records) for step in records[0].steps(drawn)}
        for drawn in (False, True)
    )
    median = statistics.median(drawn.values())
    typical = min(drawn, key=lambda step: abs(drawn[step] - median))
    first = min(record.began[typical] for record in records)
    lanes = [
        [[span.name, span.start - first, span.end - first, span.lane] for span in lane]
        for record in records
        for lane in timeline.laid_out(record.spans[typical])
    ]
    exposed = max(timeline.exposed(record.spans[typical]) for record in records)
    # On real devices nobody sees the copies between the threads of one process.
    seen = not stage.all_reduce or any(span[0] == "communication" for span in lanes[0])
    counted = [record.traffic for record in records] if stage.counted else []
    return {
        "stage": stage.key,
        "name": stage.name,
        "step_ms": 1000 * statistics.median(timed.values()),
        "communication_ms": 1000 * exposed if seen else None,
        "bytes_sent_max": max((traffic.bytes_sent for traffic in counted), default=None),
        "bytes_received_max": max((traffic.bytes_received for traffic in counted), default=None),
        "messages_max": max(
            (traffic.messages_sent + traffic.messages_received for traffic in counted), default=None
        ),
        "loss": [
            statistics.fmean(step) for step in zip(*(rank["loss"] for rank in ranks), strict=True)
        ],
        "max_abs_diff_vs_single": max(rank["difference"] for rank in ranks),
        "evaluation": ranks[0]["evaluation"],
        "timeline": lanes,
    }
