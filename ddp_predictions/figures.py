"""Figures of predictions: the scoreboard, and which way of training suits which machine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_course.showing import plots
from ddp_course.showing.plots import STAGE_COLOURS, Picture, name_rows, panels
from ddp_course.showing.simulator_plots import ALGORITHM_COLOURS
from ddp_course.showing.widgets import explorer

from .plans import decide, readable

EDGE = 2.5  # The figure of predictions ends at this ratio, and an arrow stands for a larger one.
BANDWIDTHS = ["100Mbit", "1Gbit", "10Gbit", "100Gbit", "200Gbit", "400Gbit"]
PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 1}


@explorer(
    billions=("parameters (billions)", [0.1, 0.3, 1, 3, 7, 13, 30, 70, 180, 400]),
    devices=("devices", [1, 2, 4, 8, 16, 64, 256, 1024]),
    bandwidth=("link (one NIC)", BANDWIDTHS),
)
def decision_chart(billions: float = 7, devices: int = 16, bandwidth: str = "100Gbit") -> Picture:
    """Which plan suits which model and machine, for hosts of up to 8 devices of 80 GB."""
    setting = {"billions": billions, "memory_gb": 80, "devices": devices, "bandwidth": bandwidth}
    return decision_figure(setting, *decide(**setting, per_host=min(8, devices)))


def decision_figure(
    setting: dict[str, Any], chosen: Any, reason: str, plans: Sequence[Any]
) -> Picture:
    """Memory and step time of each plan for a `setting` (a dict); grey ones do not fit, the chosen
    one is black.
    """
    billions, memory_gb, devices = (setting[key] for key in ("billions", "memory_gb", "devices"))
    machine = f"{billions:g} billion parameters, {devices} x {memory_gb} GB"
    message = f"{machine}: {chosen.name if chosen else 'more devices'} ({reason}; derived)"
    seen = "Bars of memory and time"
    with panels(1, 2, 9.4, 1.7 + 0.26 * len(plans), message, seen, sharey=True) as (picture, axes):
        for panel, column, unit in ((axes[0], "memory_gb", "GB"), (axes[1], "step_s", "s")):
            values = [getattr(p, column) for p in plans]
            colours = [
                "#000000" if p == chosen else STAGE_COLOURS["6"] if p.fits else "#D9D9D9"
                for p in plans
            ]
            drawn = panel.barh(range(len(plans)), values, color=colours, height=0.6)
            texts = [f"{readable(value)} {unit}" for value in values]
            panel.bar_label(drawn, texts, padding=3, fontsize=9, bbox=PLAIN)
            plots.logarithmic(panel, "x")
            panel.set_xlim(min(values) / 3, max(*values, memory_gb if unit == "GB" else 0) * 6)
            plots.name_rows(panel, [plan.name for plan in plans])
        axes[0].axvline(memory_gb, color="black", linestyle="--")
        axes[0].set_xlabel("memory per device (GB); dashed: what it has")
        axes[1].set_xlabel("time of a step (s, derived)")
        title = f"{chosen.name if chosen else 'More devices'}: {reason}".replace("; ", ";\n")
        picture.suptitle(title, fontsize=10.5, fontweight="bold")
    return picture


def predictions_figure(rows: Sequence[dict[str, Any]]) -> Picture:
    """Predicted over measured, a point per row of the scoreboard, by table; hollow where the fit
    saw the row.
    """
    tables = list(dict.fromkeys(row["table"] for row in rows if row["measured"] is not None))
    known = {
        name: [row for row in rows if row["table"] == name and row["measured"] is not None]
        for name in tables
    }
    height, kind = 0.9 + 0.5 * len(tables), "published; derived"
    with panels(1, 1, 9.6, height, seen="Points by table", kind=kind) as (picture, axes):
        for place, name in enumerate(tables):
            colour = list(ALGORITHM_COLOURS.values())[place % len(ALGORITHM_COLOURS)]
            for index, row in enumerate(known[name]):
                height = place + 0.5 * ((index + 0.5) / len(known[name]) - 0.5)
                face = "none" if row["calibrated"] else colour
                ratio, mark = min(1 + row["error"], EDGE), ">" if 1 + row["error"] > EDGE else "o"
                axes.plot(ratio, height, mark, ms=4.5, markeredgecolor=colour, markerfacecolor=face)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log", base=2)
        ticks = [0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        label = f"predicted / measured (hollow: the fit saw this row; arrow: more than {EDGE:g})"
        axes.set(xlim=(0.45, 1.05 * EDGE), xlabel=label)
        name_rows(axes, [f"{name}\n{_errors_text(known[name])}" for name in tables])
        new = [abs(row["error"]) for name in tables for row in known[name] if not row["calibrated"]]
        picture.message = (
            f"median error of {len(new)} rows that no fit saw: {np.median(new):.1%}, worst"
            f" {max(new):.0%}"
        )
        axes.set_title(picture.message[0].upper() + picture.message[1:])
    return picture


def _errors_text(rows):
    sizes = [abs(row["error"]) for row in rows]
    return f"median {np.median(sizes):.1%}, worst {max(sizes):.0%}"
