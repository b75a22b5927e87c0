"""`launch`: call a function on K ranks, get back one result for each.

    caller ── server (torch preloaded; started once, forks) ── agent (one a launch) ── rank 0 … rank K-1

The caller makes the pipes on which each rank reports, prints and shows its stacks, and reads all of them in one
loop: no threads, no signal handlers, nothing for a cell to hang on.
"""

# ruff: noqa: SIM115 (the files opened here outlive the function that opens them)
import atexit
import linecache
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import cloudpickle

from .devices import placement
from .limits import check_world_size, usable_cores
from .progress import Bar
from .run import Run, show_line


def launch(fn, *args, world_size=4, device="auto", timeout=300.0, link=None, progress=False, **kwargs) -> list:
    """Call `fn(*args, **kwargs)` on `world_size` ranks with the process group up; return the results in rank order.

    `fn` may be defined in a cell. `device`: "auto", "cpu", "cuda" or one GPU. `timeout`: seconds for the whole
    launch. `link`: an emulated link between the ranks (`ddp_course.Link`). Raises RankError when a rank fails,
    LaunchTimeout when time runs out, LaunchError when the ranks are ended from outside, ValueError for bad input.
    """
    return run_ranks(pack_call(fn, args, kwargs), world_size, device, timeout, link, progress)


def run_ranks(payload, world_size, device, timeout, link, progress, show=show_line) -> list:
    """Run a packed call on all ranks; `show(bar, rank, stream, text)` gets every line that a rank prints."""
    with payload:
        setting = describe_launch(world_size, device, timeout, link, progress)
        check_world_size(world_size, os.fstat(payload.fileno()).st_size, setting["devices"][0] != "cpu")
        if start_method() == "spawn":
            from . import spawned  # here: where processes can be forked it is never needed

            return spawned.run(setting, payload, partial(show, Bar(None)))
        for last_try in (False, True):
            run = Run(setting, secrets.randbits(64), show, order)
            try:
                run.start(payload)
                run.watch()
            finally:
                run.close()
            if last_try or not run.never_started():
                return run.outcome(_server.log())
            with suppress(subprocess.TimeoutExpired):
                _server.process.wait(1)  # it was being killed; the next try starts a new one


def start_method() -> str:
    """How ranks come to life: forked from the preloaded server where the system can fork, spawned otherwise."""
    return os.environ.get("DDP_COURSE_START") or ("fork" if hasattr(os, "fork") else "spawn")


def describe_launch(world_size, device, timeout, link, progress) -> dict:
    """Check what was asked for, and put down all that agent and ranks must know, as plain data."""
    placed = placement(device, world_size)
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it must be a positive number of seconds")
    if link is not None:
        link.check(world_size, placed.backend)
    return {
        "world_size": world_size,
        "backend": placed.backend,
        "devices": placed.devices,
        "timeout": timeout,
        "threads": max(1, usable_cores() // world_size),
        "link": cloudpickle.dumps(link),
        "progress": progress,
        "modules": [name for name in sys.modules if name.startswith(("ddp_course.stage", "ddp_course.collectives"))],
        "path": list(sys.path),
        "argv": list(sys.argv),
        "folder": os.getcwd(),
        "environ": dict(os.environ),
    }


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
        self.complaints = tempfile.TemporaryFile()
        environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1"}
        environ["TMPDIR"] = tempfile.gettempdir()  # where the launches' folders are
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server.py"))],
                stdin=theirs, stdout=subprocess.DEVNULL, stderr=self.complaints,
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

    def log(self):
        """What the server wrote on its standard error: nothing, unless it could not start."""
        return os.pread(self.complaints.fileno(), 1 << 16, 0).decode("utf-8", "replace")

    def close(self):
        """End the server, and with it all launches that still run."""
        self.control.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        self.complaints.close()


_server = None
_server_lock = threading.Lock()


def order(letter, number, descriptors=()):
    """Give the server an order; for a new launch, start a server if there is none, or if the last one was killed."""
    global _server
    with _server_lock:
        usable = _server is not None and _server.usable()
        if letter == b"K" and not usable:
            return  # its launches have ended with it
        if not usable:
            stop_server()
            _server = Server()
        with suppress(BrokenPipeError, ConnectionResetError):  # it dies right now: the launch notices, and tries again
            _server.take_order(letter, number, descriptors)


@atexit.register
def stop_server():
    """End this process's server; the next launch starts a new one."""
    global _server
    if _server is not None:
        _server.close()
        _server = None
