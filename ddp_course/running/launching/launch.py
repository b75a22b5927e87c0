"""`launch`: call a function on K ranks, get back one result for each.

    caller ── server (torch preloaded; started once, forks) ── agent (one a launch) ── rank 0 … rank K-1

The caller makes the pipes on which each rank reports, prints and shows its stacks, and reads all of them in one
loop: no threads, no signal handlers, nothing for a cell to hang on. Where processes cannot safely be forked, the
ranks come from spares that wait with torch loaded (`spawned`).
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import CourseError, LinkError
from .run import check_request, pack_call, run_ranks

EXPECTED = (CourseError, LinkError, ValueError, TypeError, KeyboardInterrupt)


def launch(
    fn: Callable, *args: Any, world_size: int | None = None, device: Any = "auto", timeout: float = 300.0,
    link: Any = None, progress: bool | int = False, hosts: str | int | list | None = None, **kwargs: Any,
) -> list:  # fmt: skip
    """Call `fn(*args, **kwargs)` on `world_size` (4) ranks with the process group up; return the results in rank order.

    `fn` may be defined in a cell. `device`: "auto", "cpu", "cuda" or one GPU; or an emulated accelerator
    (`ddp_course.Device`) for each rank, or a list of them, in rank order. `timeout`: seconds for the whole launch.
    `link`: an emulated link between the ranks (`ddp_course.Link`). `hosts`: other machines that have joined
    (`ddp-course hosts`): "all", a number of them, or a list of names; ranks go there in blocks. Raises RankError when
    a rank fails, LaunchTimeout when time runs out, LaunchError when the ranks are ended from outside, ValueError for
    bad input.
    """
    try:
        if world_size is None:
            check_arguments(fn, args, kwargs)
        count = check_request(4 if world_size is None else world_size, device, timeout, link)
        payload = pack_call(fn, args, kwargs)
        if link is not None and hosts is None:
            link.rehearse(count)
        return run_ranks(payload, count, device, timeout, link, progress, hosts=hosts)
    except EXPECTED as error:
        raise plain(error) from None


def check_arguments(fn: Any, args: tuple, kwargs: dict) -> None:
    """Say so where an argument looks as if the world size were meant: TypeError if the function takes none such."""
    if len(args) != 1 or type(args[0]) is not int or not callable(fn):
        return
    name, meant = getattr(fn, "__name__", "fn"), f"for {args[0]} ranks write world_size={args[0]}"
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a function of C says nothing of its parameters
        return
    try:
        (parameter,) = signature.bind(*args, **kwargs).arguments.keys() - kwargs.keys()
    except (TypeError, ValueError):
        raise TypeError(f"{name} does not take the argument {args[0]}; {meant}") from None
    if signature.parameters[parameter].default is not inspect.Parameter.empty:
        print(f"launch: {args[0]} is the {parameter} of {name}; {meant}", file=sys.stderr)


def plain(error: Any) -> BaseException:
    """An error without our own frames, which would bury its message; notebooks show the message alone."""
    name = type(error).__name__
    error._render_traceback_ = partial(list, [f"{name}: {error}" if str(error) else name])
    return error.with_traceback(None)
