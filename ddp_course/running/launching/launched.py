"""One launch as its caller sees it: what each rank prints and reports, and in the end the results or an error.

How the ranks come to life, and over what their words arrive, is in `forked` and `spawned`.
"""

import math
import os
import pickle
import secrets
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO

from ...errors import Failure, LaunchError, LaunchTimeout, RankError
from .. import flight_recorder
from . import stacks
from .channel import put
from .progress import Bar
from .readers import Lines, Mail, Text
from .setting import open_memory

STARTING_SECONDS = 60.0  # for torch to be imported from a cold disk; the launch's own time starts after that
GRACE_SECONDS = 0.25  # after the first failure: for others to report theirs, so that the earliest can be told
KEPT_GRACE_SECONDS = 2.0  # the same for ranks that stay: if all of them fail, they need not end
EXIT_CODE_SECONDS = 1.5  # until it is known how a rank died
ENDING_SECONDS = 5.0  # for all processes to end, after the last result or after they were told to
STACK_SECONDS = 2.0  # for ranks to write their stacks when time has run out …
QUIET_SECONDS = 0.4  # … or until nothing more comes for so long
MARK = "DDP_COURSE_LAUNCH"  # in the environment of all that the ranks start, so that it can be found
UNCONNECTED = (
    "launch: no collective ran, so these are {} models that know nothing of each other, and they differ now. "
    "To train one together, wrap the model or average the gradients.\n"
)
SIGNAL_HINTS = {
    "SIGKILL": " (from outside, or by the system: then probably because memory ran out)",
    "SIGSEGV": " (segmentation fault)",
    "SIGABRT": " (a library gave up)",
}


def show_line(bar: Bar, rank: int | str, stream: str, text: str) -> None:
    """Print one line of a rank on the caller's own stream ("stdout" or "stderr"), above the progress bar.

    `rank` is its number, or its number and the name of its host.
    """
    bar.print(f"[rank {rank}] {text}\n", stream)


