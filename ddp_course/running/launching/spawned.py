"""Launches where processes cannot safely be forked (macOS, Windows): the ranks are warm spares of the caller's.

    caller ── spare 0 … spare n: started by exec, torch imported, waiting; a launch takes what it needs

The packed call, the flight recorder and the throttled wire are files in a temporary folder that the caller removes.
"""

import pickle
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import cloudpickle

from ...errors import LaunchError
from ..store import serve_store
from .channel import write
from .local import ENDING_SECONDS, LocalLaunch, kill_marked
from .spares import refill, take_spares

LOOPBACK = "127.0.0.1"
LATE_STACK_SECONDS = 1.5  # without SIGUSR1, ranks write their stacks by their own clocks


class Spawned(LocalLaunch):
    """A launch whose ranks were spares."""

    tick = 0.005  # no pipe tells that a process has ended

    def __init__(self, setting: dict, show: Callable):
        self.folder = tempfile.TemporaryDirectory(prefix="ddp_course_", ignore_cleanup_errors=True)
        super().__init__({**setting}, show)
        self.spares: dict = {}
        self.store: Any = None

    def make_recorder(self) -> IO[bytes]:
        """The flight recorder's memory: a file that the ranks open by its name."""
        return open(Path(self.folder.name) / "recorder", "w+b")

    def start(self, payload: IO[bytes]) -> None:
        """Lay everything out in the folder, and send as many spares there as there are ranks."""
        folder = Path(self.folder.name)
        payload.seek(0)
        (folder / "call").write_bytes(payload.read())
        link = pickle.loads(self.setting["link"])
        if link is not None:
            link.prepare(self.world_size, folder)
            self.setting["link"] = cloudpickle.dumps(link)
        if not self.setting["store"]:
            self.store = serve_store(LOOPBACK)
            self.setting["store"] = LOOPBACK, self.store.port
        self.spares = dict(zip(self.ranks, take_spares(len(self.ranks)), strict=True))
        for rank, spare in self.spares.items():
            for reader in self.readers(rank):
                self.inbox.add(spare.pipes.pop(0), reader)
            self.orders[rank] = spare.process.stdin
            with suppress(OSError):  # the spare may have ended
                write(spare.process.stdin.fileno(), {"folder": str(folder), "rank": rank, "setting": self.setting})

    def step(self, seconds: float) -> bool:
        """Take what has arrived; the ends of processes are noted last, so that their last words come before."""
        ended = {rank: code for rank, spare in self.spares.items() if (code := spare.process.poll()) is not None}
        came = super().step(seconds)
        new = ended.keys() - self.exit_codes.keys()
        for rank in new:
            self.rank_exited(rank, ended[rank])
            self.rank_ended(rank)
        self.agent_gone = bool(self.spares) and len(ended) == len(self.spares)
        return came or bool(new)

    def ask(self, pid: int) -> None:
        """Ask a rank for its stack; without signals it writes it by its own clock, about now."""
        if hasattr(signal, "SIGUSR1"):
            super().ask(pid)
        else:
            self.quiet = LATE_STACK_SECONDS

    def rank_exited(self, rank: int, code: int) -> None:
        """A rank's process has ended; one that never came to life says why."""
        if rank not in self.pids and not self.closing and (words := self.spares[rank].log()):
            self.refusal = LaunchError(f"the ranks could not be started\n{words}".strip())
        super().rank_exited(rank, code)

    def end(self) -> None:
        """Kill what still runs, and whatever the ranks have started, wherever it has gone."""
        for spare in self.spares.values():
            spare.kill()
        kill_marked({spare.mark for spare in self.spares.values()})
        self.read_for(ENDING_SECONDS, lambda: self.agent_gone or not self.spares)

    def release(self) -> None:
        """Close all files, remove their folder, and have new spares wait."""
        super().release()
        for spare in self.spares.values():
            spare.close()
        self.store = None
        self.folder.cleanup()
        refill(len(self.ranks))
