"""Derives the setting of a launch, which its agent and its ranks must know, from the request."""

import operator
import os
import resource
import sys
from collections.abc import Sequence
from typing import IO, Any

from .. import this_torch
from ..devices.device import Device, for_ranks
from ..devices.placement import placement, say_sharing, usable_gpus
from ..errors import EmulationError
from ..linux import free_memory, usable_cores
from .protocol import EmulatedLink, Progress, Setting

LONGEST_TIMEOUT = 1e7  # No launch may take more seconds.
MIB = 1 << 20
# An idle CPU rank with a small model was measured to have 13 to 60 MiB of its own.
RANK_MEMORY = 64 * MIB
# CUDA's libraries and its context take so much of the machine's memory.
GPU_RANK_MEMORY = 1024 * MIB
# For each rank the caller has open both ends of four pipes, and two files in memory.
RANK_FILES = 10
# So many files are left for what the caller's own program opens meanwhile.
SPARE_FILES = 64


def start_method() -> str:
    """Return how ranks start: by "fork" where a process with torch may fork, else by "spawn".

    Raises ValueError if MANYRANKS_START names another way.
    """
    usual = "spawn" if sys.platform == "darwin" else "fork"
    return choice_of("MANYRANKS_START", usual, ["fork", "spawn"])


def network() -> str:
    """Return the network in which ranks meet: "auto", "private" or "open".

    "private" is a network of their own. "auto" is that where the system allows it, else the
    machine's loopback, where the ranks refuse other users. "open" is the loopback, where they
    refuse nobody. Raises ValueError if MANYRANKS_NETWORK is anything else.
    """
    return choice_of("MANYRANKS_NETWORK", "auto", ["auto", "private", "open"])


def choice_of(variable: str, usual: str, choices: list[str]) -> str:
    """Return one of the `choices`: what an environment variable asks for, or the `usual` one.

    Raises ValueError if it asks for anything else.
    """
    asked = os.environ.get(variable) or usual
    if asked not in choices:
        raise ValueError(f'{variable} is "{asked}"; choose {" or ".join(choices)}')
    return asked


def describe_launch(
    call: IO[bytes],
    world_size: int,
    device: str | Device | Sequence[Device],
    timeout: float,
    link: EmulatedLink | None = None,
    progress: Progress = False,
    sizes_only: bool = False,
    answer: float | None = None,
) -> Setting:
    """Return the setting that follows from the request for a launch.

    Raises ValueError if an argument is wrong, or if this machine cannot hold `world_size` ranks,
    each with the arguments of the packed `call`.
    """
    this_torch.say_once()
    world_size = check_request(world_size, device, timeout, link)
    if answer is not None and not sizes_only:
        raise ValueError(f"answer is {answer!r}, but there are values: it needs sizes_only=True")
    gpus = usable_gpus() if isinstance(device, str) and device != "cpu" else 0
    # This comes first, as a list of a billion ranks takes long.
    check_world_size(world_size, os.fstat(call.fileno()).st_size, on_gpus=gpus > 0)
    emulated = for_ranks(device, world_size) if isinstance(device, (Device, list, tuple)) else None
    backend, devices = placement("cpu" if emulated or sizes_only else str(device), world_size)
    if gpus:
        say_sharing(world_size, gpus=len(set(devices)))
    if link is not None:
        check_link(link, world_size, backend, sizes_only)
    return Setting(
        world_size=world_size,
        start=start_method(),
        network=network(),
        backend=backend,
        devices=devices,
        timeout=timeout,
        threads=threads_of_a_rank(world_size),
        link=link,
        emulated=emulated,
        progress=progress,
        sizes_only=sizes_only,
        answer=answer,
        computes=bool(emulated or progress or sizes_only),
    )


def check_request(world_size: Any, device: Any, timeout: Any, link: Any) -> int:
    """Return the world size as an int, once the arguments are of the right kind.

    Raises ValueError, with what was expected, if one is not.
    """
    try:
        number = operator.index(world_size)
    except TypeError:
        raise ValueError(
            f"world size is {world_size!r}; it must be a whole number, such as 4"
        ) from None
    if number < 1:
        raise ValueError(f"world size is {number}; it must be 1 or more")
    if not isinstance(timeout, (int, float)) or not 0 < timeout <= LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout is {timeout!r}; it must be a positive number of seconds, at most"
            f" {LONGEST_TIMEOUT:g}"
        )
    for name, value in (("link", link), ("device", device)):
        if isinstance(value, type):
            raise ValueError(
                f"{name} is the class {value.__name__}; it must be one made of it:"
                f" {value.__name__}(…)"
            )
    if link is not None and not hasattr(link, "prepare"):
        raise ValueError(
            f"link is {link!r}; it must be a Link, such as Link(bandwidth={str(link)!r}), or None"
        )
    return number


def check_link(link: EmulatedLink, world_size: int, backend: str, sizes_only: bool) -> None:
    """Raise EmulationError if a launch of this kind can never have this link."""
    link.check(world_size, backend)
    if sizes_only and link.mode != "virtual":
        raise EmulationError(
            "with sizes only there is nothing to send over real sockets: choose a link whose"
            ' mode is "virtual"'
        )


def threads_of_a_rank(world_size: int) -> int:
    """Return a rank's share of the cores, at most `OMP_NUM_THREADS`.

    Where many people share a machine, threads that spin for each other's cores slow everybody down.
    """
    share = max(1, usable_cores() // world_size)
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(share, int(allowed))) if allowed.isdigit() else share


def check_world_size(world_size: int, argument_bytes: int, on_gpus: bool = False) -> None:
    """Raise ValueError if too little memory or too few open files are left for all ranks.

    The error names the largest world size that fits.
    """
    libraries = GPU_RANK_MEMORY if on_gpus else RANK_MEMORY
    # Every rank gets its own copy of the arguments.
    needed = libraries + argument_bytes
    free = free_memory()
    most = free // needed
    reason = f"about {needed / MIB:,.0f} MiB and {free / MIB:,.0f} MiB are free"
    if world_size <= most:
        files = free_files()
        most = files // RANK_FILES
        may_open = files or "no"
        reason = (
            f"{RANK_FILES} open files and this process may open {may_open} more (see `ulimit -n`)"
        )
    if world_size > most:
        largest = f"the largest that fits is {most}" if most else "not even one rank fits"
        raise ValueError(
            f"world size {world_size} does not fit: each rank needs {reason}; {largest}"
        )


def free_files() -> int:
    """Return how many more files this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    open_now = len(os.listdir("/dev/fd"))
    return max(0, limit - open_now - SPARE_FILES)
