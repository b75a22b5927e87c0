"""One launch as its caller sees it: what the ranks say arrives, and in the end there are results or
an error.
"""

import pickle
import signal
import time
from collections.abc import Callable
from typing import IO, Any

from ...errors import Failure, LaunchError, LaunchTimeout, RankError
from . import stacks
from .channel import LEAVE
from .progress import Bar

STARTING_SECONDS = (
    60.0  # torch may be imported from a cold disk; the launch's own time starts after that
)
GRACE_SECONDS = (
    0.25  # after a failure other ranks have this long to report theirs; the earliest is named first
)
KEPT_GRACE_SECONDS = 2.0  # kept ranks have longer: if all of them fail, they need not end
EXIT_CODE_SECONDS = (
    1.5  # after a connection is lost, the system has this long to say which rank died, and how
)
ENDING_SECONDS = (
    5.0  # all processes have this long to end after the last result, or after the order to end
)
UNCONNECTED = (
    "launch: no collective ran, so these are {} models that know nothing of each other, and they"
    " differ now. To train one together, wrap the model or average the gradients.\n"
)
SIGNAL_HINTS = {
    "SIGKILL": " (from outside, or by the system: then probably because memory ran out)",
    "SIGSEGV": " (segmentation fault)",
    "SIGABRT": " (a library gave up)",
}


def show_line(bar: Bar, rank: int, stream: str, text: str) -> None:
    """Print one line of `rank` on the caller's own "stdout" or "stderr"."""
    bar.print(f"[rank {rank}] {text}\n", stream)


class Ranks:
    """The processes of one launch, as `Launch` uses them; `local` implements these methods:

    start(payload)      start the ranks; `payload` is an open file with the packed call
    step(seconds)       pass on what arrives within `seconds`; return False if nothing came
    order(word)         tell all ranks that there is another call, or, once all have answered, that
                        they may leave
    look(pids)          return what the ranks do, by rank: states of processes, stacks, last
                        collectives
    close()             end the processes, wait until they have ended, read their last lines, and
                        close all files
    explain()           return why the ranks have ended, as far as that is known: "" or lines of
                        text

    Messages of ranks become events, `hear(kind, rank, value)`: "started" (a process id), "steps"
    (their number), "answer" (packed), "stdout" and "stderr" (a line), "exited" (a code, and the
    last words), "refused" (an exception).
    """

    hear: Callable
    step: Callable
    gone = False  # this becomes True when no process of the launch is left
    cut_off = False  # this becomes True when processes end that the ranks still depend on

    def read_for(self, seconds: float, enough: Callable) -> None:
        """Pass on what arrives for `seconds`, or until `enough()`."""
        deadline = time.monotonic() + seconds
        while not enough() and time.monotonic() < deadline:
            self.step(max(0.0, deadline - time.monotonic()))


