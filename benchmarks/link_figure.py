"""Figures of measured times over emulated links, against the formulas."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ddp_course.showing.plots import STAGE_COLOURS, Picture, panels

LOOKS = {
    "parameter_server": ("3", "parameter server, 2(K−1) p/b"),
    "whole_gradient_ring": ("4w", "whole-gradient ring, (K−1) p/b"),
    "ring": ("4", "ring, 2(K−1)/K p/b"),
    "gloo": ("torch", "gloo's all_reduce"),
}
LOOKS_OF_MODES = {"hosts": ("o", "-"), "virtual": ("^", "--")}
MODE_NAMES = {"hosts": "virtual hosts", "virtual": "virtual time"}


def link_figure(rows: list[dict[str, Any]]) -> Picture:
    """Time against K and against p, on logarithmic scales: points are measured, lines are the
    formulas.

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
    ratios = [
        row["ratio"] for row in rows if row["bytes"] >= 4 << 20 and row["algorithm"] != "gloo"
    ]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "not measured"
    message = f"measured over theory from 4 MiB on: {spread}, at {bandwidth / 1e6:g} Mbit/s"
    with panels(1, 2, 10.5, 4.6, message, "Time by ranks and by size") as (
        picture,
        (by_ranks, by_size),
    ):
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
    """One panel: for each algorithm its formula as a line and its measurements as points."""
    ticks = sorted({row[column] for row in rows})
    for mode, (marker, dashes) in LOOKS_OF_MODES.items():
        here = [row for row in rows if row["mode"] == mode]
        for name, (stage, _) in LOOKS.items():
            points = sorted(
                (row for row in here if row["algorithm"] == name), key=lambda row: row[column]
            )
            if points and name != "gloo":
                line = [row["theory_s"] for row in points]
                axes.plot(
                    [row[column] for row in points],
                    line,
                    dashes,
                    color=STAGE_COLOURS[stage],
                    zorder=2,
                )
            axes.plot(
                [row[column] for row in points],
                [row["measured_s"] for row in points],
                marker,
                zorder=3,
                color=STAGE_COLOURS[stage],
                fillstyle="none",
                markersize=11 if name == "gloo" else 7,
            )
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend(rows: list[dict[str, Any]]) -> list[Line2D]:
    """A line for each algorithm, a point for each mode that was measured."""
    names = {row["algorithm"] for row in rows}
    points_only: dict[str, Any] = {"ls": "", "marker": "o", "mfc": "none", "ms": 11}
    handles = [
        Line2D(
            [],
            [],
            color=STAGE_COLOURS[stage],
            label=label,
            **(points_only if name == "gloo" else {}),
        )
        for name, (stage, label) in LOOKS.items()
        if name in names
    ]
    modes = sorted({row["mode"] for row in rows})
    points = [
        Line2D(
            [], [], ls=dashes, marker=marker, color="#555555", mfc="none", label=MODE_NAMES[mode]
        )
        for mode, (marker, dashes) in LOOKS_OF_MODES.items()
        if mode in modes
    ]
    return handles + points
