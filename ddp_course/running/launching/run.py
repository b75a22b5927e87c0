"""A launch without its rehearsal: the request checked, the call packed, the ranks run here or on other hosts."""

import linecache
import math
import operator
import os
import pickle
from collections.abc import Callable
from typing import IO, Any

from . import pickling
from .launched import show_line
from .limits import check_world_size
from .local import LocalLaunch
from .setting import describe_launch, open_memory, start_method

LONGEST_TIMEOUT = 1e7  # seconds


def run_ranks(
    payload: IO[bytes], world_size: int, device: Any = "cpu", timeout: float = 300.0, link: Any = None,
    progress: bool | int = False, show: Callable = show_line, hosts: str | int | list | None = None,
) -> list:  # fmt: skip
    """Run a packed call on all ranks; `show(bar, rank, stream, text)` gets every line that a rank prints."""
    with payload:
        world_size, nbytes = check_request(world_size, device, timeout, link), os.fstat(payload.fileno()).st_size
        if hosts is not None:
            from .hosts import run_on_hosts  # here: it needs the extra ddp-course[hosts]

            return run_on_hosts(hosts, payload, world_size, device, timeout, link, progress, show)
        check_world_size(world_size, nbytes, on_gpu=False)
        setting = describe_launch(world_size, device, timeout, link, progress)
        check_world_size(world_size, nbytes, on_gpu=setting["devices"][0] != "cpu")
        return run_here(setting, payload, show)


def run_here(setting: dict, payload: IO[bytes], show: Callable) -> list:
    """Run one launch to its end; once more if it came to nothing because the server was just ending."""
    for last_try in (False, True):
        launched = new_launch(setting, show)
        try:
            launched.start(payload)
            launched.watch()
        finally:
            launched.close()
        if last_try or not launched.never_started():
            return launched.outcome()
    raise AssertionError("the last try returns or raises")


def new_launch(setting: dict, show: Callable) -> LocalLaunch:
    """A launch whose ranks come to life as this system allows."""
    if start_method() == "spawn":
        from .spawned import Spawned  # here: where processes can be forked it is never needed

        return Spawned(setting, show)
    from .forked import Forked  # here: it needs what only systems with fork have

    return Forked(setting, show)


def check_request(world_size: Any, device: Any, timeout: Any, link: Any) -> int:
    """The world size as an int; ValueError that says what was expected for any argument of the wrong kind."""
    try:
        number = operator.index(world_size)
    except TypeError:
        raise ValueError(f"world size is {world_size!r}; it must be a whole number, such as 4") from None
    if number < 1:
        raise ValueError(f"world size is {number}; it must be 1 or more")
    if device is None or isinstance(device, (int, float)):
        raise ValueError(f'device is {device!r}; choose "auto", "cpu", "cuda" or one GPU, such as "cuda:0"')
    if not isinstance(timeout, (int, float)) or math.isnan(timeout) or not 0 < timeout <= LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout is {timeout!r}; it must be a positive number of seconds, at most {LONGEST_TIMEOUT:g}"
        )
    for name, value in (("link", link), ("device", device)):
        if isinstance(value, type):
            raise ValueError(f"{name} is the class {value.__name__}; it must be one made of it: {value.__name__}(…)")
    if link is not None and not hasattr(link, "prepare"):
        raise ValueError(f"link is {link!r}; it must be a Link, such as Link(bandwidth={str(link)!r}), or None")
    return number


def pack_call(fn: Callable, args: tuple, kwargs: dict) -> IO[bytes]:
    """An unlinked temporary file with the source of all cells and the pickled call; ranks map it, none copies it."""
    sources = {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
    packed_sources = pickle.dumps(sources)
    if not callable(fn):
        raise TypeError(f"launch takes the function itself, as in launch(train, …), not what it returned: {fn!r:.100}")
    try:
        packed_call = pickling.dumps((fn, args, kwargs), protocol=5)
    except Exception as error:
        name, reason = pickling.unsendable(pickling.used_by(fn, args, kwargs)) or (repr(fn), error)
        raise TypeError(f"{name} cannot be sent to other processes: {reason}") from None
    payload = open_memory("call")
    payload.write(len(packed_sources).to_bytes(8, "little"))
    payload.write(packed_sources)
    payload.write(packed_call)
    payload.flush()
    return payload