class Launch:
    """One launch, which is started, watched until it is decided, closed, and then asked for its
    outcome.
    """

    keeps = False  # this is True if the ranks stay for another call

    def __init__(
        self, ranks: Any, world_size: int, timeout: float, progress: bool | int, show: Callable
    ):
        self.ranks, self.world_size, self.timeout, self.show = ranks, world_size, timeout, show
        self.bar = Bar(None if progress is True else progress)
        self.closing = False
        self.pids: dict = {}
        self.results: dict = {}
        self.failures: dict = {}
        self.died = False  # this becomes True when a rank's process ends in mid-launch
        # this maps a rank to the sum of the model it trained without any message, or None
        self.models: dict = {}
        self.timed_out: LaunchTimeout | None = None
        self.refusal: Exception | None = None
        ranks.hear = self.hear

    def run(self, payload: IO[bytes]) -> "Launch":
        """Start the ranks, watch them to their end, and close everything, whatever happens."""
        try:
            self.ranks.start(payload)
            self.watch()
        finally:
            self.close()
        return self

    def watch(self) -> None:
        """Read until all results are in, or a rank has failed, or the ranks are gone, or time is
        up.
        """
        read_for = self.ranks.read_for
        read_for(STARTING_SECONDS + self.timeout, lambda: self.pids or self.is_decided())
        read_for(self.timeout, self.is_decided)
        if not self.is_decided():
            seen = stacks.look(self.world_size, self.results, *self.ranks.look(self.pids))
            self.timed_out = LaunchTimeout(self.timeout, *seen)
            return
        if self.has_all_results() and not self.failures and not self.keeps:
            self.ranks.order(LEAVE)
            read_for(ENDING_SECONDS, lambda: self.ranks.gone or self.failures)
        if self.failures:
            read_for(KEPT_GRACE_SECONDS if self.keeps else GRACE_SECONDS, self.all_have_reported)
            read_for(EXIT_CODE_SECONDS, lambda: self.ranks.gone or self.cause_is_known())

    def hear(self, kind: str, rank: int, value: Any) -> None:
        """Note one event of `Ranks`."""
        match kind:
            case "started":
                self.pids[rank] = value
            case "steps":
                self.bar.advance_to(value)
            case "answer":
                self.answered(rank, value)
            case "stdout" | "stderr":
                self.show(self.bar, rank, kind, value)
            case "refused":
                self.refusal = value
            case "exited":
                self.exited(rank, *value)

    def answered(self, rank: int, packed: bytes) -> None:
        """Note that a rank has returned a result, or failed."""
        try:
            kind, value = pickle.loads(packed)
        except Exception as error:
            message = f"its result cannot be read here: {type(error).__name__}: {error}"
            kind, value = (
                "failed",
                {"type_name": "TypeError", "message": message, "time": time.monotonic()},
            )
        if kind == "result":
            self.results[rank], self.models[rank] = value
        else:
            self.failures[rank] = Failure(rank=rank, **value)

    def exited(self, rank: int, code: int, words: str) -> None:
        """Note the exit code and the last words of a rank's process; if the rank never started, the
        words say why.
        """
        if not self.closing and (code or self.keeps or rank not in self.results):
            self.died = True
            kind, how = how_it_ended(code)
            failure = Failure(rank, kind, how, words, time.monotonic())
            self.failures.setdefault(rank, failure)
            if code > 0 and rank not in self.pids:
                self.refusal = LaunchError(f"the ranks could not be started\n{words}".strip())

    def is_decided(self) -> bool:
        """Return whether the outcome is decided, so that only the end is left to wait for."""
        return bool(self.failures or self.refusal or self.has_all_results() or self.ranks.gone)

    def has_all_results(self) -> bool:
        return len(self.results) == self.world_size

    def all_have_reported(self) -> bool:
        return len(self.failures.keys() | self.results.keys()) == self.world_size

    def cause_is_known(self) -> bool:
        """Return whether some rank has failed by itself, and has not only lost its connection to a
        rank that did.
        """
        return any(not failure.consequence for failure in self.failures.values())

    def close(self) -> None:
        """End what still runs, and close what is open."""
        self.closing = True
        try:
            self.ranks.close()
        finally:
            self.bar.close()

    def outcome(self) -> list:
        """Return the results in rank order, or raise the error that says best what happened."""
        if error := self.refusal or self.timed_out:
            raise error
        if self.failures and (self.cause_is_known() or not self.ranks.cut_off):
            failures = sorted(
                self.failures.values(), key=lambda failure: (failure.consequence, failure.time)
            )
            raise RankError(failures, self.world_size)
        if self.failures or not self.has_all_results():
            reason = self.ranks.explain()
            raise LaunchError(
                f"the ranks were ended from outside, launch again{': ' if reason else ''}{reason}"
            )
        if None not in self.models.values() and len(set(self.models.values())) > 1:
            self.bar.print(UNCONNECTED.format(self.world_size), "stderr")
        return [self.results[rank] for rank in range(self.world_size)]


def how_it_ended(code: int) -> tuple:
    """Return an exit code in words: (kind, message)."""
    if code >= 0:
        return "exited", f"with code {code}, without a result"
    name = signal.Signals(-code).name
    return "killed", f"by {name}{SIGNAL_HINTS.get(name, '')}"