class Launched(ABC):
    """One launch: started, watched until its fate is known, closed, and then asked for its outcome.

    One whose ranks stay (`keeps`) is not closed after the first outcome, but gets the next call by `again`.
    """

    quiet = QUIET_SECONDS
    tick = math.inf  # the longest wait without a look at `stop`
    keeps = False

    def __init__(self, setting: dict, show: Callable):
        self.setting, self.show = setting, show
        self.world_size, self.ranks = setting["world_size"], setting["ranks"]
        self.mark = setting["environ"][MARK] = secrets.token_hex(8)
        self.results, self.failures, self.pids, self.exit_codes = {}, {}, {}, {}
        self.refusal, self.states, self.cause, self.agent_gone, self.closing = None, None, "", False, False
        self.stacks, self.agent_log, self.ended_from_outside = {}, Text(None), False
        self.orders: dict = {}  # by rank, the file over which it hears of the next call, or that it may leave
        self.stop: Callable = lambda: False  # whether this launch is to be given up
        self.hold: Callable = lambda: None  # what is to be waited for between the last result and the ranks' end
        self.calls, self.entered = {}, {}
        self.unconnected: dict = {}  # of ranks that trained without a word to the others: a sum over their model
        self.bar = Bar(None if setting["progress"] is True else setting["progress"])
        self.advance: Callable = self.bar.advance_to  # what is told how many steps rank 0 has done
        self.recorder = self.make_recorder()
        self.recorder.truncate(flight_recorder.size(self.world_size))

    @abstractmethod
    def start(self, payload: IO[bytes]) -> None:
        """Bring the ranks to life; `payload` is an open file with the packed call."""

    @abstractmethod
    def step(self, seconds: float) -> bool:
        """Take what has arrived, waiting at most `seconds` for it; False if nothing came."""

    @abstractmethod
    def end(self) -> None:
        """End what still runs, and wait until it has."""

    @abstractmethod
    def release(self) -> None:
        """Give back what was open."""

    def never_started(self) -> bool:
        """Whether everything was gone before any rank came to life, so that the launch may be tried again."""
        return False

    def explain(self) -> str:
        """Which process that the ranks depend on has ended, and how, as far as that is known."""
        return ""

    def make_recorder(self) -> IO[bytes]:
        """The flight recorder's memory, an open file."""
        return open_memory("recorder")

    def readers(self, rank: int) -> list:
        """What makes a reader of each file that comes from a rank: its report, stdout, stderr and stacks."""
        return [
            lambda report: Mail(report, partial(self.from_rank, rank), partial(self.rank_ended, rank)),
            lambda out: Lines(out, partial(self.print, rank, "stdout")),
            lambda err: Lines(err, partial(self.print, rank, "stderr")),
            Text,
        ]

    def print(self, rank: int, stream: str, text: str) -> None:
        """Pass on a line that a rank printed."""
        self.show(self.bar, rank, stream, text)

    def from_rank(self, rank: int, pickled: bytes | None) -> None:
        """A rank has started, or trained a few steps, or returned a result, or failed."""
        try:
            if pickled is None:
                raise ValueError("something else in its process wrote over it")
            kind, value = pickle.loads(pickled)
        except Exception as error:
            message = f"its result cannot be read here: {type(error).__name__}: {error}"
            kind, value = "failed", {"type_name": "TypeError", "message": message, "time": time.monotonic()}
        if kind == "started":
            self.pids[rank] = value
        elif kind == "steps":
            self.advance(value)
        elif kind == "unconnected":
            self.unconnected[rank] = value
        elif kind == "result":
            self.results[rank] = value
        else:
            self.failures[rank] = Failure(rank=rank, **value)

    def rank_ended(self, rank: int) -> None:
        """A rank's report ended; without a result before, the rank died."""
        if not self.closing and (self.keeps or rank not in self.results):
            self.failures.setdefault(rank, Failure(rank, "ended", time=time.monotonic()))

    def rank_exited(self, rank: int, code: int) -> None:
        """A rank's process has ended, with this exit code."""
        self.exit_codes[rank] = code
        if code and not self.closing:
            self.failures.setdefault(rank, Failure(rank, "ended", time=time.monotonic()))

    def watch(self) -> None:
        """Read until all results are in, or a rank has failed, or the agent is gone, or time is up."""
        self.read_for(STARTING_SECONDS + self.setting["timeout"], lambda: self.pids or self.is_decided())
        self.read_for(self.setting["timeout"], self.is_decided)
        if not self.is_decided():
            self.states, self.cause = self.look_at_ranks()
            return
        if self.has_all_results() and not self.failures and not self.keeps:
            self.hold()
            self.order(b"")
            self.read_for(ENDING_SECONDS, lambda: self.agent_gone or self.failures)
        if self.failures:
            self.read_for(KEPT_GRACE_SECONDS if self.keeps else GRACE_SECONDS, self.all_have_reported)
            self.read_for(EXIT_CODE_SECONDS, self.cause_is_known)
            unknown = not any(rank in self.exit_codes for rank in self.failures)
            self.ended_from_outside = self.agent_gone and unknown and not self.has_told()

    def order(self, message: bytes | memoryview) -> None:
        """Give all ranks their next call, packed, or b"": all have their results, and may leave."""
        for file in self.orders.values():
            put(file, message)

    def again(self, packed: bytes, timeout: float, show: Callable) -> None:
        """Have the ranks that stayed carry out another packed call; to be watched as the first."""
        self.show, self.setting["timeout"] = show, timeout
        self.results, self.failures, self.exit_codes = {}, {}, {}
        while self.step(0):
            pass
        self.order(packed)

    def goes_on(self) -> bool:
        """Whether ranks that stay are fit for another call: none died or hangs, and all returned or all failed."""
        failures = list(self.failures.values())
        alone = any(failure.consequence or failure.type_name == "ended" for failure in failures)
        unharmed = not (self.states or self.refusal or self.agent_gone or self.exit_codes or alone)
        return unharmed and len(failures) in (0, len(self.ranks)) and self.all_have_reported()

    def all_have_reported(self) -> bool:
        """Whether every rank has returned or failed."""
        return len(self.failures.keys() | self.results.keys()) == len(self.ranks)

    def cause_is_known(self) -> bool:
        """Whether waiting will not tell more: some rank has told its own error, and how the dead ones died is known."""
        died = [rank for rank, failure in self.failures.items() if failure.type_name == "ended"]
        return self.agent_gone or (bool(died or self.has_told()) and all(rank in self.exit_codes for rank in died))

    def has_told(self) -> bool:
        """Whether some rank has told an error of its own."""
        return any(failure.type_name != "ended" and not failure.consequence for failure in self.failures.values())

    def is_decided(self) -> bool:
        """Whether nothing but the end is left to wait for."""
        return bool(self.agent_gone or self.failures or self.refusal or self.has_all_results() or self.stop())

    def has_all_results(self) -> bool:
        """Whether every rank has returned."""
        return len(self.results) == len(self.ranks)

    def read_for(self, seconds: float, enough: Callable) -> None:
        """Take what arrives for `seconds`, or until `enough()`."""
        deadline = time.monotonic() + seconds
        while not enough() and time.monotonic() < deadline:
            self.step(max(0.0, min(self.tick, deadline - time.monotonic())))

    def look_at_ranks(self) -> tuple:
        """Ask every rank for its stack; all ranks' states, first of those that the others wait for, and who waits."""
        for rank, pid in self.pids.items():
            if rank not in self.results:
                self.ask(pid)
        deadline = time.monotonic() + STACK_SECONDS
        while self.step(self.quiet) and time.monotonic() < deadline:
            pass
        self.calls = flight_recorder.calls(self.recorder.fileno(), self.world_size)
        states, self.entered = stacks.look_at_all(self.ranks, self.pids, self.stacks, self.calls, self.results)
        return stacks.culprits_first(states, self.calls, self.entered)

    def ask(self, pid: int) -> None:
        """Ask a rank for its stack."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)

    def close(self) -> None:
        """End what still runs, read the last lines, and give everything back."""
        self.closing = True
        try:
            self.end()
            while self.step(0):
                pass
            self.bar.close()
        finally:
            self.recorder.close()
            self.release()

    def outcome(self) -> list:
        """The results in rank order, or the error that says best what happened."""
        if self.refusal:
            raise self.refusal
        if self.states:
            raise LaunchTimeout(self.setting["timeout"], self.states, self.cause)
        if self.failures and not self.ended_from_outside:
            raise RankError(self.ordered_failures(), self.world_size)
        if self.ended_from_outside or len(self.results) < len(self.ranks):
            reason = self.explain()
            first = f"the ranks were ended from outside{': ' if reason else ''}{reason}; launch again"
            raise LaunchError(f"{first}\n{self.agent_log.text()}".strip())
        if len(self.unconnected) == len(self.ranks) and len(set(self.unconnected.values())) > 1:
            self.bar.print(UNCONNECTED.format(self.world_size), "stderr")
        return [self.results[rank] for rank in self.ranks]

    def ordered_failures(self) -> list:
        """The earliest first; broken connections, which only follow from another rank's failure, last."""
        for rank, failure in self.failures.items():
            if failure.type_name == "ended":
                failure.type_name, failure.message = how_it_ended(self.exit_codes.get(rank))
                frames = "\n".join(map(stacks.show, stacks.parse(self.stacks[rank].text())))
                failure.traceback = frames or self.agent_log.text()
        return sorted(self.failures.values(), key=lambda failure: (failure.consequence, failure.time))


def how_it_ended(code: int | None) -> tuple:
    """An exit code in words: (kind, message)."""
    if code is None:
        return "ended", "without a result"
    if code >= 0:
        return "exited", f"with code {code}, without a result"
    name = signal.Signals(-code).name
    return "killed", f"by {name}{SIGNAL_HINTS.get(name, '')}"


def kill_marked(mark: str) -> None:
    """Kill all processes that a launch's ranks have started, by the mark in their environment."""
    import psutil  # here: a launch that ends as it should does without

    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=1.0)
