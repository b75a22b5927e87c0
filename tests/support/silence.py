"""How long each cell of a notebook shows nothing new while it runs."""

import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient


class Listener(NotebookClient):
    """Runs a notebook and notes when its kernel says something."""

    def __init__(self, notebook, **options):
        super().__init__(notebook, kernel_name="python3", **options)
        self.silent = {}  # {id of a cell: its longest silence in seconds}
        self.heard = 0.0
        self.on_cell_execute = self.begin
        self.on_cell_executed = self.end

    def begin(self, cell, **_):
        self.heard = time.monotonic()

    def end(self, cell, **_):
        self.hear(cell)

    def hear(self, cell):
        now = time.monotonic()
        self.silent[cell.id] = max(self.silent.get(cell.id, 0.0), now - self.heard)
        self.heard = now

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] != "status":
            self.hear(cell)
        return super().process_message(msg, cell, cell_index)


def silences(path: Path) -> dict[str, float]:
    """{id of a cell: the longest time in seconds in which it showed nothing}, of one run."""
    notebook = nbformat.read(path, as_version=4)
    client = Listener(notebook, timeout=400, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    return client.silent


if __name__ == "__main__":
    import sys

    for name in sys.argv[1:]:
        for cell, seconds in silences(Path(name)).items():
            if seconds > 1.0:
                print(f"{Path(name).stem}: {cell} {seconds:.1f} s", flush=True)
        print(f"{Path(name).stem}: done", flush=True)
