"""How long each cell of a notebook shows nothing new while it runs.

A silence is what passed on the clock, but no more than the processor seconds of the kernel and half
of those of all that it has started: so a busy machine does not make a cell seem slow, and one of
many cores does not either, since there the clock counts. (What a cell sleeps is not counted.)
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient


class Listener(NotebookClient):
    """Runs a notebook and notes when its kernel says something."""

    def __init__(self, notebook, **options):
        super().__init__(notebook, kernel_name="python3", **options)
        self.silent = {}  # {id of a cell: its longest silence in seconds}
        self.heard = (0.0, 0.0)
        self.on_cell_execute = self.begin
        self.on_cell_executed = self.end

    def begin(self, cell, **_):
        self.heard = self.now()

    def end(self, cell, **_):
        self.hear(cell)

    def hear(self, cell):
        now = self.now()
        silence = min(after - before for before, after in zip(self.heard, now, strict=True))
        self.silent[cell.id] = max(self.silent.get(cell.id, 0.0), silence)
        self.heard = now

    def now(self):
        """(The clock, the seconds of a quiet machine of two cores that the kernel and its ranks
        have computed so far).
        """
        kernel = psutil.Process(self.km.provisioner.pid)
        own = kernel.cpu_times()
        seconds = own.user + own.system
        for process in kernel.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:4]) / 2  # its own, and of children that ended
        return time.monotonic(), seconds

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] != "status":
            self.hear(cell)
        return super().process_message(msg, cell, cell_index)


def silences(path: Path) -> dict[str, float]:
    """{id of a cell: the longest time in seconds in which it showed nothing}, of one run."""
    notebook = nbformat.read(path, as_version=4)
    client = Listener(notebook, timeout=900, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})  # waiting threads would count, too
    return client.silent


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for cell, seconds in silences(Path(name)).items():
            if seconds > 1.0:
                print(f"{Path(name).stem}: {cell} {seconds:.1f} s", flush=True)
        print(f"{Path(name).stem}: done", flush=True)
