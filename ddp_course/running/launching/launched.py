"""One launch as its caller sees it: what each rank prints and reports, and in the end the results or an error.

How the ranks come to life, and over what their words arrive, is in `forked` and `spawned`.
"""

import io
import math
import os
import pickle
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import IO, Any

from ...errors import Failure, LaunchError, LaunchTimeout, RankError
from .. import flight_recorder
from . import stacks
from .channel import Frames, read_into
from .progress import Bar

STARTING_SECONDS = 60.0  # for torch to be imported from a cold disk; the launch's own time starts after that
GRACE_SECONDS = 0.25  # after the first failure: for others to report theirs, so that the earliest can be told
EXIT_CODE_SECONDS = 1.5  # until it is known how a rank died
ENDING_SECONDS = 5.0  # for all processes to end, after the last result or after they were told to
STACK_SECONDS = 2.0  # for ranks to write their stacks when time has run out …
QUIET_SECONDS = 0.4  # … or until nothing more comes for so long
READ_AT_MOST, KEPT_AT_MOST = 1 << 16, 1 << 18
NOISE = ("[Gloo] Rank ",)  # gloo greets every new group on standard output
SIGNAL_HINTS = {
    "SIGKILL": " (from outside, or by the system because memory ran out)",
    "SIGSEGV": " (segmentation fault)",
    "SIGABRT": " (a library gave up; its last words are above)",
}


def show_line(bar: Bar, rank: int | str, stream: str, text: str) -> None:
    """Print one line of a rank on the caller's own stream ("stdout" or "stderr"), above the progress bar.

    `rank` is its number, or its number and the name of its host.
    """
    bar.print(f"[rank {rank}] {text}\n", stream)


class Lines:
    """What a rank prints, cut into whole lines."""

    def __init__(self, file: Any, show: Callable):
        self.file, self.show, self.ended, self.rest = file, show, False, b""

    def read(self) -> None:
        """Take what is there."""
        taken = read_some(self.file)
        self.ended = taken == b""
        self.feed(taken or b"")

    def feed(self, taken: bytes) -> None:
        """Show the lines that `taken` completes."""
        *lines, self.rest = (self.rest + taken).split(b"\n")
        for line in lines:
            self.say(line)

    def say(self, line: bytes) -> None:
        """Show one line, unless it is a library's chatter; of a progress bar, what follows its last carriage return."""
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        if not text.startswith(NOISE):
            self.show(text)

    def close(self) -> None:
        """Show what is left, whole line or not."""
        rest, self.rest = self.rest, b""
        if rest:
            self.say(rest)


class Text:
    """The last 256 KiB of what arrived."""

    def __init__(self, file: Any):
        self.file, self.ended, self.bytes = file, False, b""

    def read(self) -> None:
        """Take what is there."""
        taken = read_some(self.file)
        self.ended = taken == b""
        self.bytes = (self.bytes + (taken or b""))[-KEPT_AT_MOST:]

    def text(self) -> str:
        """What came, as text."""
        return self.bytes.decode("utf-8", "replace")

    def close(self) -> None:
        """Nothing is left to do."""


class Mail:
    """Messages of the agent or of one rank, each handed to `deliver(message)`; `at_end()` when the stream ends."""

    def __init__(self, file: io.RawIOBase, deliver: Callable, at_end: Callable):
        self.frames, self.deliver, self.at_end = Frames(file), deliver, at_end
        self.ended = False

    def read(self) -> None:
        """Deliver all messages that are complete."""
        for pickled in self.frames.read():
            self.deliver(pickled)
        if self.frames.ended:
            self.ended = True
            self.at_end()

    def close(self) -> None:
        """Nothing is left to do."""


def read_some(file: io.RawIOBase) -> bytes | None:
    """Some bytes of an unbuffered file, b"" at its end, None if there is nothing now."""
    buffer = bytearray(READ_AT_MOST)
    count = read_into(file, buffer)
    return None if count is None else bytes(buffer[:count])


