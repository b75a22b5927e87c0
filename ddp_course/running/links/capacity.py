"""How fast emulated links can be: at what bandwidth this processor keeps all of them busy at once."""

import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ...errors import LinkError
from .. import wire
from ..devices.device import two_digits
from ..launching.launch import pack_call, run_ranks

UNLIMITED = "30Gbit"  # more than any processor carries between virtual hosts
HEADROOM = 0.6  # of what the processor carries: the rest is for the model, and for keeping time
TRIES = 3


def rehearse(link: Any, make_link: Callable, host_count: int) -> None:
    """Raise LinkError if this machine cannot carry `link` between so many hosts; `make_link` is the class `Link`."""
    if host_count == 1:
        return
    tries = []
    while len(tries) < TRIES:
        tries.append(capacity(make_link, link.mode, host_count, len(tries)))
        if link.bandwidth <= tries[-1]:
            return
    raise LinkError(
        f"{link.bandwidth / 1e6:g} Mbit/s between {host_count} hosts ({link.kind.title}) is more than this "
        f"machine's processor carries; choose at most {two_digits(max(tries), math.floor) / 1e6:g}Mbit"
    )


@cache
def capacity(make_link: Callable, mode: Any, host_count: int, attempt: int = 0) -> float:
    """The highest bandwidth (bits per second) at which this processor keeps all hosts' links busy at once.

    Every `attempt` is measured once: a processor that is busy with something else may do better next time.
    """
    link = make_link(UNLIMITED, mode=mode)
    return HEADROOM * 8 * min(run_ranks(pack_call(full_speed, (), {}), host_count, link=link))


def full_speed(message_bytes: Any = 1 << 20, seconds: float = 0.2) -> float:
    """Send to the right and receive from the left, on all ranks; returns bytes per second, in each direction."""
    _, _, left, right = wire.neighbours()
    outgoing, incoming = torch.zeros(2, message_bytes, dtype=torch.uint8)
    wire.exchange(outgoing, right, incoming, left)
    start, sent = time.perf_counter(), 0
    going_on = torch.ones(1)
    while going_on.item():
        for _ in range(4):
            wire.exchange(outgoing, right, incoming, left)
            sent += message_bytes
        going_on.fill_(float(time.perf_counter() - start < seconds))
        dist.all_reduce(going_on, op=dist.ReduceOp.MIN)
    return sent / (time.perf_counter() - start)
