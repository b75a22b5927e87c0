"""What a rank's tensors take of its device's memory, counted by their live storage."""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..clocks.stalls import line_of
from ..errors import OutOfMemoryError
from ..torch_inside import around, tensors_in

BLOCK = 512  # CUDA's caching allocator hands out multiples of so many bytes.


class Memory:
    """The bytes of all storages that live, and their `peak`.

    `capacity` is what the device has, or None for no limit.

    Counted is what a program's tensors take, in the order in which the host makes and frees them:
    no library's workspace, and no gap between blocks.
    """

    current: "Memory | None" = None  # A process counts at most once.

    def __init__(self, capacity: float | None = None):
        self.capacity = capacity
        self.live = 0
        self.peak = 0
        self.sizes: dict[int, int] = {}  # by the identity of a storage
        self.references: dict[int, weakref.ref] = {}

    def note(self, *operands: Any) -> None:
        """Count the storages of tensors that are not counted yet; raises OutOfMemoryError."""
        for tensor in tensors_in(*operands):
            storage = tensor.untyped_storage()
            if id(storage) not in self.sizes:
                self.references[id(storage)] = weakref.ref(storage, self.forget(id(storage)))
                self.count(id(storage), storage.nbytes())

    def forget(self, key: int) -> Callable:
        """Return what is to be done when a storage is freed."""

        def freed(_: Any) -> None:
            self.live -= self.sizes.pop(key)
            del self.references[key]

        return freed

    def count(self, key: int, nbytes: int) -> None:
        """Note how many bytes a storage takes from now on; raises OutOfMemoryError."""
        whole = -(-nbytes // BLOCK) * BLOCK
        self.live += whole - self.sizes.get(key, 0)
        self.sizes[key] = whole
        if self.capacity is not None and self.live > self.capacity:
            needed = self.live
            self.live -= whole
            self.sizes[key] = 0
            gigabytes = f"{needed / 1e9:.4g} of {self.capacity / 1e9:.4g} GB"
            raise OutOfMemoryError(f"out of memory at {line_of(sys._getframe())}: {gigabytes}")
        self.peak = max(self.peak, self.live)

    def resize(self, run: Callable, storage: torch.UntypedStorage, nbytes: int) -> Any:
        """Resize a storage, as `fully_shard` does to free gathered parameters."""
        if id(storage) in self.sizes:
            self.count(id(storage), int(nbytes))
        return run(storage, nbytes)

    @contextmanager
    def counting(self) -> Iterator["Memory"]:
        """Within this block this is the process's memory.

        Storages that change their size are counted anew; whoever runs operations tells of new ones
        by `note`.
        """
        Memory.current = self
        try:
            with around(torch.UntypedStorage, "resize_", self.resize):
                yield self
        finally:
            Memory.current = None


def peak_memory() -> int:
    """Return the most bytes that this rank's tensors have taken at once.

    They are counted in a launch with `sizes_only`. Raises RuntimeError elsewhere.
    """
    if Memory.current is None:
        raise RuntimeError("memory is not counted here: launch(…, sizes_only=True) does")
    return Memory.current.peak
