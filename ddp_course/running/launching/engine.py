"""A host's part of a launch over several machines: what the head calls in the ipyparallel engine of
that host.

`survey` says who the host is, `begin` starts its ranks, `news` returns the events of the ranks
since the last request. A thread reads from the ranks, so that the engine can serve several launches
at once. When requests for `news` stop, the head or the network to it is lost, and the engine ends
the ranks.
"""

import os
import pickle
import platform
import socket
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from queue import Empty, SimpleQueue
from typing import Any

import psutil
import torch

from .channel import open_memory
from .local import LocalRanks
from .setting import describe_launch

LEASE_SECONDS = 2.5  # a host ends its ranks after this many seconds without a request for news
TICK_SECONDS = 0.05  # an engine waits this many seconds for news at a time

_parts: dict = {}  # this maps a launch's number to this host's part of the launch


def survey(head: str) -> tuple:
    """Return this host's name, its card on the network where `head` (an address) is, and its
    `versions`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((head, 9))  # this sends nothing, and only chooses a route
        address = towards.getsockname()[0]
    cards = psutil.net_if_addrs().items()
    card = next((name for name, uses in cards if any(use.address == address for use in uses)), "")
    return socket.gethostname(), card, versions()


def versions() -> dict:
    """Return the versions that must be the same on all hosts: those of Python, torch, and this
    package.
    """
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "ddp_course": version("ddp-course"),
    }


def backend(count: int, device: str) -> str:
    """Return the backend that `count` ranks would use on this host; raises ValueError if it cannot
    hold them.
    """
    return describe_launch(count, device, 1.0, None, False)["backend"]


def begin(number: int, request: dict, packed: bytes, ranks: list, card: str) -> None:
    """Start this host's ranks of launch `number`; raises ValueError if this host cannot hold
    them.
    """
    os.environ.pop("IPP_CONNECTION_INFO", None)  # the ranks do not need the engine's key
    setting = describe_launch(
        len(ranks), request["device"], request["timeout"], None, request["progress"], len(packed)
    )
    setting["environ"]["GLOO_SOCKET_IFNAME"] = card
    setting |= {
        "ranks": ranks,
        **{name: request[name] for name in ("world_size", "store", "backend")},
    }
    _parts[number] = Part(setting, packed)


def news(number: int) -> bytes:
    """Return the events of a launch's ranks since the last request, pickled; wait a moment for the
    first.
    """
    part = _parts[number]
    events = part.news()
    if events and events[-1][0] == "over":
        del _parts[number]
    return pickle.dumps(events)


def call(number: int, method: str, *arguments: Any) -> Any:
    """Call a method of a launch's ranks on this host: order or look."""
    return getattr(_parts[number].ranks, method)(*arguments)


def end(number: int) -> None:
    """Have the thread of a launch end its ranks."""
    if number in _parts:
        _parts[number].ending = True


class Part:
    """The ranks of one launch that run on this host, and their events that the head has not asked
    for yet.
    """

    def __init__(self, setting: dict, packed: bytes):
        self.ranks, self.events = LocalRanks(setting), SimpleQueue()
        self.ending, self.asked_at = False, time.monotonic()
        self.ranks.hear = lambda *event: self.events.put(event)
        with open_memory("call", packed) as payload:
            self.ranks.start(payload)
        threading.Thread(target=self.watch, daemon=True).start()

    def news(self) -> list:
        """Return the events since the last request; wait a moment for the first of them."""
        events = []
        with suppress(Empty):
            events.append(self.events.get(timeout=TICK_SECONDS))
            while True:
                events.append(self.events.get_nowait())
        self.asked_at = time.monotonic()
        return events

    def watch(self) -> None:
        """Read from the ranks, in a thread, until they are gone, or the head has ended this launch
        or is lost.
        """
        while not (
            self.ranks.gone or self.ending or time.monotonic() > self.asked_at + LEASE_SECONDS
        ):
            self.ranks.step(TICK_SECONDS)
        self.ranks.close()
        self.events.put(("over", self.ranks.cut_off, self.ranks.explain()))
