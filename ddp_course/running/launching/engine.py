"""A host's part of a launch over several machines: what the head calls in the ipyparallel engine of that host.

`survey` says who the host is, `begin` starts its ranks, `news` brings what they have said since. A thread reads from
the ranks, so that the engine can serve several launches at once; when no `news` is asked for any more, the head or the
way to it is gone, and the ranks are ended.
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

LEASE_SECONDS = 2.5  # a host ends its ranks when no request for news came for so long
TICK_SECONDS = 0.05  # so long an engine waits for news at a time

_parts: dict = {}  # {number of a launch: this host's part of it}


def survey(head: str) -> tuple:
    """The name of this host, its card on the network where `head` (an address) is, and what it runs on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((head, 9))  # sends nothing: it only chooses the way
        address = towards.getsockname()[0]
    cards = psutil.net_if_addrs().items()
    card = next((name for name, uses in cards if any(use.address == address for use in uses)), "")
    return socket.gethostname(), card, versions()


def versions() -> dict:
    """What must be the same on all hosts: Python, torch, and this package."""
    return {"Python": platform.python_version(), "torch": torch.__version__, "ddp_course": version("ddp-course")}


def backend(count: int, device: str) -> str:
    """The backend that `count` ranks would take on this host; ValueError if it cannot have them."""
    return describe_launch(count, device, 1.0, None, False)["backend"]


def begin(number: int, request: dict, packed: bytes, ranks: list, card: str) -> None:
    """Start this host's ranks of launch `number`; ValueError if this host cannot have them."""
    os.environ.pop("IPP_CONNECTION_INFO", None)  # the ranks need no key of the engine's
    setting = describe_launch(len(ranks), request["device"], request["timeout"], None, request["progress"], len(packed))
    setting["environ"]["GLOO_SOCKET_IFNAME"] = card
    setting |= {"ranks": ranks, **{name: request[name] for name in ("world_size", "store", "backend")}}
    _parts[number] = Part(setting, packed)


def news(number: int) -> bytes:
    """What the ranks of a launch have said since, pickled; waits a moment for it."""
    part = _parts[number]
    events = part.news()
    if events and events[-1][0] == "over":
        del _parts[number]
    return pickle.dumps(events)


def call(number: int, method: str, *arguments: Any) -> Any:
    """Call a method of a launch's ranks on this host: order or look."""
    return getattr(_parts[number].ranks, method)(*arguments)


def end(number: int) -> None:
    """Have the ranks of a launch ended."""
    if number in _parts:
        _parts[number].ending = True


class Part:
    """The ranks of one launch that live on this host, and what they have said that the head has not heard yet."""

    def __init__(self, setting: dict, packed: bytes):
        self.ranks, self.events = LocalRanks(setting), SimpleQueue()
        self.ending, self.asked_at = False, time.monotonic()
        self.ranks.hear = lambda *event: self.events.put(event)
        with open_memory("call", packed) as payload:
            self.ranks.start(payload)
        threading.Thread(target=self.watch, daemon=True).start()

    def news(self) -> list:
        """The events since the last request; waits a moment for the first of them."""
        events = []
        with suppress(Empty):
            events.append(self.events.get(timeout=TICK_SECONDS))
            while True:
                events.append(self.events.get_nowait())
        self.asked_at = time.monotonic()
        return events

    def watch(self) -> None:
        """In a thread: read from the ranks until they are gone, or the head has ended this launch, or is gone."""
        while not (self.ranks.gone or self.ending or time.monotonic() > self.asked_at + LEASE_SECONDS):
            self.ranks.step(TICK_SECONDS)
        self.ranks.close()
        self.events.put(("over", self.ranks.cut_off, self.ranks.explain()))
