"""A launch whose ranks are processes of this machine: what they report, how they end, where they hang.

How they come to life is in `forked` and `spawned`; each rank reports, prints and shows its stacks on pipes of its own.
"""

import os
import pickle
import secrets
import signal
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO

from ...errors import Failure
from .. import flight_recorder
from . import stacks
from .channel import Inbox, Lines, Mail, Text, write
from .launched import Launch
from .setting import open_memory

STARTING_SECONDS = 60.0  # for torch to be imported from a cold disk; the launch's own time starts after that
GRACE_SECONDS = 0.25  # after the first failure, for other ranks to report theirs: the earliest is told first
KEPT_GRACE_SECONDS = 2.0  # the same for ranks that stay: if all of them fail, they need not end
EXIT_CODE_SECONDS = 1.5  # until it is known how a rank died
ENDING_SECONDS = 5.0  # for all processes to end, after the last result or after the order to end
STACK_SECONDS = 2.0  # for ranks to write their stacks when time has run out …
QUIET_SECONDS = 0.4  # … or until nothing more comes for so long
MARK = "DDP_COURSE_LAUNCH"  # this environment variable marks all programs that ranks start
UNCONNECTED = (
    "launch: no collective ran, so these are {} models that know nothing of each other, and they differ now. "
    "To train one together, wrap the model or average the gradients.\n"
)
SIGNAL_HINTS = {
    "SIGKILL": " (from outside, or by the system: then probably because memory ran out)",
    "SIGSEGV": " (segmentation fault)",
    "SIGABRT": " (a library gave up)",
}


