"""Draws the scoreboard of predictions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddp_course.lab.showing.plots import Picture, name_rows, panels
from ddp_course.lab.showing.simulator_plots import ALGORITHM_COLOURS

from .scoreboard import known_rows

EDGE = 2.5  # The figure ends at this ratio, and an arrow stands for a larger one.


def predictions_figure(rows: Sequence[dict[str, Any]]) -> Picture:
    """Return a figure of predicted over measured, with a point per row of the scoreboard.

    The points are grouped by tables, and hollow where the fit saw the row.
    """
    known = known_rows(rows)
    tables: dict[str, list] = {}
    for row in known:
        tables.setdefault(row["table"], []).append(row)
    new = [abs(row["error"]) for row in known if not row["calibrated"]]
    median, nine_in_ten = np.quantile(new, (0.5, 0.9))
    message = (
        f"Median error of {len(new)} rows that no fit saw: {median:.1%}, nine in ten within"
        f" {nine_in_ten:.0%}"
    )
    with panels(
        width=9.6,
        height=0.9 + 0.5 * len(tables),
        message=message,
        description="Points by table",
        kind="published; derived",
    ) as (picture, axes):
        colours = list(ALGORITHM_COLOURS.values())
        labels = []
        for lane, (name, table) in enumerate(tables.items()):
            draw_points(axes, lane, table, colours[lane % len(colours)])
            sizes = [abs(row["error"]) for row in table]
            labels.append(f"{name}\nmedian {np.median(sizes):.1%}, worst {max(sizes):.0%}")
        name_rows(axes, labels)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log", base=2)
        ticks = [0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        label = f"predicted / measured (hollow: the fit saw this row; arrow: more than {EDGE:g})"
        axes.set(xlim=(0.45, 1.05 * EDGE), xlabel=label)
    return picture


def draw_points(axes: Any, lane: int, rows: Sequence[dict[str, Any]], colour: str) -> None:
    """Draw a point for each row, one below the other in the middle half of a lane."""
    for number, row in enumerate(rows):
        place = (number + 0.5) / len(rows) - 0.5
        ratio = 1 + row["error"]
        axes.plot(
            min(ratio, EDGE),
            lane + 0.5 * place,
            ">" if ratio > EDGE else "o",
            ms=4.5,
            markeredgecolor=colour,
            markerfacecolor="none" if row["calibrated"] else colour,
        )
