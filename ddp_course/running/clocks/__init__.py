"""Virtual time: each thread of each rank has a clock; operations and messages move it on, and
nobody sleeps.

docs/VIRTUAL_TIME.md has the definition. Where a device or a link is emulated, `running_in` gives a
rank its clocks.

    now() advance(seconds)      this thread's time in seconds; let time pass
    post(…) join(…) wait(…)     what the process group calls for messages and collectives
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import DeadlockError
from .clock import advance, begin, local, moment, now, own, process, several_compute
from .events import join, post, wait
from .table import CLOCK, FAILED, Table

__all__ = [
    "DeadlockError",
    "Table",
    "advance",
    "join",
    "moment",
    "now",
    "own",
    "post",
    "several_compute",
    "wait",
]


def enter(table: Table, rank: int) -> None:
    """Give this process, which is `rank`, clocks, and have torch make groups with clocks where it
    would use gloo.
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
    """While the caller's function runs, the main thread has a clock; a rank that failed causes no
    deadlock.
    """
    table: Any = process.table
    if table is None:
        yield
        return
    if own() is None:  # kept ranks are called again, and go on at the latest clock
        with table.lock:
            latest = int(table.arrays["threads"][CLOCK].max())
            local.clock = begin(table, table.own_threads()[0], latest, needed=True)
    try:
        yield
    except BaseException:
        table.head[FAILED] = 1
        raise
    finally:
        own().end()  # type: ignore[union-attr]
