"""What one rank did in each step of its training, and what all ranks' reports sum up to.

with recording() as record:
    train(model, record.stamped(batches), lr)
record.report()                     seconds, waits, traffic and timeline of this rank's steps
summed_up(stage, reports)           one stage's entry in the comparison: the slowest and the busiest rank count
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise

from ..ladder import Stage
from ..running import wire
from ..running.devices import rank_device
from ..running.devices.clock import ThreadClock
from . import timeline

WARM_UP = 2  # steps in which caches fill, connections open and DDP lays its buckets out; they are not timed


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what this rank does in each step: `with recording() as record: train(model, record.stamped(batches))`."""
    record = Recording()
    record.on_gpu = rank_device().type == "cuda"
    whole: AbstractContextManager[list] = nullcontext([]) if record.on_gpu else timeline.recording()
    with whole as record.spans:
        with wire.observing(lambda event: record.traffic[-1].add(event)):
            yield record


class Recording:
    """Spans and traffic of one rank's training, and when each step began.

    On a GPU spans are recorded in every second step, and the others are timed: events take time, too.
    """

    def __init__(self):
        self.spans, self.began, self.traffic, self.on_gpu = [], [], [wire.Traffic()], False
        self.in_line, self.queued = ThreadClock().in_line, []

    def stamped(self, batches: Iterable) -> Iterator:
        """Yield the batches, noting when each was asked for, and when the last step was over."""
        self.note()
        for number, batch in enumerate(batches, 1):
            self.traffic.append(wire.Traffic())
            drawn = self.on_gpu and number % 2 == 0
            step: AbstractContextManager[list] = timeline.recording() if drawn else nullcontext([])
            with step as spans:
                yield batch
            self.spans += spans
            self.note()
        self.traffic.append(wire.Traffic())  # What comes after the last step is counted apart.

    def note(self) -> None:
        """Note when a step begins, and for how long this thread has waited for a processor so far."""
        self.began.append(time.perf_counter())
        self.queued.append(self.in_line())

    def report(self) -> dict:
        """Seconds of each step; exposed communication and timeline of those recorded; the traffic of the last one.

        "queued": the share of a step for which this rank waited for a processor that others used; the median.
        """
        steps = list(pairwise(self.began))
        traffic = self.traffic[len(steps)]
        numbers = range(min(WARM_UP, len(steps) - 1), len(steps))
        drawn = [steps[n] for n in numbers if not self.on_gpu or n % 2 == 1] or steps[-1:]
        timed = [steps[n] for n in numbers if not self.on_gpu or n % 2 == 0] or steps[-1:]
        by_step = [[span for span in self.spans if start <= span.start < end] for start, end in drawn]
        shares = [(self.queued[n + 1] - self.queued[n]) / (steps[n][1] - steps[n][0]) for n in numbers]
        return {
            "queued": statistics.median(shares),
            "step_s": [end - start for start, end in timed],
            "drawn_s": [end - start for start, end in drawn],
            "exposed_s": [timeline.exposed(inside) for inside in by_step],
            "traffic": {
                "bytes_sent_max": traffic.bytes_sent,
                "bytes_received_max": traffic.bytes_received,
                "messages_max": traffic.messages_sent + traffic.messages_received,
            },
            "began_s": [begin for begin, _ in drawn],
            "timelines": [timeline.laid_out(inside) for inside in by_step],
        }


def as_lists(lane: Iterable[timeline.Span], begin: float) -> list[list]:
    """Spans as [name, start, end, lane], ready for JSON, in seconds from `begin`."""
    return [[span.name, span.start - begin, span.end - begin, span.lane] for span in lane]


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
    lanes = [as_lists(lane, first) for rank in ranks for lane in rank["timelines"][typical]]
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
