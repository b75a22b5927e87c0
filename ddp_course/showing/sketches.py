"""The course's drawings: a star, a ring, what DataParallel does with a batch, and which layer is in which bucket."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import nn

from .plots import SPAN_COLOURS, STAGE_COLOURS, Picture, panels, style

RANK_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#F0E442"]


def _blank(width, height, seen, message):
    picture, axes = panels(width=width, height=height, seen=seen, message=message)
    axes.set_axis_off()
    axes.set_aspect("equal")
    return picture, axes


def _places(count, radius=1.0):
    """`count` points on a circle, the first at the top, clockwise."""
    angles = [math.pi / 2 - 2 * math.pi * i / count for i in range(count)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]


def _node(axes, place, label, colour, radius=0.24):
    axes.add_patch(Circle(place, radius, facecolor=colour, edgecolor="white", zorder=3))
    axes.text(*place, label, ha="center", va="center", color="white", fontsize=9.5, fontweight="bold", zorder=4)


def _arrow(axes, start, end, colour="#444444", bend=0.0, shrink=22):
    options = {"arrowstyle": "-|>", "mutation_scale": 13, "linewidth": 1.6, "color": colour}
    rounded = f"arc3,rad={bend}"
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=rounded, shrinkA=shrink, shrinkB=shrink, **options))


def star(world_size: int = 4) -> Picture:
    """The parameter server: every arrow passes through the server's one link."""
    others, s = world_size - 1, "s" if world_size > 2 else ""
    message = f"through the server's link: {others} gradient{s} in, {others} average{s} out"
    around = f"{others} ranks around it" if s else "one beside it"
    picture, axes = _blank(4.2, 3.6, f"A star: rank 0 in the middle, {around}", message)
    with style():
        _node(axes, (0, 0), "0\nserver", STAGE_COLOURS["3"], 0.3)
        for rank, place in enumerate(_places(world_size - 1, 1.25), 1):
            _node(axes, place, str(rank), "#5F5F5F")
            _arrow(axes, place, (0, 0), STAGE_COLOURS["3"], 0.16)
            _arrow(axes, (0, 0), place, "#999999", 0.16)
        axes.set(xlim=(-1.7, 1.7), ylim=(-1.45, 1.6))
        axes.set_title("The star: gradients in, averages out", loc="center")
    return picture


def ring(world_size: int = 4) -> Picture:
    """The ring: every rank sends to its right neighbour only, all at the same time."""
    message = f"{world_size} links, all busy at the same time, each with one message"
    picture, axes = _blank(4.2, 3.6, f"A ring of {world_size} ranks, an arrow from each to the next", message)
    places = _places(world_size, 1.15)
    with style():
        for rank, place in enumerate(places):
            _node(axes, place, str(rank), STAGE_COLOURS["4"])
            _arrow(axes, place, places[(rank + 1) % world_size], "#444444", -0.2)
        axes.set(xlim=(-1.7, 1.7), ylim=(-1.5, 1.55))
        axes.set_title("The ring: each rank sends to its right", loc="center")
    return picture


def _box(axes, x, y, label, colour, width=1.5, height=0.62):
    options = {"boxstyle": "round,pad=0.02,rounding_size=0.1", "facecolor": colour, "edgecolor": "white"}
    axes.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, zorder=3, **options))
    shade = "#111111" if colour in ("#E69F00", "#56B4E9", "#F0E442") else "white"
    axes.text(x, y, label, ha="center", va="center", color=shade, fontsize=9, zorder=4)


def scatter_gather(devices: int = 4) -> Picture:
    """One step of DataParallel from left to right, one row per device; the first row is the master."""
    message = "the master's row is the fullest: it holds the batch, all outputs, the loss and the sum of the gradients"
    picture, axes = _blank(9.4, 0.75 * devices + 1.1, f"A flow chart with {devices} rows", message)
    columns = ["scatter", "replicate", "forward", "gather, loss", "backward", "reduce"]
    with style():
        for place, name in enumerate(columns):
            axes.text(2 * place, 0.75, name, ha="center", fontsize=10, fontweight="bold")
        for device in range(devices):
            colour, y = RANK_COLOURS[device % len(RANK_COLOURS)], -0.9 * device
            axes.text(-1.35, y, "master" if device == 0 else f"device {device}", ha="right", va="center", fontsize=9.5)
            for place, step in enumerate(
                ["shard", "model" if device == 0 else "copy", "outputs", None, "gradient", None]
            ):
                if step:
                    _box(axes, 2 * place, y, f"{step} {device}", colour)
            for place in (2, 4):
                _arrow(axes, (2 * place + 0.77, y), (2 * place + 1.23, 0), colour, 0, 0)
            for place in (0, 1) if device else ():  # The master hands out shards and copies.
                _arrow(axes, (2 * place - 0.75, -0.1), (2 * place - 0.77, y), "#888888", 0.5 / device, 0)
            _arrow(axes, (2.77, y), (3.23, y), colour, 0, 0)
        for place, name in ((3, "all outputs\nloss"), (5, "sum of all\ngradients")):
            _box(axes, 2 * place, 0, name, "#333333", height=0.74)
        for device in range(devices):
            _arrow(axes, (6.77, 0), (7.23, -0.9 * device), "#333333", 0, 0)
        axes.set(xlim=(-2.7, 11.0), ylim=(-0.9 * (devices - 1) - 0.5, 1.1))
    return picture


