"""Ranks that are processes of this machine: how they come to life, what they say, how they end.

    caller ── server ── agent (one per launch) ── rank 0 … rank K-1

Through one socket the agent gets open files: those in memory, which hold the setting, a log, the
call and the flight recorder, and for each rank the far ends of the pipes for its orders, messages
and prints, and files for its stacks and its answer. The caller reads all pipes in one loop, without
threads or signal handlers on which a cell could hang.
"""

import atexit
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import IO

from .. import flight_recorder
from . import stacks
from .agent import SCRIPT, preloading_environment
from .channel import LEAVE, Inbox, Lines, open_memory, parse
from .launched import ENDING_SECONDS, Ranks, how_it_ended
from .setting import start_method

MARK = "DDP_COURSE_LAUNCH"  # this environment variable marks all programs that ranks start
STACK_SECONDS = 1.0  # when time has run out, ranks have this long to write their stacks
LONGEST_TEXT = 1 << 18  # no more bytes of a rank's stacks, or of a log, are shown
NEEDED_TOO = (
    "torch._dynamo",
    "pytest",
)  # ranks need these as well if the caller has loaded them, and they load slowly


class Server:
    """The caller's launch server: a process that forks an agent whenever it is asked to, over
    `control`.
    """

    def __init__(self):
        self.control, theirs = socket.socketpair()
        self.complaints = open_memory("complaints")
        self.owner = os.getpid()
        needed = [name for name in NEEDED_TOO if name in sys.modules]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, start_method(), *needed],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self.complaints,
                start_new_session=True,
                env=preloading_environment(),
            )

    def usable(self) -> bool:
        """Return whether the server runs, is not stopped by a signal, and was started by this
        process.
        """
        alive = self.owner == os.getpid() and self.process.poll() is None
        return alive and stacks.status_of(self.process.pid) != stacks.STATUS["T"]

    def how_it_ended(self, patience: float) -> str:
        """Return in words how the server ended, with its standard error; "" if it runs on for
        `patience` seconds.
        """
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return ""
        log = "" if self.complaints.closed else text_in(self.complaints)
        return f"the launch server {ending(code)}\n{log}"

    def close(self) -> None:
        """End the server, and with it all running launches, unless a process that forked this one
        started it.
        """
        self.control.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        self.complaints.close()


servers: list[Server] = []  # The first launch adds the only server.
_lock = threading.Lock()


def use_server(server: Server | None) -> None:
    """Send this process's launches to `server` from now on; the server before it ends."""
    for earlier in servers:
        earlier.close()
    servers[:] = [server] if server else []


def ask_for_agent(launch: socket.socket) -> Server:
    """Have the server fork an agent, which talks over this socket; start a server if none is
    usable.
    """
    with _lock:
        if not (servers and servers[0].usable()):
            use_server(Server())
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the server is dying: the launch tries again
            socket.send_fds(servers[0].control, [b"L"], [launch.fileno()])
        return servers[0]


atexit.register(use_server, None)


