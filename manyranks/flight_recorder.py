"""The record of each rank's last collectives, which other ranks and the launcher can read.

The ranks of a launch share one table in memory. Each of our collectives records in it what it is
about to reduce, before it sends anything, and reads what the other ranks recorded for the same
call: a rank with another shape, data type or operation raises an error at once, where gloo would
hang or mix up the numbers. Outside `launch` (under torchrun) nothing is recorded, but each message
of gloo carries the `tag` of its collective: messages of another collective wait, and are not mixed
up with it. A record costs about 20 microseconds per collective.
"""

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, c_bool, c_char, c_double, c_uint32, sizeof
from functools import cache
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from .errors import MismatchError

CALLS_PER_RANK = 64  # The newest calls are kept: those of ranks further apart are not compared.
TEXT_BYTES = 200  # A longer description of a call is cut off.
MOST_MEMBERS = 128  # Ranks from this number on have no place in the record of a call.

# A process takes part in at most one launch, and shares its table.
_own = SimpleNamespace(memory=None, rank=0)
sequences: dict = {}  # how many of our collectives this rank has entered, by the group's name
_inside = threading.local()  # Its `tag` is that of the collective in which this thread is.


class Call(Structure):
    """One collective of one rank, laid out as in C.

    `digest` and `group` are the numbers (`number_of`) of the call's whole text and of the group's
    name. `sequence` counts the calls in the group. `marks` is True at the ranks of the group that
    are among the first 128. Times are monotonic; the call returned at `end`, but on a GPU its work
    may go on.
    """

    _fields_ = [
        ("digest", c_uint32),
        ("group", c_uint32),
        ("sequence", c_uint32),
        ("begin", c_double),
        ("end", c_double),
        ("marks", c_bool * MOST_MEMBERS),
        ("words", c_char * TEXT_BYTES),
    ]

    @property
    def members(self) -> list[int]:
        """The ranks of the group."""
        return [rank for rank, mark in enumerate(self.marks) if mark]

    @property
    def text(self) -> str:
        """The collective and what it works on."""
        return self.words.decode("utf-8", "replace")

    def __str__(self):
        return f"{self.text}, call {self.sequence}"


def size(world_size: int) -> int:
    """Return the bytes of shared memory that `world_size` ranks need."""
    return sizeof(Call) * CALLS_PER_RANK * world_size


def attach(descriptor: int, rank: int, world_size: int) -> None:
    """Record this process's collectives as those of rank `rank` in the shared file `descriptor`."""
    _own.memory = (Call * CALLS_PER_RANK * world_size).from_buffer(mmap.mmap(descriptor, 0))
    _own.rank = rank


@contextmanager
def entry(
    name: str,
    tensors: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
) -> Iterator[None]:
    """Record a collective while it runs.

    `tensors` is the tensor, or the list of tensors, that it works on. Only the outermost collective
    is recorded, not those inside it. Raises MismatchError when another member of `group` came to
    the same call with other tensors or another collective.
    """
    if tag():
        yield
        return
    what = f"{name} of {describe(tensors)}"
    _inside.tag = number_of(what)
    try:
        call = None if _own.memory is None else recorded(what, group)
        yield
    finally:
        _inside.tag = 0
    if call is not None:
        call.end = time.monotonic()


def tag() -> int:
    """Return the number of this thread's collective, the same on all ranks; 0 outside of any."""
    return getattr(_inside, "tag", 0)


def recorded(what: str, group: dist.ProcessGroup | None) -> Call:
    """Record that a collective begins, and compare it with the other ranks' calls."""
    group_name = (group or dist.group.WORLD).group_name
    members = tuple(dist.get_process_group_ranks(group))
    sequence = sequences.get(group_name, 0) + 1
    sequences[group_name] = sequence
    group_number = number_of(group_name)
    # All ranks record this call in the slot of this number.
    slot = (group_number + sequence) % CALLS_PER_RANK
    own = _own.memory[_own.rank][slot]
    own.sequence = 0  # Readers skip a record without a number: this one is being written.
    own.digest = tag()
    own.group = group_number
    own.begin = time.monotonic()
    own.end = 0.0
    own.marks = marks(members)
    own.words = what.encode()[:TEXT_BYTES]
    # This is written last: a reader that sees it finds the other fields complete.
    own.sequence = sequence
    for rank in members:
        compare(_own.memory[rank][slot], rank, own)
    return own


@cache
def marks(members: tuple) -> Any:
    """Return an array that is True at each rank of a group that is among the job's first 128."""
    array = (c_bool * MOST_MEMBERS)()
    for rank in members:
        if rank < MOST_MEMBERS:
            array[rank] = True
    return array


def number_of(text: str) -> int:
    """Return a number from 1 to 2**30 for `text`, the same in all processes, as a message's tag."""
    return 1 + (crc32(text.encode()) >> 2)


def describe(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """Return data types and shapes in words, such as "float32 [3, 4]"."""
    if isinstance(tensors, torch.Tensor):
        return f"{str(tensors.dtype).removeprefix('torch.')} {list(tensors.shape)}"
    if isinstance(tensors, (list, tuple)):
        return f"{len(tensors)} tensors: " + "; ".join(describe(tensor) for tensor in tensors)
    return type(tensors).__name__


def compare(other: Call, rank: int, own: Call) -> None:
    """Raise MismatchError if `rank` recorded another collective or tensors for this call."""
    # There are two readings: at the first the other rank may have been writing its record.
    for _ in range(2):
        if (other.group, other.sequence) != (own.group, own.sequence) or other.digest == own.digest:
            return
    raise MismatchError(
        f"collective number {own.sequence} is {other.text} on rank {rank}, but {own.text} on rank "
        f"{_own.rank}; all ranks must call the same collective with the same shape and data type"
    )


def calls(descriptor: int, world_size: int) -> dict:
    """Return the last collectives of each rank that has recorded any, in the order of its calls."""
    with mmap.mmap(descriptor, size(world_size), access=mmap.ACCESS_READ) as memory:
        table = (Call * CALLS_PER_RANK * world_size).from_buffer_copy(memory)
    by_rank = {}
    for rank, slots in enumerate(table):
        recorded_calls = [call for call in slots if call.sequence]
        if recorded_calls:
            by_rank[rank] = sorted(recorded_calls, key=lambda call: call.begin)
    return by_rank
