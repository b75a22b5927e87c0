"""Figures of the simulator, the theory and the scoreboard: where scaling ends, and which algorithm
wins.
"""

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from ..measuring import theory
from ..measuring.simulate.step import KNEE, knee
from .plots import MESSAGE_TICKS, Picture, panels

ALGORITHM_COLOURS = {
    "parameter_server": "#D55E00",
    "whole_gradient_ring": "#332288",
    "ring": "#0072B2",
    "tree": "#009E73",
    "halving_doubling": "#CC79A7",
    "hierarchical_ring": "#3B96CC",
}
CONTENDERS = ("parameter_server", "ring", "tree", "halving_doubling")
# They are 2, 3, 4, 6, 8, 12, …, 4096.
RANKS = sorted([2**k for k in range(1, 13)] + [3 * 2**k for k in range(11)])


def label(algorithm: str) -> str:
    """How an algorithm is called in figures and tables."""
    return algorithm.replace("_", " ").replace("halving doubling", "halving-doubling")


def scaling_figure(steps: dict[str, Any], title: str = "Scaling efficiency") -> Picture:
    """Efficiency against K, a line per algorithm, the knee marked; `steps`: {algorithm: [Step,
    …]}.
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
            ranks = [step.world_size for step in row]
            efficiencies = [100 * step.efficiency for step in row]
            colour = ALGORITHM_COLOURS[name]
            axes.plot(ranks, efficiencies, "o-", ms=3.5, color=colour, label=label(name))
            if knees[name] and knees[name] != ranks[-1]:
                height = efficiencies[ranks.index(knees[name])]
                axes.plot(
                    knees[name],
                    height,
                    "o",
                    ms=11,
                    markerfacecolor="none",
                    markeredgewidth=1.8,
                    color=colour,
                )
        axes.axhline(100 * KNEE, color="#777777", linewidth=1, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.set(
            xlabel="devices K",
            ylabel="efficiency (%)",
            ylim=(0, 106),
            title=f"{title} (circle: the knee)",
        )
        axes.legend(loc="lower left")
    return picture


def winners_figure(costs: Any) -> Picture:
    """Which algorithm is fastest where: message size against K, on links with these `Costs`, by
    closed form.
    """
    sizes = 2.0 ** np.arange(6, 31, 0.125)
    best = []
    for count in RANKS:
        row = []
        for size in sizes:
            seconds = [theory.seconds(name, size, count, costs) for name in CONTENDERS]
            row.append(int(np.argmin(seconds)))
        best.append(row)
    names = [CONTENDERS[index] for index in np.unique(best)]
    message = f"fastest somewhere: {', '.join(label(name) for name in names)}"
    with panels(height=5.4, message=message, kind="derived") as (picture, axes):
        colours = ListedColormap([ALGORITHM_COLOURS[name] for name in CONTENDERS])
        edges = np.arange(len(RANKS) + 1) - 0.5
        axes.pcolormesh(
            sizes,
            edges,
            np.array(best)[:, :-1],
            cmap=colours,
            vmin=-0.5,
            vmax=len(CONTENDERS) - 0.5,
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(MESSAGE_TICKS), MESSAGE_TICKS.values())
        axes.set_yticks(range(len(RANKS)), [str(count) for count in RANKS])
        axes.grid(visible=False)
        latency = costs.alpha * 1e6
        bandwidth = 8 / costs.beta / 1e9
        title = f"The fastest all-reduce at {latency:.3g} µs and {bandwidth:.3g} Gbit/s"
        axes.set(xlabel="message", ylabel="devices K", title=title)
        handles = [Patch(color=ALGORITHM_COLOURS[name], label=label(name)) for name in names]
        axes.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=4,
            handlelength=1.2,
        )
    return picture
