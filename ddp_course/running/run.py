"""One launch as its caller sees it: what each rank prints and reports, and in the end the results or an error."""

# ruff: noqa: SIM115 (the files opened here outlive the function that opens them)
import os
import pickle
import selectors
import shutil
import signal
import socket
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import partial

from ..errors import Failure, LaunchError, LaunchTimeout, RankError
from . import flight_recorder, stacks
from .channel import Inbox, send, send_descriptors
from .limits import PIPES_A_RANK
from .progress import Bar

STARTING_SECONDS = 60.0  # for the server to import torch from a cold disk; the launch's own time starts after that
GRACE_SECONDS = 0.25  # after the first failure: for others to report theirs, so that the earliest can be told
EXIT_CODE_SECONDS = 1.5  # for the agent to say how a rank died
ENDING_SECONDS = 5.0  # for ranks and agent to end, after the last result or after they were told to
STACK_SECONDS = 2.0  # for ranks to write their stacks when time has run out …
QUIET_SECONDS = 0.4  # … or until nothing more comes for so long
NOISE = ("[Gloo] Rank ",)  # gloo greets every new group on standard output
SIGNAL_HINTS = {
    "SIGKILL": " (from outside, or by the system because memory ran out)",
    "SIGSEGV": " (segmentation fault)",
    "SIGABRT": " (a library gave up; its last words are above)",
}


def show_line(bar, rank, stream, text):
    """Print one line of a rank on the caller's own stream ("stdout" or "stderr"), above the progress bar."""
    bar.print(f"[rank {rank}] {text}\n", stream)


class Lines:
    """What a rank prints, cut into whole lines."""

    def __init__(self, descriptor, show):
        self.descriptor, self.show, self.ended, self.rest = descriptor, show, False, b""

    def read(self):
        """Take what is there."""
        taken = read_some(self.descriptor)
        self.ended = taken == b""
        self.feed(taken or b"")

    def feed(self, taken):
        """Show the lines that `taken` completes."""
        *lines, self.rest = (self.rest + taken).split(b"\n")
        for line in lines:
            self.say(line)

    def say(self, line):
        """Show one line, unless it is a library's chatter; of a progress bar, what follows its last carriage return."""
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        if not text.startswith(NOISE):
            self.show(text)

    def close(self):
        """Show what is left, whole line or not."""
        rest, self.rest = self.rest, b""
        if rest:
            self.say(rest)


class Text:
    """The last 256 KiB of what arrived on a pipe."""

    def __init__(self, descriptor):
        self.descriptor, self.ended, self.bytes = descriptor, False, b""

    def read(self):
        """Take what is there."""
        taken = read_some(self.descriptor)
        self.ended = taken == b""
        self.bytes = (self.bytes + (taken or b""))[-(1 << 18) :]

    def text(self):
        """What came, as text."""
        return self.bytes.decode("utf-8", "replace")

    def close(self):
        """Nothing is left to do."""


class Mail:
    """Messages of the agent or of one rank, each handed to `deliver(message)`; `at_end()` when the stream ends."""

    def __init__(self, descriptor, deliver, at_end):
        self.inbox, self.deliver, self.at_end = Inbox(descriptor), deliver, at_end
        self.ended = False

    def read(self):
        """Deliver all messages that are complete."""
        for pickled in self.inbox.read():
            self.deliver(pickled)
        if self.inbox.ended:
            self.ended = True
            self.at_end()

    def close(self):
        """Nothing is left to do."""