def buckets(model: nn.Module, bucket_cap_mb: float) -> Picture:
    """Which gradient travels in which bucket: one bar per parameter, in the order in which backward reaches them."""
    from ..stage5_bucketed import assign_buckets

    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = assign_buckets([p for p in model.parameters() if p.requires_grad], bucket_cap_mb)
    message = f"cap {bucket_cap_mb:g} MiB: {len(groups)} buckets, {sum(map(len, groups))} parameters"
    count = sum(map(len, groups))
    picture, axes = panels(width=7.2, height=1.3 + 0.22 * count, message=message, seen="A bar a parameter")
    with style():
        labels, row = [], 0
        for position, group in enumerate(groups):
            colour = RANK_COLOURS[position % 6]
            for parameter in group:
                axes.barh(row, parameter.numel() * parameter.element_size() / 1024, color=colour, height=0.75)
                labels.append(names[parameter])
                row += 1
            total = sum(parameter.numel() * parameter.element_size() for parameter in group) / 1024
            note = f"bucket {position}: {total:,.0f} KiB"
            place = (0.99, (row - len(group) / 2 - 0.5))
            axes.text(*place, note, color=colour, transform=axes.get_yaxis_transform(), ha="right", va="center")
            axes.axhline(row - 0.5, color="#BBBBBB", linewidth=0.8)
        axes.set_yticks(range(count), labels)
        axes.set_ylim(count - 0.4, -0.6)
        axes.set_xlim(right=axes.get_xlim()[1] * 1.35)
        axes.grid(axis="y", visible=False)
        axes.set(xlabel="gradient (KiB)", title=f"Backward goes from the top down: {message}")
    return picture


def ring_states(world_size: int) -> list[Any]:
    """What each rank's chunks hold after every step: a list of `states[rank][chunk]`, the ranks added up so far.

    It follows the schedule of `reduce_scatter` and `allgather`; the state of step 0 is before the first message.
    """
    state = [[frozenset([rank]) for _ in range(world_size)] for rank in range(world_size)]
    states = [state]
    for _, chunk_of in ring_schedule(world_size):
        after = [list(chunks) for chunks in state]
        for rank in range(world_size):
            chunk, right = chunk_of(rank), (rank + 1) % world_size
            after[right][chunk] = state[right][chunk] | state[rank][chunk]
        state = after
        states.append(state)
    return states


def ring_schedule(world_size: int) -> list[tuple[str, Callable[..., int]]]:
    """The 2(K-1) steps as (phase, function from a rank to the chunk it sends)."""
    reduce = [("reduce-scatter", lambda rank, s=s: (rank - s) % world_size) for s in range(world_size - 1)]
    gather = [("allgather", lambda rank, s=s: (rank + 1 - s) % world_size) for s in range(world_size - 1)]
    return reduce + gather


def ring_step(world_size: int = 4, step: int = 0) -> Picture:
    """The chunked ring after `step` of 2(K-1) steps: columns are ranks, rows are chunks, stripes the ranks summed up.

    The arrows are the messages of the next step; those that leave on the right come in on the left.
    """
    schedule, state = ring_schedule(world_size), ring_states(world_size)[step]
    done = sum(len(chunk) == world_size for chunks in state for chunk in chunks)
    message = f"after step {step} of {len(schedule)}: {done} of {world_size**2} chunks complete"
    size: Any = {
        "width": max(5.6, 1.7 * world_size + 0.6),
        "height": 0.62 * world_size + 1.4,
    }
    picture, axes = panels(**size, message=message, seen="A grid of ranks and chunks")
    with style():
        axes.set_axis_off()
        for rank in range(world_size):
            axes.text(1.7 * rank + 0.6, -0.55, f"rank {rank}", ha="center", fontweight="bold")
            for chunk in range(world_size):
                _chunk(axes, 1.7 * rank, chunk, state[rank][chunk], world_size)
        for chunk in range(world_size):
            axes.text(-0.42, chunk + 0.36, f"chunk {chunk}", ha="right", va="center", fontsize=9)
        if step < len(schedule):
            _messages(axes, schedule[step][1], world_size)
        following = f"next: {schedule[step][0]}" if step < len(schedule) else "all ranks have all sums"
        axes.set_title(f"Step {step} of {len(schedule)}, {done} chunks complete; {following}", loc="center")
        axes.set(xlim=(-1.5, 1.7 * world_size + 0.3), ylim=(world_size + 0.1, -1.0))
    return picture


