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
from typing import Any

import psutil

from ..linux import free_memory
from .local import MARK
from .setting import preloading_environment

SPARE_MEMORY = 300 << 20  # bytes of its own, once it has imported all that ranks need: measured 260 MiB
MOST_SPARES = 16
PIPES = 4  # report, stdout, stderr and stacks of the rank that it will be
SCRIPT = str(Path(__file__).with_name("spare.py"))

_waiting: list = []
_owner = [os.getpid()]
_lock = threading.Lock()


class Spare:
    """A process that waits to become a rank, with the pipes on which that rank will report."""

    def __init__(self):
        self.mark, self.complaints = secrets.token_hex(8), tempfile.TemporaryFile()
        self.pipes, far_ends = map(list, zip(*(os.pipe() for _ in range(PIPES)), strict=True))
        names, options = inherited(far_ends)
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, *map(str, names)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.complaints,
            env={**preloading_environment(), MARK: self.mark},
            **options,
        )  # fmt: skip
        for end in far_ends:
            os.close(end)

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        """What the process wrote on its standard error: nothing, unless it could not start."""
        self.complaints.seek(0)
        return self.complaints.read().decode("utf-8", "replace")

    def close(self) -> None:
        """Close all connections to the process."""
        for pipe in self.pipes:
            os.close(pipe)
        self.process.stdin.close()
        self.complaints.close()


def inherited(descriptors: list) -> tuple[list, dict[str, Any]]:
    """The numbers by which a new process knows these open files, and the options of Popen that pass them on."""
    if sys.platform != "win32":
        return descriptors, {"pass_fds": descriptors, "start_new_session": True}
    import msvcrt

    handles = [msvcrt.get_osfhandle(descriptor) for descriptor in descriptors]
    for handle in handles:
        os.set_handle_inheritable(handle, True)
    startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": handles})
    return handles, {"startupinfo": startup, "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}


def take_spares(count: int) -> list:
    """So many spares: those that wait, and new ones for what is missing. Afterwards the pool refills."""
    with _lock:
        if _owner != [os.getpid()]:  # this process is a fork of the one that the spares belong to
            _waiting.clear()
            _owner[:] = [os.getpid()]
        alive = [spare for spare in _waiting if spare.process.poll() is None]
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
    return [spare.process.pid for spare in _waiting if spare.process.poll() is None]


def all_spares() -> list:
    """The memory of its own, in bytes, of every spare that runs on this machine, whosever it is."""
    nbytes = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error, OSError):
            if SCRIPT in (process.info["cmdline"] or []):
                nbytes.append(process.memory_full_info().uss)
    return nbytes


@atexit.register
def stop_spares() -> None:
    """End the spares that wait; the next launch starts new ones."""
    if _owner == [os.getpid()]:
        refill(0)
