"""Which rank is slow? All wait for the slowest, so every rank's step takes the same time: look at what they compute."""

from dataclasses import dataclass
from statistics import median

from .timeline import Span


@dataclass(frozen=True)
class Straggler:
    """A rank that computes `seconds` in a step, `factor` times as long as the median rank."""

    rank: int
    seconds: float
    factor: float

    def __str__(self):
        return f"rank {self.rank} computes {1000 * self.seconds:.1f} ms, {self.factor:.1f} times the median rank's time"


def computing(spans: list[Span]) -> float:
    """Seconds of forward, backward and update in one rank's spans, less the waiting and communicating inside them."""
    busy = [span for span in spans if span.name in ("forward", "backward", "update") and span.lane == "compute"]
    idle = [span for span in spans if span.name in ("wait", "communication") and span.lane == "compute"]
    overlap = sum(max(0.0, min(b.end, i.end) - max(b.start, i.start)) for b in busy for i in idle)
    return sum(span.seconds for span in busy) - overlap


def stragglers(ranks: list[list[Span]], factor: float = 1.5) -> list[Straggler]:
    """Name the ranks that compute more than `factor` times as long as the median rank, the slowest first.

    `ranks`: the spans of the same steps for each rank, in rank order, as `timeline.recording` collects them.
    """
    seconds = [computing(spans) for spans in ranks]
    usual = median(sorted(seconds)[: max(1, len(seconds) - 1)])  # of the others: with two ranks, of the faster one
    slow = [Straggler(rank, s, s / usual) for rank, s in enumerate(seconds) if usual > 0 and s > factor * usual]
    return sorted(slow, key=lambda one: -one.factor)
