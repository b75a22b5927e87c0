"""Ranks that are processes of this machine: how they come to life, what they say, how they end.

    fork     caller ── server ── agent (one per launch) ── rank 0 … rank K-1      one socket, to the agent
    spawn    caller ── spare 0 … spare K-1, which become the ranks                one socket to each

Through its socket a process gets the setting and the open files of its ranks: a log, the call, the flight recorder,
and of each rank the far ends of the pipes on which it hears orders, reports, prints and shows its stacks. The caller
reads all of them in one loop: no threads, no signal handlers, nothing for a cell to hang on.
"""

import os
import pickle
import secrets
import signal
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from .. import flight_recorder
from ..store import serve_store
from . import pickling, processes, stacks
from .channel import Inbox, Lines, Mail, Pieces, close_all, write
from .launched import ENDING_SECONDS, Ranks, how_it_ended
from .processes import MARK
from .setting import LOOPBACK, PIPES_PER_RANK, SHARED_FILES, open_memory, start_method


def local_ranks(setting: dict) -> "Forked | Spawned":
    """The ranks of a launch here, which come to life as this system allows."""
    return Spawned(setting) if start_method() == "spawn" else Forked(setting)


class LocalRanks(Ranks):
    """What is common to ranks on this machine: their pipes."""

    def __init__(self, setting: dict):
        self.setting, self.ranks = setting, setting["ranks"]
        self.mark = setting["environ"][MARK] = secrets.token_hex(8)
        self.inbox, self.heard, self.ending = Inbox(), False, False
        self.orders: dict = {}  # {rank: the pipe over which it hears of the next call, or that it may leave}
        self.recorder = open_memory("recorder")
        self.recorder.truncate(flight_recorder.size(setting["world_size"]))

    def tell(self, kind: str, rank: int | None, value: Any = None) -> None:
        """Pass on an event."""
        self.heard |= kind != "closed"
        self.hear(kind, rank, value)

    def hand_over(self, connection: socket.socket, payload: IO[bytes], own: list) -> None:
        """Give the process behind `connection` what it needs to be, or to fork, the ranks `own`."""
        count = SHARED_FILES + PIPES_PER_RANK * len(own)
        write(connection.fileno(), {**self.setting, "own": own, "descriptors": count})
        log = self.inbox.pipe(Pieces(partial(self.tell, "log", own[0])))
        self.pass_on(connection, own[0], [log], [payload.fileno(), self.recorder.fileno()])
        for rank in own:
            orders, writing = os.pipe()
            self.orders[rank] = open(writing, "wb")  # noqa: SIM115 (closed by `release`)
            report = Mail(partial(self.tell, "message", rank), partial(self.tell, "closed", rank))
            prints = [Lines(partial(self.print, rank, stream)) for stream in ("stdout", "stderr")]
            readers = [report, *prints, Pieces(partial(self.tell, "stack", rank))]
            self.pass_on(connection, rank, [orders, *map(self.inbox.pipe, readers)])

    def pass_on(self, connection: socket.socket, rank: int, ends: list, shared: Sequence = ()) -> None:
        """Pass far ends of pipes, which are then ours no more, and open files that stay ours as well."""
        try:
            socket.send_fds(connection, [b"f"], [*ends, *shared])
        finally:
            close_all(ends)

    def print(self, rank: int, stream: str, text: str) -> None:
        """Pass on a line that a rank printed."""
        self.tell("print", rank, (stream, text))

    def step(self, seconds: float) -> bool:
        """Pass on what has arrived, waiting at most `seconds` for it; False if nothing came."""
        return self.inbox.read(seconds)

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

    def release(self) -> None:
        """Close the pipes and the recorder's memory."""
        self.inbox.close()
        for file in self.orders.values():
            file.close()
        self.recorder.close()


