"""The course's drawings: a star, a ring, and which layer is in which bucket."""

import math
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from matplotlib.patches import Circle, FancyArrowPatch
from torch import nn

from .plots import SPAN_COLOURS, STAGE_COLOURS, Picture, name_rows, panels

RANK_COLOURS = [  # White letters can be read on each.
    "#0072B2",
    "#9A6A00",
    "#007F5C",
    "#A63F86",
    "#5D3FA8",
    "#BF5200",
    "#6E6E6E",
    "#1A1A1A",
]
CENTRE: Any = {"ha": "center", "va": "center"}
APART: Any = {"shrinkA": 22, "shrinkB": 22}  # An arrow begins and ends at the edge of a node.


@contextmanager
def _blank(width, height, seen, message, title="", **limits):
    """A figure without axes whose units are equally long in both directions, from and to the
    `limits`.
    """
    with panels(1, 1, width, height, message, seen) as (picture, axes):
        yield picture, axes
        axes.set_axis_off()
        axes.set(aspect="equal", **limits)
        axes.set_title(title, loc="center")


def _places(count, radius):
    """`count` points on a circle, the first at the top, clockwise."""
    angles = [math.pi / 2 - 2 * math.pi * i / count for i in range(count)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]


def _node(axes, place, label, colour, radius=0.24):
    axes.add_patch(Circle(place, radius, facecolor=colour, edgecolor="white", zorder=3))
    axes.text(*place, label, color="white", fontsize=9.5, fontweight="bold", zorder=4, **CENTRE)


def _arrow(axes, start, end, colour="#444444", bend=0.0, **look):
    shape: Any = {
        "arrowstyle": "-|>",
        "mutation_scale": 13,
        "linewidth": 1.6,
        "shrinkA": 0,
        "shrinkB": 0,
    } | look
    axes.add_patch(
        FancyArrowPatch(start, end, color=colour, connectionstyle=f"arc3,rad={bend}", **shape)
    )


def star(world_size: int = 4) -> Picture:
    """The parameter server: every arrow passes through the server's one link."""
    others = world_size - 1
    s = "s" if world_size > 2 else ""
    message = f"through the server's link: {others} gradient{s} in, {others} average{s} out"
    seen = "A star: rank 0 in the middle, all others around it"
    title = "The star: gradients in, averages out"
    with _blank(4.2, 3.6, seen, message, title, xlim=(-1.7, 1.7), ylim=(-1.45, 1.6)) as (
        picture,
        axes,
    ):
        _node(axes, (0, 0), "0\nserver", STAGE_COLOURS["3"], 0.3)
        for rank, place in enumerate(_places(others, 1.25), 1):
            _node(axes, place, str(rank), "#5F5F5F")
            _arrow(axes, place, (0, 0), STAGE_COLOURS["3"], 0.16, **APART)
            _arrow(axes, (0, 0), place, "#808080", 0.16, **APART)
    return picture


def ring(world_size: int = 4) -> Picture:
    """The ring: every rank sends to its right neighbour only, all at the same time."""
    message = f"{world_size} links, all busy at the same time, each with one message"
    seen = f"A ring of {world_size} ranks, an arrow from each to the next"
    title = "The ring: each rank sends to its right"
    with _blank(4.2, 3.6, seen, message, title, xlim=(-1.7, 1.7), ylim=(-1.5, 1.55)) as (
        picture,
        axes,
    ):
        places = _places(world_size, 1.15)
        for rank, place in enumerate(places):
            _node(axes, place, str(rank), STAGE_COLOURS["4"])
            _arrow(axes, place, places[(rank + 1) % world_size], bend=-0.2, **APART)
    return picture


