"""Sets of moments: sorted lists of spans (start, end) that do not touch each other."""

from collections.abc import Iterable

Spans = list[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return the moments that are in any of these spans."""
    joined: Spans = []
    for start, end in sorted(spans):
        if start == end:
            continue
        if joined:
            first, last = joined[-1]
            if start <= last:
                joined[-1] = (first, max(last, end))
                continue
        joined.append((start, end))
    return joined


def within(spans: Spans, start: int, end: int) -> Spans:
    """Return the part of a set that lies between two moments."""
    cut = [(max(first, start), min(last, end)) for first, last in spans]
    return [(first, last) for first, last in cut if first < last]


def length(spans: Spans) -> int:
    """Return how long a set is."""
    return sum(end - start for start, end in spans)


def outside(spans: Spans, others: Spans) -> int:
    """Return how long the part of a set is that lies outside of another set."""
    return length(union([*spans, *others])) - length(others)