def _chunk(axes, x, y, contributors, world_size):
    """One chunk of one rank: a stripe for every rank whose gradient is in it."""
    width = 1.2 / world_size
    for rank in range(world_size):
        colour = RANK_COLOURS[rank] if rank in contributors else "#F2F2F2"
        axes.add_patch(
            Rectangle((x + rank * width, y), width, 0.72, facecolor=colour, edgecolor="white", linewidth=0.8)
        )
        if rank in contributors and world_size <= 6:
            centre = (x + (rank + 0.5) * width, y + 0.37)
            shade = "black" if rank in (1, 4, 7) else "white"
            axes.text(*centre, str(rank), ha="center", va="center", color=shade, fontsize=9)
    if len(contributors) == world_size:
        axes.add_patch(Rectangle((x, y), 1.2, 0.72, fill=False, edgecolor="black", linewidth=2))


def _messages(axes, chunk_of, world_size):
    for rank in range(world_size):
        y, start = chunk_of(rank) + 0.36, 1.7 * rank + 1.2
        options = {"arrowstyle": "-|>", "mutation_scale": 12, "linewidth": 1.8, "color": "#222222"}
        axes.add_patch(FancyArrowPatch((start, y), (start + 0.5, y), shrinkA=1, shrinkB=1, **options))
        if rank == world_size - 1:
            axes.add_patch(FancyArrowPatch((-0.36, y), (0, y), shrinkA=0, shrinkB=0, **options))


def whole_ring_step(world_size: int = 4, step: int = 0) -> Picture:
    """The whole-gradient ring after `step` of K-1 steps: which gradients each rank has added up."""
    message = f"after step {step} of {world_size - 1}: each rank has added {step + 1} of {world_size} gradients"
    picture, axes = panels(width=max(5.6, 1.7 * world_size + 0.6), height=1.9, message=message)
    with style():
        axes.set_axis_off()
        for rank in range(world_size):
            added = {(rank - back) % world_size for back in range(step + 1)}
            axes.text(1.7 * rank + 0.6, -0.2, f"rank {rank}", ha="center", fontweight="bold")
            _chunk(axes, 1.7 * rank, 0, added, world_size)
        if step < world_size - 1:
            _messages(axes, lambda rank: 0, world_size)
        axes.set_title(f"Whole gradients, step {step} of {world_size - 1}", loc="center")
        axes.set(xlim=(-0.5, 1.7 * world_size + 0.3), ylim=(0.9, -0.6))
    return picture


PASSES = {  # of a pipeline: letter and colour
    "forward": ("F", SPAN_COLOURS["forward"]),
    "backward": ("B", SPAN_COLOURS["backward"]),
    "input": ("B", SPAN_COLOURS["backward"]),
    "weight": ("W", "#5B8C5A"),
}


def schedule(rows: Sequence[Any], title: str) -> Picture:
    """A pipeline's timetable: rows of (instruction, start, end) from `stage8_pipeline.timetable`, one lane per rank."""
    return schedules({title: rows})


def schedules(timetables: dict[str, Sequence[Any]]) -> Picture:
    """Timetables {title: rows} of pipelines one below the other, in the same time; a rank's second stage is paler."""
    last = max(end for rows in timetables.values() for row in rows for _, _, end in row)
    titles = [f"{title}; idle {100 * idle(rows):.0f} %" for title, rows in timetables.items()]
    size: Any = {"width": 9.4, "height": 0.4 + sum(0.75 + 0.4 * len(rows) for rows in timetables.values())}
    form: Any = {"squeeze": False, "sharex": True, "height_ratios": [len(rows) + 1 for rows in timetables.values()]}
    picture, panels_ = panels(
        len(timetables), 1, **size, message=". ".join(titles), seen="A timetable", kind="derived", **form
    )
    with style():
        picture.label(panels_[0, 0])
        for axes, rows, title in zip(panels_[:, 0], timetables.values(), titles, strict=True):
            for rank, row in enumerate(rows):
                for span in row:
                    _pass(axes, rank, len(rows), span, last)
            axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
            axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, last), title=title)
            axes.grid(axis="y", visible=False)
        panels_[-1, 0].set_xlabel("time (forward passes of a micro-batch)")
    return picture


