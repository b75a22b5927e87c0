"""What each rank's last collective was: readable by the other ranks, and from outside when a rank hangs.

The ranks of a launch share one table in memory. Each collective of ours writes down there what it is about to reduce,
before it sends anything, and reads what the other ranks wrote for the same call: a rank that comes with another shape,
type or operation raises an error at once, where gloo would hang or mix up the numbers. Outside `launch` (under
torchrun) nothing is recorded, but each of gloo's messages bears the `tag` of its collective: messages of another
collective wait, and are not mixed up with it. Calling costs about 20 microseconds per collective.
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

from ..errors import MismatchError

CALLS_PER_RANK = 64  # ranks are never further apart than that
TEXT_BYTES, MOST_MEMBERS = 200, 128

_own = SimpleNamespace(memory=None, rank=0)  # a process takes part in at most one launch, and shares its table
sequences: dict = {}  # how many collectives of ours this rank has entered, by the name of their group
_inside = threading.local()


class Call(Structure):
    """One collective of one rank, laid out as in C: `sequence` counts the calls in `group`; times are monotonic.

    `digest` and `group` are the numbers of all words and of the group's name. `marks` has a mark at each of the group's
    ranks, as far as they are among the first 128. At `end` the call returned; on a GPU its work may go on.
    """

    _fields_ = [
        ("digest", c_uint32), ("group", c_uint32), ("sequence", c_uint32), ("begin", c_double), ("end", c_double),
        ("marks", c_bool * MOST_MEMBERS), ("words", c_char * TEXT_BYTES),
    ]  # fmt: skip

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
    """Bytes of shared memory that `world_size` ranks need."""
    return sizeof(Call) * CALLS_PER_RANK * world_size


def attach(descriptor: int, rank: int, world_size: int) -> None:
    """Call this process's collectives as rank `rank`'s in the shared file `descriptor`."""
    _own.memory, _own.rank = (Call * CALLS_PER_RANK * world_size).from_buffer(mmap.mmap(descriptor, 0)), rank


@contextmanager
def entry(
    name: str, tensors: torch.Tensor | Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Call a collective while it runs; `tensors` is what it works on: a tensor, or a list of them.

    Only the outermost collective counts, not the collectives it is made of. Raises MismatchError when another member
    of `group` came to the same call with other tensors or another collective.
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
    """A number that stands for the collective that this thread is in, the same on all ranks; 0 outside of any."""
    return getattr(_inside, "tag", 0)


def recorded(what: str, group: dist.ProcessGroup | None) -> Call:
    """Write down that a collective begins, and compare it with the other ranks' calls."""
    group_name, members = (group or dist.group.WORLD).group_name, tuple(dist.get_process_group_ranks(group))
    sequence = sequences[group_name] = sequences.get(group_name, 0) + 1
    key = number_of(group_name)
    slot = (key + sequence) % CALLS_PER_RANK  # all ranks keep this call there
    own = _own.memory[_own.rank][slot]
    own.sequence = 0
    own.digest, own.group, own.begin, own.end = tag(), key, time.monotonic(), 0.0
    own.marks, own.words = marks(members), what.encode()[:TEXT_BYTES]
    own.sequence = sequence  # it comes last: a reader that sees it has the rest complete
    for rank in members:
        compare(_own.memory[rank][slot], rank, own)
    return own


@cache
def marks(members: tuple) -> Any:
    """Marks at the ranks of a group, as far as there is room."""
    return (c_bool * MOST_MEMBERS)(*(rank in members for rank in range(MOST_MEMBERS)))


def number_of(text: str) -> int:
    """A number of 30 bits, not 0, that stands for `text`, the same in all processes."""
    return 1 + (crc32(text.encode()) >> 2)


def describe(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """Data types and shapes in words, such as "float32 [3, 4]"."""
    if isinstance(tensors, torch.Tensor):
        return f"{str(tensors.dtype).removeprefix('torch.')} {list(tensors.shape)}"
    if isinstance(tensors, (list, tuple)):
        return f"{len(tensors)} tensors: " + "; ".join(describe(tensor) for tensor in tensors)
    return type(tensors).__name__


def compare(other: Call, rank: int, own: Call) -> None:
    """Raise MismatchError if `rank`'s record `other` is of the same call with another collective or other tensors."""
    for _ in range(2):  # the other rank may have been writing when it was read first
        if (other.group, other.sequence) != (own.group, own.sequence) or other.digest == own.digest:
            return
    raise MismatchError(
        f"collective number {own.sequence} is {other.text} on rank {rank}, but {own.text} on rank "
        f"{_own.rank}; all ranks must call the same collective with the same shape and data type"
    )


def calls(descriptor: int, world_size: int) -> dict:
    """The last collectives of each rank that has recorded any, in the order in which the rank entered them."""
    with mmap.mmap(descriptor, size(world_size), access=mmap.ACCESS_READ) as memory:
        table = (Call * CALLS_PER_RANK * world_size).from_buffer_copy(memory)
    made = {rank: [call for call in own if call.sequence] for rank, own in enumerate(table)}
    return {rank: sorted(entered, key=lambda call: call.begin) for rank, entered in made.items() if entered}
