"""The caller's side of the launch server: it starts the server, asks it for agents, and ends it."""

import atexit
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

from ..errors import LaunchError
from ..linux import PROCESS_LIMIT
from ..memory import open_memory
from .decision import exit_code_in_words
from .environment import preloading_environment, server_command
from .setting import start_method

NO_PROCESS = "Resource temporarily unavailable"
LONGEST_TEXT = 1 << 18  # Of a rank's stacks, or of a log, no more bytes are shown.
# Ranks need these as well if the caller has loaded them, and they load slowly.
SLOW_MODULES = ("torch._dynamo", "pytest")


class Server:
    """The caller's launch server: a process that forks an agent when `control` asks for one."""

    def __init__(self) -> None:
        self.control, far_end = socket.socketpair()
        self.complaints = open_memory("complaints")
        self.owner = os.getpid()
        needed = [name for name in SLOW_MODULES if name in sys.modules]
        with far_end:
            self.process = subprocess.Popen(
                server_command(start_method(), *needed),
                stdin=far_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self.complaints,
                start_new_session=True,
                env=preloading_environment(),
            )

    def usable(self) -> bool:
        """Return whether the server runs and was started by this process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def how_it_ended(self, patience: float) -> str:
        """Return how the server ended, and its complaints; "" if it outlives `patience` seconds."""
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return ""
        complaints = "" if self.complaints.closed else text_in(self.complaints)
        complaints = complaints.replace(NO_PROCESS, f"{NO_PROCESS} ({PROCESS_LIMIT})")
        return f"the launch server {ending_in_words(code)}\n{complaints}"

    def close(self) -> None:
        """End the server, and with it all running launches.

        If another process started the server, and forked this one, only let go of the server.
        """
        self.control.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        self.complaints.close()


servers: list[Server] = []  # This has one server once a launch has started it, and none before.
_lock = threading.Lock()


def use_server(server: Server | None) -> None:
    """Send this process's launches to `server` from now on, and end the server before it.

    With None the next launch starts a server.
    """
    for earlier in servers:
        earlier.close()
    servers[:] = [server] if server else []


def ask_for_agent(far_end: socket.socket, setting: IO[bytes]) -> Server:
    """Have the server fork an agent, which talks over this socket and reads its `setting`.

    Start a server if none is usable, and return it. Raises LaunchError where no process can be
    started.
    """
    with _lock:
        if not (servers and servers[0].usable()):
            try:
                use_server(Server())
            except BlockingIOError:
                raise LaunchError(f"no launch server can be started: {PROCESS_LIMIT}") from None
        # If the server is just dying, the launch learns that from the end of its socket.
        with suppress(ConnectionError):
            socket.send_fds(servers[0].control, [b"L"], [far_end.fileno(), setting.fileno()])
        return servers[0]


atexit.register(use_server, None)


def ending_in_words(code: int) -> str:
    """Return an exit code in words, as the end of a sentence."""
    kind, words = exit_code_in_words(code)
    # A process "was killed", or "exited".
    return f"was {kind} {words}" if code < 0 else f"{kind} {words}"


def text_in(file: IO[bytes]) -> str:
    """Return the text that other processes have written to a file so far."""
    return os.pread(file.fileno(), LONGEST_TEXT, 0).decode("utf-8", "replace")
