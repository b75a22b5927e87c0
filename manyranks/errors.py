"""The errors that this library raises on purpose.

    ManyranksError
    ├── LaunchError          a launch failed; raised itself if the ranks could not be started, or
    │   │                    were ended from outside
    │   ├── RankError        a rank raised an exception, was killed or ended
    │   ├── LaunchTimeout    time was up
    │   └── DeadlockError    under virtual time nothing can go on; also a RuntimeError
    ├── MismatchError        ranks entered one collective with unlike tensors; also a RuntimeError
    ├── EmulationError       a link or device that cannot be had; also a ValueError
    ├── NoValueError         with sizes only, a program asks for a value; also a RuntimeError
    ├── OutOfMemoryError     with sizes only, a device has too little memory; also a RuntimeError
    └── NotFiniteError       a gradient with NaN or infinite elements

A setting that cannot work raises a plain ValueError or TypeError.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class ManyranksError(Exception):
    """The base of these errors, whose messages say what was wrong and what to do."""

    def _render_traceback_(self):
        """Return what a notebook shows: the message alone, without the launcher's own frames."""
        return [f"{type(self).__name__}: {self}"]


class LaunchError(ManyranksError):
    """A launch failed: its ranks could not be started or were ended, or a subclass says how."""


WAITING_WORDS = {
    "send": "to send to rank {ranks[0]}",
    "receive": "to receive from rank {ranks[0]}",
    "receive from any": "to receive from any rank",
    "collective": "for ranks {ranks} in {name}",
    "new group": "for ranks {ranks} to make a group",
    "thread": "for another thread",
    "turn": "for its turn",
    "files": "for files to be ready",
    "fault": "after a fault",
}


class Awaited(NamedTuple):
    """What a thread waits for; as text it is, for example, "to send to rank 1".

    `kind` is a key of WAITING_WORDS. `ranks` are the peer of a message, or all members of a
    collective; `name` is that of the collective.
    """

    kind: str
    ranks: tuple = ()
    name: str = ""

    def __str__(self):
        return WAITING_WORDS[self.kind].format(ranks=list(self.ranks), name=self.name)


@dataclass(frozen=True)
class Wait:
    """What a rank waits for in a deadlock, since when (virtual seconds), and at which line.

    `file` is a name without its folder, or "cell"; `text` is the line. If no line of the program's
    own waits, the place is in a library, and `in_program` is False. As text it is, for example,
    "rank 0 waits to send to rank 1".
    """

    rank: int
    what: Awaited
    since: float
    file: str
    line: int
    text: str
    in_program: bool = True

    def __str__(self):
        return f"rank {self.rank} waits {self.what}"


@dataclass
class Failure:
    """How one rank failed.

    `type_name` is the exception's name, or "killed" or "exited" for a process that ended.
    `traceback` is text, from the caller's function down to the failing line; `time` is seconds on
    the machine's monotonic clock; `consequence` marks a broken connection, which follows from
    another rank's failure. A process that ended has its `exit_code`, negative for a signal; a
    DeadlockError has its `waits`.
    """

    rank: int
    type_name: str
    message: str = ""
    traceback: str = ""
    time: float = 0.0
    consequence: bool = False
    exit_code: int | None = None
    waits: list = field(default_factory=list)

    def __str__(self):
        rank = f"rank {self.rank}"
        if self.consequence:
            return f"{rank}: lost its connection to another rank ({self.type_name})"
        kind = f"{rank}: {self.type_name}"
        return f"{kind}: {self.message}" if self.message else kind


class RankError(LaunchError):
    """A rank of a launch raised an exception or ended without a result.

    `failures` has one Failure for each rank that failed, the culprit's first.
    """

    def __init__(self, failures: list, world_size: int):
        self.failures = failures
        self.world_size = world_size
        culprit = failures[0]
        self.rank = culprit.rank
        self.type_name = culprit.type_name
        self.message = culprit.message
        self.traceback = culprit.traceback
        super().__init__(failures, world_size)

    def __str__(self):
        culprit = self.failures[0]
        others = self.failures[1:]
        lines = [f"{culprit} (of {self.world_size} ranks)"]
        if culprit.traceback:
            lines += ["", culprit.traceback.rstrip()]
        if others:
            lines += ["", "After that:", *(f"  {other}" for other in others)]
        return "\n".join(lines)


@dataclass
class RankState:
    """What a rank was doing when time ran out.

    `stack` is text, and `collective` is the last collective that the rank entered.
    """

    rank: int
    status: str
    collective: str = ""
    stack: str = ""


class LaunchTimeout(LaunchError):
    """A launch was not finished in time.

    `states` has a RankState for each rank. `cause` tells which ranks did not enter the collective
    that the others wait in, if that is known; their states come first.
    """

    def __init__(self, timeout: float, states: list, cause: str = ""):
        self.timeout = timeout
        self.states = states
        self.cause = cause
        super().__init__(timeout, states, cause)

    def __str__(self):
        cause = f": {self.cause}" if self.cause else ""
        lines = [
            f"not finished after {self.timeout:g} s{cause}. All ranks were ended. This is where"
            " they were:"
        ]
        for state in self.states:
            lines += ["", f"rank {state.rank}: {state.status}"]
            lines += [f"  last collective: {state.collective}"] if state.collective else []
            lines += [state.stack.rstrip()] if state.stack else []
        return "\n".join(lines)


class DeadlockError(LaunchError, RuntimeError):
    """Under virtual time every thread of every rank waits for another; the message names all.

    `waits` has a Wait for each rank that waits, and `returned` has the ranks that have returned. If
    a launch raises the error, `failures` has a Failure for each rank, with its traceback.
    """

    def __init__(
        self, message: str, waits: Sequence = (), returned: Sequence = (), failures: Sequence = ()
    ):
        self.message = message
        self.waits = list(waits)
        self.failures = list(failures)
        self.returned = list(returned)
        super().__init__(message, waits, returned, failures)

    def __str__(self):
        if not self.failures:
            return self.message
        # The last line of the traceback would say all of it again.
        frames, _, _ = self.failures[0].traceback.rstrip().rpartition("\n")
        return f"{self.message}\n\n{frames}".rstrip()


class MismatchError(ManyranksError, RuntimeError):
    """Two ranks entered the same collective with different shapes, dtypes or names."""


class EmulationError(ManyranksError, ValueError):
    """An emulated link or device has impossible values, or cannot be emulated on this machine."""


class NoValueError(ManyranksError, RuntimeError):
    """A program asks for a value, and its tensors have sizes only."""


class OutOfMemoryError(ManyranksError, RuntimeError):
    """The tensors of a rank need more than its device has, as they would on a GPU."""


class NotFiniteError(ManyranksError):
    """A gradient has NaN or infinite elements; the message names the rank and the parameter."""
