"""What one rank did in each step of its training, and what all ranks' reports sum up to.

record = Recording()
train(model, record.stamped(batches), lr)
record.report()                     seconds, waits, traffic and timeline of this rank's steps
summed_up(stage, reports)           one stage's entry in the comparison: the slowest and the busiest rank count
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

from ..ladder import Stage
from ..running import wire
from ..running.devices import rank_device
from ..running.devices.clock import ThreadClock
from . import timeline

WARM_UP = 2  # steps in which caches fill, connections open and DDP lays its buckets out; they are not timed


class Recording:
    """Spans and traffic of one rank's training, and when each step began.

    On a GPU spans are recorded in every second step, and the others are timed: events take time, too.
    """

    def __init__(self):
        self.began, self.queued, self.spans, self.traffic = [], [], [], wire.Traffic()
        self.on_gpu, self.in_line = rank_device().type == "cuda", ThreadClock().in_line

    def stamped(self, batches: Iterable) -> Iterator:
        """Yield the batches, noting when each was asked for, and when the last step was over."""
        self.note()
        for number, batch in enumerate(batches, 1):
            drawn = not self.on_gpu or number % 2 == 0
            step: AbstractContextManager[list] = timeline.recording() if drawn else nullcontext([])
            with wire.counting() as self.traffic, step as spans:
                yield batch
            self.spans.append(spans)
            self.note()

    def note(self) -> None:
        """Note when a step begins, and for how long this thread has waited for a processor so far."""
        self.began.append(time.perf_counter())
        self.queued.append(self.in_line())

    def report(self) -> dict:
        """Seconds of each step; exposed communication and timeline of those recorded; the traffic of the last one.

        "queued": the share of a step for which this rank waited for a processor that others used; the median.
        """
        steps = list(pairwise(self.began))
        numbers = range(min(WARM_UP, len(steps) - 1), len(steps))
        drawn = [n for n in numbers if not self.on_gpu or n % 2 == 1] or numbers[-1:]
        timed = [n for n in numbers if not self.on_gpu or n % 2 == 0] or numbers[-1:]
        seconds = [end - start for start, end in steps]
        return {
            "queued": statistics.median((self.queued[n + 1] - self.queued[n]) / seconds[n] for n in numbers),
            "step_s": [seconds[n] for n in timed],
            "drawn_s": [seconds[n] for n in drawn],
            "exposed_s": [timeline.exposed(self.spans[n]) for n in drawn],
            "traffic": {
                "bytes_sent_max": self.traffic.bytes_sent,
                "bytes_received_max": self.traffic.bytes_received,
                "messages_max": self.traffic.messages_sent + self.traffic.messages_received,
            },
            "began_s": [self.began[n] for n in drawn],
            "timelines": [timeline.laid_out(self.spans[n]) for n in drawn],
        }


def summed_up(stage: Stage, ranks: list[dict]) -> dict:
    """The entry of a stage in the results, from what each of its ranks reports; the slowest and the busiest count.

    Timeline and communication are those of a typical step: the one whose time is nearest to the median. The timeline
    has a lane for each device, in rank order.
    """
    measured, drawn = (
        [max(step) for step in zip(*(r[key] for r in ranks), strict=True)] for key in ("step_s", "drawn_s")
    )
    median = statistics.median(drawn)
    typical = min(range(len(drawn)), key=lambda step: abs(drawn[step] - median))
    exposed = max(rank["exposed_s"][typical] for rank in ranks)
    first = min(rank["began_s"][typical] for rank in ranks)
    lanes = [  # Each is a list of [name, start, end, lane], in seconds from the first rank's start.
        [[span.name, span.start - first, span.end - first, span.lane] for span in lane]
        for rank in ranks
        for lane in rank["timelines"][typical]
    ]
    # The copies between the threads of one process are timed on emulated devices only.
    timed = not stage.all_reduce or any(span[0] == "communication" for span in lanes[0])
    traffic = [rank["traffic"] for rank in ranks]
    busiest = {key: max(counts[key] for counts in traffic) if stage.counted else None for key in traffic[0]}
    return {
        "stage": stage.key,
        "name": stage.name,
        "step_ms": 1000 * statistics.median(measured),
        "communication_ms": 1000 * exposed if timed else None,
        "queued": max(rank["queued"] for rank in ranks),
        **busiest,
        "loss": [statistics.fmean(step) for step in zip(*(rank["loss"] for rank in ranks), strict=True)],
        "max_abs_diff_vs_single": max(rank["difference"] for rank in ranks),
        "evaluation": ranks[0]["evaluation"],
        "timeline": lanes,
    }
