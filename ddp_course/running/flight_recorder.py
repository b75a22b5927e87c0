"""What each rank's last collective was: readable by the other ranks, and from outside when a rank hangs.

The ranks of a launch share one table in memory. Each collective of ours writes down there what it is about to reduce,
before it sends anything, and reads what the other ranks wrote for the same call: a rank that comes with another shape,
type or operation raises an error at once, where gloo would hang or mix up the numbers. Outside `launch` (under
torchrun) nothing is recorded, but each of gloo's messages bears the `tag` of its collective: messages of another
collective wait, and are not mixed up with it. Recording costs about 20 microseconds per collective.
"""

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from ..errors import MismatchError

CALLS_PER_RANK = 64  # ranks are never further apart than that
TEXT_BYTES, MOST_MEMBERS = 200, 128
NUMBERS = [("digest", "u8"), ("group", "u8"), ("sequence", "u8"), ("begin", "f8"), ("end", "f8")]
RECORD = np.dtype([*NUMBERS, ("members", "?", MOST_MEMBERS), ("text", f"S{TEXT_BYTES}")])  # has the fields of `Call`

_own = SimpleNamespace(memory=None, rank=0)  # a process takes part in at most one launch, and shares its table
_sequences: dict = {}
_inside = threading.local()


@dataclass(frozen=True)
class Call:
    """One collective of one rank: `sequence` counts the calls in `group`; begin and end are monotonic seconds.

    `digest` and `group` are numbers that stand for the text and for the group's name. `members` are the ranks of the
    group, as far as they are among the first 128. A negative end marks a call that was launched and may still run.
    """

    digest: int
    group: int
    sequence: int
    begin: float
    end: float
    members: Sequence[int]
    text: str

    def __str__(self):
        return f"{self.text}, call {self.sequence}"


def size(world_size: int) -> int:
    """Bytes of shared memory that `world_size` ranks need."""
    return world_size * CALLS_PER_RANK * RECORD.itemsize


def attach(descriptor: int, rank: int, world_size: int) -> None:
    """Record this process's collectives as rank `rank`'s in the shared file `descriptor`."""
    shared = mmap.mmap(descriptor, size(world_size))
    _own.memory, _own.rank = np.frombuffer(shared, RECORD).reshape(world_size, CALLS_PER_RANK), rank


@contextmanager
def entry(
    name: str, tensors: torch.Tensor | Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Record a collective while it runs; `tensors` is what it works on: a tensor, or a list of them.

    Only the outermost collective counts, not the collectives it is made of. Raises MismatchError when another member
    of `group` came to the same call with other tensors or another collective.
    """
    if tag():
        yield
        return
    what = f"{name} of {describe(tensors)}"
    _inside.tag = 1 + (crc32(what.encode()) >> 2)
    try:
        with nullcontext() if _own.memory is None else recorded(what, tensors, group):
            yield
    finally:
        _inside.tag = 0


def has_entries() -> bool:
    """Whether this rank has entered any collective of ours."""
    return bool(_sequences)


def tag() -> int:
    """A number that stands for the collective that this thread is in, the same on all ranks; 0 outside of any."""
    return getattr(_inside, "tag", 0)


@contextmanager
def recorded(what: str, tensors: torch.Tensor | Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> Iterator:
    """Write down a collective, with its beginning and its end, and compare it with the other ranks' calls."""
    group_name, members = (group or dist.group.WORLD).group_name, dist.get_process_group_ranks(group)
    sequence = _sequences[group_name] = _sequences.get(group_name, 0) + 1
    key, digest = number_of(group_name), number_of(what)
    slots = _own.memory[:, (key + sequence) % CALLS_PER_RANK]  # all ranks keep this call here
    own = slots[_own.rank]
    own["sequence"] = 0
    own["digest"], own["group"], own["begin"], own["end"] = digest, key, time.monotonic(), 0.0
    own["members"], own["text"] = np.isin(range(MOST_MEMBERS), members), what.encode()[:TEXT_BYTES]
    own["sequence"] = sequence  # it comes last: a reader that sees it has the rest complete
    for rank in members:
        compare(slots[rank], key, sequence, digest, f"on rank {rank}, but {what[:TEXT_BYTES]} on rank {_own.rank}")
    yield
    own["end"] = -time.monotonic() if on_gpu(tensors) else time.monotonic()


def number_of(text: str) -> int:
    """A number of 64 bits that stands for `text`, the same in all processes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def describe(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """Data types and shapes in words, such as "float32 [3, 4]"."""
    if isinstance(tensors, torch.Tensor):
        return f"{str(tensors.dtype).removeprefix('torch.')} {list(tensors.shape)}"
    if isinstance(tensors, (list, tuple)):
        return f"{len(tensors)} tensors: " + "; ".join(describe(tensor) for tensor in tensors)
    return type(tensors).__name__


def on_gpu(tensors: torch.Tensor | Sequence[torch.Tensor]) -> bool:
    """Whether the work on `tensors` is only queued when the call returns."""
    listed = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in listed)


def compare(other: Any, key: int, sequence: int, digest: int, difference: str) -> None:
    """Raise MismatchError if a rank's record `other` is of the same call with another collective or other tensors."""
    for _ in range(2):  # the other rank may have been writing when it was read first
        if (other["group"], other["sequence"]) != (key, sequence) or other["digest"] == digest:
            return
    raise MismatchError(
        f"collective number {sequence} is {read(other).text} {difference}; "
        "all ranks must call the same collective with the same shape and data type"
    )


def read(record: Any) -> Call:
    """The call in a record of the table."""
    digest, group, sequence, begin, end, members, text = record.item()
    ranks = np.flatnonzero(members).tolist()
    return Call(digest, group, sequence, begin, end, ranks, text.decode("utf-8", "replace"))


def calls(descriptor: int, world_size: int) -> dict:
    """The last collectives of each rank that has recorded any, in the order in which the rank entered them."""
    with mmap.mmap(descriptor, size(world_size), access=mmap.ACCESS_READ) as memory:
        table = np.frombuffer(memory[:], RECORD).reshape(world_size, CALLS_PER_RANK)
    made = {rank: [read(record) for record in records if record["sequence"]] for rank, records in enumerate(table)}
    return {rank: sorted(entered, key=lambda call: call.begin) for rank, entered in made.items() if entered}
