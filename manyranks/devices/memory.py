"""Counts what a rank's tensors take of its device's memory, by their live storages."""

import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..clocks.stalls import line_of
from ..errors import OutOfMemoryError
from ..torch_inside import around, tensors_in

BLOCK = 512  # CUDA's caching allocator hands out whole multiples of so many bytes.
GARBAGE = 1.05  # Reference cycles are freed when so much more is live as after the last time.


class Memory:
    """The bytes of all live storages, and their `peak`.

    `capacity` is the bytes that the device has, or None for no limit. The tensors of the program
    are counted, in the order in which the host makes and frees them. The workspace of libraries and
    the gaps between blocks are not. Python frees reference cycles at moments that depend on what
    the process did before. Here these moments depend on what is counted alone, so that each run
    counts the same.
    """

    current: "Memory | None" = None  # A process counts at most once.

    def __init__(self, capacity: float | None):
        self.capacity = capacity or math.inf
        self.live = 0
        self.peak = 0
        self.collect_beyond = 0.0
        self.sizes: dict[int, int] = {}  # by the identity of a storage
        self.references: dict[int, weakref.ref] = {}

    def note(self, *operands: Any) -> None:
        """Count the new storages of tensors; raises OutOfMemoryError beyond the capacity."""
        for tensor in tensors_in(*operands):
            storage = tensor.untyped_storage()
            key = id(storage)
            # A model that is built on torch's device "meta" takes no memory until it is moved.
            if key not in self.sizes and tensor.device.type != "meta":
                self.references[key] = weakref.ref(storage, partial(self.forget, key))
                self.count(key, storage.nbytes())

    def forget(self, key: int, _: Any) -> None:
        """Count a storage no more, since it was freed."""
        self.live -= self.sizes.pop(key)
        del self.references[key]

    def count(self, key: int, nbytes: int) -> None:
        """Note how many bytes a storage takes now; raises OutOfMemoryError beyond the capacity."""
        whole = math.ceil(nbytes / BLOCK) * BLOCK
        self.live += whole - self.sizes.get(key, 0)
        self.sizes[key] = whole
        if self.live > self.collect_beyond:
            gc.collect()
            self.collect_beyond = min(GARBAGE * self.live, self.capacity)
        if self.live > self.capacity:
            needed = self.live
            self.live -= whole
            self.sizes[key] = 0
            gigabytes = f"{needed / 1e9:.4g} of {self.capacity / 1e9:.4g} GB"
            raise OutOfMemoryError(f"out of memory at {line_of(sys._getframe())}: {gigabytes}")
        self.peak = max(self.peak, self.live)

    def resize(self, run: Callable, storage: torch.UntypedStorage, nbytes: int) -> Any:
        """Resize a storage, as `fully_shard` does to free what was gathered, and count it again."""
        if id(storage) in self.sizes:
            self.count(id(storage), int(nbytes))
        return run(storage, nbytes)

    @contextmanager
    def counting(self) -> Iterator["Memory"]:
        """Make this the memory of the process within this block.

        Storages that change their size are counted again. The mode that runs operations calls
        `note` with new tensors.
        """
        Memory.current = self
        was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()  # What was there before takes no time in each collection.
        try:
            with around(torch.UntypedStorage, "resize_", self.resize):
                yield self
        finally:
            Memory.current = None
            gc.unfreeze()
            if was_enabled:
                gc.enable()
