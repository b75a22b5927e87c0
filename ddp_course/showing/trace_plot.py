"""A step of a recorded GPU, drawn: what its processor and its two streams did."""

from pathlib import Path

from ..measuring import traces
from .plots import Picture, draw_lane, name_rows, name_spans, panels

BEFORE_MS = 4.0  # The lower panel shows so much of the step before the first all-reduce begins,
AFTER_MS = 3.0  # and so much after that.


def trace(path: str | Path | None = None, step: int = 0) -> Picture:
    """Draw a step of a trace of torch's profiler: the two A100s of the course, or the file at
    `path`.

    Above the whole step with the numbers in each all-reduce, below a few milliseconds of it. The
    upper half of the GPU's row is the stream that computes, the lower half NCCL's. ValueError as
    for `traces.read`.
    """
    recorded = traces.read(path)[step]
    computing, sending = (1000 * recorded.seconds_in(lane) for lane in ("compute", "network"))
    message = (
        f"The GPU computes for {computing:.0f} of {1000 * recorded.seconds:.0f} ms;"
        f" {len(recorded.reduced)} all-reduces take {sending:.0f} ms, on a stream of their own"
    )
    seen = "A timeline of processor and GPU, and a part of it enlarged"
    with panels(2, 1, 8.4, 4.4, message, seen, "measured", message) as (picture, axes):
        for axis in axes:
            for row, spans in enumerate((recorded.processor, recorded.gpu)):
                lane = [[span.name, span.start, span.end, span.lane] for span in spans]
                draw_lane(axis, row, lane)
            name_rows(axis, ["processor", "GPU"])
        for number, (span, count) in enumerate(recorded.reduced):
            place = (1000 * span.start, 1.62 + 0.25 * (number % 3))
            axes[0].annotate(f"{count:,}", place, fontsize=9)
        middle = 500 * recorded.seconds
        if recorded.reduced:
            first, _ = recorded.reduced[0]
            middle = 1000 * first.start
        axes[0].set(xlim=(0, 1000 * recorded.seconds), ylim=(2.2, -0.6))
        axes[1].set_xlim(middle - BEFORE_MS, middle + AFTER_MS)
        axes[1].set_xlabel("time (ms)")
        name_spans(picture, [lane])
    return picture
