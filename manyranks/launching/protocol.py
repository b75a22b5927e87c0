"""What the processes of a launch say to each other; all of them read this file.

    caller ── server ── agent (one per launch) ── rank 0 … rank K-1

The caller gives the agent its `Surroundings` and a `Setting`, the agent gives each rank a
`Meeting`. Agent and ranks send messages to the caller, the caller tells the ranks to leave, one
pickle at a time over `multiprocessing.connection`. What may be long, a call or a result, is in a
file without a name that both sides have open. This module imports the standard library only: the
server keeps it for good, while every launch reads the other modules anew.
"""

import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

# This says how many steps a progress bar expects, or True; a pair begins with the bar's name.
Progress = bool | int | tuple[str, int]


class Network(Protocol):
    """The network that a link builds for a launch; ranks that are not forked get it pickled."""

    master_address: str  # the address at which ranks reach what listens in the agent's network
    table: Any  # the table of the ranks' clocks; None where time is real

    def enter(self, rank: int) -> None:
        """Move this process, which is `rank` and has no socket yet, to its place."""


class EmulatedLink(Protocol):
    """The parts of a link that a launch needs."""

    mode: str  # "hosts" is a network apart from the machine's.
    network: Network

    def check(self, world_size: int, backend: str) -> None:
        """Raise an error, in the caller, if a launch can never have this link."""

    def prepare(self, world_size: int) -> None:
        """Build `network`, in the agent, which has no thread and no socket yet."""


@dataclass(frozen=True)
class Setting:
    """What agent and ranks must know of a launch."""

    world_size: int
    start: str  # "fork" or "spawn"
    network: str  # "auto", "private" or "open"
    backend: str  # "gloo" or another one of torch.distributed
    devices: list  # the device of each rank, such as "cpu" or "cuda:0"
    timeout: float  # in seconds
    threads: int  # of each rank
    link: EmulatedLink | None  # the emulated link, which the agent prepares
    emulated: list | None  # the emulated device of each rank
    progress: Progress
    sizes_only: bool  # whether tensors have no values, so that nothing is computed
    answer: float | None  # with `sizes_only`, the number for a program that asks for a value
    # Whether ranks surely train something, so that what optimizers need is imported before: they
    # do if the request has an emulated device, a bar, or sizes only.
    computes: bool


class Surroundings(NamedTuple):
    """What the ranks have in common with the caller's process."""

    path: list
    argv: list
    folder: str
    environ: dict
    packages: dict  # the register of `own_code`


@dataclass(frozen=True)
class Meeting:
    """What the agent has made so that the ranks can meet.

    Their store is at an address and a port, where rank 0 serves it on the open socket `listener`.
    Where other users could reach these, the store is the open file `store_file`.
    """

    agent: int  # the process id of the agent
    clocks: Any  # the table of clocks; None where time is real
    address: str
    port: int = 0
    listener: int | None = None
    store_file: int | None = None


class LaunchFiles(NamedTuple):
    """The numbers of the open files that the agent gets for the whole launch."""

    log: int  # what agent and ranks print while no rank runs the function yet
    call: int
    recorder: int


class RankFiles(NamedTuple):
    """The numbers of the open files that one rank has for itself."""

    orders: int  # a pipe from the caller
    report: int  # a pipe to the caller, like the next two
    out: int
    err: int
    stacks: int  # the stacks that are written when time is up, or at a crash
    answer: int


class Duty(NamedTuple):
    """All that one rank must know, however its process begins."""

    setting: Setting
    number: int
    meeting: Meeting
    launch_files: LaunchFiles
    files: RankFiles


@dataclass(frozen=True)
class AgentStarted:
    """The agent runs; its process id is also the number of its process group."""

    pid: int


@dataclass(frozen=True)
class AgentExited:
    """The agent has ended with an error, as the server says."""

    code: int


@dataclass(frozen=True)
class Refused:
    """The agent cannot set up this launch, or none of its ranks can begin."""

    error: Exception


@dataclass(frozen=True)
class RankExited:
    """The process of a rank has ended."""

    rank: int
    code: int


@dataclass(frozen=True)
class Started:
    """A rank runs in the process `pid`."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Stepped:
    """Rank 0 has done so many optimizer steps."""

    steps: int


@dataclass(frozen=True)
class Answered:
    """A rank has written its result, or its error, to the file of its answer."""


@dataclass(frozen=True)
class Leave:
    """The order to a rank to end, once all have answered."""


def send(descriptor: int, message: Any) -> None:
    """Send a message, which must be short, over a pipe or a socket.

    Raises OSError if nobody reads any more.
    """
    with Connection(os.dup(descriptor)) as connection:
        connection.send(message)
