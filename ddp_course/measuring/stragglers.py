"""Which rank is slow? All wait for the slowest, so every rank's step takes the same time: look at what they compute."""

from dataclasses import dataclass
from statistics import median

from .timeline import BLOCKING, Span, laid_out


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
    return sum(span.seconds for span in laid_out(spans)[0] if span.lane == "compute" and span.name not in BLOCKING)


def stragglers(ranks: list[list[Span]], factor: float = 1.5) -> list[Straggler]:
    """Name the ranks that compute more than `factor` times as long as the median rank, the slowest first.

    `ranks`: the spans of the same steps for each rank, in rank order, as `timeline.recording` collects them.
    """
    seconds = [computing(spans) for spans in ranks]
    usual = median(
        sorted(seconds)[: max(1, len(seconds) - 1)]
    )  # The slowest is left out: of two ranks the faster counts.
    slow = [Straggler(rank, s, s / usual) for rank, s in enumerate(seconds) if usual > 0 and s > factor * usual]
    return sorted(slow, key=lambda straggler: -straggler.factor)
