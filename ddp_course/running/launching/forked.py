"""Launches whose ranks are forked, and the preloaded server that forks them."""

# ruff: noqa: SIM115 (the files opened here outlive the function that opens them)
import atexit
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from . import stacks
from .channel import Mail, send_descriptors, write
from .local import ENDING_SECONDS, LocalLaunch, how_it_ended, kill_marked
from .setting import PIPES_PER_RANK, SHARED_PIPES, preloading_environment


class Forked(LocalLaunch):
    """A launch whose processes the server forks."""

    tick = 1.0

    def __init__(self, setting: dict, show: Callable):
        super().__init__(setting, show)
        self.number = secrets.randbits(64)
        self.server: Server | None = None
        self.agent_code: int | None = None
        self.groups: set = set()  # the process groups of ranks that have come to life: one, the agent's

    def start(self, payload: IO[bytes]) -> None:
        """Have the server fork an agent; hand it the call, and the far ends of all pipes."""
        connection, theirs = socket.socketpair()
        with theirs:
            self.server = order(b"L", self.number, [theirs.fileno()])
        try:
            count = SHARED_PIPES + PIPES_PER_RANK * len(self.ranks)
            write(connection.fileno(), {**self.setting, "descriptors": count})
            log = self.inbox.pipe(self.agent_log)
            hand_over(connection, [log, payload.fileno(), self.recorder.fileno()], [log])
            for rank in self.ranks:
                orders, writing = os.pipe()
                self.orders[rank] = open(writing, "wb")
                ends = [orders, *(self.inbox.pipe(reader) for reader in self.readers(rank))]
                hand_over(connection, ends, ends)
        except (BrokenPipeError, ConnectionResetError):
            self.agent_gone = True
        self.inbox.add(connection.detach(), Mail(self.from_agent, self.agent_ended))

    def from_agent(self, pickled: bytes) -> None:
        """The agent could not set up the link, or a rank has ended, or the agent itself, as the server says."""
        kind, value = pickle.loads(pickled)
        if kind == "refused":
            self.refusal = value
        elif kind == "ended":
            self.rank_exited(*value)
        elif kind == "agent":
            self.agent_code = value

    def from_rank(self, rank: int, pickled: bytes) -> None:
        """As for every launch; and once, to which process group the ranks belong."""
        super().from_rank(rank, pickled)
        if not self.groups and rank in self.pids:
            with suppress(ProcessLookupError):
                self.groups.add(os.getpgid(self.pids[rank]))

    def agent_ended(self) -> None:
        """The launch socket ended: agent and ranks are gone."""
        self.agent_gone = True

    def step(self, seconds: float) -> bool:
        """Take what has arrived, waiting at most `seconds` for it; False if nothing came."""
        came = super().step(seconds)
        if not came and not self.pids and self.server and not self.server.usable():
            self.agent_gone = True  # a server that was stopped by a signal forks no agent
        return came

    def end(self) -> None:
        """Have the server kill what still runs, and wait until it has; without a server, do it here."""
        if self.server is not None and not self.agent_gone:
            order(b"K", self.number)
            self.read_for(ENDING_SECONDS, lambda: self.agent_gone)
        if self.pids and self.server_code() is not None:
            for group in self.groups:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            kill_marked({self.mark})

    def server_code(self) -> int | None:
        """The exit code of the server that this launch belongs to, None while it runs."""
        return self.server.exit_code(patience=1.0 if self.agent_gone else 0.0) if self.server else None

    def never_started(self) -> bool:
        """Whether the server was gone before any rank came to life, so that the launch may be tried again."""
        heard = self.pids or self.refusal or self.agent_log.bytes or self.exit_codes or self.agent_code is not None
        if heard or not self.agent_gone:
            return False
        return self.server is None or self.server_code() is not None or not self.server.usable()

    def ended_process(self) -> str:
        """Whether the server or the agent has ended, and how."""
        for name, code in (("the launch server", self.server_code()), ("their agent", self.agent_code)):
            if code is not None:
                kind, words = how_it_ended(code)
                return f"{name} was {kind} {words}\n{self.server.log() if self.server else ''}".rstrip()
        return ""


def hand_over(connection: socket.socket, descriptors: list, ours: list) -> None:
    """Pass open files to the agent, and close those of them that are `ours` no more."""
    try:
        send_descriptors(connection, descriptors)
    finally:
        for descriptor in ours:
            os.close(descriptor)


NEEDED_TOO = ("torch._dynamo", "pytest")  # ranks need these as well if the caller has loaded them, and they load slowly


class Server:
    """The preloaded server process of this caller, and the socket over which it takes orders."""

    def __init__(self):
        self.control, theirs = socket.socketpair()
        self.complaints = tempfile.TemporaryFile()
        self.owner = os.getpid()
        needed = [name for name in NEEDED_TOO if name in sys.modules]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server.py")), *needed],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.complaints, start_new_session=True,
                env=preloading_environment(),
            )  # fmt: skip

    def usable(self) -> bool:
        """Whether the server runs, not stopped by a signal, and belongs to this process, not to one that forked us."""
        alive = self.owner == os.getpid() and self.process.poll() is None
        return alive and stacks.status_of(self.process.pid) != stacks.STATUS["stopped"]

    def exit_code(self, patience: float) -> int | None:
        """How the server ended, None if it has not within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        return self.process.returncode

    def log(self) -> str:
        """What the server wrote on its standard error: nothing, unless it could not start."""
        if self.complaints.closed:
            return ""
        return os.pread(self.complaints.fileno(), 1 << 16, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """End the server, and with it all launches that still run."""
        self.control.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        self.complaints.close()


_servers: list[Server] = []  # none before the first launch, then one
_server_lock = threading.Lock()


def use_server(server: Server | None) -> None:
    """From now on this process's launches go to `server`; the one before ends."""
    for earlier in _servers:
        earlier.close()
    _servers[:] = [server] if server else []


def server_pid() -> int | None:
    """The process id of this process's server, None before its first launch."""
    return _servers[0].process.pid if _servers else None


def order(letter: bytes, number: int, descriptors: Sequence = ()) -> Server | None:
    """Give the server an order: "L" (a new launch, with its socket) or "K" (kill that launch). Returns the server.

    A new launch starts a server if there is none, or none that answers.
    """
    with _server_lock:
        usable = bool(_servers) and _servers[0].usable()
        if letter == b"K" and not usable:
            return None  # its launches have ended with it
        if not usable:
            use_server(Server())
        with suppress(BrokenPipeError, ConnectionResetError):  # it dies right now: the launch notices, and tries again
            socket.send_fds(_servers[0].control, [letter + number.to_bytes(8, "little")], descriptors)
        return _servers[0]


atexit.register(use_server, None)
