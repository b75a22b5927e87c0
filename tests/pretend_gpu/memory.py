"""Memory of pretended GPUs: a block for each storage, which knows its uses, and pools.

Pools hand blocks out again.
"""

import os
import weakref
from collections import Counter, defaultdict
from typing import NamedTuple

import torch

from .report import note
from .streams import LOCK, clocks, current, host, open_context, physical, place

SIZE = int(os.environ.get("PRETEND_BYTES", 4 * 2**30))  # This is the memory of each GPU.
MOST_USES = 64  # A block remembers so many uses.
used = Counter()
peak = Counter()
noted = Counter()
blocks = weakref.WeakValueDictionary()  # The key is the address of torch's own record.
# Memory whose uses may not be over is listed by the stream whose pool it is in.
freed = defaultdict(list)


class Use(NamedTuple):
    """Work on a stream that reads or writes a range of bytes; `count` is its number there."""

    key: tuple
    count: int
    writes: bool
    start: int
    end: int
    place: str


class Freed(NamedTuple):
    """Memory that was given back, with the uses by other streams."""

    size: int
    uses: list
    place: str


def is_over(use, clock):
    """Return whether a use is known to be over."""
    return clock.get(use.key, 0) >= use.count or host.get(use.key, 0) >= use.count


class Block:
    """The memory of one storage.

    It comes from the pool of the stream that is current when it is taken.
    """

    def __init__(self, index, storage):
        self.size = 0
        self.storage = storage  # Its address is not given out again before this block is gone.
        self.uses = []
        self.messages = []
        self.take(index)

    def take(self, index):
        """Take memory for all bytes of the storage."""
        self.place = place()
        self.recorded = set()
        self.key = current(open_context(index))
        start = self.storage.data_ptr()
        nbytes = self.storage.nbytes()
        size = -(-nbytes // 512) * 512
        with LOCK:
            if used[index] + size > SIZE:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU {index} has a "
                    f"total capacity of {SIZE} bytes of which {SIZE - used[index]} are free."
                )
            self.size = size
            used[index] += size
            peak[index] = max(peak[index], used[index])
            if used[index] > 1.25 * noted[index]:  # ranks end without farewell: note it as it grows
                noted[index] = used[index]
                note("peak", f"{physical(index)}\t{used[index]}")
            if size:
                self.reuse()
            count = clocks[self.key].get(self.key, 0)
            self.uses.append(Use(self.key, count, True, start, start + nbytes, self.place))

    def give(self):
        """Give the memory back to the pool that it came from."""
        with LOCK:
            used[self.key[0]] -= self.size
            uses = [u for u in self.uses if u.key != self.key and u.key not in self.recorded]
            if uses:
                freed[self.key].append(Freed(self.size, uses, self.place))
            self.size = 0
            self.uses = []

    def reuse(self):
        """Take memory of the pool: a race if another stream may still use it."""
        for old in freed[self.key][:]:
            late = [use for use in old.uses if not is_over(use, clocks[self.key])]
            if late and old.size >= self.size:
                note(
                    "race",
                    f"memory from {old.place} was freed and is given out again at {self.place}, "
                    f"but stream {late[0].key} may still use it (at {late[0].place}): "
                    "record_stream is missing",
                )
            if not late or old.size >= self.size:
                freed[self.key].remove(old)

    def __del__(self):
        self.give()

    def use(self, new, clock):
        """Note a use, and each other use that nothing orders before it."""
        kept = []
        for old in self.uses:
            apart = old.end <= new.start or new.end <= old.start
            harmless = apart or not (old.writes or new.writes)
            if not harmless and old.key != new.key and not is_over(old, clock):
                verb = "writes" if new.writes else "reads"
                before = "wrote" if old.writes else "read"
                note(
                    "race",
                    f"stream {new.key} {verb} at {new.place} what stream {old.key} {before} at "
                    f"{old.place}: no event orders them",
                )
            inside = new.start <= old.start and old.end <= new.end
            replaced = inside and (new.writes or (not old.writes and old.key == new.key))
            if not replaced:
                kept.append(old)
        self.uses = [*kept[-MOST_USES:], new]


def resizing(original):
    """`resize_` of a storage, which frees the memory of a tensor that lives on.

    It also takes some again.
    """

    def resize_(storage, size):
        block = blocks.get(storage._cdata)
        if block is not None:
            block.give()
        original(storage, size)
        if block is not None:
            block.take(block.key[0])
        return storage

    return resize_
