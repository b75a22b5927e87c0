"""The processes of one launch, as the caller handles them: how they begin, speak and end.

Through one socket the agent gets open files. Some are files in memory: the setting, a log, the call
and the flight recorder, and for each rank its stacks and its answer. The others are the far ends of
pipes, over which each rank gets orders, sends messages and prints.
"""

import os
import pickle
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import IO, Any

from .. import flight_recorder
from ..errors import Failure
from ..memory import open_memory
from . import pickling, stacks
from .decision import ENDING_SECONDS, Ended, Event, Gone, Raised, Returned
from .environment import surroundings
from .inbox import Inbox, Lines, Messages
from .protocol import (
    AgentExited,
    AgentStarted,
    Answered,
    LaunchFiles,
    Leave,
    RankExited,
    RankFiles,
    Refused,
    Setting,
    Started,
    Stepped,
    send,
)
from .server_handle import Server, ask_for_agent, ending_in_words, text_in

MARK = "MANYRANKS_LAUNCH"  # This environment variable marks all programs that ranks start.
LOOPBACK_CARD = "lo0" if sys.platform == "darwin" else "lo"
DYING_SECONDS = 1.0  # A server that has closed its socket has this long to end.
STACK_SECONDS = 1.0  # When time has run out, ranks have this long to write their stacks.


