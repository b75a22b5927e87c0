"""One launch as its caller sees it: what each rank prints and reports, and in the end the results or an error."""

import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time

from ..errors import Failure, LaunchError, LaunchTimeout, RankError, RankState
from .channel import Inbox, send, send_descriptors

GRACE_SECONDS = 0.25  # after the first failure: for others to report theirs, so that the earliest can be told
ENDING_SECONDS = 5.0  # for ranks and agent to end, after the last result or after they were told to
STACK_SECONDS = 1.0  # for ranks to write their stacks when time has run out
NOISE = ("[Gloo] Rank ",)  # gloo greets every new group on standard output


def show_line(rank, stream, line):
    """Print one line of a rank on the caller's own stream ("stdout" or "stderr")."""
    getattr(sys, stream).write(f"[rank {rank}] {line}\n")


class Lines:
    """What a rank prints, cut into whole lines."""

    def __init__(self, descriptor, show):
        self.descriptor, self.show, self.ended, self.rest = descriptor, show, False, b""

    def read(self):
        """Show all lines that are complete; of a progress bar's line, what follows the last carriage return."""
        taken = read_some(self.descriptor)
        self.ended = taken == b""
        *lines, self.rest = (self.rest + (taken or b"")).split(b"\n")
        for line in lines:
            self.say(line)

    def say(self, line):
        """Show one line, unless it is a library's chatter."""
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        if not text.startswith(NOISE):
            self.show(text)

    def close(self):
        """Show what is left, whole line or not."""
        if self.rest:
            self.say(self.rest)


