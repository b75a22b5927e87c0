"""Launches where processes cannot safely be forked (macOS, Windows): the ranks are warm spares of the caller's.

    caller ── spare 0 … spare n: started by exec, torch imported, waiting; a launch takes what it needs

The call, the ranks' reports, prints and stacks are files in a temporary folder that the caller reads and removes.
"""

# ruff: noqa: SIM115 (the files opened here outlive the function that opens them)
import io
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import cloudpickle

from ...errors import LaunchError
from .channel import put
from .launched import ENDING_SECONDS, Launched, kill_marked
from .spares import refill, take_spares

POLL_SECONDS = 0.005
LATE_STACK_SECONDS = 1.5  # without SIGUSR1, ranks write their stacks by their own clocks
FILES = ("report", "stdout", "stderr", "stacks")


class Spawned(Launched):
    """A launch whose ranks were spares, and whose words come through files."""

    def __init__(self, setting: dict, show: Callable):
        self.folder = tempfile.TemporaryDirectory(prefix="ddp_course_", ignore_cleanup_errors=True)
        super().__init__({**setting}, show)
        self.readers_of, self.spares, self.store, self.files, self.complaints = {}, {}, None, [], ""

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
            self.store, self.setting["store"] = open_store()
        for rank in self.ranks:
            opened = [self.growing(folder / f"{name}-{rank}") for name in FILES]
            self.readers_of[rank] = [make(file) for make, file in zip(self.readers(rank), opened, strict=True)]
            self.stacks[rank] = self.readers_of[rank][-1]
        taken = take_spares(len(self.ranks))
        self.spares = dict(zip(self.ranks, taken, strict=True))
        for rank, spare in self.spares.items():
            self.orders[rank] = spare.process.stdin
            put(spare.process.stdin, {"folder": self.folder.name, "rank": rank, "setting": self.setting})

    def growing(self, path: Path) -> "GrowingFile":
        """A new file that a rank will append to, opened for reading."""
        path.touch()
        self.files.append(GrowingFile(path))
        return self.files[-1]

    def step(self, seconds: float) -> bool:
        """Take what has arrived, waiting at most `seconds` for it; False if nothing came."""
        deadline = time.monotonic() + seconds
        while not self.look():
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(POLL_SECONDS, seconds))
        return True

    def look(self) -> bool:
        """Take what has arrived by now: first see who has ended, then read, so that last words come before the end."""
        ended = {rank: code for rank, spare in self.spares.items() if (code := spare.exit_code()) is not None}
        before = sum(file.taken for file in self.files)
        for readers in self.readers_of.values():
            for reader in readers:
                reader.read()
        new = ended.keys() - self.exit_codes.keys()
        for rank in new:
            self.rank_exited(rank, ended[rank])
            self.rank_ended(rank)
        self.agent_gone = bool(self.spares) and len(ended) == len(self.spares)
        return bool(new) or sum(file.taken for file in self.files) > before

    def ask(self, pid: int) -> None:
        """Ask a rank for its stack; without signals it writes it by its own clock, about now."""
        if hasattr(signal, "SIGUSR1"):
            super().ask(pid)
        else:
            self.quiet = LATE_STACK_SECONDS

    def rank_exited(self, rank: int, code: int) -> None:
        """A rank's process has ended; if it never came as far as being one, with what it complained of."""
        if rank not in self.pids:
            self.complaints += self.spares[rank].log()
        super().rank_exited(rank, code)

    def end(self) -> None:
        """Kill what still runs, and whatever the ranks have started, wherever it has gone."""
        for spare in self.spares.values():
            spare.kill()
            kill_marked(spare.mark)
        self.read_for(ENDING_SECONDS, lambda: self.agent_gone or not self.spares)

    def release(self) -> None:
        """Close all files, and remove their folder."""
        for readers in self.readers_of.values():
            for reader in readers:
                reader.close()
        for file in [*self.files, *self.spares.values()]:
            with suppress(OSError):
                file.close()
        self.store = None
        self.folder.cleanup()
        refill(len(self.ranks))

    def outcome(self) -> list:
        """As for every launch; spares that came to nothing say why."""
        if self.complaints:
            raise LaunchError(f"the ranks could not be started\n{self.complaints}".strip())
        return super().outcome()


class GrowingFile(io.RawIOBase):
    """A file that another process appends to: its end is only the end for now."""

    def __init__(self, path: Path):
        self.file, self.taken = open(path, "rb", buffering=0), 0

    def readinto(self, view: Any) -> int | None:
        """How many bytes were there, None if there is nothing new."""
        count = self.file.readinto(view)
        self.taken += count or 0
        return count or None

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def open_store() -> tuple:
    """A key-value store for the ranks, in this process, on this machine only; and its address and port."""
    import torch.distributed as dist

    address = "127.0.0.1"
    settings: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    if sys.platform == "win32":  # a socket is no file there
        store = dist.TCPStore(address, 0, **settings)
    else:
        with socket.create_server((address, 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            store = dist.TCPStore(address, port, master_listen_fd=listener.detach(), **settings)
    return store, (address, store.port)
