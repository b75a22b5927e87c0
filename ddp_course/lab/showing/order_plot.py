"""Shows what `every_order` has found: a timeline in a notebook, text in a terminal."""

import textwrap
from collections import defaultdict
from typing import Any, NamedTuple

from IPython import get_ipython
from IPython.display import display

from manyranks.errors import Awaited
from manyranks.orders.verdict import MOST_OF_A_RANK, Verdict

from .plots import Picture, panels

COLOURS = {"send": "#0072B2", "receive": "#007F5C"}
DIRECTIONS = {"send": "to", "receive": "from"}
COLLECTIVE = "#5F5F5F"
FAULT = "#BF5200"
HATCHED = "▨ not waited for:"  # This stands before a line that begins a message.
STOPS = "×"  # This sign stands before a line at which a rank goes no further.


class Bar(NamedTuple):
    """A message on its way from `start` to `end`, in virtual milliseconds.

    `what` is the wait that its events have.
    """

    start: float
    end: float
    what: Awaited
    waited_for: bool


def verdict(found: Verdict) -> None:
    """Draw a verdict of `every_order` in a notebook; elsewhere print it, with its last events."""
    if getattr(get_ipython(), "kernel", None):
        display(timeline(found))
    else:
        print(found.text())


def timeline(verdict: Verdict) -> Picture:
    """Return a figure with a row for each rank, and a bar for each message from post to wait.

    The bar of a message for which nobody waited is hatched, a cross marks where a rank stops, and
    the program's lines stand below.
    """
    lanes_by_rank = lanes_of_ranks(verdict.events)
    lines = lines_of(verdict)
    height = 1.6 + 0.2 * len(lines) + 0.3 * sum(map(len, lanes_by_rank.values()))
    description = f"A timeline of {len(lanes_by_rank)} ranks, messages as bars"
    with panels(1, 1, 8.4, height, str(verdict), description, "virtual time") as (picture, axes):
        axes.set_title(verdict.kind or verdict.proof)
        row = 0
        middles = {}
        for rank, lanes in lanes_by_rank.items():
            middles[rank] = row + (len(lanes) - 1) / 2
            for bars in lanes:
                for bar in bars:
                    draw(axes, row, bar)
                row += 1
            axes.axhline(row - 0.5, color="#BBBBBB", linewidth=0.8)
        for event in verdict.events:
            # A message for which nobody waits stops no rank: it is found at the rank's end.
            is_stop = event.kind not in ("post", "wait", "not waited for")
            if is_stop and event.rank in verdict.ranks:
                place = (1000 * event.moment, middles[event.rank])
                axes.plot(*place, "x", color=FAULT, markersize=12, markeredgewidth=3)
        axes.set_yticks(list(middles.values()), [f"rank {rank}" for rank in middles])
        axes.set_ylim(row - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("\n".join(["time (ms)", *lines]), loc="left")
    return picture


def lines_of(verdict: Verdict) -> list[str]:
    """Return the program's lines of a verdict, those of a fault with a rank and a sign."""
    lines = [textwrap.shorten(line, 90) for line in verdict.lines]
    # No rank stops where results differ, and nothing says which rank was at a line.
    if verdict.kind == "unlike results":
        return lines
    # One rank begins a message and touches its memory too early; in a deadlock each has a line.
    signs = [HATCHED, STOPS]
    ranks = verdict.ranks * 2
    if verdict.kind == "deadlock":
        signs = [STOPS] * len(lines)
    return [
        f"{sign} rank {rank}, {line}" for sign, rank, line in zip(signs, ranks, lines, strict=False)
    ]


def lanes_of_ranks(events: list) -> dict[int, list[list[Bar]]]:
    """Return the last messages of each rank, in lanes; one without a wait lasts to the end."""
    ranks = {event.rank for event in events}
    bars = {rank: [] for rank in sorted(ranks)}
    posts = defaultdict(list)  # when each rank posted the messages for which it has not waited
    for event in events:
        message = (event.rank, event.what)
        moment = 1000 * event.moment
        if event.kind == "post":
            posts[message].append(moment)
        elif event.kind == "wait":
            start = posts[message].pop(0)
            bars[event.rank].append(Bar(start, moment, event.what, waited_for=True))
    # The millisecond more lets a message be seen that has only just begun.
    end = 1000 * events[-1].moment + 1
    for (rank, what), starts in posts.items():
        bars[rank] += [Bar(start, end, what, waited_for=False) for start in starts]
    return {rank: lanes_of(messages[-MOST_OF_A_RANK:]) for rank, messages in bars.items()}


def lanes_of(bars: list[Bar]) -> list[list[Bar]]:
    """Return the bars in as few lanes as they need for none to cover another."""
    lanes = [[]]
    for bar in sorted(bars):
        free_lanes = [lane for lane in lanes if not lane or lane[-1].end <= bar.start]
        if free_lanes:
            free_lanes[0].append(bar)
        else:
            lanes.append([bar])
    return lanes


def draw(axes: Any, row: int, bar: Bar) -> None:
    """Draw a bar with its name."""
    colour, name = colour_and_name(bar.what)
    look: Any = {"facecolor": colour, "edgecolor": "white"}
    letters: Any = {"color": "white"}
    if not bar.waited_for:
        look = {"facecolor": "white", "edgecolor": FAULT, "hatch": "////"}
        letters = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
    axes.broken_barh([(bar.start, bar.end - bar.start)], (row - 0.42, 0.84), **look)
    middle = (bar.start + bar.end) / 2
    axes.text(middle, row, name, ha="center", va="center", fontsize=9, **letters)


def colour_and_name(what: Awaited) -> tuple[str, str]:
    """Return a bar's colour and name.

    A send to rank 1 is blue and called "to 1", a receive is green and called "from 1", and a
    collective is grey and has its own name.
    """
    if what.kind in COLOURS:
        return COLOURS[what.kind], f"{DIRECTIONS[what.kind]} {what.ranks[0]}"
    return COLLECTIVE, what.name
