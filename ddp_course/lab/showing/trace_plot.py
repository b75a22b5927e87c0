"""Draws a recorded step of a GPU: what the processor and the GPU's two streams did."""

from pathlib import Path

from manyranks.devices.placement import usable_gpus
from manyranks.launching.launch import launch

from ..measuring import traces
from ..measuring.on_your_gpus import find_size, profile_step
from ..measuring.timeline import hidden_share
from .plots import Picture, draw_lane, name_rows, name_spans, panels

# The lower panel shows so much of the step, before and after the first all-reduce begins.
BEFORE_MS = 4.0
AFTER_MS = 3.0


def trace(path: str | Path | None = None, step: int = 0) -> Picture:
    """Return a drawing of a step of a trace: of the two A100s, or from the file at `path`.

    The upper panel has the whole step, with the count of numbers in each all-reduce; the lower one
    a few milliseconds of it. The upper half of the GPU's row is the stream that computes, and the
    lower half is NCCL's. Raises the ValueError of `traces.read`.
    """
    recorded = traces.read(path)[step]
    step_ms = 1000 * recorded.seconds
    computing_ms = 1000 * recorded.seconds_in("compute")
    sending_ms = 1000 * recorded.seconds_in("network")
    hidden_percent = 100 * hidden_share(recorded.gpu)
    message = (
        f"The GPU computes for {computing_ms:.0f} of {step_ms:.0f} ms;"
        f" {len(recorded.reduced)} all-reduces take {sending_ms:.0f} ms, on a stream of their own,"
        f" {hidden_percent:.0f} % of it hidden under the backward pass"
    )
    description = "A timeline of processor and GPU, and a part of it enlarged"
    with panels(2, 1, 8.4, 4.4, message, description, "measured") as (picture, (whole, part)):
        for axes in (whole, part):
            draw_lane(axes, 0, recorded.processor)
            draw_lane(axes, 1, recorded.gpu)
            name_rows(axes, ["processor", "GPU"])
        for number, reduced in enumerate(recorded.reduced):
            # Three heights in turn: numbers side by side do not cover each other.
            height = 1.62 + 0.25 * (number % 3)
            place = (1000 * reduced.span.start, height)
            whole.annotate(f"{reduced.numbers:,}", place, fontsize=9)
        # Without an all-reduce the lower panel shows the middle of the step.
        shown_ms = step_ms / 2
        if recorded.reduced:
            shown_ms = 1000 * recorded.reduced[0].span.start
        whole.set(xlim=(0, step_ms), ylim=(2.2, -0.6))
        whole.set_xlabel("numbers: elements in each all-reduce", fontsize=9)
        part.set(xlim=(shown_ms - BEFORE_MS, shown_ms + AFTER_MS), xlabel="time (ms)")
        name_spans(picture, [recorded.processor, recorded.gpu], loc="outside lower center")
    return picture


def own_trace(file: str = "my_trace.json") -> Picture | None:
    """Record a step of stage 6 on this machine's GPUs into `file`, and draw rank 0's.

    Without GPUs print that there is nothing to record, and return None.
    """
    gpus = usable_gpus()
    if not gpus:
        print("No GPU that CUDA can use is here, so there is no trace to record.")
        return None
    [(size, _)] = launch(find_size, gpus, world_size=1)
    launch(profile_step, size, file, world_size=gpus)
    return trace(file)
