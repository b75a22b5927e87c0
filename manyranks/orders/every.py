"""`every_order`: run a program once, in a way that decides for all orders of its messages.

The run has no buffers (a send ends when its receive is there), and links so slow that every wait is
late. docs/EVERY_ORDER.md has the argument. It does not cover all programs: others run many times,
and their messages are delayed by random times.
"""

import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..clocks.stalls import Line, line_of_wait, wait_and_line, who_waits
from ..errors import Awaited, DeadlockError, LaunchError, Wait
from ..launching.launch import launch
from ..links import Link
from .in_flight import Watch, watching
from .verdict import Event, Verdict, faults_in, judge

SLOW = Link("10Mbit", "1ms")
EARLY = 2  # A buffer that receives holds this number until the wait, and more in other orders.
DRAWN_ORDERS = 20  # Where one run proves nothing, so many orders are drawn.
PROOF = "no buffer was needed, no memory was touched on its way"


def every_order(fn: Callable, *args: Any, world_size: int = 3, **kwargs: Any) -> Verdict:
    """Return a verdict on whether `fn` is right in whatever order its messages travel.

    It is called as `fn(*args, **kwargs)` on `world_size` ranks.

    One run decides if each rank has one thread, receives from named ranks, asks neither a clock nor
    whether a message has arrived, and speaks to no other rank by files or stores. Else 20 orders
    are drawn, their results are compared, and the verdict's `proof` names the lines for which it
    proves less. An error of `fn` itself is raised, as `launch` does.
    """
    events, results = run([None], world_size, fn, args, kwargs)
    doubts = sorted(
        {f"{event.text} ({event.lines[0]})" for event in events if event.kind == "doubt"}
    )
    if not doubts or faults_in(events):
        return judge(events, results, 1, f"right in every order: {PROOF}")
    # The order without delays comes again: results that differ then depend on no order.
    seeds = [None, None, *range(DRAWN_ORDERS)]
    drawn_events, drawn_results = run(seeds, world_size, fn, args, kwargs)
    runs = 1 + DRAWN_ORDERS
    proof = (
        f"right in {runs} orders that were tried: {PROOF}; this proves less, and of all others it"
        f" cannot tell, because {'; '.join(doubts)}"
    )
    return judge(drawn_events, results + drawn_results, runs, proof, alike=3)


def run(
    seeds: Iterable, world_size: int, *program: Any, timeout: float = 300.0
) -> tuple[list[Event], list]:
    """Run the program once for each seed; the seed None is for a run without delays.

    `program` is a function, its arguments and its keyword arguments. Return the events, by time,
    and the results of all ranks for each seed. Raises LaunchTimeout after `timeout` seconds, and
    the error of the program, unless the events have a fault that explains it.
    """
    results: list = []
    failure = None
    with tempfile.NamedTemporaryFile(prefix="manyranks_") as log:
        try:
            results = launch(
                run_on_rank,
                log.name,
                list(seeds),
                *program,
                world_size=world_size,
                device="cpu",
                link=SLOW,
                timeout=timeout,
            )
        except LaunchError as error:
            failure = error
        lines = Path(log.name).read_text(encoding="utf-8").splitlines()
    events = [read_event(line) for line in lines]
    if isinstance(failure, DeadlockError):
        events += stops_in(failure)
    events.sort(key=attrgetter("moment", "rank", "kind", "text"))
    if failure and not faults_in(events):
        raise failure
    # The results come by rank, and are returned by seed.
    return events, list(zip(*results, strict=True))


def read_event(text: str) -> Event:
    """Return the event that a rank has written down as JSON."""
    moment, rank, kind, words, lines, what = json.loads(text)
    if what is not None:
        awaited, ranks, name = what
        what = Awaited(awaited, tuple(ranks), name)
    return Event(moment, rank, kind, words, [Line(*line) for line in lines], what)


def stops_in(error: DeadlockError) -> list[Event]:
    """Return an event for each rank that waits in a deadlock.

    All have the same text, in which {0}, {1}, … stand for the lines of the waiting ranks.
    """

    def numbered(wait: Wait) -> str:
        return wait_and_line(wait, f"{{{error.waits.index(wait)}}}")

    text = f"without buffers all wait for ever: {who_waits(error.waits, error.returned, numbered)}"
    return [
        Event(wait.since, wait.rank, "deadlock", text, [line_of_wait(wait)]) for wait in error.waits
    ]


def run_on_rank(log: str, seeds: list, fn: Callable, args: tuple, kwargs: dict) -> list:
    """Run the program on this rank once for each seed, None for no delays; return the results."""
    results = []
    with open(log, "ab", buffering=0) as file:
        # All runs have one watch, since threads may outlive a run.
        watch = Watch(file)
        for number, seed in enumerate(seeds):
            own_args, own_kwargs = copy.deepcopy((args, kwargs))
            dist.barrier()
            draw_alike()
            watch.draw = None
            watch.early = EARLY
            watch.skew_s = 0.0 if number else None
            if seed is not None:
                watch.draw = random.Random(f"{seed} {dist.get_rank()}")
                watch.early = EARLY + 1 + seed % 3
            with watching(watch):
                results.append(fn(*own_args, **own_kwargs))
                watch.ended()
    return results


def draw_alike() -> None:
    """Have a program that draws random numbers without a seed draw the same ones in each run."""
    torch.manual_seed(torch.initial_seed())
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
