"""Figures of measured times over emulated links, against the formulas."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ddp_course.lab.showing.plots import STAGE_COLOURS, Picture, panels

LARGE = 4 << 20  # bytes: what links.py promises holds for messages of this size and more.
LOOKS = {  # {algorithm: (stage, in whose colour it is drawn, label)}
    "parameter_server": ("3", "parameter server, 2(K−1) p/b"),
    "whole_gradient_ring": ("4w", "whole-gradient ring, (K−1) p/b"),
    "ring": ("4", "ring, 2(K−1)/K p/b"),
    "gloo": ("torch", "gloo's all_reduce"),
}
LOOKS_OF_MODES = {"hosts": ("o", "-"), "virtual": ("^", "--")}  # {mode: (marker, dashes)}
MODE_NAMES = {"hosts": "virtual hosts", "virtual": "virtual time"}


def link_figure(rows: list[dict[str, Any]]) -> Picture:
    """Return time against K and against p on logarithmic scales, measured points beside formulas.

    `rows` are those of bench_links.json, which have the formulas' seconds. One bandwidth is drawn,
    the highest; the left panel has its largest messages, the right panel the largest number of
    ranks measured in every mode.
    """
    bandwidth = max(row["bandwidth_bits_s"] for row in rows)
    rows = [row for row in rows if row["bandwidth_bits_s"] == bandwidth]
    size = max(row["bytes"] for row in rows)
    modes = sorted({row["mode"] for row in rows})
    in_every_mode = {row["world_size"] for row in rows}
    for mode in modes:
        in_every_mode &= {row["world_size"] for row in rows if row["mode"] == mode}
    ranks = max(in_every_mode)
    large = [row for row in rows if row["bytes"] >= LARGE]
    ratios = [row["ratio"] for row in large if row["algorithm"] != "gloo"]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "not measured"
    message = (
        f"measured over theory from {LARGE >> 20} MiB on: {spread}, at {bandwidth / 1e6:g} Mbit/s"
    )
    with panels(
        rows=1,
        columns=2,
        width=10.5,
        height=4.6,
        message=message,
        description="Time by ranks and by size",
    ) as (picture, (by_ranks, by_size)):
        at_size = [row for row in rows if row["bytes"] == size]
        draw(by_ranks, at_size, "world_size")
        by_ranks.set(xlabel="ranks K", ylabel="seconds", title=f"By ranks: {size / 2**20:g} MiB")
        at_ranks = [row for row in rows if row["world_size"] == ranks]
        draw(by_size, at_ranks, "bytes")
        by_size.set(xlabel="message p (MiB)", title=f"By size: {ranks} ranks")
        by_size.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 2**20:g}"))
        picture.legend(handles=legend(rows), loc="outside lower center", ncols=3)
    return picture


def draw(axes: Axes, rows: list[dict[str, Any]], column: str) -> None:
    """Draw one panel: for each algorithm its formula as a line and its measurements as points."""
    ticks = sorted({row[column] for row in rows})
    for mode, (marker, dashes) in LOOKS_OF_MODES.items():
        of_mode = [row for row in rows if row["mode"] == mode]
        for name, (stage, _) in LOOKS.items():
            points = [row for row in of_mode if row["algorithm"] == name]
            points.sort(key=lambda row: row[column])
            xs = [row[column] for row in points]
            colour = STAGE_COLOURS[stage]
            if points and name != "gloo":
                formula = [row["theory_s"] for row in points]
                axes.plot(xs, formula, dashes, color=colour, zorder=2)
            axes.plot(
                xs,
                [row["measured_s"] for row in points],
                marker,
                zorder=3,
                color=colour,
                fillstyle="none",
                markersize=11 if name == "gloo" else 7,  # gloo's points lie around the ring's.
            )
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend(rows: list[dict[str, Any]]) -> list[Line2D]:
    """Return a line for each algorithm, a point for each mode that was measured."""
    names = {row["algorithm"] for row in rows}
    handles = []
    for name, (stage, label) in LOOKS.items():
        if name in names:
            line = Line2D([], [], color=STAGE_COLOURS[stage], label=label)
            if name == "gloo":  # gloo has points and no formula.
                line.set(linestyle="", marker="o", markerfacecolor="none", markersize=11)
            handles.append(line)
    modes = {row["mode"] for row in rows}
    for mode, (marker, dashes) in LOOKS_OF_MODES.items():
        if mode in modes:
            point = Line2D([], [], color="#555555", label=MODE_NAMES[mode])
            point.set(linestyle=dashes, marker=marker, markerfacecolor="none")
            handles.append(point)
    return handles
