"""The caller's launch server: the process that forks an agent for every launch."""

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

from . import stacks
from .agent import SCRIPT, preloading_environment
from .setting import start_method

NEEDED_TOO = ("torch._dynamo", "pytest")  # ranks need these as well if the caller has loaded them, and they load slowly


class Server:
    """The process; `control` brings it orders."""

    def __init__(self):
        self.control, theirs = socket.socketpair()
        self.complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self.owner = os.getpid()
        needed = [name for name in NEEDED_TOO if name in sys.modules]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, start_method(), *needed],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.complaints, start_new_session=True,
                env=preloading_environment(),
            )  # fmt: skip

    def usable(self) -> bool:
        """Whether it runs, not stopped by a signal, and belongs to this process, not to one that forked us."""
        alive = self.owner == os.getpid() and self.process.poll() is None
        return alive and stacks.status_of(self.process.pid) != stacks.STATUS["stopped"]

    def exit_code(self, patience: float) -> int | None:
        """How it ended, None if it has not within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        return self.process.returncode

    def log(self) -> str:
        """What it wrote on its standard error: nothing, unless it could not start."""
        if self.complaints.closed:
            return ""
        return os.pread(self.complaints.fileno(), 1 << 16, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """End it, unless it is of the process that forked us, and with it all launches that still run."""
        self.control.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        self.complaints.close()


_servers: list[Server] = []  # there is none before the first launch, then one
_lock = threading.Lock()


def use_server(server: Server | None) -> None:
    """From now on this process's launches go to `server`; the one before ends."""
    for earlier in _servers:
        earlier.close()
    _servers[:] = [server] if server else []


def server_pid() -> int | None:
    """The process id of this process's server, None before its first launch."""
    return _servers[0].process.pid if _servers else None


def ask_for_agent(launch: socket.socket) -> Server:
    """Have the server fork an agent, which talks over this socket; start a server if there is none that answers."""
    with _lock:
        if not (_servers and _servers[0].usable()):
            use_server(Server())
        with suppress(BrokenPipeError, ConnectionResetError):  # it dies right now: the launch notices, and tries again
            socket.send_fds(_servers[0].control, [b"L"], [launch.fileno()])
        return _servers[0]


atexit.register(use_server, None)