def buckets(model: nn.Module, bucket_cap_mb: float) -> Picture:
    """Which gradient travels in which bucket: one bar per parameter, in the order in which backward
    reaches them.
    """
    from ..stage5_bucketed import assign_buckets

    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = assign_buckets([p for p in model.parameters() if p.requires_grad], bucket_cap_mb)
    labels = [names[parameter] for group in groups for parameter in group]
    message = f"cap {bucket_cap_mb:g} MiB: {len(groups)} buckets, {len(labels)} parameters"
    with panels(1, 1, 7.2, 1.3 + 0.22 * len(labels), message, "A bar a parameter") as (
        picture,
        axes,
    ):
        row = 0
        for position, group in enumerate(groups):
            colour = RANK_COLOURS[position % len(RANK_COLOURS)]
            sizes = [parameter.nbytes / 1024 for parameter in group]
            axes.barh(range(row, row + len(group)), sizes, color=colour, height=0.75)
            row += len(group)
            axes.text(
                0.99,
                row - len(group) / 2 - 0.5,
                f"bucket {position}: {sum(sizes):,.0f} KiB",
                color="black",
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="center",
            )
            axes.axhline(row - 0.5, color="#BBBBBB", linewidth=0.8)
        name_rows(axes, labels)
        axes.set_xlim(right=axes.get_xlim()[1] * 1.35)
        axes.set(xlabel="gradient (KiB)", title=f"Backward goes from the top down: {message}")
    return picture


def ring_states(world_size: int) -> list[Any]:
    """What each rank's chunks hold after every step: a list of `states[rank][chunk]`, the ranks
    added up so far.

    The states follow the schedule of `reduce_scatter` and `allgather`; that of step 0 is before the
    first message.
    """
    states = [[[frozenset([rank])] * world_size for rank in range(world_size)]]
    for _, sent in ring_schedule(world_size):
        states.append([list(chunks) for chunks in states[-1]])
        for rank, chunk in enumerate(sent):
            states[-1][(rank + 1) % world_size][chunk] |= states[-2][rank][chunk]
    return states


def ring_schedule(world_size: int) -> list[tuple[str, list[int]]]:
    """The 2(K-1) steps as (phase, the chunk that each rank sends)."""
    schedule = []
    for phase, first in (("reduce-scatter", 0), ("allgather", 1)):
        for step in range(world_size - 1):
            sent = [(rank + first - step) % world_size for rank in range(world_size)]
            schedule.append((phase, sent))
    return schedule


def ring_step(world_size: int = 4, step: int = 0) -> Picture:
    """The chunked ring after `step` of 2(K-1) steps, or the last; the arrows are the messages of
    the next step.
    """
    schedule = ring_schedule(world_size)
    step = min(step, len(schedule))
    state = ring_states(world_size)[step]
    done = sum(len(chunk) == world_size for chunks in state for chunk in chunks)
    last = step == len(schedule)
    message = f"after step {step} of {len(schedule)}: {done} of {world_size**2} chunks complete"
    following = "all ranks have all sums" if last else f"next: {schedule[step][0]}"
    title = f"Step {step} of {len(schedule)}, {done} chunks complete; {following}"
    return _chunks(
        state,
        [] if last else schedule[step][1],
        message,
        title,
        [f"chunk {n}" for n in range(world_size)],
    )


def whole_ring_step(world_size: int = 4, step: int = 0) -> Picture:
    """The whole-gradient ring after `step` of K-1 steps: which gradients each rank has added up."""
    message = (
        f"after step {step} of {world_size - 1}: each rank has added {step + 1} of {world_size}"
        " gradients"
    )
    state = []
    for rank in range(world_size):
        added = {(rank - back) % world_size for back in range(step + 1)}
        state.append([added])
    sent = [0] * world_size if step < world_size - 1 else []
    return _chunks(
        state, sent, message, f"Whole gradients, step {step} of {world_size - 1}", ["gradient"]
    )


