"""The cell magic `%%ranks`: run a notebook cell on every rank."""

import linecache
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from typing import IO, Any
from zlib import crc32

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ...errors import LaunchError
from ..files import open_memory
from .cell import PROVIDED, compile_cell, run_cell, used_names
from .decision import Failures, Results, Stage
from .launch import DEFAULT_RANKS, EXPECTED, LONGEST_TIMEOUT, check_request, pack_call, plain
from .protocol import Call, Setting, Started
from .setting import describe_launch
from .watch import Launch

NOT_SENT = {*PROVIDED, "In", "Out", "get_ipython", "exit", "quit"}
# Kept ranks end after this many seconds without a cell.
IDLE_SECONDS = float(os.environ.get("MANYRANKS_IDLE") or 1800)
ENDED = "The kept ranks have ended, and their variables with them; %%ranks --keep starts new ones."


class RankByRank(Launch):
    """A launch that shows what ranks print at the end, one rank after the other."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.printed = defaultdict(list)

    def print(self, rank: int, stream: str, text: str) -> None:
        """Keep a line that a rank has printed."""
        self.printed[rank].append((stream, text))

    def show(self) -> None:
        """Show all lines since the last time."""
        for rank in sorted(self.printed):
            for stream, text in self.printed[rank]:
                super().print(rank, stream, text)
        self.printed.clear()

    def close(self) -> None:
        """End the ranks, and show what they have printed."""
        try:
            super().close()
        finally:
            self.show()


class KeptRanks(RankByRank):
    """Ranks that stay alive until `close`, until one dies or hangs, or until no cell has come for
    IDLE_SECONDS.
    """

    def __init__(self, world_size: int, device: str):
        setting = describe_launch(world_size, device, LONGEST_TIMEOUT)
        super().__init__(replace(setting, idle=IDLE_SECONDS))
        self.shared_call = open_memory("call")  # the ranks have this file open for all calls
        self.last_use = time.monotonic()

    def call(self, packed_call: IO[bytes], timeout: float) -> list:
        """Run a packed call on all ranks, which the first call starts; results and errors are those
        of `launch`. Raises LaunchError if the ranks have ended while no cell wanted them.
        """
        began = time.monotonic()
        is_first = self.ending is None
        stage = Stage.STARTING if is_first else Stage.RUNNING
        self.phase = replace(self.phase, stage=stage, since=began, timeout=timeout)
        self.events = [event for event in self.events if isinstance(event, Started)]
        self.ending = None
        self.shared_call.seek(0)
        self.shared_call.truncate()
        self.shared_call.write(packed_call.read())
        self.shared_call.flush()
        try:
            if is_first:
                self.ranks.start(self.shared_call)
            elif began > self.last_use + IDLE_SECONDS:
                raise LaunchError(
                    f"the kept ranks have ended: no cell wanted them for {IDLE_SECONDS / 60:g}"
                    " minutes"
                )
            else:
                self.ranks.order(Call())
            self.watch()
            self.last_use = time.monotonic()
        finally:
            if self.goes_on():
                self.show()
            else:
                self.close()
        return self.outcome()

    def goes_on(self) -> bool:
        """Return whether the ranks are fit for another call: no rank died or hangs, and all
        returned or all failed.
        """
        match self.ending:
            case Results():
                return not self.ranks.gone
            case Failures(all_alive=alive):
                return alive
        return False


def load_ipython_extension(ipython: Any) -> None:
    """Register the magic: `%load_ext` calls this."""
    ipython.register_magics(RanksMagic)


@magics_class
class RanksMagic(Magics):
    """The class that IPython wants around `%%ranks`."""

    kept_ranks: KeptRanks | None = None

    @magic_arguments()
    @argument("world_size", nargs="?", type=int, help="number of ranks: 4, or as many as are kept")
    @argument(
        "--keep",
        action="store_true",
        help="leave the ranks and their variables alive for the next cells",
    )
    @argument("--pull", default="", help="names to bring back from rank 0, separated by commas")
    @argument("--device", default="auto", help="auto, cpu, cuda, or one GPU such as cuda:0")
    @argument("--timeout", type=float, default=300.0, help="seconds (300)")
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """Run the cell on several ranks, with rank, world_size, dist, torch and device at hand.

        The names that the cell uses from the notebook are sent along. What the ranks print is shown
        rank by rank, with the value of each rank's last expression. Each cell starts anew, unless
        the ranks are kept: then what cells assign on the ranks stays there for the next %%ranks
        cells, until %ranks stop. Raises the errors of `launch`, without the frames in between.
        """
        if line.strip() == "--help":
            print(self.ranks.__doc__)
        elif cell is None:
            self.stop(line.strip())
        else:
            try:
                self.run(parse_argstring(self.ranks, line), cell)
            except EXPECTED as error:
                raise plain(error) from None

    def stop(self, word: str) -> None:
        """End the kept ranks, as `%ranks stop` asks; raises UsageError for any other word."""
        if word != "stop":
            raise UsageError(
                "%ranks takes stop or --help; to run a cell on the ranks, begin it with %%ranks"
            )
        if self.kept_ranks is None:
            print("no ranks are kept")
        else:
            self.kept_ranks.close()
        self.kept_ranks = None

    def run(self, options: Any, cell: str) -> None:
        """Run a cell on new ranks, or on the kept ones, as `%%ranks` asks; raises UsageError if a
        name that is to be pulled is not there.
        """
        pull = [name.strip() for name in options.pull.split(",") if name.strip()]
        world_size = self.world_size(options)
        # Tracebacks show the cell's lines by this name, which another cell does not have.
        filename = f"<ranks {crc32(cell.encode()):08x}>"
        linecache.cache[filename] = (len(cell), None, cell.splitlines(True), filename)
        compile_cell(cell, filename)  # a syntax error is shown before anything starts
        sent = used_names(cell) - NOT_SENT
        given = {name: value for name, value in self.shell.user_ns.items() if name in sent}
        check_request(world_size, options.device, options.timeout, None)
        with pack_call(run_cell, (cell, filename, pull), given) as call:
            results = self.launch(call, world_size, options)
        self.shell.push(results[0])
        if missing := [name for name in pull if name not in results[0]]:
            raise UsageError(
                f'"{missing[0]}" is to be pulled, but the cell assigned no such name on rank 0'
            )

    def launch(self, call: IO[bytes], world_size: int, options: Any) -> list:
        """Run a packed call on new ranks, or on the kept ones, as `%%ranks` asks; return the
        results in rank order.
        """
        if self.kept_ranks is None and not options.keep:
            setting = describe_launch(world_size, options.device, options.timeout, call=call)
            return RankByRank(setting).run(call)
        if self.kept_ranks is None:
            self.kept_ranks = KeptRanks(world_size, options.device)
        try:
            return self.kept_ranks.call(call, options.timeout)
        finally:
            if not self.kept_ranks.goes_on():
                self.kept_ranks = None
                print(ENDED, file=sys.stderr)

    def world_size(self, options: Any) -> int:
        """Return how many ranks are asked for; raises UsageError if another number of ranks is
        kept.
        """
        if self.kept_ranks is None:
            return DEFAULT_RANKS if options.world_size is None else options.world_size
        kept = self.kept_ranks.phase.world_size
        if options.world_size not in (None, kept):
            raise UsageError(
                f"{kept} ranks are kept; end them with %ranks stop before others start"
            )
        return kept
