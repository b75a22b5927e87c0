"""`launch`: call a function on K ranks, get back one result for each.

    caller ── server (torch preloaded; started once, forks) ── agent (one a launch) ── rank 0 … rank K-1

The caller makes the pipes on which each rank reports, prints and shows its stacks, and reads all of them in one
loop: no threads, no signal handlers, nothing for a cell to hang on.
"""

import atexit
import itertools
import linecache
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import cloudpickle

from ..errors import LaunchError
from .devices import placement
from .run import Run, show_line


def launch(fn, *args, world_size=4, device="auto", timeout=300.0, link=None, progress=False, **kwargs) -> list:
    """Call `fn(*args, **kwargs)` on `world_size` ranks with the process group up; return the results in rank order.

    `fn` may be defined in a cell. `device`: "auto", "cpu", "cuda" or one GPU. `timeout`: seconds for the whole
    launch. `link`: an emulated link between the ranks (`ddp_course.Link`). Raises RankError when a rank fails,
    LaunchTimeout when time runs out, LaunchError when the ranks are ended from outside, ValueError for bad input.
    """
    setting = describe_launch(world_size, device, timeout, link)
    return run_ranks(setting, pack_call(fn, args, kwargs), show_line)


def describe_launch(world_size, device, timeout, link) -> dict:
    """Check what was asked for, and put down all that agent and ranks must know, as plain data."""
    placed = placement(device, world_size)
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it must be a positive number of seconds")
    return {
        "world_size": world_size,
        "backend": placed.backend,
        "devices": placed.devices,
        "timeout": timeout,
        "threads": max(1, usable_cores() // world_size),
        "link": cloudpickle.dumps(link),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "folder": os.getcwd(),
        "environ": dict(os.environ),
    }


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ranks(setting, payload, show) -> list:
    """Run one launch to its end; `show(rank, stream, line)` gets every line that a rank prints."""
    with payload:
        for last_try in (False, True):
            run = Run(setting, show)
            try:
                run.start(payload, next_number(), order)
                run.watch()
            finally:
                run.close(order)
            if last_try or not run.never_started():
                return run.outcome()
    raise LaunchError("unreachable")


def pack_call(fn, args, kwargs):
    """An unlinked temporary file with the source of all cells and the pickled call; ranks map it, none copies it."""
    sources = {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
    packed_sources = pickle.dumps(sources)
    try:
        packed_call = cloudpickle.dumps((fn, args, kwargs), protocol=5)
    except Exception as error:
        raise TypeError(f"{fn!r} or its arguments cannot be sent to other processes: {error}") from error
    payload = tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else open(os.memfd_create("call"), "w+b")
    payload.write(len(packed_sources).to_bytes(8, "little"))
    payload.write(packed_sources)
    payload.write(packed_call)
    payload.flush()
    return payload


class Server:
    """The preloaded server process of this caller, and the socket over which it takes orders."""

    def __init__(self):
        self.control, theirs = socket.socketpair()
        environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server.py"))],
                stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                env=environ, start_new_session=True,
            )  # fmt: skip
        self.owner = os.getpid()

    def usable(self):
        """Whether the server still runs, and belongs to this process and not to the one that we were forked from."""
        return self.owner == os.getpid() and self.process.poll() is None

    def take_order(self, letter, number, descriptors=()):
        """Send one order: "L" (a new launch, with its socket) or "K" (kill that launch)."""
        message = letter + number.to_bytes(8, "little")
        if descriptors:
            socket.send_fds(self.control, [message], descriptors)
        else:
            self.control.sendall(message)

    def close(self):
        """End the server, and with it all launches that still run."""
        self.control.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
            self.process.stderr.close()


_server = None
_server_lock = threading.Lock()
_numbers = itertools.count()


def next_number() -> int:
    """A number for a launch that no other launch of this process has."""
    return next(_numbers)


def order(letter, number, descriptors=()):
    """Give the server an order; start one if there is none, or if the last one was killed."""
    global _server
    with _server_lock:
        if _server is None or not _server.usable():
            stop_server()
            _server = Server()
        _server.take_order(letter, number, descriptors)


@atexit.register
def stop_server():
    """End this process's server; the next launch starts a new one."""
    global _server
    if _server is not None:
        _server.close()
        _server = None