class LocalLaunch(Launch):
    """A launch on this machine. If its ranks stay (`keeps`), it gets the next call by `again` instead of its end."""

    quiet = QUIET_SECONDS
    keeps = False

    def __init__(self, setting: dict, show: Callable):
        super().__init__(setting["ranks"], setting["timeout"], setting["progress"], show)
        self.setting, self.world_size = setting, setting["world_size"]
        self.mark = setting["environ"][MARK] = secrets.token_hex(8)
        self.inbox, self.agent_log, self.agent_gone = Inbox(), Text(), False
        self.pids: dict = {}
        self.exit_codes: dict = {}
        self.stacks: dict = {}
        self.orders: dict = {}  # by rank, the pipe over which it hears of the next call, or that it may leave
        self.unconnected: dict = {}  # of ranks that trained without any message, a sum over their model
        self.stop: Callable = lambda: False  # whether this launch is to be given up
        self.hold: Callable = lambda: None  # waits between the last result and the ranks' end
        self.advance: Callable = self.bar.advance_to  # hears how many steps rank 0 has done
        self.recorder = self.make_recorder()
        self.recorder.truncate(flight_recorder.size(self.world_size))

    @abstractmethod
    def start(self, payload: IO[bytes]) -> None:
        """Bring the ranks to life; `payload` is an open file with the packed call."""

    def never_started(self) -> bool:
        """Whether everything was gone before any rank came to life, so that the launch may be tried again."""
        return False

    def make_recorder(self) -> IO[bytes]:
        """The flight recorder's memory, an open file."""
        return open_memory("recorder")

    def readers(self, rank: int) -> list:
        """A reader for each pipe that comes from a rank: its report, stdout, stderr and stacks."""
        self.stacks[rank] = Text()
        report = Mail(partial(self.from_rank, rank), partial(self.rank_ended, rank))
        prints = [Lines(partial(self.print, rank, stream)) for stream in ("stdout", "stderr")]
        return [report, *prints, self.stacks[rank]]

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

    def step(self, seconds: float) -> bool:
        """Take what has arrived, waiting at most `seconds` for it; False if nothing came."""
        return self.inbox.read(seconds)

    def watch(self) -> None:
        """Read until all results are in, or a rank has failed, or the agent is gone, or time is up."""
        self.read_for(STARTING_SECONDS + self.timeout, lambda: self.pids or self.is_decided())
        self.read_for(self.timeout, self.is_decided)
        if not self.is_decided():
            self.look_at_ranks()
            return
        if self.has_all_results() and not self.failures and not self.keeps:
            self.hold()
            self.order(b"")
            self.read_for(ENDING_SECONDS, lambda: self.agent_gone or self.failures)
        if self.failures:
            self.read_for(KEPT_GRACE_SECONDS if self.keeps else GRACE_SECONDS, self.all_have_reported)
            self.read_for(EXIT_CODE_SECONDS, self.cause_is_known)
            codes_unknown = not any(rank in self.exit_codes for rank in self.failures)
            if self.agent_gone and codes_unknown and not self.has_own_error():  # the ranks were ended from outside
                self.results, self.failures = {}, {}

    def is_decided(self) -> bool:
        """Whether nothing but the end is left to wait for."""
        return bool(super().is_decided() or self.agent_gone or self.stop())

    def order(self, message: bytes | memoryview) -> None:
        """Give all ranks their next call, packed, or b"": all have their results, and may leave."""
        for file in self.orders.values():
            with suppress(OSError):  # the rank may have ended
                write(file.fileno(), message)

    def again(self, packed: bytes, timeout: float, show: Callable) -> None:
        """Have the ranks that stayed carry out another packed call; to be watched as the first."""
        self.show, self.timeout = show, timeout
        self.results, self.failures, self.exit_codes = {}, {}, {}
        while self.step(0):
            pass
        self.order(packed)

    def goes_on(self) -> bool:
        """Whether ranks that stay are fit for another call: none died or hangs, and all returned or all failed."""
        failures = self.failures.values()
        lonely = any(failure.consequence or failure.type_name == "ended" for failure in failures)
        unharmed = not (self.states or self.refusal or self.agent_gone or self.exit_codes or lonely)
        return unharmed and len(failures) in (0, len(self.ranks)) and self.all_have_reported()

    def cause_is_known(self) -> bool:
        """Whether waiting is useless: some rank has reported its own error, and all exit codes of dead ranks came."""
        died = [rank for rank, failure in self.failures.items() if failure.type_name == "ended"]
        return self.agent_gone or (bool(died or self.has_own_error()) and all(rank in self.exit_codes for rank in died))

    def has_own_error(self) -> bool:
        """Whether some rank has reported an error of its own."""
        return any(failure.type_name != "ended" and not failure.consequence for failure in self.failures.values())

    def look_at_ranks(self) -> None:
        """Ask every rank for its stack, and note what each one was doing."""
        for rank, pid in self.pids.items():
            if rank not in self.results:
                self.ask(pid)
        deadline = time.monotonic() + STACK_SECONDS
        while self.step(self.quiet) and time.monotonic() < deadline:
            pass
        self.calls = flight_recorder.calls(self.recorder.fileno(), self.world_size)
        dumps = {rank: text.text() for rank, text in self.stacks.items()}
        self.states, self.entered = stacks.look_at_all(self.ranks, self.pids, dumps, self.calls, self.results)

    def ask(self, pid: int) -> None:
        """Ask a rank for its stack."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)

    def release(self) -> None:
        """Close the pipes and the recorder's memory."""
        self.inbox.close()
        for file in self.orders.values():
            file.close()
        self.recorder.close()

    def outcome(self) -> list:
        """As for every launch; models that were trained without any message are pointed out."""
        results = super().outcome()
        if len(self.unconnected) == len(self.ranks) and len(set(self.unconnected.values())) > 1:
            self.bar.print(UNCONNECTED.format(self.world_size), "stderr")
        return results

    def ordered_failures(self) -> list:
        """As for every launch; a rank that died is described by its exit code and its last stack."""
        for rank, failure in self.failures.items():
            if failure.type_name == "ended":
                failure.type_name, failure.message = how_it_ended(self.exit_codes.get(rank))
                frames = "\n".join(map(stacks.show, stacks.parse(self.stacks[rank].text())))
                failure.traceback = frames or self.agent_log.text()
        return super().ordered_failures()

    def explain(self) -> str:
        """Why there are no results, and which process that the ranks depend on has ended, if that is known."""
        reason = self.ended_process()
        first = f"the ranks were ended from outside{': ' if reason else ''}{reason}; launch again"
        return f"{first}\n{self.agent_log.text()}".strip()

    def ended_process(self) -> str:
        """Which process that the ranks depend on has ended, and how; "" if that is not known."""
        return ""


def how_it_ended(code: int | None) -> tuple:
    """An exit code in words: (kind, message)."""
    if code is None:
        return "ended", "without a result"
    if code >= 0:
        return "exited", f"with code {code}, without a result"
    name = signal.Signals(-code).name
    return "killed", f"by {name}{SIGNAL_HINTS.get(name, '')}"


def kill_marked(marks: set) -> None:
    """Kill all programs that the ranks of a launch have started, by the marks in their environment."""
    import psutil  # here: most launches end without it

    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) in marks:
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=1.0)
