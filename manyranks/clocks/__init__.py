"""Virtual time: operations and messages move a thread's clock on, and nobody sleeps.

Each thread of each rank has a clock. Where a device or a link is emulated, `enter` gives a rank its
clocks. docs/VIRTUAL_TIME.md defines how they move.

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
    """Give clocks to the threads of this process, which is rank `rank`.

    From then on torch makes groups with clocks where it would use gloo.
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
    group.Group.table = table
    torch_inside.make_groups_with(group.Group)
    torch_inside.wait_for_futures_with(group.wait_by_lock, group.All)


def refuse_plain_gloo() -> None:
    """Raise a ManyranksError if the whole job's process group has no clocks, though ranks have."""
    if process.table is not None:
        from .. import torch_inside
        from .group import Group

        torch_inside.refuse_others(Group)


@contextmanager
def calling() -> Iterator[None]:
    """Run the caller's function within this block; after it the main thread has no clock.

    If the function has failed, other ranks that wait for this one are in no deadlock. In real time
    this does nothing, nor does it in a child that the function has forked.
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