def _chunks(state, sent, message, title, labels):
    """Columns are ranks, rows chunks, stripes the ranks summed up; an arrow starts at the chunk
    that a rank sends.

    The arrow of the last rank leaves on the right and comes in on the left.
    """
    world_size = len(state)
    height = 0.62 * len(labels) + 1.4
    width = max(5.6, 1.7 * world_size + 0.6)
    with panels(1, 1, width, height, message, "A grid of ranks and chunks") as (picture, axes):
        axes.set_axis_off()
        for rank, chunks in enumerate(state):
            axes.text(1.7 * rank + 0.6, -0.55, f"rank {rank}", ha="center", fontweight="bold")
            for chunk, contributors in enumerate(chunks):
                _chunk(axes, 1.7 * rank, chunk, contributors, world_size)
        for chunk, label in enumerate(labels):
            axes.text(-0.42, chunk + 0.36, label, ha="right", va="center", fontsize=9)
        for rank, chunk in enumerate(sent):
            y = chunk + 0.36
            start = 1.7 * rank + 1.2
            _arrow(axes, (start, y), (start + 0.5, y), "#222222", linewidth=1.8)
            if rank == world_size - 1:
                _arrow(axes, (-0.36, y), (0, y), "#222222", linewidth=1.8)
        axes.set_title(title, loc="center")
        axes.set(xlim=(-1.5, 1.7 * world_size + 0.3), ylim=(len(labels) + 0.1, -1.0))
    return picture


def _chunk(axes, x, y, contributors, world_size):
    """One chunk of one rank: a stripe for every rank whose gradient is in it."""
    width = 1.2 / world_size
    for rank in range(world_size):
        colour = RANK_COLOURS[rank] if rank in contributors else "#F2F2F2"
        axes.barh(
            y,
            width,
            0.72,
            x + rank * width,
            align="edge",
            color=colour,
            edgecolor="white",
            linewidth=0.8,
        )
        if rank in contributors:
            centre = (x + (rank + 0.5) * width, y + 0.37)
            axes.text(*centre, str(rank), color="white", fontsize=9, **CENTRE)
    if len(contributors) == world_size:
        axes.barh(y, 1.2, 0.72, x, align="edge", fill=False, edgecolor="black", linewidth=2)


PASSES = {  # Each pass of a pipeline has a colour.
    "F": SPAN_COLOURS["forward"],
    "B": SPAN_COLOURS["backward"],
    "W": "#5B8C5A",
}


def schedules(timetables: dict[str, Sequence[Any]]) -> Picture:
    """Timetables of pipelines one below the other, on one axis of time; a rank's second stage is
    an outline.

    `timetables`: {title: rows of (instruction, start, end) from `stage8_pipeline.timetable`}, one
    row per rank.
    """
    last = max(end for rows in timetables.values() for row in rows for _, _, end in row)
    titles = [f"{title}; idle {100 * idle(rows):.0f} %" for title, rows in timetables.items()]
    height = 0.4 + sum(0.75 + 0.4 * len(rows) for rows in timetables.values())
    form: Any = {
        "squeeze": False,
        "sharex": True,
        "height_ratios": [len(rows) + 1 for rows in timetables.values()],
    }
    message = ". ".join(titles)
    with panels(len(timetables), 1, 9.4, height, message, "A timetable", "derived", **form) as (
        picture,
        panels_,
    ):
        for axes, rows, title in zip(panels_[:, 0], timetables.values(), titles, strict=True):
            for rank, row in enumerate(rows):
                for span in row:
                    _pass(axes, rank, len(rows), span, last)
            name_rows(axes, [f"rank {rank}" for rank in range(len(rows))])
            axes.set(xlim=(0, last), title=title)
        panels_[-1, 0].set_xlabel("time (forward passes of a micro-batch)")
    return picture


def idle(rows: Sequence[Any]) -> float:
    """The share (0 to 1) of the time of a timetable in which a rank idles, on average."""
    busy = sum(end - start for row in rows for _, start, end in row)
    return 1 - busy / (len(rows) * max(end for row in rows for _, _, end in row))


def _pass(axes, rank, ranks, span, last):
    instruction, start, end = span
    letter = instruction.letter
    colour = PASSES[letter]
    second = instruction.stage >= ranks
    look = {"facecolors": colour, "edgecolor": "white"}
    if second:
        look = {"facecolors": "white", "edgecolor": colour}
    axes.broken_barh([(start, end - start)], (rank - 0.4, 0.8), **look)
    size = min(9, 330 * (end - start) / last)  # A label of three letters fits at this size.
    if size >= 5:
        shade = "black" if letter == "F" or second else "white"
        axes.text(
            (start + end) / 2,
            rank,
            f"{letter}{instruction.microbatch}",
            fontsize=size,
            color=shade,
            **CENTRE,
        )
