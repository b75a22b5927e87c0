"""The cell magic `%%ranks`: run a notebook cell on every rank."""

from collections import defaultdict
from typing import Any
from zlib import crc32

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ..memory import remember_source
from .cell import PROVIDED, compile_cell, run_cell, used_names
from .launch import DEFAULT_RANKS, EXPECTED, pack_call, plain
from .protocol import Setting
from .setting import describe_launch
from .watch import Launch

NOT_SENT = {*PROVIDED, "In", "Out", "get_ipython", "exit", "quit"}


class RankByRank(Launch):
    """A launch that shows only at its end what the ranks have printed, rank by rank."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.printed = defaultdict(list)

    def print(self, rank: int, stream: str, text: str) -> None:
        """Keep a line that a rank has printed."""
        self.printed[rank].append((stream, text))

    def close(self) -> None:
        """End the ranks, and show what they have printed."""
        try:
            super().close()
        finally:
            for rank in sorted(self.printed):
                for stream, text in self.printed[rank]:
                    super().print(rank, stream, text)


@magics_class
class RanksMagic(Magics):
    """The magic `%%ranks`, in the class that IPython wants around it."""

    @magic_arguments()
    @argument("world_size", nargs="?", type=int, default=DEFAULT_RANKS, help="number of ranks (4)")
    @argument("--pull", default="", help="names to bring back from rank 0, separated by commas")
    @argument("--device", default="auto", help="auto, cpu, cuda, or one GPU such as cuda:0")
    @argument("--timeout", type=float, default=300.0, help="seconds (300)")
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """Run the cell on several ranks, with rank, world_size, dist, torch and device at hand.

        The names that the cell uses from the notebook are sent along. What the ranks print is shown
        rank by rank, with the value of each rank's last expression. Each cell starts anew. Raises
        the errors of `launch`, without the frames in between, and UsageError without a cell.
        """
        if line.strip() == "--help":
            print(self.ranks.__doc__)
        elif cell is None:
            raise UsageError("to run a cell on the ranks, begin it with %%ranks")
        else:
            try:
                self.run(parse_argstring(self.ranks, line), cell)
            except EXPECTED as error:
                raise plain(error) from None

    def run(self, options: Any, cell: str) -> None:
        """Run a cell with the options of its `%%ranks` line.

        Raises UsageError if the cell has not assigned a name that is to be pulled.
        """
        pull = [name.strip() for name in options.pull.split(",") if name.strip()]
        # Tracebacks find the cell's lines by this name, which no other cell has.
        filename = f"<ranks {crc32(cell.encode()):08x}>"
        remember_source(filename, cell)
        # A syntax error is shown before anything starts.
        compile_cell(cell, filename)
        sent = used_names(cell) - NOT_SENT
        given = {name: value for name, value in self.shell.user_ns.items() if name in sent}
        with pack_call(run_cell, (cell, filename, pull), given) as call:
            setting = describe_launch(call, options.world_size, options.device, options.timeout)
            pulled, *_ = RankByRank(setting).run(call)
        self.shell.push(pulled)
        for name in pull:
            if name not in pulled:
                raise UsageError(
                    f'"{name}" is to be pulled, but the cell assigned no such name on rank 0'
                )
