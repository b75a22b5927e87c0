"""Virtual time: each thread of each rank has a clock; operations and messages move it on, and
nobody sleeps.

docs/VIRTUAL_TIME.md has the definition. Where a device or a link is emulated, `enter` gives a rank
its clocks.

    now() advance(seconds)      this thread's time in seconds; let time pass
    post(…) join(…) wait(…)     what the process group calls for messages and collectives
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .clock import advance, begin, local, moment, now, own, process, several_compute, virtual
from .events import join, post, wait
from .table import Table

__all__ = [
    "Table",
    "advance",
    "join",
    "moment",
    "now",
    "own",
    "post",
    "several_compute",
    "virtual",
    "wait",
]


def enter(table: Table, rank: int) -> None:
    """Give the threads of this process, which is `rank`, clocks, and have torch make groups with
    clocks where it would use gloo.
    """
    from .. import torch_inside
    from . import group, stalls, threads

    process.table = table
    table.rank = rank
    threading.Thread(target=stalls.watch, args=(table,), name="watchdog", daemon=True).start()
    slot = table.own_threads()[0]
    table.idents[slot] = threading.get_ident()
    local.clock = begin(table, slot, 0, needed=True)
    threads.patch()
    torch_inside.make_groups_with(group.Group)


@contextmanager
def calling() -> Iterator[None]:
    """Within this block the caller's function runs; after it the main thread has no clock. If the
    function has failed, other ranks that wait for this one are in no deadlock. In real time, and in
    a child that the function has forked, this does nothing.
    """
    try:
        yield
    except BaseException:
        if process.table is not None:
            process.table.head.failed = 1
        raise
    finally:
        if process.table is not None:
            own().end()  # type: ignore[union-attr]
