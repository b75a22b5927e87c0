"""How many ranks this machine can hold."""

import os
import sys
from pathlib import Path

MIB = 1 << 20
RANK_MEMORY = 64 * MIB  # what an idle CPU rank has of its own, with a small model: measured 13 to 60 MiB
GPU_RANK_MEMORY = 1024 * MIB  # host memory of a rank that has initialised CUDA
PIPES_A_RANK, SHARED_PIPES = 4, 4
SPARE_FILES = 64
MEMORY = Path("/proc/meminfo")  # Linux: no library is needed
CGROUPS = [  # the limit, the use and the details of this container's memory, cgroup version 2 and 1
    ("memory.max", "memory.current", "inactive_file", Path("/sys/fs/cgroup")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", Path("/sys/fs/cgroup/memory")),
]


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
    if world_size * PIPES_A_RANK > files:
        raise ValueError(
            f"world size {world_size} does not fit: each rank needs {PIPES_A_RANK} open files and this process may "
            f"open {files or 'no'} more (see `ulimit -n`); {largest(files // PIPES_A_RANK)}"
        )


def largest(fits: int) -> str:
    """What the caller may ask for."""
    return f"the largest that fits is {fits}" if fits else "not even one rank fits"


def free_memory() -> int:
    """Bytes that new processes may use: what the machine has free, or what its container allows."""
    free = available_memory()
    for limit, used, reclaimable, folder in CGROUPS:
        allowed = (folder / limit).read_text().strip() if (folder / limit).is_file() else ""
        if allowed.isdigit():
            details = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            taken = int((folder / used).read_text()) - int(details.get(reclaimable, 0))
            free = min(free, int(allowed) - taken)
    return max(0, free)


def available_memory() -> int:
    """Bytes that the machine has free, or would free at once for whoever asks."""
    if MEMORY.is_file():
        words = next(line for line in MEMORY.read_text().splitlines() if line.startswith("MemAvailable")).split()
        return int(words[1]) * 1024
    import psutil

    return psutil.virtual_memory().available


def free_files() -> int:
    """Files that this process may still open."""
    if sys.platform == "win32":
        return 8192
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/dev/fd"))
    return sys.maxsize if most == resource.RLIM_INFINITY else max(0, most - open_now - SPARE_FILES)
