"""Ranks that are processes of this machine: how they come to life, what they say, how they end.

    caller ── server ── agent (one per launch) ── rank 0 … rank K-1

Through one socket the agent gets the setting and the open files of its ranks: a log, the call, the flight recorder,
and of each rank the far ends of the pipes on which it hears orders, reports, prints and shows its stacks. The caller
reads all of them in one loop: no threads, no signal handlers, nothing for a cell to hang on.
"""

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
from contextlib import suppress
from functools import partial
from typing import IO, Any

from .. import flight_recorder
from . import stacks
from .agent import SCRIPT, preloading_environment
from .channel import Inbox, Lines, Mail, close_all, write
from .launched import ENDING_SECONDS, Ranks, how_it_ended
from .setting import open_memory, start_method

MARK = "DDP_COURSE_LAUNCH"  # this environment variable marks all programs that ranks start
NEEDED_TOO = ("torch._dynamo", "pytest")  # ranks need these as well if the caller has loaded them, and they load slowly


class Server:
    """The caller's launch server: a process that forks an agent whenever it is asked to, over `control`."""

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


_servers: list[Server] = []  # The first launch adds the only one.
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


class LocalRanks(Ranks):
    """Ranks that an agent starts, which the server forks."""

    def __init__(self, setting: dict):
        self.setting, self.ranks = setting, setting["ranks"]
        self.mark = setting["environ"][MARK] = secrets.token_hex(8)
        self.inbox, self.ending = Inbox(), False
        self.server: Server | None = None
        self.agent: int | None = None  # this process id is also the process group of all that it starts
        self.agent_code: int | None = None
        self.orders: dict = {}  # {rank: the pipe over which it hears of the next call, or that it may leave}
        self.far_ends: dict = {}
        self.recorder = open_memory("recorder")
        self.recorder.truncate(flight_recorder.size(setting["world_size"]))

    def start(self, payload: IO[bytes]) -> None:
        """Have the server fork an agent, and hand over to it."""
        connection, theirs = socket.socketpair()
        with theirs:
            self.server = ask_for_agent(theirs)
        with suppress(BrokenPipeError, ConnectionResetError):  # Its end arrives next.
            self.hand_over(connection, payload)
        self.inbox.add(connection.detach(), Mail(self.from_agent, self.all_gone))

    def hand_over(self, connection: socket.socket, payload: IO[bytes]) -> None:
        """Give the agent what it needs: the setting, and open files.

        Far ends of pipes stay open here until their rank has spoken: macOS loses what is closed on its way.
        """
        write(connection.fileno(), self.setting)
        log = self.inbox.pipe(partial(self.tell, "log", self.ranks[0]))
        self.far_ends[self.ranks[0]] = [log]
        socket.send_fds(connection, [b"f"], [log, payload.fileno(), self.recorder.fileno()])
        for rank in self.ranks:
            orders, writing = os.pipe()
            self.orders[rank] = open(writing, "wb")  # noqa: SIM115 (closed by `release`)
            report = Mail(partial(self.tell, "message", rank))
            prints = [Lines(partial(self.tell, stream, rank)) for stream in ("stdout", "stderr")]
            readers: list = [report, *prints, partial(self.tell, "stack", rank)]
            ends = [orders, *map(self.inbox.pipe, readers)]
            self.far_ends.setdefault(rank, []).extend(ends)
            socket.send_fds(connection, [b"f"], ends)

    def from_agent(self, pickled: bytes) -> None:
        """The agent lives, could not set up the link, or tells how a rank ended; or the server how the agent did."""
        kind, rank, value = pickle.loads(pickled)
        if kind == "agent":
            self.agent = value
        elif kind == "agent exited":
            self.agent_code = value
        else:
            self.tell(kind, rank, value)

    def tell(self, kind: str, rank: int, value: Any = None) -> None:
        """Pass on an event."""
        close_all(self.far_ends.pop(rank, []))
        self.hear(kind, rank, value)

    def step(self, seconds: float) -> bool:
        """Pass on what has arrived, waiting at most `seconds` for it; False if nothing came.

        A server that was stopped by a signal forks no agent.
        """
        came = self.inbox.read(seconds)
        if not came and not self.agent and self.server and not self.server.usable():
            self.all_gone()
        return came

    def order(self, message: bytes) -> None:
        """Give all ranks their next call, packed, or b"": all have their results, and may leave."""
        self.ending |= not message
        for file in self.orders.values():
            with suppress(OSError):  # the rank may have ended
                write(file.fileno(), message)

    def ask(self, pids: dict) -> None:
        """Ask these ranks, as far as they are here, for their stacks, by a signal."""
        for rank in pids.keys() & set(self.ranks):
            with suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGUSR1)

    def look(self, pids: dict) -> tuple[dict, dict]:
        """The state of each rank's process, and its last collectives, by rank."""
        calls = flight_recorder.calls(self.recorder.fileno(), self.setting["world_size"])
        return {rank: stacks.status_of(pids[rank]) if rank in pids else "" for rank in self.ranks}, calls

    def all_gone(self) -> None:
        """Note that no process of the launch is left."""
        self.cut_off |= not self.gone and not self.ending
        self.gone = True

    def end(self) -> None:
        """Kill what still runs, and wait until the server has reaped it."""
        self.ending = True
        while self.step(0):
            pass
        if self.server is not None and not self.gone:
            self.read_for(ENDING_SECONDS, lambda: self.agent or self.gone)
        if self.agent and (self.cut_off or not self.gone):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.agent, signal.SIGKILL)
            self.read_for(ENDING_SECONDS, lambda: self.gone)
        if self.agent and (self.cut_off or sys.platform != "linux"):  # then no server has killed what left the group
            kill_marked(self.mark)

    def server_code(self) -> int | None:
        """The exit code of the server, None while it runs; it ends a moment after its socket has."""
        return self.server.exit_code(patience=1.0 if self.cut_off else 0.0)

    def never_started(self) -> bool:
        """Whether the server was gone before it forked an agent, so that the launch may be tried again."""
        return self.agent is None and (self.server_code() is not None or not self.server.usable())

    def explain(self) -> str:
        """Whether the server or the agent has ended, and how."""
        for name, code in (("the launch server", self.server_code()), ("their agent", self.agent_code)):
            if code is not None:
                kind, words = how_it_ended(code)
                return f"{name} {'was ' * (code < 0)}{kind} {words}\n{self.server.log()}".rstrip()
        return ""

    def release(self) -> None:
        """Close the pipes and the recorder's memory."""
        self.inbox.close()
        for ends in self.far_ends.values():
            close_all(ends)
        for file in self.orders.values():
            file.close()
        self.recorder.close()


def kill_marked(mark: str) -> None:
    """Kill all programs that the ranks of a launch have started, by the mark in their environment."""
    import psutil  # most launches end without it

    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=1.0)