class Text:
    """The last 256 KiB of what arrived on a pipe."""

    def __init__(self, descriptor):
        self.descriptor, self.ended, self.bytes = descriptor, False, b""

    def read(self):
        """Take what is there."""
        taken = read_some(self.descriptor)
        self.ended = taken == b""
        self.bytes = (self.bytes + (taken or b""))[-(1 << 18) :]

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

    def __init__(self, setting, show):
        self.setting, self.world_size, self.show = setting, setting["world_size"], show
        self.results, self.failures, self.pids, self.exit_codes, self.stacks = {}, {}, {}, {}, {}
        self.closing, self.states, self.agent_gone, self.number, self.agent_log = False, None, False, None, None
        self.selector, self.descriptors = selectors.DefaultSelector(), []
        self.connection, self.recorder = None, tempfile.TemporaryFile()

    def start(self, payload, number, order):
        """Have the server fork an agent, and hand it the call and the writing ends of all pipes."""
        self.number = number
        self.connection, theirs = socket.socketpair()
        given = []
        with theirs:
            order(b"L", number, [theirs.fileno()])
        try:
            self.open_pipes(given)
            shared = [given[0], payload.fileno(), self.recorder.fileno()]
            send(self.connection, {**self.setting, "descriptors": len(given) + 2})
            send_descriptors(self.connection, shared + given[1:])
        except (BrokenPipeError, ConnectionResetError):
            self.agent_gone = True
        finally:
            for descriptor in given:
                os.close(descriptor)
        self.connection.setblocking(False)
        self.listen(self.connection.fileno(), Mail(self.connection.fileno(), self.from_agent, self.agent_ended))

    def open_pipes(self, given):
        """Listen on the agent's log, and on each rank's report, output, errors and stacks; fills `given`."""
        self.agent_log = self.listen(self.pipe(given), Text)
        for rank in range(self.world_size):
            report = self.pipe(given)
            self.listen(report, Mail(report, lambda p, r=rank: self.from_rank(r, p), lambda r=rank: self.rank_ended(r)))
            for stream in ("stdout", "stderr"):
                printed = self.pipe(given)
                self.listen(printed, Lines(printed, lambda line, r=rank, s=stream: self.show(r, s, line)))
            stack = self.pipe(given)
            self.stacks[rank] = self.listen(stack, Text(stack))

    def pipe(self, given):
        """A new pipe: the reading end, non-blocking; the writing end goes to `given`."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.descriptors.append(reading)
        given.append(writing)
        return reading

    def listen(self, descriptor, reader):
        """Let `reader` take what arrives on `descriptor`."""
        reader = reader(descriptor) if isinstance(reader, type) else reader
        self.selector.register(descriptor, selectors.EVENT_READ, reader)
        return reader

    def step(self, seconds):
        """Take what has arrived, waiting at most `seconds` for it; False if nothing came."""
        ready = self.selector.select(max(0.0, seconds))
        for key, _ in ready:
            key.data.read()
            if key.data.ended:
                self.selector.unregister(key.fd)
                key.data.close()
        return bool(ready)

    def from_agent(self, pickled):
        """The agent says how its ranks ended, as its last word."""
        _, self.exit_codes = pickle.loads(pickled)

    def agent_ended(self):
        """The launch socket ended: agent and ranks are gone."""
        self.agent_gone = True

    def from_rank(self, rank, pickled):
        """A rank has started, or returned a result, or failed."""
        try:
            kind, value = pickle.loads(pickled)
        except Exception as error:
            message = f"its result cannot be read here: {type(error).__name__}: {error}"
            kind, value = "failed", {"type_name": "TypeError", "message": message, "time": time.monotonic()}
        if kind == "started":
            self.pids[rank] = value
        elif kind == "result":
            self.results[rank] = value
        else:
            self.failures[rank] = Failure(rank=rank, **value)

    def rank_ended(self, rank):
        """A rank's report ended; without a result before, the rank died."""
        if not self.closing and rank not in self.results and rank not in self.failures:
            self.failures[rank] = Failure(rank, "ended", "", time=time.monotonic())

    def watch(self):
        """Read until all results are in, or a rank has failed, or the agent is gone, or time is up."""
        deadline = time.monotonic() + self.setting["timeout"]
        while not self.agent_gone and len(self.results) < self.world_size and not self.failures:
            if time.monotonic() > deadline:
                self.states = self.look_at_ranks()
                return
            self.step(deadline - time.monotonic())
        if self.failures:
            self.read_for(GRACE_SECONDS, lambda: len(self.failures) + len(self.results) == self.world_size)
            silent = any(failure.type_name == "ended" for failure in self.failures.values())
            self.read_for(STACK_SECONDS if silent else 0, lambda: self.exit_codes or self.agent_gone)
        elif not self.agent_gone:
            self.read_for(ENDING_SECONDS, lambda: self.agent_gone)

    def read_for(self, seconds, enough):
        """Go on reading for `seconds`, or until `enough()`."""
        deadline = time.monotonic() + seconds
        while not enough() and time.monotonic() < deadline:
            self.step(deadline - time.monotonic())

    def look_at_ranks(self):
        """Ask every rank for its stack."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGUSR1)
        self.read_for(STACK_SECONDS, lambda: False)
        return [RankState(r, "running", stack=self.stacks[r].bytes.decode()) for r in range(self.world_size)]

    def close(self, order):
        """Kill what still runs, read the last lines, and close every descriptor."""
        self.closing = True
        try:
            if not self.agent_gone and self.connection is not None:
                order(b"K", self.number)
                self.read_for(ENDING_SECONDS, lambda: self.agent_gone)
            while self.step(0):
                pass
        finally:
            for key in list(self.selector.get_map().values()):
                key.data.close()
            self.selector.close()
            for descriptor in self.descriptors:
                os.close(descriptor)
            self.recorder.close()
            if self.connection is not None:
                self.connection.close()

    def never_started(self):
        """Whether the server was gone before any rank came to life, so that the launch may be tried again."""
        return self.agent_gone and not (self.pids or self.failures or self.results or self.agent_log.bytes)

    def outcome(self):
        """The results in rank order, or the error that says best what happened."""
        if self.states:
            raise LaunchTimeout(self.setting["timeout"], self.states)
        if self.failures:
            raise RankError(self.ordered_failures(), self.world_size)
        if len(self.results) < self.world_size:
            raise LaunchError("the ranks were ended from outside\n" + self.agent_log.bytes.decode("utf-8", "replace"))
        return [self.results[rank] for rank in range(self.world_size)]

    def ordered_failures(self):
        """The earliest first; broken connections, which only follow from another's failure, last."""
        for rank, failure in list(self.failures.items()):
            if failure.type_name == "ended" and self.exit_codes and rank not in self.exit_codes:
                del self.failures[rank]  # the elastic launcher ended it, after another rank had died
            elif failure.type_name == "ended":
                failure.type_name, failure.message = how_it_ended(self.exit_codes.get(rank))
        return sorted(self.failures.values(), key=lambda failure: (failure.consequence, failure.time))


def how_it_ended(code):
    """An exit code in words: (kind, message)."""
    if code is None:
        return "ended", "without a result"
    if code >= 0:
        return "exited", f"with code {code}"
    name = signal.Signals(-code).name
    hint = " (out of memory, or killed from outside)" if name == "SIGKILL" else ""
    return "killed", f"by {name}{hint}"
