"""Figures of predictions: the scoreboard."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_course.showing.plots import Picture, name_rows, panels
from ddp_course.showing.simulator_plots import ALGORITHM_COLOURS

EDGE = 2.5  # The figure of predictions ends at this ratio, and an arrow stands for a larger one.


def predictions_figure(rows: Sequence[dict[str, Any]]) -> Picture:
    """Predicted over measured, a point per row of the scoreboard, by table; hollow where the fit
    saw the row.
    """
    known: dict[str, list] = {}
    for row in rows:
        if row["measured"] is not None:
            known.setdefault(row["table"], []).append(row)
    height = 0.9 + 0.5 * len(known)
    kind = "published; derived"
    with panels(1, 1, 9.6, height, description="Points by table", kind=kind) as (picture, axes):
        for place, name in enumerate(known):
            colour = list(ALGORITHM_COLOURS.values())[place % len(ALGORITHM_COLOURS)]
            count = len(known[name])
            for index, row in enumerate(known[name]):
                y = place + 0.5 * ((index + 0.5) / count - 0.5)
                ratio = 1 + row["error"]
                mark = "o"
                if ratio > EDGE:
                    mark = ">"
                    ratio = EDGE
                face = colour
                if row["calibrated"]:
                    face = "none"
                axes.plot(ratio, y, mark, ms=4.5, markeredgecolor=colour, markerfacecolor=face)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log", base=2)
        ticks = [0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        label = f"predicted / measured (hollow: the fit saw this row; arrow: more than {EDGE:g})"
        axes.set(xlim=(0.45, 1.05 * EDGE), xlabel=label)
        name_rows(axes, [f"{name}\n{_errors_text(known[name])}" for name in known])
        new = [
            abs(row["error"])
            for row in rows
            if row["measured"] is not None and not row["calibrated"]
        ]
        picture.message = (
            f"median error of {len(new)} rows that no fit saw: {np.median(new):.1%}, worst"
            f" {max(new):.0%}"
        )
        axes.set_title(picture.message[0].upper() + picture.message[1:])
    return picture


def _errors_text(rows):
    sizes = [abs(row["error"]) for row in rows]
    return f"median {np.median(sizes):.1%}, worst {max(sizes):.0%}"
