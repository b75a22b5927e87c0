"""Draws schedules: the chunks of a ring, and the timetables of pipelines."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from matplotlib.patches import Patch

from .plots import SPAN_COLOURS, Picture, name_rows, panels

# White letters can be read on each of these colours.
RANK_COLOURS = [
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


def ring_states(world_size: int) -> list[Any]:
    """Return the state of all chunks after every step, beginning before the first message.

    Each state is a list of lists: `state[rank][chunk]` is the set of ranks whose numbers have been
    added up. The states follow the schedule of `reduce_scatter` and `allgather`.
    """
    state = [[frozenset([rank])] * world_size for rank in range(world_size)]
    states = [state]
    for _, sent_chunks in ring_schedule(world_size):
        before = state
        state = [list(chunks) for chunks in before]
        for rank, chunk in enumerate(sent_chunks):
            state[(rank + 1) % world_size][chunk] |= before[rank][chunk]
        states.append(state)
    return states


def ring_schedule(world_size: int) -> list[tuple[str, list[int]]]:
    """Return the 2(K-1) steps as pairs: the phase, and the chunk that each rank sends."""
    schedule = []
    # First a rank sends the chunk of its own number. When the allgather begins, it has the whole
    # sum of the chunk after that.
    for phase, first in (("reduce-scatter", 0), ("allgather", 1)):
        for step in range(world_size - 1):
            sent_chunks = [(rank + first - step) % world_size for rank in range(world_size)]
            schedule.append((phase, sent_chunks))
    return schedule


def ring_step(world_size: int = 4, step: int = 0) -> Picture:
    """Return a drawing of the chunked ring after `step` of 2(K-1) steps, or after the last.

    Columns are ranks, rows are chunks, and stripes are the ranks that are summed up. Arrows are the
    messages of the next step, and start at the chunk that a rank sends; that of the last rank
    leaves on the right and comes in on the left.
    """
    schedule = ring_schedule(world_size)
    step = min(step, len(schedule))
    state = ring_states(world_size)[step]
    complete = sum(len(summed) == world_size for chunks in state for summed in chunks)
    progress = f"{complete} of {world_size**2} chunks complete"
    outlook = "all ranks have all sums"
    sent_chunks = []
    if step < len(schedule):
        phase, sent_chunks = schedule[step]
        outlook = f"next: {phase}"
    message = f"Step {step} of {len(schedule)}, {progress}; {outlook}"
    height = 0.62 * world_size + 1.4
    width = max(5.6, 1.7 * world_size + 0.6)
    with panels(1, 1, width, height, message, "A grid of ranks and chunks") as (picture, axes):
        axes.set_axis_off()
        # A chunk is 1.2 wide and 0.72 high; ranks are 1.7 apart, and chunks 1.
        for rank, chunks in enumerate(state):
            axes.text(1.7 * rank + 0.6, -0.55, f"rank {rank}", ha="center", fontweight="bold")
            # There are as many chunks as ranks.
            axes.text(-0.42, rank + 0.36, f"chunk {rank}", ha="right", va="center", fontsize=9)
            for chunk, contributors in enumerate(chunks):
                _chunk(axes, 1.7 * rank, chunk, contributors, world_size)
        for rank, chunk in enumerate(sent_chunks):
            start = 1.7 * rank + 1.2
            _arrow(axes, start, start + 0.5, chunk + 0.36)
            if rank == world_size - 1:
                _arrow(axes, -0.36, 0, chunk + 0.36)
        axes.set_title(message, loc="center")
        axes.set(xlim=(-1.5, 1.7 * world_size + 0.3), ylim=(world_size + 0.1, -1.0))
    return picture


def _arrow(axes, start, end, y):
    line = {"arrowstyle": "-|>", "color": "#222222", "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(end, y), xytext=(start, y), arrowprops=line)


def _chunk(axes, x, y, contributors, world_size):
    """Draw one chunk of one rank: a stripe for every rank whose gradient is in it."""
    width = 1.2 / world_size
    for rank in range(world_size):
        left = x + rank * width
        colour = RANK_COLOURS[rank] if rank in contributors else "#F2F2F2"
        axes.barh(
            y,
            width,
            height=0.72,
            left=left,
            align="edge",
            color=colour,
            edgecolor="white",
            linewidth=0.8,
        )
        if rank in contributors:
            axes.text(left + width / 2, y + 0.37, str(rank), color="white", fontsize=9, **CENTRE)
    if len(contributors) == world_size:
        axes.barh(y, 1.2, 0.72, left=x, align="edge", fill=False, edgecolor="black", linewidth=2)


# Each pass of a pipeline has a colour.
PASSES = {
    "F": SPAN_COLOURS["forward"],
    "B": SPAN_COLOURS["backward"],
    "W": "#5B8C5A",
}
PASS_NAMES = {"F": "forward", "B": "backward", "W": "the weights' gradients"}


def schedules(timetables: dict[str, Sequence[Any]]) -> Picture:
    """Return a drawing of timetables of pipelines, one below the other, on one axis of time.

    `timetables` are {title: rows of (instruction, start, end) from `stage8_pipeline.timetable`},
    one row per rank. The passes of a rank's second stage are outlines.
    """
    longest = max(duration(rows) for rows in timetables.values())
    titles = [f"{title}; idle {100 * idle(rows):.0f} %" for title, rows in timetables.items()]
    height = 0.7 + sum(0.75 + 0.4 * len(rows) for rows in timetables.values())
    ratios = [len(rows) + 1 for rows in timetables.values()]
    with panels(
        len(timetables),
        1,
        9.4,
        height,
        message=". ".join(titles),
        description="A timetable",
        kind="derived",
        sharex=True,
        height_ratios=ratios,
    ) as (picture, _):
        for axes, rows, title in zip(picture.axes, timetables.values(), titles, strict=True):
            for rank, row in enumerate(rows):
                for span in row:
                    _pass(axes, rank, len(rows), span, longest)
            name_rows(axes, [f"rank {rank}" for rank in range(len(rows))])
            axes.set(xlim=(0, longest), title=title)
        axes.set_xlabel("time (forward passes of a micro-batch)")
        _name_passes(picture, timetables.values())
    return picture


def _name_passes(picture, timetables):
    """Add a legend of the letters in a figure of timetables, and of its outlines."""
    letters = set()
    has_outlines = False
    for rows in timetables:
        for instruction, _, _ in chain.from_iterable(rows):
            letters.add(instruction.letter)
            has_outlines |= instruction.stage >= len(rows)
    shown = [letter for letter in PASSES if letter in letters]
    handles = [Patch(color=PASSES[letter]) for letter in shown]
    names = [f"{letter}: {PASS_NAMES[letter]}" for letter in shown]
    if has_outlines:
        handles.append(Patch(facecolor="white", edgecolor=PASSES["B"]))
        names.append("outlined: a rank's second stage")
    picture.legend(handles, names, ncols=4, handlelength=1.2, loc="outside lower center")


def duration(rows: Sequence[Any]) -> float:
    """Return when the last pass of a timetable ends."""
    return max(end for row in rows for _, _, end in row)


def idle(rows: Sequence[Any]) -> float:
    """Return the share (0 to 1) of a timetable in which a rank idles, on average."""
    busy = sum(end - start for row in rows for _, start, end in row)
    return 1 - busy / (len(rows) * duration(rows))


def _pass(axes, rank, ranks, span, longest):
    """Draw a pass, with its letter and its micro-batch where they can be read."""
    instruction, start, end = span
    letter = instruction.letter
    colour = PASSES[letter]
    is_outline = instruction.stage >= ranks
    face = "white" if is_outline else colour
    edge = colour if is_outline else "white"
    bar = [(start, end - start)]
    axes.broken_barh(bar, (rank - 0.4, 0.8), facecolors=face, edgecolor=edge)
    # A label of three letters fits at this size.
    size = min(9, 330 * (end - start) / longest)
    if size >= 5.5:
        letters = "black" if letter == "F" or is_outline else "white"
        name = f"{letter}{instruction.microbatch}"
        axes.text((start + end) / 2, rank, name, fontsize=size, color=letters, **CENTRE)
