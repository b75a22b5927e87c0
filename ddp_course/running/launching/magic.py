"""The cell magic `%%ranks`: run a notebook cell on every rank."""

import linecache
from collections import defaultdict
from typing import IO, Any
from zlib import crc32

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from .cell import PROVIDED, compile_cell, run_cell, used_names
from .launch import EXPECTED, check_request, pack_call, plain, run_ranks
from .watch import show_line

NOT_SENT = {*PROVIDED, "In", "Out", "get_ipython", "exit", "quit"}


def load_ipython_extension(ipython: Any) -> None:
    """Register the magic: `%load_ext ddp_course` calls this."""
    ipython.register_magics(RanksMagic)


@magics_class
class RanksMagic(Magics):
    """The class that IPython wants around `%%ranks`."""

    @magic_arguments()
    @argument("world_size", nargs="?", type=int, default=4, help="number of ranks (4)")
    @argument("--pull", default="", help="names to bring back from rank 0, separated by commas")
    @argument("--device", default="auto", help="auto, cpu, cuda, or one GPU such as cuda:0")
    @argument("--timeout", type=float, default=300.0, help="seconds (300)")
    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on several ranks, with rank, world_size, dist, torch and device at hand.

        The names that the cell uses from the notebook are sent along. What the ranks print is shown
        rank by rank, with the value of each rank's last expression. Raises the errors of `launch`,
        without the frames in between.
        """
        try:
            self.run(parse_argstring(self.ranks, line), cell)
        except EXPECTED as error:
            raise plain(error) from None

    def run(self, options: Any, cell: str) -> None:
        """Run a cell on new ranks, as `%%ranks` asks; raises UsageError if a name that is to be
        pulled is not there.
        """
        pull = [name.strip() for name in options.pull.split(",") if name.strip()]
        filename = f"<ranks {crc32(cell.encode()):08x}>"
        linecache.cache[filename] = (len(cell), None, cell.splitlines(True), filename)
        compile_cell(cell, filename)  # a syntax error is shown before anything starts
        names = used_names(cell) - NOT_SENT
        given = {name: value for name, value in self.shell.user_ns.items() if name in names}
        call = pack_call(run_cell, (cell, filename, pull), given)
        check_request(options.world_size, options.device, options.timeout, None)
        results = run_grouped(call, options)
        self.shell.push(results[0])
        if missing := [name for name in pull if name not in results[0]]:
            raise UsageError(
                f'"{missing[0]}" is to be pulled, but the cell assigned no such name on rank 0'
            )


def run_grouped(call: IO[bytes], options: Any) -> list:
    """Run a packed call on all ranks, and show what they printed rank by rank, whatever the
    outcome.
    """
    printed = defaultdict(list)

    def show(bar, rank, *line):
        printed[rank].append((bar, rank, *line))

    try:
        with call:
            return run_ranks(call, options.world_size, options.device, options.timeout, show=show)
    finally:
        for rank in sorted(printed):
            for line in printed[rank]:
                show_line(*line)
