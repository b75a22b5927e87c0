"""Launches whose ranks are forked: the caller's end of their pipes, and of the preloaded server."""

# ruff: noqa: SIM115 (the files opened here outlive the function that opens them)
import atexit
import os
import pickle
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from .channel import send, send_descriptors
from .launched import ENDING_SECONDS, Launched, Mail, Text
from .limits import PIPES_A_RANK, SHARED_PIPES


def run_forked(setting: dict, payload: IO[bytes], show: Callable) -> list:
    """Run one launch to its end; once more if the server was being killed before any rank came to life."""
    for last_try in (False, True):
        launched = Forked(setting, show)
        try:
            launched.start(payload)
            launched.watch()
        finally:
            launched.close()
        if last_try or not launched.never_started():
            return launched.outcome(server_log())
        wait_for_the_end_of_the_server()
    raise AssertionError("the last try returns or raises")


class Forked(Launched):
    """A launch whose processes the server forks, and whose words come through pipes."""

    def __init__(self, setting: dict, show: Callable):
        super().__init__(setting, show)
        self.number = secrets.randbits(64)
        self.selector, self.files = selectors.DefaultSelector(), []
        self.connection: Any = None
        self.leaving: Any = None

    def start(self, payload: IO[bytes]) -> None:
        """Have the server fork an agent; hand it the call, and the writing ends of all pipes."""
        self.connection, theirs = socket.socketpair()
        waiting, leave = os.pipe()
        self.leaving = open(leave, "wb", buffering=0)
        with theirs:
            order(b"L", self.number, [theirs.fileno()])
        try:
            send(self.connection, {**self.setting, "descriptors": SHARED_PIPES + PIPES_A_RANK * len(self.ranks)})
            with self.pipes(Text) as (opened, log), open(waiting, "rb", buffering=0):
                self.agent_log = opened[0]
                send_descriptors(self.connection, [*log, payload.fileno(), self.recorder.fileno(), waiting])
            for rank in self.ranks:
                with self.pipes(*self.readers(rank)) as (opened, given):
                    self.stacks[rank] = opened[-1]
                    send_descriptors(self.connection, given)
        except (BrokenPipeError, ConnectionResetError):
            self.agent_gone = True
        self.connection.setblocking(False)
        self.listen(self.connection.fileno(), lambda file: Mail(file, self.from_agent, self.agent_ended), closefd=False)

    @contextmanager
    def pipes(self, *makers: Callable) -> Iterator[tuple[list, list[int]]]:
        """New pipes: a reader on each one's reading end, and the writing ends, open only inside the block."""
        ends = [os.pipe() for _ in makers]
        try:
            yield [self.listen(end, make) for make, (end, _) in zip(makers, ends, strict=True)], [e for _, e in ends]
        finally:
            for _, writing in ends:
                os.close(writing)

    def listen(self, descriptor: int, make: Callable, closefd: bool = True) -> Any:
        """The reader that `make` makes of a descriptor, to be served by `step`."""
        os.set_blocking(descriptor, False)
        file = open(descriptor, "rb", buffering=0, closefd=closefd)
        self.files.append(file)
        reader = make(file)
        self.selector.register(descriptor, selectors.EVENT_READ, reader)
        return reader

    def from_agent(self, pickled: bytes) -> None:
        """The agent could not set up the link, or says how a rank has ended."""
        kind, value = pickle.loads(pickled)
        if kind == "refused":
            self.refusal = value
        else:
            self.rank_exited(*value)

    def agent_ended(self) -> None:
        """The launch socket ended: agent and ranks are gone."""
        self.agent_gone = True

    def step(self, seconds: float) -> bool:
        """Take what has arrived, waiting at most `seconds` for it; False if nothing came."""
        ready = self.selector.select(seconds)
        for key, _ in ready:
            key.data.read()
            if key.data.ended:
                self.selector.unregister(key.fileobj)
                key.data.close()
        return bool(ready)

    def leave(self) -> None:
        """Let the ranks end: all have their results."""
        self.leaving.close()

    def end(self) -> None:
        """Have the server kill what still runs, and wait until it has."""
        if self.connection is not None and not self.agent_gone:
            order(b"K", self.number)
            self.read_for(ENDING_SECONDS, lambda: self.agent_gone)

    def release(self) -> None:
        """Close all pipes."""
        for key in list(self.selector.get_map().values()):
            key.data.close()
        self.selector.close()
        for file in self.files:
            file.close()
        for held in (self.connection, self.leaving):
            if held is not None:
                held.close()

    def never_started(self) -> bool:
        """Whether the server was gone before any rank came to life, so that the launch may be tried again."""
        heard = self.pids or self.refusal or self.agent_log.bytes or self.exit_codes
        return self.agent_gone and not heard


NEEDED_TOO = ("torch._dynamo", "pytest")  # optimizers load the one, whose functions stand in tests the other


class Server:
    """The preloaded server process of this caller, and the socket over which it takes orders."""

    def __init__(self):
        self.control, theirs = socket.socketpair()
        self.complaints = tempfile.TemporaryFile()
        self.owner = os.getpid()
        with theirs:
            self.process = self.begin(theirs)

    def begin(self, theirs: socket.socket) -> subprocess.Popen:
        """Start the process, with its end of the socket; returns it, as `subprocess.Popen` does.

        What takes long to import and the caller has loaded, its ranks will need too.
        """
        needed = [name for name in NEEDED_TOO if name in sys.modules]
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py")), *needed],
            stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.complaints, start_new_session=True,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip

    def usable(self) -> bool:
        """Whether the server still runs, and belongs to this process and not to the one that we were forked from."""
        return self.owner == os.getpid() and self.process.poll() is None

    def take_order(self, letter: bytes, number: int, descriptors: Sequence = ()) -> None:
        """Send one order: "L" (a new launch, with its socket) or "K" (kill that launch)."""
        message = letter + number.to_bytes(8, "little")
        if descriptors:
            socket.send_fds(self.control, [message], descriptors)
        else:
            self.control.sendall(message)

    def log(self) -> str:
        """What the server wrote on its standard error: nothing, unless it could not start."""
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


def server_log() -> str:
    """What the server had to complain of."""
    return _servers[0].log() if _servers else ""


def wait_for_the_end_of_the_server() -> None:
    """It was being killed; give it a second, so that the next launch starts a new one."""
    with suppress(subprocess.TimeoutExpired):
        if _servers:
            _servers[0].process.wait(1)


def order(letter: bytes, number: int, descriptors: Sequence = ()) -> None:
    """Give the server an order; for a new launch, start a server if there is none, or if the last one was killed."""
    with _server_lock:
        usable = bool(_servers) and _servers[0].usable()
        if letter == b"K" and not usable:
            return  # its launches have ended with it
        if not usable:
            use_server(Server())
        with suppress(BrokenPipeError, ConnectionResetError):  # it dies right now: the launch notices, and tries again
            _servers[0].take_order(letter, number, descriptors)


@atexit.register
def stop_server() -> None:
    """End this process's server; the next launch starts a new one."""
    use_server(None)
