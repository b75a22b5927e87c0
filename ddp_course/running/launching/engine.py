"""A host's part of a launch over several machines: what the head calls in the ipyparallel engine of that host.

`survey` says who the host is, `begin` starts its ranks, `news` brings what they have said since, `end` ends them. A
part watches over its ranks in a thread, so that the engine can serve several launches at once; when no `news` is asked
for any more, the head or the way to it is gone, and the part ends its ranks itself.
"""

import platform
import socket
import threading
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import cloudpickle
import psutil
import torch

from ...errors import CourseError
from ..store import serve_store
from .launch import new_launch
from .local import LocalLaunch
from .setting import describe_launch, open_memory

LEASE_SECONDS = 2.5  # a part ends its ranks when no request for news came for so long
NEWS_SECONDS = 0.4  # how long an engine waits for news
TICK_SECONDS = 0.05

_parts: dict = {}


def survey(head: str) -> dict:
    """Who this host is, what it runs on, and its address on the network where `head` (an address) is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((head, 9))  # sends nothing: it only chooses the way
        address = towards.getsockname()[0]
    cards = psutil.net_if_addrs().items()
    card = next((name for name, uses in cards if any(use.address == address for use in uses)), "")
    return {"host": socket.gethostname(), "address": address, "card": card, **versions()}


def versions() -> dict:
    """What must be the same on all hosts: Python, torch, and this package."""
    try:
        package = version("ddp-course")
    except PackageNotFoundError:
        package = "from a folder"
    return {"Python": platform.python_version(), "torch": torch.__version__, "ddp_course": package}


def prepare(number: int, count: int, device: str, address: str | None) -> tuple:
    """Get ready for `count` ranks of launch `number`: the backend they would take, and on the first host a port.

    There, `address` is this host's, and the ranks' store is opened on it. ValueError if this host cannot have them.
    """
    backend, port = describe_launch(count, device, 1.0, None, False)["backend"], None
    if address is not None:
        store = serve_store(address)
        port, _parts[number] = store.port, (store, None)
    return backend, port


def begin(number: int, request: dict, packed: bytes) -> None:
    """Start this host's ranks of launch `number`; ValueError if this host cannot have them."""
    count = len(request["ranks"])
    setting = describe_launch(count, request["device"], request["timeout"], None, request["progress"], len(packed))
    setting["environ"]["GLOO_SOCKET_IFNAME"] = request["card"]
    setting |= {name: request[name] for name in ("world_size", "ranks", "store", "backend")}
    store, _ = _parts.pop(number, (None, None))
    _parts[number] = store, LocalRanks(setting, packed)


def news(number: int) -> bytes:
    """What the ranks of a launch have said and done since, pickled: a list of (kind, …); waits a moment for it."""
    _, part = _parts[number]
    messages = part.news(NEWS_SECONDS if sum(other is not None for _, other in _parts.values()) == 1 else TICK_SECONDS)
    if messages and messages[-1][0] == "over":
        del _parts[number]
    return cloudpickle.dumps(messages)


def end(number: int) -> None:
    """Let the ranks of a launch end, by themselves if all have their results."""
    store, part = _parts.get(number, (None, None))
    if part is not None:
        part.ending = True
    elif store is not None:
        del _parts[number]


class LocalRanks:
    """The ranks of one launch that live on this host."""

    def __init__(self, setting: dict, packed: bytes):
        self.setting, self.packed = setting, packed
        self.ending, self.asked_at, self.waiting, self.changed = False, time.monotonic(), [], threading.Condition()
        threading.Thread(target=self.carry_out, daemon=True).start()

    def news(self, patience: float) -> list:
        """The events since the last request; waits for the first of them up to `patience` seconds."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting, patience)
            messages, self.waiting, self.asked_at = self.waiting, [], time.monotonic()
        return messages

    def tell(self, *event: Any) -> None:
        """Keep an event for the next request of the head."""
        with self.changed:
            self.waiting.append(event)
            self.changed.notify()

    def given_up(self) -> bool:
        """Whether the head has ended this launch, or is gone."""
        return self.ending or time.monotonic() > self.asked_at + LEASE_SECONDS

    def carry_out(self) -> None:
        """In a thread: start this host's ranks and watch them to their end."""
        try:
            self.start_and_watch()
        except BaseException as error:
            self.tell("broken", f"{type(error).__name__}: {error}")
        self.tell("over")

    def start_and_watch(self) -> None:
        """Start the ranks, watch them, and report how they ended."""
        launched = new_launch(self.setting, lambda bar, *line: self.tell("line", *line))
        launched.tick, launched.stop = TICK_SECONDS, self.given_up
        launched.advance = lambda steps: self.tell("steps", steps)
        launched.hold = lambda: self.hold(launched)
        try:
            file = open_memory("call")
            file.write(self.packed)
            file.flush()
            launched.start(file)
            launched.watch()
        finally:
            launched.close()
        if launched.states:
            self.tell("states", launched.states, launched.calls, launched.entered)
        elif launched.failures:
            now = time.monotonic()
            self.tell(
                "failures", [replace(failure, time=failure.time - now) for failure in launched.ordered_failures()]
            )
        elif not self.ending:
            try:
                launched.outcome()
            except (CourseError, ValueError) as error:
                self.tell("broken", str(error))

    def hold(self, launched: LocalLaunch) -> None:
        """Report that all ranks here have their results, and wait until all hosts have theirs."""
        self.tell("results", launched.results)
        while not (self.given_up() or launched.failures or launched.agent_gone):
            launched.step(TICK_SECONDS)
