"""How many ranks this machine can hold."""

import os
import sys

from ..linux import free_memory

MIB = 1 << 20
RANK_MEMORY = 64 * MIB  # what an idle CPU rank has of its own, with a small model: measured 13 to 60 MiB
GPU_RANK_MEMORY = 1024 * MIB  # host memory of a rank that has initialised CUDA
PIPES_PER_RANK, SHARED_PIPES = 5, 3
SPARE_FILES = 64


def check_world_size(world_size: int, argument_bytes: int, on_gpu: bool) -> None:
    """Raise ValueError, with the largest world size that fits, if `world_size` ranks need more than there is.

    Every rank gets its own copy of the arguments, `argument_bytes` of them.
    """
    needed = (GPU_RANK_MEMORY if on_gpu else RANK_MEMORY) + argument_bytes
    free = free_memory()
    if world_size * needed > free:
        raise ValueError(
            f"world size {world_size} does not fit: each rank needs about {needed / MIB:,.0f} MiB and "
            f"{free / MIB:,.0f} MiB are free; {largest(free // needed)}"
        )
    files = free_files()
    if world_size * PIPES_PER_RANK > files:
        raise ValueError(
            f"world size {world_size} does not fit: each rank needs {PIPES_PER_RANK} open files and this process may "
            f"open {files or 'no'} more (see `ulimit -n`); {largest(files // PIPES_PER_RANK)}"
        )


def largest(fits: int) -> str:
    """What the caller may ask for."""
    return f"the largest that fits is {fits}" if fits else "not even one rank fits"


def free_files() -> int:
    """Files that this process may still open."""
    if sys.platform == "win32":
        return 8192
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    return sys.maxsize if most == resource.RLIM_INFINITY else max(0, most - open_now - SPARE_FILES)
