"""`launch`: call a function on K ranks, and get back one result for each.

This module packs the call, and `setting` checks the request. `local` starts the ranks, and `watch`
waits for their end.
"""

import difflib
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any, TypeVar

from ..clocks.clock import in_real_time
from ..devices.device import Device
from ..errors import ManyranksError
from ..memory import open_memory, remembered_sources
from . import pickling
from .protocol import EmulatedLink, Progress
from .setting import describe_launch
from .watch import Launch

T = TypeVar("T")  # what the function returns
DEFAULT_RANKS = 4
# These errors are for the caller, who sees them without the launcher's own frames.
EXPECTED = (ManyranksError, ValueError, TypeError, KeyboardInterrupt)


def launch(
    fn: Callable[..., T],
    *args: Any,
    world_size: int | None = None,
    device: str | Device | Sequence[Device] = "auto",
    timeout: float = 300.0,
    link: EmulatedLink | None = None,
    progress: Progress = False,
    sizes_only: bool = False,
    answer: float | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on `world_size` (4) ranks; return the results in rank order.

    `fn` may be defined in a cell. On each rank it finds the process group up.

    `device`: "auto", "cpu", "cuda" or one GPU; or an emulated accelerator (a `Device`) for each
    rank, or a list of them, in rank order. `timeout`: the seconds for the whole launch. `link`: an
    emulated link between the ranks (a `Link`). `progress`: whether to show a bar of the optimizer's
    steps. A number says how many steps are expected, and a pair of a name and a number also names
    the bar. `sizes_only`: whether tensors have shapes and no values, so that nothing is computed,
    and models may be larger than this machine. `answer`: with `sizes_only`, the number that a
    program gets when it asks for a value.

    Raises RankError when a rank fails, LaunchTimeout when time runs out, DeadlockError when under
    virtual time all wait, LaunchError when the ranks are ended from outside, ValueError for bad
    input.
    """
    try:
        check_arguments(fn, args, kwargs, world_size)
        if world_size is None:
            world_size = DEFAULT_RANKS
        with pack_call(fn, args, kwargs) as call:
            setting = describe_launch(
                call, world_size, device, timeout, link, progress, sizes_only, answer
            )
            # A launch within a rank whose time is virtual takes none.
            return in_real_time(lambda: Launch(setting).run(call))
    except EXPECTED as error:
        raise plain(error) from None


def check_arguments(fn: Any, args: tuple, kwargs: dict, world_size: int | None) -> None:
    """Tell the caller, before a rank starts, which argument is meant for the launch.

    Raises TypeError if the function does not take these arguments.
    """
    try:
        # A decorator may add arguments to those that the caller gives.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        # It is no function, or one written in C, which may not name its parameters.
        return
    name = getattr(fn, "__name__", "fn")
    advice = ""
    if world_size is None and len(args) == 1 and type(args[0]) is int:
        advice = f"; for {args[0]} ranks write world_size={args[0]}"
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        options = inspect.signature(launch).parameters
        for word in kwargs.keys() - signature.parameters.keys():
            for option in difflib.get_close_matches(word, options, 1):
                advice = f"; did you mean {option}, an option of launch?"
        raise TypeError(f"{name} does not take these arguments: {error}{advice}") from None
    if advice:
        [first, *_] = arguments
        if signature.parameters[first].default is not inspect.Parameter.empty:
            print(f"launch: {args[0]} is the {first} of {name}{advice}", file=sys.stderr)


def plain(error: Any) -> BaseException:
    """Return an error without our own frames, which would bury its message.

    Notebooks show the message alone, by the method that IPython asks for it.
    """
    line = type(error).__name__
    if str(error):
        line += f": {error}"
    error._render_traceback_ = partial(list, [line])
    return error.with_traceback(None)


def pack_call(fn: Callable, args: tuple, kwargs: dict) -> IO[bytes]:
    """Return a file without a name with the pickled call and the sources of all cells.

    Ranks map the file without a copy. Raises TypeError, which names what cannot be sent.
    """
    if not callable(fn):
        raise TypeError(
            "launch takes the function itself, as in launch(train, …), not what it returned:"
            f" {fn!r:.100}"
        )
    try:
        packed = pickling.dumps((remembered_sources(), fn, args, kwargs), protocol=5)
    except Exception as error:
        name, reason = pickling.unsendable(fn, args, kwargs) or (repr(fn), error)
        raise TypeError(f"{name} cannot be sent to other processes: {reason}") from None
    return open_memory("call", packed)
