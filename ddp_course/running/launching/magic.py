"""The cell magic `%%ranks`: run a notebook cell on every rank.

%load_ext ddp_course

%%ranks 4 --pull total
total = torch.tensor(float(rank))
dist.all_reduce(total)
total
"""

import linecache
from collections import defaultdict
from hashlib import blake2b
from typing import IO, Any

import cloudpickle
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from .cell import PROVIDED, compile_cell, run_cell, used_names
from .launch import EXPECTED, plain
from .launched import show_line
from .run import pack_call, run_ranks

NOT_SENT = {*PROVIDED, "In", "Out", "get_ipython", "exit", "quit"}


def load_ipython_extension(ipython: Any) -> None:
    """Called by `%load_ext ddp_course`."""
    ipython.register_magics(RanksMagic)


@magics_class
class RanksMagic(Magics):
    """Holds `%%ranks`, as IPython wants it."""

    @magic_arguments()
    @argument("world_size", nargs="?", type=int, default=4, help="number of ranks (4)")
    @argument("--pull", default="", help="names to bring back from rank 0, separated by commas")
    @argument("--device", default="auto", help="auto, cpu, cuda, or one GPU such as cuda:0")
    @argument("--hosts", help="machines that have joined: all, a number of them, or names separated by commas")
    @argument("--timeout", type=float, default=300.0, help="seconds (300)")
    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on several ranks, with rank, world_size, dist, torch and device at hand.

        The names that the cell uses from the notebook are sent along. What the ranks print is shown rank by rank,
        with the value of each rank's last expression.
        """
        options = parse_argstring(self.ranks, line)
        pull = [name.strip() for name in options.pull.split(",") if name.strip()]
        if not all(name.isidentifier() for name in pull):
            raise UsageError(f"--pull takes names separated by commas and without spaces, not {options.pull!r}")
        filename = f"<ranks {blake2b(cell.encode(), digest_size=4).hexdigest()}>"
        linecache.cache[filename] = (len(cell), None, cell.splitlines(True), filename)
        compile_cell(cell, filename)  # a syntax error is shown before anything starts
        try:
            arguments = (cell, filename, given_names(cell, self.shell.user_ns), pull)
            results = run_grouped(pack_call(run_cell, arguments, {}), options)
        except EXPECTED as error:
            raise plain(error) from None
        self.shell.push(results[0])


def run_grouped(call: IO[bytes], options: Any) -> list:
    """Run a packed call on all ranks, and show what they printed rank by rank, whatever the outcome."""
    printed = defaultdict(list)
    try:
        return run_ranks(
            call, options.world_size, options.device, options.timeout, link=None, progress=False,
            hosts=parse_hosts(options.hosts),
            show=lambda bar, rank, stream, text: printed[rank].append((bar, rank, stream, text)),
        )  # fmt: skip
    finally:
        for rank in sorted(printed, key=lambda rank: int(str(rank).split()[0])):
            for line in printed[rank]:
                show_line(*line)


def parse_hosts(text: str | None) -> str | int | list | None:
    """What `launch(hosts=…)` takes, from the command line's form of it."""
    if text is None or text == "all":
        return text
    return int(text) if text.isdigit() else [name.strip() for name in text.split(",")]


def given_names(cell: str, notebook: dict) -> dict:
    """The values of those of the notebook's names that the cell uses; TypeError for one that cannot be sent."""
    names = {name: notebook[name] for name in used_names(cell) - NOT_SENT if name in notebook}
    for name, value in names.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise TypeError(f'"{name}" is used in the cell, but cannot be sent to the ranks: {error}') from None
    return names
