"""What follows from the request for a launch, on the caller's machine and on each host that takes part."""

import os
import sys
from typing import Any

from ..devices.device import Device, for_ranks
from ..devices.placement import placement
from ..linux import free_memory, usable_cores
from . import pickling

LOOPBACK_CARD = "lo0" if sys.platform == "darwin" else "lo"
MIB = 1 << 20
RANK_MEMORY = 64 * MIB  # what an idle CPU rank has of its own, with a small model: measured 13 to 60 MiB
RANK_FILES = 10  # what the caller has open for a rank: both ends of four pipes, and two files in memory
SPARE_FILES = 64


def start_method() -> str:
    """How ranks come to life: by "fork" from a process with torch in it where that is safe, else by "spawn", anew."""
    asked = os.environ.get("DDP_COURSE_START")
    if asked not in (None, "", "fork", "spawn"):
        raise ValueError(f'DDP_COURSE_START is "{asked}"; choose fork or spawn')
    return asked or ("fork" if sys.platform != "darwin" else "spawn")


def describe_launch(
    world_size: int, device: Any, timeout: float, link: Any, progress: bool | int, argument_bytes: int = 0
) -> dict:
    """Decide what follows from the request, and put down all that agent and ranks must know, as plain data.

    ValueError if this machine cannot hold so many ranks, each with `argument_bytes` of arguments.
    """
    check_world_size(world_size, argument_bytes)  # first: a list of a billion ranks takes long
    emulated = for_ranks(device, world_size) if isinstance(device, (Device, list, tuple)) else None
    backend, devices = placement("cpu" if emulated else str(device), world_size)
    if link is not None:
        link.check(world_size, backend)
    return {
        "world_size": world_size,
        "start": start_method(),
        "ranks": list(range(world_size)),  # those that this machine runs
        "store": None,  # address and port of the ranks' store, where rank 0 does not open it itself
        "backend": backend,
        "devices": devices,
        "timeout": timeout,
        "threads": max(1, usable_cores() // world_size),
        "link": pickling.dumps(link),
        "emulated": pickling.dumps(emulated),
        "progress": progress,
        "modules": [name for name in sys.modules if name.startswith(("ddp_course.stage", "ddp_course.collectives"))],
        "path": list(sys.path),
        "argv": list(sys.argv),
        "folder": os.getcwd(),
        "environ": {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK_CARD},  # whatever card is set for other machines
        "private": os.environ.get("DDP_COURSE_NETWORK") == "private",  # a network without anybody else in it
        "idle": None,  # seconds that ranks which stay after their call wait for another one
    }


def check_world_size(world_size: int, argument_bytes: int) -> None:
    """ValueError, with the largest world size that fits, if there is too little memory, or too few files are left."""
    needed = RANK_MEMORY + argument_bytes  # every rank gets its own copy of the arguments
    free, files = free_memory(), free_files()
    memory = f"about {needed / MIB:,.0f} MiB and {free / MIB:,.0f} MiB are free"
    pipes = f"{RANK_FILES} open files and this process may open {files or 'no'} more (see `ulimit -n`)"
    for most, reason in ((free // needed, memory), (files // RANK_FILES, pipes)):
        if world_size > most:
            largest = f"the largest that fits is {most}" if most else "not even one rank fits"
            raise ValueError(f"world size {world_size} does not fit: each rank needs {reason}; {largest}")


def free_files() -> int:
    """Files that this process may still open."""
    import resource  # Windows has none, and is refused in words

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    return sys.maxsize if most == resource.RLIM_INFINITY else max(0, most - open_now - SPARE_FILES)