def read_some(descriptor):
    """What a non-blocking pipe holds: some bytes, b"" at its end, None if there is nothing now."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


class Run:
    """One launch: started, watched until its fate is known, closed, and then asked for its outcome."""

    def __init__(self, setting, number, show, order):
        self.setting, self.number, self.show, self.order = setting, number, show, order
        self.world_size = setting["world_size"]
        self.results, self.failures, self.pids, self.exit_codes = {}, {}, {}, None
        self.refusal, self.states, self.agent_gone, self.closing = None, None, False, False
        self.selector, self.descriptors, self.stacks = selectors.DefaultSelector(), [], {}
        self.connection, self.agent_log, self.ended_from_outside = None, Text(None), False
        self.bar = Bar(None if setting["progress"] is True else setting["progress"])
        self.folder = os.path.join(tempfile.gettempdir(), f"ddp_course_{number:x}")  # the server makes and removes it
        self.recorder = tempfile.TemporaryFile()
        self.recorder.truncate(flight_recorder.size(self.world_size))

    def start(self, payload):
        """Have the server fork an agent; hand it the call, and the writing ends of all pipes."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.order(b"L", self.number, [theirs.fileno()])
        try:
            send(self.connection, {**self.setting, "descriptors": 3 + PIPES_A_RANK * self.world_size})
            with self.pipes(Text) as (readers, log):
                self.agent_log = readers[0]
                send_descriptors(self.connection, [*log, payload.fileno(), self.recorder.fileno()])
            for rank in range(self.world_size):
                self.open_pipes(rank)
        except (BrokenPipeError, ConnectionResetError):
            self.agent_gone = True
        self.connection.setblocking(False)
        mail = Mail(self.connection.fileno(), self.from_agent, self.agent_ended)
        self.selector.register(self.connection, selectors.EVENT_READ, mail)

    def open_pipes(self, rank):
        """Listen to what one rank reports and prints, and to its stacks."""
        readers = [
            lambda report: Mail(report, partial(self.from_rank, rank), partial(self.rank_ended, rank)),
            lambda out: Lines(out, partial(self.print, rank, "stdout")),
            lambda err: Lines(err, partial(self.print, rank, "stderr")),
            Text,
        ]
        with self.pipes(*readers) as (opened, given):
            self.stacks[rank] = opened[-1]
            send_descriptors(self.connection, given)

    @contextmanager
    def pipes(self, *readers):
        """New pipes: a reader on each one's reading end, and the writing ends, open only inside the block."""
        ends = [os.pipe() for _ in readers]
        self.descriptors += [reading for reading, _ in ends]
        opened = [make(reading) for make, (reading, _) in zip(readers, ends, strict=True)]
        for reader, (reading, _) in zip(opened, ends, strict=True):
            os.set_blocking(reading, False)
            self.selector.register(reading, selectors.EVENT_READ, reader)
        try:
            yield opened, [writing for _, writing in ends]
        finally:
            for _, writing in ends:
                os.close(writing)

    def print(self, rank, stream, text):
        """Pass on a line that a rank printed."""
        self.show(self.bar, rank, stream, text)

    def from_agent(self, pickled):
        """The agent could not set up the link, or, as its last word, says which ranks ended badly."""
        kind, value = pickle.loads(pickled)
        if kind == "refused":
            self.refusal = value
            return
        by_rank, by_process = value
        ranks = {pid: rank for rank, pid in self.pids.items()}
        self.exit_codes = {ranks[pid]: code for pid, code in by_process.items() if pid in ranks} | by_rank
        for rank in self.exit_codes:
            self.failures.setdefault(rank, Failure(rank, "ended", time=time.monotonic()))

    def agent_ended(self):
        """The launch socket ended: agent and ranks are gone."""
        self.agent_gone = True

    def from_rank(self, rank, pickled):
        """A rank has started, or trained a few steps, or returned a result, or failed."""
        try:
            kind, value = pickle.loads(pickled)
        except Exception as error:
            message = f"its result cannot be read here: {type(error).__name__}: {error}"
            kind, value = "failed", {"type_name": "TypeError", "message": message, "time": time.monotonic()}
        if kind == "started":
            self.pids[rank] = value
        elif kind == "steps":
            self.bar.advance_to(value)
        elif kind == "result":
            self.results[rank] = value
        else:
            self.failures[rank] = Failure(rank=rank, **value)

    def rank_ended(self, rank):
        """A rank's report ended; without a result before, the rank died."""
        if not self.closing and rank not in self.results and rank not in self.failures:
            self.failures[rank] = Failure(rank, "ended", time=time.monotonic())

    def watch(self):
        """Read until all results are in, or a rank has failed, or the agent is gone, or time is up."""
        self.read_for(STARTING_SECONDS + self.setting["timeout"], lambda: self.pids or self.is_decided())
        self.read_for(self.setting["timeout"], self.is_decided)
        if not self.is_decided():
            self.states = self.look_at_ranks()
            return
        if not self.failures:
            self.read_for(ENDING_SECONDS, lambda: self.agent_gone or self.failures)
        if self.failures:
            self.read_for(GRACE_SECONDS, lambda: len(self.failures.keys() | self.results.keys()) == self.world_size)
            self.read_for(EXIT_CODE_SECONDS, self.cause_is_known)
            self.ended_from_outside = self.agent_gone and self.exit_codes is None and not self.has_told()

    def cause_is_known(self):
        """Whether waiting will not tell more: some rank has told its own error, or the agent how the dead ones died."""
        died = any(failure.type_name == "ended" for failure in self.failures.values())
        return self.agent_gone or self.exit_codes is not None or (self.has_told() and not died)

    def has_told(self):
        """Whether some rank has told an error of its own."""
        return any(failure.type_name != "ended" and not failure.consequence for failure in self.failures.values())

    def is_decided(self):
        """Whether nothing but the end is left to wait for."""
        return self.agent_gone or self.failures or self.refusal or len(self.results) == self.world_size

    def read_for(self, seconds, enough):
        """Take what arrives for `seconds`, or until `enough()`."""
        deadline = time.monotonic() + seconds
        while not enough() and time.monotonic() < deadline:
            self.step(deadline - time.monotonic())

    def step(self, seconds):
        """Take what has arrived, waiting at most `seconds` for it; False if nothing came."""
        ready = self.selector.select(max(0.0, seconds))
        for key, _ in ready:
            key.data.read()
            if key.data.ended:
                self.selector.unregister(key.fileobj)
                key.data.close()
        return bool(ready)

    def look_at_ranks(self):
        """Ask every rank for its stack, and describe all ranks."""
        for rank, pid in self.pids.items():
            if rank not in self.results:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        while self.step(QUIET_SECONDS) and time.monotonic() < deadline:
            pass
        calls, now = flight_recorder.last_calls(self.recorder.fileno(), self.world_size), time.monotonic()
        return [
            stacks.look(rank, self.pids.get(rank), self.stacks[rank].text(), calls.get(rank), rank in self.results, now)
            for rank in range(self.world_size)
        ]

    def close(self):
        """Kill what still runs, read the last lines, and close every descriptor."""
        self.closing = True
        try:
            if self.connection is not None and not self.agent_gone:
                self.order(b"K", self.number)
                self.read_for(ENDING_SECONDS, lambda: self.agent_gone)
            while self.step(0):
                pass
            for key in list(self.selector.get_map().values()):
                key.data.close()
            self.bar.close()
        finally:
            self.selector.close()
            for descriptor in self.descriptors:
                os.close(descriptor)
            self.recorder.close()
            shutil.rmtree(self.folder, ignore_errors=True)  # in case that the server was killed
            if self.connection is not None:
                self.connection.close()

    def never_started(self):
        """Whether the server was gone before any rank came to life, so that the launch may be tried again."""
        heard = self.pids or self.refusal or self.agent_log.bytes or self.exit_codes is not None
        return self.agent_gone and not heard

    def outcome(self, complaints):
        """The results in rank order, or the error that says best what happened; `complaints` is the server's log."""
        if self.refusal:
            raise self.refusal
        if self.states:
            raise LaunchTimeout(self.setting["timeout"], self.states)
        if self.failures and not self.ended_from_outside:
            raise RankError(self.ordered_failures(), self.world_size)
        if self.ended_from_outside or len(self.results) < self.world_size:
            log = self.agent_log.text() or complaints
            raise LaunchError(f"the ranks were ended from outside; launch again\n{log}".strip())
        return [self.results[rank] for rank in range(self.world_size)]

    def ordered_failures(self):
        """The earliest first; broken connections, which only follow from another rank's failure, last."""
        known = self.exit_codes or {}
        for rank, failure in list(self.failures.items()):
            if failure.type_name == "ended" and known and rank not in known:
                del self.failures[rank]  # the elastic launcher ended it, after another rank had died
            elif failure.type_name == "ended":
                failure.type_name, failure.message = how_it_ended(known.get(rank))
                failure.traceback = "\n".join(map(stacks.show, stacks.parse(self.stacks[rank].text())))
        return sorted(self.failures.values(), key=lambda failure: (failure.consequence, failure.time))


def how_it_ended(code):
    """An exit code in words: (kind, message)."""
    if code is None:
        return "ended", "without a result"
    if code >= 0:
        return "exited", f"with code {code}, without a result"
    name = signal.Signals(-code).name
    return "killed", f"by {name}{SIGNAL_HINTS.get(name, '')}"