class LocalRanks(Ranks):
    """Ranks that an agent starts, which the server forks."""

    def __init__(self, setting: dict):
        self.setting, self.ranks = setting, setting["ranks"]
        self.mark = setting["environ"][MARK] = secrets.token_hex(8)
        self.inbox, self.ending = Inbox(), False
        self.step = self.inbox.read
        self.server: Server | None = None
        self.agent: int | None = (
            None  # this process id is also the number of the agent's process group
        )
        self.agent_end = ""  # this says how the agent ended, if it ended too soon
        self.files = ExitStack()  # the stack closes all open files but the inbox's
        self.log, self.recorder = self.open_file(), self.open_file()
        self.recorder.truncate(flight_recorder.size(setting["world_size"]))
        self.stacks = {rank: self.open_file() for rank in self.ranks}
        self.answers = {rank: self.open_file() for rank in self.ranks}
        self.orders: list = []  # over these pipes ranks are told to take another call or to leave
        self.words = ""  # this is the text of the log, once the log is closed

    def open_file(self, content: bytes = b"") -> IO[bytes]:
        """Open a file in memory that is closed with the launch."""
        return self.files.enter_context(open_memory("launch", content))

    def start(self, payload: IO[bytes]) -> None:
        """Have the server fork an agent, and hand the launch's files over to it."""
        connection, theirs = socket.socketpair()
        with theirs:
            self.server = ask_for_agent(theirs)
        files = [self.open_file(pickle.dumps(self.setting)), self.log, payload, self.recorder]
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # The agent has died: its socket's end is read next.
            socket.send_fds(connection, [b"f"], [file.fileno() for file in files])
            for rank in self.ranks:
                socket.send_fds(connection, [b"f"], self.open_for(rank))
        self.inbox.add(connection.detach(), Lines(self.from_agent, self.all_gone))

    def open_for(self, rank: int) -> list:
        """Return a rank's open files; far ends of pipes stay open here too, as macOS loses those
        closed in transit.
        """
        orders, writing = os.pipe()
        self.orders.append(writing)
        prints = [partial(self.hear, stream, rank) for stream in ("stdout", "stderr")]
        ends = [orders, *map(self.inbox.pipe, [partial(self.from_rank, rank), *prints])]
        for end in (writing, *ends):
            self.files.callback(os.close, end)
        return [*ends, self.stacks[rank].fileno(), self.answers[rank].fileno()]

    def from_agent(self, line: str) -> None:
        """Note that the agent runs, or could not set up the link, or how a rank ended, or how the
        agent ended.
        """
        kind, rank, value = parse(line)
        if kind == "agent":
            self.agent = value
        elif kind == "agent exited":
            self.agent_end = f"their agent {ending(value)}\n"
        elif kind == "exited":
            self.hear(
                kind, rank, (value, stacks.shown(text_in(self.stacks[rank])) or text_in(self.log))
            )
        else:
            self.hear(kind, rank, value)

    def from_rank(self, rank: int, line: str) -> None:
        """Pass on a message of a rank, with its answer if there is one; an unreadable message is an
        empty answer.
        """
        try:
            kind, value = parse(line)
        except Exception:
            kind, value = "answer", b""
        if kind == "answered":
            self.answers[rank].seek(0)
            kind, value = "answer", self.answers[rank].read()
        self.hear(kind, rank, value)

    def order(self, word: bytes) -> None:
        self.ending |= word == LEAVE
        for pipe in self.orders:
            os.write(pipe, word)

    def look(self, pids: dict) -> tuple[dict, dict, dict]:
        for rank in pids.keys() & set(self.ranks):
            with suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        statuses = {
            rank: stacks.status_of(pids[rank]) if rank in pids else "" for rank in self.ranks
        }
        dumps = {rank: text_in(file) for rank, file in self.stacks.items()}
        calls = flight_recorder.calls(self.recorder.fileno(), self.setting["world_size"])
        for call in chain(*calls.values()):
            call.begin -= time.monotonic()  # `last_collective` counts from now
        return statuses, dumps, calls

    def all_gone(self) -> None:
        self.cut_off |= not self.gone and not self.ending
        self.gone = True

    def close(self) -> None:
        """Kill what still runs, wait until the server has reaped it, read the last lines, and close
        pipes and files.
        """
        self.ending = True
        try:
            if self.server is not None:
                self.read_for(ENDING_SECONDS, lambda: self.agent or self.gone)
            if self.agent and (self.cut_off or not self.gone):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.agent, signal.SIGKILL)
                self.read_for(ENDING_SECONDS, lambda: self.gone)
            if self.agent and (
                self.cut_off or sys.platform != "linux"
            ):  # no server kills what left the group
                kill_marked(self.mark)
            while self.step(0):
                pass
        finally:
            self.words = text_in(self.log)
            self.orders.clear()
            self.inbox.close()
            self.files.close()

    def explain(self) -> str:
        patience = 1.0 if self.cut_off else 0.0  # the server ends a moment after its socket
        reason = self.server.how_it_ended(patience) or self.agent_end
        return (reason + self.words).rstrip()


def ending(code: int) -> str:
    """Return an exit code in words, as the end of a sentence."""
    kind, words = how_it_ended(code)
    return f"{'was ' * (code < 0)}{kind} {words}"


def text_in(file: IO[bytes]) -> str:
    """Return the text that other processes have written to a file so far."""
    return os.pread(file.fileno(), LONGEST_TEXT, 0).decode("utf-8", "replace")


def kill_marked(mark: str) -> None:
    """Kill all programs that the ranks of a launch have started, by the mark in their
    environment.
    """
    import psutil  # most launches do not need psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                process.kill()
                process.wait(1.0)