def idle(rows: Sequence[Any]) -> float:
    """The share (0 to 1) of the time of a timetable in which a rank idles, on average."""
    busy = sum(end - start for row in rows for _, start, end in row)
    return 1 - busy / (len(rows) * max(end for row in rows for _, _, end in row))


def _pass(axes, rank, ranks, span, last):
    instruction, start, end = span
    letter, colour = PASSES[instruction.action]
    second = instruction.stage >= ranks
    shade = {"facecolors": colour, "edgecolor": "white", "alpha": 0.6 if second else 1}
    axes.broken_barh([(start, end - start)], (rank - 0.4, 0.8), **shade)
    size = min(9, 330 * (end - start) / last)  # A label of three letters fits.
    if size >= 5:
        look = {"ha": "center", "va": "center", "color": "black" if letter == "F" or second else "white"}
        axes.text((start + end) / 2, rank, f"{letter}{instruction.microbatch}", fontsize=size, **look)


def mesh(data: int = 2, pipeline: int = 1, tensor: int = 2) -> Picture:
    """Ranks in a mesh: a row per share of the samples, a box (a host) per part of the layers, a node per slice."""
    sizes = {"shares of the samples": data, "parts of the model": pipeline, "slices of each layer": tensor}
    message = f"{data * pipeline * tensor} ranks: " + " × ".join(f"{n} {what}" for what, n in sizes.items() if n > 1)
    width = pipeline * (tensor + 0.6)
    picture, axes = _blank(1.1 * width + 2.6, 1.4 * data + 1.4, "A mesh of ranks, hosts as boxes", message)
    with style():
        for replica in range(data):
            y = -1.7 * replica
            axes.text(-0.6, y, f"samples\n{replica + 1}/{data}", ha="right", va="center", fontsize=9)
            for part in range(pipeline):
                left = part * (tensor + 0.6)
                layers = f", layers {part + 1}/{pipeline}" if pipeline > 1 else ""
                look: Any = {"color": "#555555", "fontsize": 7.5, "ha": "center"}
                axes.text(left + tensor / 2 - 0.5, y + 0.66, f"host {replica * pipeline + part}{layers}", **look)
                _host(axes, (replica * pipeline + part) * tensor, left, y, tensor)
                if part + 1 < pipeline:
                    _joined(axes, (left + tensor - 0.52, y), (left + tensor + 0.12, y), STAGE_COLOURS["8"])
                for slot in range(tensor if replica + 1 < data else 0):
                    _joined(axes, (left + slot, y - 0.34), (left + slot, y - 1.2), STAGE_COLOURS["4"])
        names = [("9", "activations, added up", tensor), ("8", "activations, passed on", pipeline)]
        names.append(("4", "gradients, averaged", data))
        bottom = -1.7 * (data - 1) - 0.75
        for line, (key, name) in enumerate((key, name) for key, name, size in names if size > 1):
            look = {"color": STAGE_COLOURS[key], "fontsize": 9, "fontweight": "bold", "va": "center"}
            axes.text(-0.42, bottom - 0.3 * line, f"↔ {name}", **look)
        axes.set(xlim=(-1.5, width - 0.9), ylim=(bottom - 0.8, 0.9))
        axes.set_title(message, loc="center")
    return picture


def _host(axes, first, x, y, tensor):
    """One host with `tensor` ranks from number `first` on, each with its slice."""
    look = {"facecolor": "#F4F4F4", "edgecolor": "#BBBBBB", "boxstyle": "round,pad=0.05"}
    axes.add_patch(FancyBboxPatch((x - 0.42, y - 0.4), tensor - 0.16, 0.95, **look))
    for slot in range(tensor):
        _node(axes, (x + slot, y - 0.04), str(first + slot), "#5F5F5F", 0.26)
        axes.text(x + slot, y + 0.4, f"slice {slot + 1}/{tensor}", ha="center", va="center", fontsize=7.5)
        if slot + 1 < tensor:
            _joined(axes, (x + slot + 0.26, y - 0.04), (x + slot + 0.74, y - 0.04), STAGE_COLOURS["9"], 3.0)


def _joined(axes, start, end, colour, width=1.8):
    """A double arrow from edge to edge."""
    options = {"arrowstyle": "<|-|>", "mutation_scale": 10, "linewidth": width, "color": colour, "zorder": 2}
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=1, shrinkB=1, **options))
