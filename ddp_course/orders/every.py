"""`every_order`: run a program once, in a way that decides for all orders of its messages.

The run has no buffers (a send ends when its receive is there), and links so slow that every wait is
late. docs/EVERY_ORDER.md has the argument, and what lies outside of it: there, delays are drawn.
"""

import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import RankError
from ..running.clocks import DeadlockError, own
from ..running.launching.launch import launch
from ..running.links import Link
from .in_flight import Watch, watching
from .verdict import DEADLOCK, Event, Verdict, faults_in, judge

SLOW = Link("10Mbit", "1ms")
SEEDS = 20  # So many orders are drawn where one run proves nothing.
LONGEST_DELAY = 5_000_000_000  # A few messages take so many picoseconds on the slow link.
PROOF = "right in every order: no buffer was needed, no memory was touched on its way"


def every_order(fn: Callable, *args: Any, world_size: int = 3, **kwargs: Any) -> Verdict:
    """Say whether `fn(*args, **kwargs)` on `world_size` ranks is right in whatever order its
    messages travel; return a Verdict.

    One run decides if each rank receives from named ranks and asks neither the clock nor whether a
    message has arrived. Else 20 orders are drawn, their results compared, and `proof` says that
    this proves less. An error of `fn` itself is raised, as `launch` does.
    """
    events, results = run([None], world_size, fn, args, kwargs)
    doubts = sorted({event.text for event in events if event.kind == "doubt"})
    if not doubts or faults_in(events):
        return judge(events, results, 1, PROOF)
    events, results = run(range(SEEDS), world_size, fn, args, kwargs)
    proof = f"{SEEDS} orders were tried, which proves less, because of this: {'; '.join(doubts)}"
    return judge(events, results, 1 + SEEDS, proof)


def run(seeds: Iterable, world_size: int, *program: Any) -> tuple:
    """Run the program once for each seed; return what its ranks wrote down, and the results of all
    ranks for each seed.
    """
    results: list = []
    with tempfile.NamedTemporaryFile(prefix="ddp_course_") as log:
        given = (log.name, list(seeds), *program)
        try:
            results = launch(run_on_rank, *given, world_size=world_size, device="cpu", link=SLOW)
        except RankError:
            if not faults_in(read(log.name)):
                raise
        return read(log.name), list(zip(*results, strict=True))


def read(log: str) -> list:
    """What all ranks have written down, in the order of virtual time."""
    lines = Path(log).read_text(encoding="utf-8").splitlines()
    return sorted(Event(*json.loads(line)) for line in lines)


def run_on_rank(log: str, seeds: list, fn: Callable, args: tuple, kwargs: dict) -> list:
    """On each rank: run the program once for each seed, None for no delays; return the results."""
    return [run_watched(log, seed, fn, *copy.deepcopy((args, kwargs))) for seed in seeds]


def run_watched(log: str, seed: int | None, fn: Callable, args: tuple, kwargs: dict) -> Any:
    """Run the program on this rank, under a watch."""
    dist.barrier()
    draw = random.Random(f"{seed} {dist.get_rank()}")

    def delay() -> None:
        clock: Any = own()
        if seed is not None:
            clock.sleep_until(clock.moment + draw.randrange(LONGEST_DELAY), "for its turn")

    watch = Watch(Path(log), delay)
    try:
        with watching(watch):
            result = fn(*args, **kwargs)
            watch.ended()
    except DeadlockError as error:
        watch.tell(DEADLOCK, str(error))
        raise
    return result
