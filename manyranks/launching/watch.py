"""One launch as its caller sees it: messages arrive until there are results or an error."""

import time
from typing import IO

from ..errors import DeadlockError, LaunchError, LaunchTimeout, RankError, RankState
from . import stacks
from .bar import Bar
from .decision import (
    Ending,
    Event,
    Failures,
    Phase,
    Results,
    Stage,
    TimedOut,
    decide,
    next_phase,
    pids_of,
    results_of,
)
from .local import Ranks
from .protocol import Refused, Setting

TICK_SECONDS = 0.05  # While nothing arrives, the caller looks at the clock this often.
UNCONNECTED = (
    "launch: no collective ran, so these are {} models that know nothing of each other, and they"
    " differ now. To train one together, wrap the model or average the gradients.\n"
)


class Launch:
    """One launch: it is started, watched until its ending is decided, and closed."""

    def __init__(self, setting: Setting):
        self.bar = Bar(setting.progress)
        self.ranks = Ranks(setting, self.print, self.bar.advance_to)
        now = time.monotonic()
        self.phase = Phase(Stage.STARTING, now, setting.world_size, setting.timeout)
        self.events: list[Event] = []
        self.ending: Ending | None = None
        # If time was up, these say what each rank did, and for which ranks the others waited.
        self.states: list[RankState] = []
        self.cause = ""

    def print(self, rank: int, stream: str, text: str) -> None:
        """Show a line that a rank has printed, on the caller's own "stdout" or "stderr"."""
        self.bar.print(f"[rank {rank}] {text}\n", stream)

    def run(self, call: IO[bytes]) -> list:
        """Run a packed call on all ranks, close all files, and return the results in rank order."""
        try:
            self.ranks.start(call)
            self.watch()
        finally:
            self.close()
        return self.outcome()

    def watch(self) -> None:
        """Read what the ranks say until the ending is decided."""
        while self.ending is None:
            self.events += self.ranks.read(TICK_SECONDS)
            self.bar.tick()
            now = time.monotonic()
            self.ending = decide(self.phase, self.events, now)
            phase = next_phase(self.phase, self.events, now)
            if phase.stage is Stage.LEAVING and phase != self.phase and not self.ending:
                self.ranks.let_go()
            self.phase = phase
        if isinstance(self.ending, TimedOut):
            left = self.ranks.inspect(pids_of(self.events))
            finished = results_of(self.events).keys()
            self.states, self.cause = stacks.describe_ranks(self.phase.world_size, finished, left)

    def close(self) -> None:
        """End the processes that still run, and close the ranks' files and the bar."""
        try:
            self.ranks.close()
        finally:
            self.bar.close()

    def outcome(self) -> list:
        """Return the results in rank order, or raise the error that says how the launch failed."""
        match self.ending:
            case Results(by_rank):
                returned = [by_rank[rank] for rank in range(self.phase.world_size)]
                models = [each.model for each in returned]
                if None not in models and len(set(models)) > 1:
                    self.bar.print(UNCONNECTED.format(self.phase.world_size), "stderr")
                return [each.result for each in returned]
            case Failures([culprit, *_] as failures) if culprit.waits:
                waiting = {wait.rank for wait in culprit.waits}
                ended = [rank for rank in range(self.phase.world_size) if rank not in waiting]
                raise DeadlockError(culprit.message, culprit.waits, ended, failures)
            case Failures(failures):
                raise RankError(failures, self.phase.world_size)
            case Refused(error):
                raise error
            case TimedOut():
                raise LaunchTimeout(self.phase.timeout, self.states, self.cause)
        reason = self.ranks.explain()
        colon = ": " if reason else ""
        raise LaunchError(f"the ranks were ended from outside, launch again{colon}{reason}")