class Launched(ABC):
    """One launch: started, watched until its fate is known, closed, and then asked for its outcome."""

    quiet = QUIET_SECONDS
    tick = math.inf  # the longest wait without a look at `stop`

    def __init__(self, setting: dict, show: Callable):
        self.setting, self.show = setting, show
        self.world_size, self.ranks = setting["world_size"], setting["ranks"]
        self.results, self.failures, self.pids, self.exit_codes = {}, {}, {}, {}
        self.refusal, self.states, self.cause, self.agent_gone, self.closing = None, None, "", False, False
        self.stacks, self.agent_log, self.ended_from_outside = {}, Text(None), False
        self.stop: Callable = lambda: False  # whether this launch is to be given up
        self.hold: Callable = lambda: None  # what is to be waited for between the last result and the ranks' end
        self.calls, self.entered = {}, {}
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
    def leave(self) -> None:
        """Let the ranks end: all have their results."""

    @abstractmethod
    def end(self) -> None:
        """End what still runs, and wait until it has."""

    @abstractmethod
    def release(self) -> None:
        """Give back what was open."""

    def make_recorder(self) -> IO[bytes]:
        """The flight recorder's memory, an open file."""
        return tempfile.TemporaryFile()

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

    def from_rank(self, rank: int, pickled: bytes) -> None:
        """A rank has started, or trained a few steps, or returned a result, or failed."""
        try:
            kind, value = pickle.loads(pickled)
        except Exception as error:
            message = f"its result cannot be read here: {type(error).__name__}: {error}"
            kind, value = "failed", {"type_name": "TypeError", "message": message, "time": time.monotonic()}
        if kind == "started":
            self.pids[rank] = value
        elif kind == "steps":
            self.advance(value)
        elif kind == "result":
            self.results[rank] = value
        else:
            self.failures[rank] = Failure(rank=rank, **value)

    def rank_ended(self, rank: int) -> None:
        """A rank's report ended; without a result before, the rank died."""
        if not self.closing and rank not in self.results and rank not in self.failures:
            self.failures[rank] = Failure(rank, "ended", time=time.monotonic())

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
        if self.has_all_results() and not self.failures:
            self.hold()
            self.leave()
            self.read_for(ENDING_SECONDS, lambda: self.agent_gone or self.failures)
        if self.failures:
            self.read_for(GRACE_SECONDS, lambda: len(self.failures.keys() | self.results.keys()) == len(self.ranks))
            self.read_for(EXIT_CODE_SECONDS, self.cause_is_known)
            unknown = not any(rank in self.exit_codes for rank in self.failures)
            self.ended_from_outside = self.agent_gone and unknown and not self.has_told()

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
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            return

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

    def outcome(self, complaints: str = "") -> list:
        """The results in rank order, or the error that says best what happened; `complaints` may explain no start."""
        if self.refusal:
            raise self.refusal
        if self.states:
            raise LaunchTimeout(self.setting["timeout"], self.states, self.cause)
        if self.failures and not self.ended_from_outside:
            raise RankError(self.ordered_failures(), self.world_size)
        if self.ended_from_outside or len(self.results) < len(self.ranks):
            log = self.agent_log.text() or complaints
            raise LaunchError(f"the ranks were ended from outside; launch again\n{log}".strip())
        return [self.results[rank] for rank in self.ranks]

    def ordered_failures(self) -> list:
        """The earliest first; broken connections, which only follow from another rank's failure, last."""
        for rank, failure in self.failures.items():
            if failure.type_name == "ended":
                failure.type_name, failure.message = how_it_ended(self.exit_codes.get(rank))
                failure.traceback = "\n".join(map(stacks.show, stacks.parse(self.stacks[rank].text())))
        return sorted(self.failures.values(), key=lambda failure: (failure.consequence, failure.time))


def how_it_ended(code: int | None) -> tuple:
    """An exit code in words: (kind, message)."""
    if code is None:
        return "ended", "without a result"
    if code >= 0:
        return "exited", f"with code {code}, without a result"
    name = signal.Signals(-code).name
    return "killed", f"by {name}{SIGNAL_HINTS.get(name, '')}"
