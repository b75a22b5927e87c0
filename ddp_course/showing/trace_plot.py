"""A step of a recorded GPU, drawn: what its processor and its two streams did."""

from pathlib import Path

from ..measuring import traces
from ..measuring.on_your_gpus import find_size, profile_step
from ..measuring.timeline import hidden_share
from ..running.devices.placement import usable_gpus
from ..running.launching.launch import launch
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
        f" {len(recorded.reduced)} all-reduces take {sending:.0f} ms, on a stream of their own,"
        f" {100 * hidden_share(recorded.gpu):.0f} % of it hidden under the backward pass"
    )
    description = "A timeline of processor and GPU, and a part of it enlarged"
    with panels(2, 1, 8.4, 4.4, message, description, "measured", message) as (picture, axes):
        for axis in axes:
            for row, spans in enumerate((recorded.processor, recorded.gpu)):
                draw_lane(axis, row, spans)
            name_rows(axis, ["processor", "GPU"])
        for number, (span, count) in enumerate(recorded.reduced):
            height = 1.62 + 0.25 * (number % 3)  # Numbers side by side do not cover each other.
            axes[0].annotate(f"{count:,}", (1000 * span.start, height), fontsize=9)
        middle = 500 * recorded.seconds
        if recorded.reduced:
            first, _ = recorded.reduced[0]
            middle = 1000 * first.start
        axes[0].set(xlim=(0, 1000 * recorded.seconds), ylim=(2.2, -0.6))
        axes[1].set(xlim=(middle - BEFORE_MS, middle + AFTER_MS), xlabel="time (ms)")
        name_spans(picture, [recorded.gpu], loc="outside lower center")
    return picture


def own_trace(file: str = "my_trace.json") -> Picture | None:
    """Record a step of stage 6 on this machine's GPUs into `file`, and draw rank 0's; without GPUs
    say so.
    """
    gpus = usable_gpus()
    if not gpus:
        print("No GPU that CUDA can use is here, so there is no trace to record.")
        return None
    [(size, _)] = launch(find_size, gpus, world_size=1)
    launch(profile_step, size, file, world_size=gpus)
    return trace(file)