class Ranks:
    """The ranks of one launch on this machine.

    `show(rank, stream, text)` is called with each line that a rank prints, and `advance_to(steps)`
    with the number of rank 0's optimizer steps.
    """

    def __init__(self, setting: Setting, show: Callable, advance_to: Callable[[int], None]):
        self.mark = secrets.token_hex(8)
        self.setting = setting
        self.show = show
        self.advance_to = advance_to
        self.heard: list[Event] = []  # what has arrived since the last `read`
        self.inbox = Inbox()
        self.server: Server | None = None
        self.agent: int | None = None  # its process id, and the number of its process group
        self.agent_end = ""  # how the agent ended, if that was with an error
        self.told_to_end = False
        self.gone = False  # whether no process of the launch is left
        self.cut_off = False  # whether the processes have gone without having been told to
        self.files = ExitStack()  # all open files but the inbox's
        self.log = self.open_file()
        self.recorder = self.open_file()
        self.recorder.truncate(flight_recorder.size(setting.world_size))
        self.stacks = {rank: self.open_file() for rank in range(setting.world_size)}
        self.answers = {rank: self.open_file() for rank in range(setting.world_size)}
        self.orders: list[int] = []  # the pipes over which ranks get their orders
        self.last_words = ""  # the text of the log, once the log is closed

    def open_file(self, content: bytes = b"") -> IO[bytes]:
        """Open a file in memory that is closed with the launch."""
        return self.files.enter_context(open_memory("launch", content))

    def start(self, call: IO[bytes]) -> None:
        """Have the server fork an agent, and hand the launch's files and the call over to it."""
        # Users may have set another network card, and it would be shared.
        own_surroundings = surroundings(**{MARK: self.mark, "GLOO_SOCKET_IFNAME": LOOPBACK_CARD})
        setting = self.open_file(pickle.dumps(own_surroundings) + pickling.dumps(self.setting))
        connection, far_end = socket.socketpair()
        with far_end:
            self.server = ask_for_agent(far_end, setting)
        files = LaunchFiles(
            log=self.log.fileno(),
            call=call.fileno(),
            recorder=self.recorder.fileno(),
        )
        # If the agent has died, the end of its socket is read next.
        with suppress(ConnectionError):
            # Open files cannot be sent without any byte.
            socket.send_fds(connection, [b"f"], files)
            for rank in range(self.setting.world_size):
                socket.send_fds(connection, [b"f"], self.open_for(rank))
        self.inbox.readers[connection.detach()] = Messages(self.hear_agent)

    def open_for(self, rank: int) -> RankFiles:
        """Open a rank's files, and return them.

        The rank's ends of the pipes stay open here, too: macOS loses those that are closed in
        transit.
        """
        orders, own_end = os.pipe()
        self.orders.append(own_end)
        report = self.inbox.pipe(Messages(partial(self.hear_rank, rank)))
        out = self.inbox.pipe(Lines(partial(self.show, rank, "stdout")))
        err = self.inbox.pipe(Lines(partial(self.show, rank, "stderr")))
        for end in (own_end, orders, report, out, err):
            self.files.callback(os.close, end)
        return RankFiles(
            orders=orders,
            report=report,
            out=out,
            err=err,
            stacks=self.stacks[rank].fileno(),
            answer=self.answers[rank].fileno(),
        )

    def hear_agent(self, message: Any) -> None:
        """Note what the agent says, or what the server says about the agent.

        When the socket ends, no process of the launch is left.
        """
        match message:
            case AgentStarted(pid):
                self.agent = pid
            case AgentExited(code):
                self.agent_end = f"their agent {ending_in_words(code)}\n"
            case Refused():
                self.heard.append(message)
            case RankExited(rank, code):
                words = stacks.as_traceback(text_in(self.stacks[rank])) or text_in(self.log)
                self.heard.append(Ended(rank, code, words, time.monotonic()))
            case _:
                # This is None at the end, or an error for a message that cannot be read.
                self.cut_off = not self.told_to_end
                self.gone = True
                self.heard.append(Gone())

    def hear_rank(self, rank: int, message: Any) -> None:
        """Note what a rank says; a message that cannot be read counts as such an answer."""
        match message:
            case Started():
                self.heard.append(message)
            case Stepped(steps):
                self.advance_to(steps)
            case Answered():
                self.answers[rank].seek(0)
                self.heard.append(answer_of(rank, self.answers[rank].read()))
            case Exception():
                self.heard.append(answer_of(rank, b""))

    def read(self, seconds: float) -> list[Event]:
        """Return the events that arrive within `seconds`, as soon as something has come."""
        self.inbox.read(seconds)
        heard = self.heard
        self.heard = []
        return heard

    def read_for(self, seconds: float, enough: Callable[[], Any]) -> None:
        """Read for at most `seconds`, until `enough()`; nothing that comes changes the ending."""
        deadline = time.monotonic() + seconds
        while not enough() and time.monotonic() < deadline:
            self.inbox.read(deadline - time.monotonic())

    def let_go(self) -> None:
        """Tell all ranks that they may leave."""
        self.told_to_end = True
        for pipe in self.orders:
            send(pipe, Leave())

    def inspect(self, pids: dict[int, int]) -> stacks.Traces:
        """Return what the ranks, whose process ids are `pids`, do at this moment."""
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        statuses = {rank: stacks.status_of(pid) for rank, pid in pids.items()}
        dumps = {rank: text_in(file) for rank, file in self.stacks.items()}
        calls = flight_recorder.calls(self.recorder.fileno(), self.setting.world_size)
        return stacks.Traces(statuses, dumps, calls)

    def close(self) -> None:
        """Kill what still runs, wait for its end, read the last lines, and close all files."""
        self.told_to_end = True
        try:
            if self.server is not None:
                self.read_for(ENDING_SECONDS, lambda: self.agent or self.gone)
            if self.agent and (self.cut_off or not self.gone):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.agent, signal.SIGKILL)
                self.read_for(ENDING_SECONDS, lambda: self.gone)
            # In these cases no server kills the programs that have left the process group.
            if self.agent and (self.cut_off or sys.platform != "linux"):
                kill_marked(self.mark)
            while self.inbox.read(0):
                pass
        finally:
            self.last_words = text_in(self.log)
            self.orders.clear()
            self.inbox.close()
            self.files.close()

    def explain(self) -> str:
        """Return lines of text about why the processes have ended; "" if nothing is known."""
        patience = DYING_SECONDS if self.cut_off else 0.0
        server_end = self.server.how_it_ended(patience)
        return ((server_end or self.agent_end) + self.last_words).rstrip()


def answer_of(rank: int, packed: bytes) -> Returned | Raised:
    """Return the answer of a rank, which is `packed` in its file."""
    now = time.monotonic()
    try:
        answer = pickle.loads(packed)
    except Exception as error:
        message = f"its result cannot be read here: {type(error).__name__}: {error}"
        return Raised(Failure(rank, "TypeError", message, time=now), now)
    return Raised(answer, now) if isinstance(answer, Failure) else answer


def kill_marked(mark: str) -> None:
    """Kill all programs that ranks have started: they have the launch's mark in a variable."""
    import psutil  # Most launches do not need psutil.

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                process.kill()
                process.wait(1.0)
