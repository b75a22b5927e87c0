"""What follows from the request for a launch, on the caller's machine and on each host that takes part."""

import os
import sys
import tempfile
from typing import IO, Any

from ..devices import Device, for_ranks, placement, usable_cores
from . import pickling

LOOPBACK_CARDS = {"linux": "lo", "darwin": "lo0"}
NETWORK_CARD = (  # gloo takes the loopback, whatever card is set for other machines
    {"GLOO_SOCKET_IFNAME": LOOPBACK_CARDS[sys.platform]} if sys.platform in LOOPBACK_CARDS else {}
)


def start_method() -> str:
    """How ranks come to life: "fork" from the preloaded server where that is safe, else "spawn", from warm spares."""
    asked = os.environ.get("DDP_COURSE_START")
    if asked not in (None, "", "fork", "spawn"):
        raise ValueError(f'DDP_COURSE_START is "{asked}"; choose fork or spawn')
    return asked or ("fork" if hasattr(os, "fork") and sys.platform != "darwin" else "spawn")


def describe_launch(world_size: int, device: Any, timeout: float, link: Any, progress: bool | int) -> dict:
    """Decide what follows from the request, and put down all that agent and ranks must know, as plain data."""
    emulated = for_ranks(device, world_size) if isinstance(device, (Device, list, tuple)) else None
    placed = placement("cpu" if emulated else device, world_size)
    if link is not None:
        link.check(world_size, placed.backend)
    return {
        "world_size": world_size,
        "ranks": list(range(world_size)),  # those that this machine runs
        "store": None,  # address and port of the ranks' store, where rank 0 does not open it itself
        "backend": placed.backend,
        "devices": placed.devices,
        "timeout": timeout,
        "threads": max(1, usable_cores() // world_size),
        "link": pickling.dumps(link),
        "emulated": pickling.dumps(emulated),
        "progress": progress,
        "modules": [name for name in sys.modules if name.startswith(("ddp_course.stage", "ddp_course.collectives"))],
        "path": list(sys.path),
        "argv": list(sys.argv),
        "folder": os.getcwd(),
        "environ": {**os.environ, **NETWORK_CARD},
        "private": os.environ.get("DDP_COURSE_NETWORK") == "private",  # a network without anybody else in it
        "idle": None,  # seconds that ranks which stay after their call wait for another one
    }


def preloading_environment() -> dict:
    """The environment of a process that preloads torch; its ranks get the caller's as it is at their launch."""
    return {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1"}


def open_memory(name: str) -> IO[bytes]:
    """A new file that no folder lists, in memory where the system can do that: a full disk is no obstacle."""
    return tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else open(os.memfd_create(name), "w+b")
