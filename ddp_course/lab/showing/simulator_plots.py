"""The figure of the simulator, and the colours and names of all-reduces."""

from typing import Any

from ..measuring.simulate.step import KNEE, knee
from .plots import Picture, panels

ALGORITHM_COLOURS = {
    "parameter_server": "#D55E00",
    "whole_gradient_ring": "#332288",
    "ring": "#0072B2",
    "tree": "#009E73",
    "halving_doubling": "#CC79A7",
    "hierarchical": "#882255",
}
CONTENDERS = ("parameter_server", "ring", "tree", "halving_doubling")


def label(algorithm: str) -> str:
    """Return an algorithm's name in figures and tables."""
    return algorithm.replace("_", " ").replace("halving doubling", "halving-doubling")


def scaling_figure(steps: dict[str, Any], title: str = "Scaling efficiency") -> Picture:
    """Return a figure of efficiency against K, with a line per algorithm and its knee.

    `steps` are {algorithm: [Step, …]}, in the order of growing K.
    """
    knees = {name: knee(row) for name, row in steps.items()}
    parts = []
    for name, devices in knees.items():
        if devices:
            parts.append(f"{label(name)}: {KNEE:.0%} efficient up to K = {devices}")
        else:
            parts.append(f"{label(name)}: never {KNEE:.0%} efficient")
    message = "; ".join(parts)
    with panels(message=message, kind="simulated") as (picture, axes):
        for name, row in steps.items():
            efficiencies = {step.world_size: 100 * step.efficiency for step in row}
            ranks = list(efficiencies)
            look: Any = {"color": ALGORITHM_COLOURS[name], "markersize": 3.5}
            axes.plot(ranks, efficiencies.values(), "o-", label=label(name), **look)
            end = knees[name]
            # If the largest K is still efficient, the knee lies beyond the figure.
            if end and end != ranks[-1]:
                look |= {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.8}
                axes.plot(end, efficiencies[end], "o", **look)
        axes.axhline(
            100 * KNEE, color="#777777", linewidth=1, linestyle=":", label=f"{KNEE:.0%} efficient"
        )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(
            xlabel="devices K",
            ylabel="efficiency (%)",
            ylim=(0, 106),
            title=f"{title} (circle: the knee)",
        )
        axes.legend(loc="lower left")
    return picture
