"""The caller's processes that have imported torch and wait: the server that forks launches, and the warm spares."""

import atexit
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..linux import free_memory
from . import stacks
from .setting import preloading_environment

SCRIPT = str(Path(__file__).with_name("preloaded.py"))
MARK = "DDP_COURSE_LAUNCH"  # this environment variable marks all programs that ranks start
NEEDED_TOO = ("torch._dynamo", "pytest")  # ranks need these as well if the caller has loaded them, and they load slowly
SPARE_MEMORY = 300 << 20  # bytes: a spare that has imported all that ranks need has 260 MiB of its own (measured)
MOST_SPARES = 16


class Preloaded:
    """A process that imports torch and waits, as a "server" or as a "spare"; `control` brings it orders."""

    def __init__(self, role: str):
        self.control, theirs = socket.socketpair()
        self.complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self.owner, self.mark = os.getpid(), secrets.token_hex(8)
        needed = [name for name in NEEDED_TOO if name in sys.modules]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, role, *needed],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self.complaints, start_new_session=True,
                env={**preloading_environment(), MARK: self.mark},
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

    def kill(self) -> None:
        """End it, unless it is of the process that forked us."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """End it, and with a server all launches that still run."""
        self.control.close()
        self.kill()
        self.complaints.close()


_servers: list[Preloaded] = []  # there is none before the first launch, then one
_spares: list[Preloaded] = []
_lock = threading.Lock()


def use_server(server: Preloaded | None) -> None:
    """From now on this process's launches go to `server`; the one before ends."""
    for earlier in _servers:
        earlier.close()
    _servers[:] = [server] if server else []


def server_pid() -> int | None:
    """The process id of this process's server, None before its first launch."""
    return _servers[0].process.pid if _servers else None


def order(letter: bytes, number: int, descriptors: Sequence = ()) -> Preloaded | None:
    """Give the server an order: "L" (a new launch, with its socket) or "K" (kill that launch). Returns the server.

    A new launch starts a server if there is none, or none that answers.
    """
    with _lock:
        usable = bool(_servers) and _servers[0].usable()
        if letter == b"K" and not usable:
            return None  # its launches have ended with it
        if not usable:
            use_server(Preloaded("server"))
        with suppress(BrokenPipeError, ConnectionResetError):  # it dies right now: the launch notices, and tries again
            socket.send_fds(_servers[0].control, [letter + number.to_bytes(8, "little")], descriptors)
        return _servers[0]


def take_spares(count: int) -> list:
    """So many spares: those that wait, and new ones for what is missing."""
    with _lock:
        waiting = [spare for spare in _spares if spare.usable()]
        taken, _spares[:] = waiting[:count], waiting[count:]
    return taken + [Preloaded("spare") for _ in range(count - len(taken))]


def refill(count: int) -> None:
    """Have at most `count` spares wait, as far as the machine's memory allows; end those that are too many."""
    wanted = most_spares(count)
    with _lock:
        surplus, _spares[:] = _spares[wanted:], _spares[:wanted]
        _spares.extend(Preloaded("spare") for _ in range(wanted - len(_spares)))
    for spare in surplus:
        spare.close()


def most_spares(count: int) -> int:
    """How many of `count` spares may wait: they take at most half of the memory that is free."""
    return min(count, MOST_SPARES, free_memory() // 2 // SPARE_MEMORY)


def waiting_spares() -> list:
    """The process ids of the spares that wait for this process."""
    return [spare.process.pid for spare in _spares if spare.usable()]


def all_spares() -> list:
    """The memory of its own, in bytes, of every spare that runs on this machine, whosever it is."""
    import psutil  # launches need it only where something goes wrong

    nbytes = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error, OSError):
            if {SCRIPT, "spare"} <= set(process.info["cmdline"] or []):
                nbytes.append(process.memory_full_info().uss)
    return nbytes


@atexit.register
def stop() -> None:
    """End the server and the spares that wait; the next launch starts new ones."""
    use_server(None)
    refill(0)
