"""One launch as its caller sees it: lines and reports arrive from the ranks, and in the end results or an error.

`local` has what is special about ranks on this machine, `hosts` what is special about ranks on several.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ...errors import LaunchError, LaunchTimeout, RankError
from . import stacks
from .progress import Bar


def show_line(bar: Bar, rank: int | str, stream: str, text: str) -> None:
    """Print one line of a rank on the caller's own stream ("stdout" or "stderr"), above the progress bar.

    `rank` is its number, or its number and the name of its host.
    """
    bar.print(f"[rank {rank}] {text}\n", stream)


class Launch(ABC):
    """One launch: started, watched until its fate is known, closed, and then asked for its outcome."""

    tick = math.inf  # seconds: the longest wait between two looks at `is_decided`

    def __init__(self, ranks: list, timeout: float, progress: bool | int, show: Callable):
        self.ranks, self.timeout, self.show = ranks, timeout, show
        self.bar = Bar(None if progress is True else progress)
        self.results: dict = {}
        self.failures: dict = {}
        self.states: list = []  # after a timeout, what each rank was doing
        self.calls: dict = {}  # after a timeout, the collectives of each rank by the flight recorder
        self.entered: dict = {}  # after a timeout, the collective of torch that each rank is in, by its stack
        self.refusal: Exception | None = None
        self.closing = False

    @abstractmethod
    def watch(self) -> None:
        """Read until the fate of this launch is known."""

    @abstractmethod
    def step(self, seconds: float) -> bool:
        """Take what has arrived, waiting at most `seconds` for it; False if nothing came."""

    @abstractmethod
    def end(self) -> None:
        """End what still runs, and wait until it has."""

    @abstractmethod
    def release(self) -> None:
        """Give back what was open."""

    def is_decided(self) -> Any:
        """Whether nothing but the end is left to wait for."""
        return self.failures or self.refusal or self.states or self.has_all_results()

    def has_all_results(self) -> bool:
        """Whether every rank has returned."""
        return len(self.results) == len(self.ranks)

    def all_have_reported(self) -> bool:
        """Whether every rank has returned or failed."""
        return len(self.failures.keys() | self.results.keys()) == len(self.ranks)

    def read_for(self, seconds: float, enough: Callable) -> None:
        """Take what arrives for `seconds`, or until `enough()`."""
        deadline = time.monotonic() + seconds
        while not enough() and time.monotonic() < deadline:
            self.step(max(0.0, min(self.tick, deadline - time.monotonic())))

    def close(self) -> None:
        """End what still runs, read the last lines, and give everything back."""
        self.closing = True
        try:
            self.end()
            while self.step(0):
                pass
            self.bar.close()
        finally:
            self.release()

    def outcome(self) -> list:
        """The results in rank order, or the error that says best what happened."""
        if self.refusal:
            raise self.refusal
        if self.states:
            raise LaunchTimeout(self.timeout, *stacks.culprits_first(self.states, self.calls, self.entered))
        if self.failures:
            raise RankError(self.ordered_failures(), len(self.ranks))
        if not self.has_all_results():
            raise LaunchError(self.explain())
        return [self.results[rank] for rank in self.ranks]

    def ordered_failures(self) -> list:
        """The earliest first; broken connections, which only follow from another rank's failure, last."""
        return sorted(self.failures.values(), key=lambda failure: (failure.consequence, failure.time))

    def explain(self) -> str:
        """Why there are no results, although no rank failed."""
        return "the ranks were ended from outside; launch again"
