"""The warm spares of this process: how many wait, how they are taken, and that none outlives its caller."""

# ruff: noqa: SIM115 (the files opened here outlive the function that opens them)
import atexit
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from ..linux import free_memory
from .launched import MARK
from .setting import short_environment

SPARE_MEMORY = 300 << 20  # bytes of its own, once it has imported all that ranks need: measured 260 MiB
MOST_SPARES = 16

_waiting: list = []
_owner = [os.getpid()]
_lock = threading.Lock()


class Spare:
    """One process that waits to become a rank."""

    def __init__(self):
        self.mark, self.complaints = secrets.token_hex(8), tempfile.TemporaryFile()
        own_group = {"creationflags": 0x200} if sys.platform == "win32" else {"start_new_session": True}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("spare.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.complaints,
            env={**short_environment(), MARK: self.mark},
            **own_group,
        )  # fmt: skip

    def exit_code(self) -> int | None:
        """How it ended, None while it runs."""
        return self.process.poll()

    def kill(self) -> None:
        """End it, and all that can be found below it."""
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        """What it wrote on its standard error: nothing, unless it could not start."""
        self.complaints.seek(0)
        return self.complaints.read().decode("utf-8", "replace")

    def close(self) -> None:
        """Close what it was connected to."""
        with suppress(OSError):
            self.process.stdin.close()
        self.complaints.close()


def take_spares(count: int) -> list:
    """So many spares: those that wait, and new ones for what is missing. Afterwards the pool refills."""
    with _lock:
        if _owner != [os.getpid()]:  # a fork of the process that the spares belong to
            _waiting.clear()
            _owner[:] = [os.getpid()]
        alive = [spare for spare in _waiting if spare.exit_code() is None]
        taken, _waiting[:] = alive[:count], alive[count:]
        taken += [Spare() for _ in range(count - len(taken))]
    return taken


def refill(count: int) -> None:
    """Have at most `count` spares wait, as far as the machine's memory allows; end those that are too many."""
    wanted = most_spares(count)
    with _lock:
        surplus, _waiting[:] = _waiting[wanted:], _waiting[:wanted]
        _waiting.extend(Spare() for _ in range(wanted - len(_waiting)))
    for spare in surplus:
        spare.kill()
        spare.close()


def most_spares(count: int) -> int:
    """How many of `count` spares may wait: they take at most half of the memory that is free."""
    return min(count, MOST_SPARES, free_memory() // 2 // SPARE_MEMORY)


def waiting_spares() -> list:
    """The process ids of the spares that wait for this process."""
    return [spare.process.pid for spare in _waiting if spare.exit_code() is None]


def all_spares() -> list:
    """The memory of its own, in bytes, of every spare that runs on this machine, whosever it is."""
    taken = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error, OSError):
            if str(Path(__file__).with_name("spare.py")) in (process.info["cmdline"] or []):
                taken.append(process.memory_full_info().uss)
    return taken


@atexit.register
def stop_spares() -> None:
    """End the spares that wait; the next launch starts new ones."""
    if _owner == [os.getpid()]:
        refill(0)
