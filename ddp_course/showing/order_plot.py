"""What `every_order` has found, on a timeline: a figure in a notebook, text in a terminal."""

import textwrap
from collections import defaultdict
from typing import Any, NamedTuple

from IPython import get_ipython
from IPython.display import display

from .plots import Picture, panels

LAST = 6  # So many messages of a rank are drawn: those without a wait, and the latest.
COLOURS = {"send": "#0072B2", "receive": "#007F5C"}
COLLECTIVE = "#5F5F5F"
FAULT = "#BF5200"
BEGUN = "▨"  # This stands before a line that begins a message, which is hatched in the figure,
STOPS = "×"  # and this before a line at which a rank goes no further.


class Bar(NamedTuple):
    """A message on its way, in virtual milliseconds."""

    start: float
    end: float
    what: str
    waited_for: bool


def show(verdict: Any) -> None:
    """Draw a verdict in a notebook; elsewhere print it, and the last events of its ranks."""
    if getattr(get_ipython(), "kernel", None):
        display(timeline(verdict))
        return
    print(verdict)
    about = verdict.ranks or sorted({event.rank for event in verdict.events})
    rows = [event for event in verdict.events if event.rank in about]
    for moment, rank, kind, what, lines in rows[-LAST * len(about) :]:
        column = "    " * about.index(rank)
        said = f"{kind} {what}" if kind in ("post", "wait") else kind
        place = f"  ({lines[-1].partition(':')[0]})" if lines else ""
        print(f"{1000 * moment:10.3f} ms  {column}rank {rank}: {said}{place}")


def timeline(verdict: Any) -> Picture:
    """A row for each rank, and on it a bar for each message, from its post to its wait. A bar that
    nobody has waited for is hatched, a cross is where a rank stops, and the lines stand below.
    """
    bars = bars_of(verdict.events)
    lines = lines_of(verdict)
    height = 1.6 + 0.2 * len(lines) + 0.3 * sum(map(len, bars.values()))
    description = f"A timeline of {len(bars)} ranks, messages as bars"
    title = verdict.kind or verdict.proof
    with panels(1, 1, 8.4, height, str(verdict), description, "virtual time", title) as (
        picture,
        axes,
    ):
        top = 0
        middles = {}
        for rank, lanes in bars.items():
            middles[rank] = top + (len(lanes) - 1) / 2
            for lane in lanes:
                for bar in lane:
                    draw(axes, top, bar)
                top += 1
            axes.axhline(top - 0.5, color="#BBBBBB", linewidth=0.8)
        for moment, rank, kind, *_ in verdict.events:
            if rank in verdict.ranks and kind not in ("post", "wait", "not waited for"):
                place = (1000 * moment, middles[rank])
                axes.plot(*place, "x", color=FAULT, markersize=12, markeredgewidth=3)
        axes.set_yticks(list(middles.values()), [f"rank {rank}" for rank in middles])
        axes.set_ylim(top - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("\n".join(["time (ms)", *lines]), loc="left")
    return picture


def lines_of(verdict: Any) -> list[str]:
    """The program's lines of a fault, each with its rank and its sign in the figure."""
    signs = [STOPS] * len(verdict.lines) if verdict.kind == "deadlock" else [BEGUN, STOPS]
    ranks = verdict.ranks * len(verdict.lines)
    return [
        f"{sign} rank {rank}, {textwrap.shorten(line, 90)}"
        for sign, rank, line in zip(signs, ranks, verdict.lines, strict=False)
    ]


def bars_of(events: list) -> dict[int, list[list[Bar]]]:
    """The last messages of each rank, in lanes. What has no wait is on its way to the end."""
    ranks = {event.rank for event in events}
    bars: dict = {rank: [] for rank in sorted(ranks)}
    begun = defaultdict(list)
    for moment, rank, kind, what, _ in events:
        if kind == "post":
            begun[rank, what].append(1000 * moment)
        elif kind == "wait":
            bars[rank].append(Bar(begun[rank, what].pop(0), 1000 * moment, what, True))
    end = 1000 * events[-1].moment + 1  # A message that has only just begun can be seen as well.
    for (rank, what), starts in begun.items():
        bars[rank] += [Bar(start, end, what, False) for start in starts]
    return {rank: lanes_of(own[-LAST:]) for rank, own in bars.items()}


def lanes_of(bars: list[Bar]) -> list[list[Bar]]:
    """The bars in as few lanes as they need for none to cover another."""
    lanes: list = [[]]
    for bar in sorted(bars):
        free = [lane for lane in lanes if not lane or lane[-1].end <= bar.start]
        if free:
            free[0].append(bar)
        else:
            lanes.append([bar])
    return lanes


def draw(axes: Any, row: int, bar: Bar) -> None:
    """Draw a bar with its name: "to 1", "from 2" or "all_reduce"."""
    # It is "to send to rank 1", "to receive from rank 1", or "for ranks [0, 1] in all_reduce".
    _, verb, preposition, *_, last = bar.what.split()
    colour = COLOURS.get(verb, COLLECTIVE)
    look: Any = {"facecolor": colour, "edgecolor": "white"}
    letters: Any = {"color": "white"}
    if not bar.waited_for:
        look = {"facecolor": "white", "edgecolor": FAULT, "hatch": "////"}
        letters = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}
    axes.broken_barh([(bar.start, bar.end - bar.start)], (row - 0.42, 0.84), **look)
    name = f"{preposition} {last}" if verb in COLOURS else last
    middle = (bar.start + bar.end) / 2
    axes.text(middle, row, name, ha="center", va="center", fontsize=9, **letters)
