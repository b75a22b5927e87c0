"""`every_order`: run a program once, in a way that decides for all orders of its messages.

The run has no buffers (a send ends when its receive is there), and links so slow that every wait is
late. docs/EVERY_ORDER.md has the argument, and what lies outside of it: there, delays are drawn.
"""

import copy
import json
import random
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RankError
from ..running.clocks import DeadlockError, own
from ..running.launching.launch import launch
from ..running.links import Link
from ..running.torch_inside import tree_leaves
from .in_flight import Watch, watching
from .verdict import Verdict

PROOF = "right in every order: no buffer was needed, no memory was touched on its way"
SLOW = {"bandwidth": "10Mbit", "latency": "1ms"}
SEEDS = 20  # so many orders are drawn where one run proves nothing
LONGEST_DELAY_S = 0.005  # a few messages take so long on the slow link
WAITS = re.compile(r"rank (\d+) waits (.+?) since [\d.]+ s, (.+?)(?=; rank \d+ |$)")


def every_order(fn: Callable, *args: Any, world_size: int = 3, **kwargs: Any) -> Verdict:
    """Say whether `fn(*args, **kwargs)` on `world_size` ranks is right in whatever order its
    messages travel; return a Verdict.

    One run decides if each rank receives from named ranks and asks neither the clock nor whether a
    message has arrived. Else 20 orders are drawn, their results compared, and `proof` says that
    this proves less. An error of `fn` itself is raised, as `launch` does.
    """
    events, _ = one_launch(fn, args, kwargs, [None], world_size)
    doubts = sorted({event["text"] for event in events if event["kind"] == "doubt"})
    if not doubts or is_wrong(events):
        return judge(events, 1, PROOF)
    tried, results = one_launch(fn, args, kwargs, list(range(SEEDS)), world_size)
    less = f"{SEEDS} orders were tried, which proves less, because of this: {'; '.join(doubts)}"
    verdict = judge(tried, 1 + SEEDS, less)
    if verdict.ok and any(differ(results[0], other) for other in results[1:]):
        verdict.ok = False
        verdict.kind = "unlike results"
        verdict.proof = f"the results depend on the order of messages; {less}"
    return verdict


def one_launch(fn: Callable, args: tuple, kwargs: dict, seeds: list, world_size: int) -> tuple:
    """Run the program once for each seed; return what its ranks wrote down, and the results of all
    ranks for each seed.
    """
    results: list = []
    with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
        try:
            by_rank = launch(
                watched,
                fn,
                args,
                kwargs,
                seeds,
                folder,
                world_size=world_size,
                device="cpu",
                link=Link(**SLOW),
            )
            results = list(zip(*by_rank, strict=True))
        except RankError as error:
            events = read(folder, world_size)
            if not is_wrong(events):
                raise error from None
            return events, results
        return read(folder, world_size), results


def read(folder: str, world_size: int) -> list:
    """The events that all ranks have written down, in the order of virtual time."""
    events: list = []
    for rank in range(world_size):
        with suppress(FileNotFoundError):
            lines = Path(folder, str(rank)).read_text(encoding="utf-8").splitlines()
            events += [{"rank": rank, **json.loads(line)} for line in lines]
    return sorted(events, key=lambda event: event["moment"])


def watched(fn: Callable, args: tuple, kwargs: dict, seeds: list, folder: str) -> list:
    """On each rank: run the program once for each seed, None for no delays; return the results."""
    results = []
    for seed in seeds:
        dist.barrier()
        watch = Watch(Path(folder, str(dist.get_rank())))
        own_args, own_kwargs = copy.deepcopy((args, kwargs))
        delay = drawn_delay(random.Random(f"{seed} {dist.get_rank()}"), seed is not None)
        try:
            with watching(watch, delay):
                results.append(fn(*own_args, **own_kwargs))
                watch.ended()
        except DeadlockError as error:
            watch.tell("wrong", str(error), wrong="deadlock", lines=[])
            raise
        if watch.refusal:  # The program may have caught the error.
            raise watch.refusal
    return results


def drawn_delay(draw: random.Random, delays: bool) -> Callable:
    """What is called before each post: if there are delays, it waits for a random moment."""

    def delay() -> None:
        clock = own()
        if delays and clock is not None:
            moment = clock.moment + round(draw.uniform(0, LONGEST_DELAY_S) * 1e12)
            clock.sleep_until(moment, "for its turn")

    return delay


def is_wrong(events: list) -> bool:
    """Whether a rank has written down that something is wrong."""
    return any(event["kind"] == "wrong" for event in events)


def judge(events: list, runs: int, proof: str) -> Verdict:
    """The verdict on the events of all ranks; `proof` is that of a program without a fault."""
    shown = [
        (event["rank"], event["moment"], f"{event['kind']} {event['text']}", event["line"])
        for event in events
        if event["kind"] in ("post", "wait")
    ]
    wrong = [event for event in events if event["kind"] == "wrong"]
    if not wrong:
        return Verdict(True, runs, proof, events=shown)
    touches = [event for event in wrong if event["wrong"] != "deadlock"]
    if touches:
        first = touches[0]
        text = first["text"]
        rank = first["rank"]
        return Verdict(
            False, runs, f"rank {rank}: {text}", first["wrong"], [rank], first["lines"], shown
        )
    waits = WAITS.findall(wrong[0]["text"])
    ranks = [int(rank) for rank, _, _ in waits]
    lines = [line for _, _, line in waits]
    text = "; ".join(f"rank {rank} waits {what} ({line})" for rank, what, line in waits)
    proof = f"if the network buffers nothing, the ranks wait for each other for ever: {text}"
    return Verdict(False, runs, proof, "deadlock", ranks, lines, shown)


def differ(one: Any, other: Any) -> bool:
    """Whether two results have different values anywhere."""
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=False))
    if len(tree_leaves(one)) != len(tree_leaves(other)):
        return True
    return any(not alike(*pair) for pair in pairs)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same, tensors bit by bit but for NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and (one == other or one != one)
