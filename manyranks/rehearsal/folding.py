"""Folding: one rank is run, and all others are booked as its copies.

Ranks that share the data do the same at the same moments. So a collective of all ranks begins when
one has come, and takes the time that it takes for all. The last rank is run, too: where it does
not do what the first one does, or comes later anywhere, nothing is claimed.
"""

import io
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from typing import Any

import torch.distributed as dist

from .. import clocks, torch_inside
from ..clocks import events, recording, streams
from ..clocks.group import Done, Group, Work
from ..errors import EmulationError
from .script import Told, run_script

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
    """The group of all ranks: this process is one of them, and the others are its copies."""

    table: Any = None  # It knows the links between all ranks; this process's own has one of each.

    def begin(self, of_some_ranks: bool) -> None:
        """Take a number of this process's own; raises EmulationError for a group of some ranks."""
        if len(self.members) < self.table.ranks:
            raise EmulationError(UNLIKE)
        table = clocks.process.table
        self.number = 1 + table.rank
        table.members[self.number][table.rank] = 1

    def mover(self) -> Copies:
        """Return what moves the data: there is nobody to move it to."""
        return Copies()

    def timed(self, name: str, work: Any, nbytes: float, steps: int) -> Work:
        """Begin a collective of all ranks: the others come when this one comes."""
        duration = steps * self.table.step_takes(nbytes, self.members)

        def join() -> Work:
            call = recording.note_call(name, tuple(self.members), steps * nbytes, duration)
            alone = [clocks.process.table.rank]
            ticket = events.join(self.number, alone, duration, nbytes > 0, name)
            return Work(work, ticket, call)

        return streams.at_its_start(join)

    def message(self, *arguments: Any) -> Work:
        """Raise an EmulationError."""
        raise EmulationError(UNLIKE)

    def recv_anysource(self, tensors: list, tag: int) -> Work:
        """Raise an EmulationError."""
        raise EmulationError(UNLIKE)


def run_folded(
    path: str, arguments: list[str], device: Any, per_host: int, link: Any, ranks: int
) -> Told:
    """Run the script as the first or the last of `ranks` ranks; return what it did."""
    is_last = dist.get_rank() == 1
    rank = ranks - 1 if is_last else 0
    if link is None:
        Folded.table = clocks.Table([0] * ranks)
    else:
        link.prepare(ranks)
        Folded.table = link.network.table
    dist.destroy_process_group()
    torch_inside.make_groups_with(Folded)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=ranks)
    with ExitStack() as stack:
        if is_last:  # What it prints would have another rank's name.
            stack.enter_context(redirect_stdout(io.StringIO()))
        return run_script(path, arguments, device, per_host)


def check_alike(told: list[Told], rank: int) -> None:
    """Raise an EmulationError where the last `rank` does not do what the first one does, in time.

    It may be earlier, as one is whose shard is smaller: the first one decides then.
    """
    first, last = told
    if len(first.calls) != len(last.calls) or len(first.steps) != len(last.steps):
        raise EmulationError(
            f"rank 0 makes {len(first.steps)} steps with {len(first.calls)} collectives, rank"
            f" {rank} {len(last.steps)} with {len(last.calls)}: they are not alike; {ALL}"
        )
    for mine, other in zip(first.calls, last.calls, strict=True):
        file, line, text = mine[3]
        if mine[:4] != other[:4]:
            difference = f"calls {other[0]} of {other[2]:.0f} bytes, line {other[3][1]}"
        elif other[4] > mine[4]:
            difference = f"comes {(other[4] - mine[4]) / 1e9:.6f} ms later"
        else:
            continue
        raise EmulationError(
            f"{file} line {line}: {text}: rank 0 calls {mine[0]} of {mine[2]:.0f} bytes, rank"
            f" {rank} {difference}: they are not alike; {ALL}"
        )