class Forked(LocalRanks):
    """Ranks that an agent forks, which the preloaded server forks."""

    def __init__(self, setting: dict):
        super().__init__(setting)
        self.number = secrets.randbits(64)
        self.server: processes.Preloaded | None = None
        self.agent: int | None = None  # this process id is also the process group of all that it starts
        self.agent_code: int | None = None

    def start(self, payload: IO[bytes]) -> None:
        """Have the server fork an agent, and hand over to it."""
        connection, theirs = socket.socketpair()
        with theirs:
            self.server = processes.order(b"L", self.number, [theirs.fileno()])
        with suppress(BrokenPipeError, ConnectionResetError):  # then its end arrives next
            self.hand_over(connection, payload, self.ranks)
        self.inbox.add(connection.detach(), Mail(self.from_agent, self.all_gone))

    def from_agent(self, pickled: bytes) -> None:
        """The agent lives, could not set up the link, or tells how a rank ended; or the server how the agent did."""
        self.heard = True
        kind, rank, value = pickle.loads(pickled)
        if kind == "agent":
            self.agent = value
        elif kind == "agent exited":
            self.agent_code = value
        else:
            self.tell(kind, rank, value)

    def step(self, seconds: float) -> bool:
        """Pass on what has arrived; a server that was stopped by a signal forks no agent."""
        came = super().step(seconds)
        if not came and not self.heard and self.server and not self.server.usable():
            self.all_gone()
        return came

    def end(self) -> None:
        """Have the server kill what still runs, and wait until it has; without a server, do it here."""
        self.ending = True
        if self.server is not None and not self.gone:
            processes.order(b"K", self.number)
            self.read_for(ENDING_SECONDS, lambda: self.gone)
        if self.agent and self.server_code() is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.agent, signal.SIGKILL)
            kill_marked({self.mark})

    def server_code(self) -> int | None:
        """The exit code of the server that this launch belongs to, None while it runs."""
        return self.server.exit_code(patience=1.0 if self.cut_off else 0.0) if self.server else None

    def never_started(self) -> bool:
        """Whether the server was gone before any rank came to life, so that the launch may be tried again."""
        if self.heard or not self.gone:
            return False
        return self.server is None or self.server_code() is not None or not self.server.usable()

    def explain(self) -> str:
        """Whether the server or the agent has ended, and how."""
        for name, code in (("the launch server", self.server_code()), ("their agent", self.agent_code)):
            if code is not None:
                kind, words = how_it_ended(code)
                return f"{name} was {kind} {words}\n{self.server.log() if self.server else ''}".rstrip()
        return ""


class Spawned(LocalRanks):
    """Ranks that were spares: where processes cannot safely be forked, as on macOS."""

    tick = 0.02  # a process that a rank has forked may hold its pipes open when the rank has ended

    def __init__(self, setting: dict):
        super().__init__({**setting, "link_folder": None})
        self.spares: dict = {}
        self.ended: dict = {}
        self.far_ends: dict = {}
        self.folder: tempfile.TemporaryDirectory | None = None
        self.store: Any = None

    def start(self, payload: IO[bytes]) -> None:
        """Take as many spares as there are ranks, and hand over to each; a link has its memory in a folder."""
        link = pickle.loads(self.setting["link"])
        if link is not None:
            self.folder = tempfile.TemporaryDirectory(prefix="ddp_course_", ignore_cleanup_errors=True)
            link.prepare(self.setting["world_size"], Path(self.folder.name))
            self.setting |= {"link": pickling.dumps(link), "link_folder": self.folder.name}
        if not self.setting["store"]:
            self.store = serve_store(LOOPBACK)
            self.setting["store"] = LOOPBACK, self.store.port
        self.spares = dict(zip(self.ranks, processes.take_spares(len(self.ranks)), strict=True))
        for rank, spare in self.spares.items():
            self.setting["environ"][MARK] = spare.mark
            with suppress(OSError):  # the spare may have ended
                self.hand_over(spare.control, payload, [rank])
            self.inbox.add(spare.control.detach(), Pieces(lambda piece: None))

    def pass_on(self, connection: socket.socket, rank: int, ends: list, shared: Sequence = ()) -> None:
        """The same, but keep the far ends until the rank has spoken: macOS loses what is closed on its way."""
        self.far_ends.setdefault(rank, []).extend(ends)
        socket.send_fds(connection, [b"f"], [*ends, *shared])

    def tell(self, kind: str, rank: Any, value: Any = None) -> None:
        """Pass on an event; a rank that has spoken has its ends of the pipes."""
        close_all(self.far_ends.pop(rank, []))
        super().tell(kind, rank, value)

    def step(self, seconds: float) -> bool:
        """Pass on what has arrived; the ends of processes are noted last, so that their last words come before."""
        codes = {rank: spare.exit_code(0.0) for rank, spare in self.spares.items() if rank not in self.ended}
        came = super().step(seconds)
        for rank, code in codes.items():
            if code is not None:
                came, self.ended[rank] = True, code
                self.tell("log", rank, self.spares[rank].log().encode())
                self.tell("exited", rank, code)
                self.tell("closed", rank)
        if self.spares and len(self.ended) == len(self.spares):
            self.all_gone()
        return came

    def end(self) -> None:
        """Kill what still runs, and whatever the ranks have started, wherever it has gone."""
        self.ending = True
        for spare in self.spares.values():
            spare.kill()
        kill_marked({spare.mark for spare in self.spares.values()})
        self.read_for(ENDING_SECONDS, lambda: self.gone or not self.spares)

    def explain(self) -> str:
        """Nothing but the ranks themselves can end."""
        return ""

    def release(self) -> None:
        """Close all files, remove the link's folder, and have new spares wait."""
        super().release()
        for rank, spare in self.spares.items():
            close_all(self.far_ends.pop(rank, []))
            spare.close()
        self.store = None
        if self.folder is not None:
            self.folder.cleanup()
        processes.refill(len(self.ranks))


def kill_marked(marks: set) -> None:
    """Kill all programs that the ranks of a launch have started, by the marks in their environment."""
    import psutil  # most launches end without it

    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) in marks:
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=1.0)
