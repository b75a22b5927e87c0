"""`launch`: call a function on K ranks, get back one result for each.

    caller ── server (torch preloaded; started once, forks) ── agent (one a launch) ── rank 0 … rank K-1

The caller makes the pipes on which each rank reports, prints and shows its stacks, and reads all of them in one
loop: no threads, no signal handlers, nothing for a cell to hang on. Where processes cannot safely be forked, the
ranks come from spares that wait with torch loaded (`spawned`).
"""

import linecache
import math
import operator
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import IO, Any

from ...errors import CourseError, LinkError
from . import pickling
from .launched import show_line
from .limits import check_world_size
from .setting import describe_launch, open_payload, start_method

LONGEST_TIMEOUT = 1e7  # seconds
EXPECTED = (CourseError, LinkError, ValueError, TypeError, KeyboardInterrupt)


def launch(
    fn: Callable, *args: Any, world_size: int = 4, device: Any = "auto", timeout: float = 300.0, link: Any = None,
    progress: bool | int = False, hosts: str | int | list | None = None, **kwargs: Any,
) -> list:  # fmt: skip
    """Call `fn(*args, **kwargs)` on `world_size` ranks with the process group up; return the results in rank order.

    `fn` may be defined in a cell. `device`: "auto", "cpu", "cuda" or one GPU; or an emulated accelerator
    (`ddp_course.Device`) for each rank, or a list of them, in rank order. `timeout`: seconds for the whole launch.
    `link`: an emulated link between the ranks (`ddp_course.Link`). `hosts`: other machines that have joined
    (`ddp-course hosts`): "all", a number of them, or a list of names; ranks go there in blocks. Raises RankError when
    a rank fails, LaunchTimeout when time runs out, LaunchError when the ranks are ended from outside, ValueError for
    bad input.
    """
    try:
        return run_ranks(pack_call(fn, args, kwargs), world_size, device, timeout, link, progress, hosts=hosts)
    except EXPECTED as error:
        raise plain(error) from None


def plain(error: Any) -> BaseException:
    """An error without our own frames, which would bury its message; notebooks show the message alone."""
    name = type(error).__name__
    error._render_traceback_ = partial(list, [f"{name}: {error}" if str(error) else name])
    return error.with_traceback(None)


def run_ranks(
    payload: IO[bytes], world_size: int, device: Any, timeout: float, link: Any, progress: bool | int,
    show: Callable = show_line, hosts: str | int | list | None = None,
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
        if start_method() == "spawn":
            from .spawned import run_spawned  # here: where processes can be forked it is never needed

            return run_spawned(setting, payload, show)
        from .forked import run_forked  # here: it needs what only systems with fork have

        return run_forked(setting, payload, show)


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
    try:
        packed_call = pickling.dumps((fn, args, kwargs), protocol=5)
    except Exception as error:
        raise TypeError(f"{fn!r} or its arguments cannot be sent to other processes: {error}") from None
    payload = open_payload()
    payload.write(len(packed_sources).to_bytes(8, "little"))
    payload.write(packed_sources)
    payload.write(packed_call)
    payload.flush()
    return payload
