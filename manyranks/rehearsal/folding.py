"""Folding: the first and the last rank are run, and all others are booked as their copies.

Ranks that share the data do the same at the same moments, but for the last ones, whose shards may
be smaller. So a collective of all ranks begins when these two have come, and takes the time that it
takes for all. Where the two do not communicate alike, nothing is claimed. What no run of two ranks
can see is a rank between them that comes later than both.
"""

import io
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from .. import clocks, torch_inside
from ..clocks import recording
from ..clocks.clock import process
from ..clocks.group import Done, Group
from ..errors import DeadlockError, EmulationError, LaunchError, LaunchTimeout, RankError
from .script import RankRecord, Script, run_script

ALL = "leave out --fold, and all ranks are run"
UNLIKE = (
    "with --fold all ranks are alike, so none sends to another one or in a group of some, and none"
    f" adds up numbers that have values; {ALL}"
)
GATHER = ("allgather", "all_gather_single")
GATHERING = {name for each in GATHER for name in torch_inside.methods_of(each).values()}


def hand_out(outputs: Any, inputs: Any, *options: Any) -> Done:
    """Gather what all members send: it is what this one sends."""
    [given] = torch_inside.tensors_in(inputs)
    gathered = torch_inside.tensors_in(outputs)
    for output in gathered:
        times = output.numel() // max(1, given.numel())
        output.view(-1).copy_(given.reshape(-1).repeat(times))
    return Done(gathered)


def keep(*tensors: Any, **options: Any) -> Done:
    """Keep what this member has, as all others have the same."""
    return Done(torch_inside.tensors_in(*tensors))


def refuse(*arguments: Any, **options: Any) -> None:
    """Raise an EmulationError: the ranks are not alike."""
    raise EmulationError(UNLIKE)


class Copies:
    """Stands for gloo: each other member sends what this one sends."""

    def __getattr__(self, name: str) -> Callable:
        if name in ("broadcast", "barrier"):
            return keep
        return hand_out if name in GATHERING else refuse


class Folded(Group):
    """The group of all ranks: this process is one of them, and the others are its copies.

    Its `table` knows the links between all ranks; the launch's own has two ranks.
    """

    of_launch: Any = None  # This one takes the place of the launch's own group.

    def begin(self, of_some_ranks: bool) -> None:
        """Raise an EmulationError for a group of some ranks."""
        if len(self.members) < self.table.ranks:
            raise EmulationError(UNLIKE)

    def mover(self) -> Copies:
        """Return what moves the data: there is nobody to move it to."""
        return Copies()

    @property
    def partners(self) -> list[int]:
        """The two ranks that are run: a collective of all begins when they have come."""
        return process.table.names

    message = recv_anysource = refuse  # type: ignore[assignment]


def run_folded(
    script: Script, arguments: list[str], device: Any, per_host: int, link: Any, ranks: int
) -> RankRecord:
    """Run the script as the first or the last of `ranks` ranks; return what it did."""
    is_last = dist.get_rank() == 1
    rank = ranks - 1 if is_last else 0
    process.table.names = [0, ranks - 1]
    if link is None:
        Folded.table = clocks.Table([0] * ranks)
    else:
        link.prepare(ranks)
        Folded.table = link.network.table
    # While the other rank still joins that group, this rank must not take its end away.
    Folded.of_launch = dist.group.WORLD
    dist.destroy_process_group()
    torch_inside.make_groups_with(Folded)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=ranks)
    with ExitStack() as stack:
        if is_last:  # What it prints would have another rank's name.
            stack.enter_context(redirect_stdout(io.StringIO()))
        return run_script(script, arguments, device, per_host)


def check_alike(records: list[RankRecord], rank: int) -> None:
    """Raise an EmulationError where the last `rank` communicates otherwise than the first one."""
    first, last = records
    for mine, other in zip_longest(first.calls, last.calls):
        if mine is None or other is None or what_is_sent(mine) != what_is_sent(other):
            raise EmulationError(
                f"rank 0 {in_words(mine)}, rank {rank} {in_words(other)}: they are not alike; {ALL}"
            )


def what_is_sent(call: recording.Call) -> tuple:
    """Return what must be alike on ranks of which one stands for the other."""
    return call.name, call.ranks, call.nbytes, call.line


def in_words(call: recording.Call | None) -> str:
    """Return what a rank calls, and at which line; None is for a rank that calls nothing more."""
    if call is None:
        return "calls nothing more"
    return f"calls {call.name} of {call.nbytes:.0f} bytes at {call.line}"


def print_with_last(
    last: int, run: Callable, launched: Any, process: int, stream: str, text: str
) -> None:
    """Show a line of a folded launch under the number of the rank as which a process ran."""
    run(launched, numbered(process, last), stream, text)


def with_last(error: LaunchError, rank: int) -> LaunchError:
    """Return the error of a launch of two ranks, whose second one ran as the last `rank`."""
    if isinstance(error, LaunchTimeout):
        states = [replace(state, rank=numbered(state.rank, rank)) for state in error.states]
        cause = error.cause.replace("rank 1 ", f"rank {rank} ")
        return LaunchTimeout(error.timeout, states, cause)
    if not isinstance(error, (DeadlockError, RankError)):
        return error
    failures = [replace(each, rank=numbered(each.rank, rank)) for each in error.failures]
    if isinstance(error, RankError):
        return RankError(failures, rank + 1)
    waiting = {wait.rank for wait in error.waits}
    returned = [each for each in (0, rank) if each not in waiting]
    return DeadlockError(error.message, error.waits, returned, failures)


def numbered(process: int, rank: int) -> int:
    """Return the number of the rank as which a process of a folded launch ran."""
    return rank if process == 1 else process
