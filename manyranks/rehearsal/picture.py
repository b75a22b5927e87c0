"""A rehearsal's last step as a picture (SVG): what each rank does when.

A rank has a bar: it computes, or waits for what it sends, or for others. Below it is a thin one for
all that is sent, hidden or not.
"""

from collections.abc import Iterator
from html import escape

from . import spans
from .report import Report, duration

WIDTH = 900  # of the bars, in pixels
LEFT = 70
LANE = 34
MOST = 32  # More ranks would not be told apart: these are the first ones.
COLOURS = {
    "computing": "#0072B2",
    "sending that shows": "#D55E00",
    "waiting": "#DDDDDD",
    "all sending": "#C48400",
}


def picture(report: Report) -> str:
    """Return the text of an SVG file; of a script that makes no step it has only one line."""
    ranks = range(min(MOST, len(report.records)) if report.steps else 0)
    height = 80 + LANE * len(ranks)
    shapes = "\n".join([*head(report), *(shape for rank in ranks for shape in lane(report, rank))])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}"'
        f' font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{shapes}\n</svg>\n'
    )


def head(report: Report) -> Iterator[str]:
    """Yield the title and the legend."""
    yield f'<text x="8" y="20">{escape(report.line())}</text>'
    if not report.steps:
        return
    place = LEFT
    for name, colour in COLOURS.items():
        yield f'<rect x="{place}" y="34" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{place + 18}" y="45">{name}</text>'
        place += 170
    start, end = whole(report)
    took = duration((end - start) / 1e12)
    yield f'<text x="{LEFT + WIDTH}" y="45" text-anchor="end">{took}</text>'


def whole(report: Report) -> tuple[int, int]:
    """Return the moments between which some rank is in its last step."""
    windows = [report.window(rank, len(report.steps) - 1) for rank in range(len(report.records))]
    starts, ends = zip(*windows, strict=True)
    return min(starts), max(ends)


def lane(report: Report, rank: int) -> Iterator[str]:
    """Yield the bars of one rank."""
    top = 60 + LANE * rank
    start, end = report.window(rank, len(report.steps) - 1)
    record = report.records[rank]
    busy = spans.within(report.busy(record), start, end)
    sent = spans.within(report.sent(record), start, end)
    origin, last_end = whole(report)
    scale = WIDTH / (last_end - origin)
    yield f'<text x="8" y="{top + 15}">rank {rank}</text>'
    for name, place, height, pieces in (
        ("waiting", top, 20, [(start, end)]),
        ("sending that shows", top, 20, sent),
        ("computing", top, 20, busy),
        ("all sending", top + 22, 5, sent),
    ):
        for first, last in pieces:
            x = LEFT + scale * (first - origin)
            width = scale * (last - first)
            yield (
                f'<rect x="{x:.2f}" y="{place}" width="{width:.2f}" height="{height}"'
                f' fill="{COLOURS[name]}"/>'
            )
