"""What each rank's last collective was: readable by the other ranks, and from outside when a rank hangs.

The launch shares one piece of memory among its ranks. Each collective of ours writes down there what it is about
to reduce, before it sends anything, and reads what the other ranks wrote for the same call: a rank that comes with
another shape, type or operation raises an error at once, where gloo would hang or mix up the numbers. Outside `launch`
(under torchrun) nothing is recorded, but each of gloo's messages bears the `tag` of its collective: messages of another
collective wait, and are not mixed up with it. Recording costs about 20 microseconds per collective.
"""

import mmap
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from zlib import crc32

import torch
import torch.distributed as dist

from ..errors import MismatchError

CALLS_PER_RANK = 64  # ranks are never further apart than that
CALL_BYTES = 256
TEXT_BYTES, MEMBER_BITS = 200, 128
CALL = struct.Struct(f"<8s8sQdd16s{TEXT_BYTES}s")  # the fields of `Call`
SEQUENCE, SEQUENCE_AT = struct.Struct("<Q"), 16
END, END_AT = struct.Struct("<d"), 32

_own = SimpleNamespace(memory=None, rank=0)  # a process takes part in at most one launch, and shares its memory
_sequences: dict = {}
_inside = threading.local()


@dataclass(frozen=True)
class Call:
    """One collective of one rank: `sequence` counts the calls in `group`; begin and end are monotonic seconds.

    `members` are the ranks of the group, as far as they are among the first 128.
    """

    digest: bytes
    group: bytes
    sequence: int
    begin: float
    end: float
    members: Sequence[int]
    text: str

    def __str__(self):
        return f"{self.text}, call {self.sequence}"


def size(world_size: int) -> int:
    """Bytes of shared memory that `world_size` ranks need."""
    return world_size * CALLS_PER_RANK * CALL_BYTES


def attach(descriptor: int, rank: int, world_size: int) -> None:
    """Record this process's collectives as rank `rank`'s in the shared file `descriptor`."""
    _own.memory, _own.rank = mmap.mmap(descriptor, size(world_size)), rank


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
    group_name = (group or dist.group.WORLD).group_name
    sequence = _sequences[group_name] = _sequences.get(group_name, 0) + 1
    key = blake2b(group_name.encode(), digest_size=8).digest()
    digest = blake2b(what.encode(), digest_size=8).digest()
    members = dist.get_process_group_ranks(group)
    write(Call(digest, key, sequence, time.monotonic(), 0.0, members, what))
    compare(digest, key, sequence, what, members)
    yield
    sign = -1 if on_gpu(tensors) else 1  # a negative end marks a call that was launched and may still run
    END.pack_into(_own.memory, place(_own.rank, key, sequence) + END_AT, sign * time.monotonic())


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


def place(rank: int, key: bytes, sequence: int) -> int:
    """Where in the shared memory call number `sequence` of a group is kept."""
    slot = (int.from_bytes(key[:4], "little") + sequence) % CALLS_PER_RANK
    return (rank * CALLS_PER_RANK + slot) * CALL_BYTES


def write(call: Call) -> None:
    """Write down a call of this rank, its number last: a reader that sees the number finds the rest complete."""
    text = call.text.encode()[:TEXT_BYTES]
    offset = place(_own.rank, call.group, call.sequence)
    members = sum(1 << rank for rank in call.members if rank < MEMBER_BITS).to_bytes(MEMBER_BITS // 8, "little")
    CALL.pack_into(_own.memory, offset, call.digest, call.group, 0, call.begin, call.end, members, text)
    SEQUENCE.pack_into(_own.memory, offset + SEQUENCE_AT, call.sequence)


def read(memory: mmap.mmap | bytes, offset: int) -> Call:
    """The call that is kept at `offset`."""
    digest, group, sequence, begin, end, packed, text = CALL.unpack_from(memory, offset)
    bits = int.from_bytes(packed, "little")
    members = tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)
    return Call(digest, group, sequence, begin, end, members, text.rstrip(b"\0").decode("utf-8", "replace"))


def compare(digest: bytes, key: bytes, sequence: int, what: str, ranks: Sequence[int]) -> None:
    """Raise MismatchError if any of `ranks` recorded another collective or other tensors for the same call."""
    for rank in ranks:
        other = read(_own.memory, place(rank, key, sequence))
        if (other.group, other.sequence) == (key, sequence) and other.digest != digest:
            other = read(_own.memory, place(rank, key, sequence))  # the other rank may have been writing
        if (other.group, other.sequence) == (key, sequence) and other.digest != digest:
            what = what if len(what) < TEXT_BYTES else what[: TEXT_BYTES - 1] + "…"
            raise MismatchError(
                f"collective number {sequence} is {other.text} on rank {rank}, but {what} on rank {_own.rank}; "
                "all ranks must call the same collective with the same shape and data type"
            )


def calls(descriptor: int, world_size: int) -> dict:
    """The last collectives of each rank that has recorded any, in the order in which the rank entered them."""
    entered = {}
    with mmap.mmap(descriptor, size(world_size), access=mmap.ACCESS_READ) as memory:
        for rank in range(world_size):
            slots = [read(memory, (rank * CALLS_PER_RANK + slot) * CALL_BYTES) for slot in range(CALLS_PER_RANK)]
            entered[rank] = sorted((call for call in slots if call.sequence), key=lambda call: call.begin)
    return {rank: made for rank, made in entered.items() if made}
