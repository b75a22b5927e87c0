"""The agent: the process that owns the ranks of one launch. It is never the caller itself.

The server forks it, torch's elastic launcher (what torchrun runs on) starts and watches the ranks from here, and
each rank reports straight to the caller through its own pipes. When the agent dies, so do its ranks.
"""

import contextlib
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile

from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from . import rank
from .channel import receive_descriptors, send
from .rank import die_with_parent

MONITOR_SECONDS = 0.01


def run(launch: socket.socket, setting: dict) -> None:
    """Run one launch to its end, tell the caller which ranks ended badly and how, and exit."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.disable()  # the elastic launcher's own reports; torch would import dynamo, for a second, to format them
    pipes = rank.Pipes.unpack(receive_descriptors(launch, setting["descriptors"]), setting["world_size"])
    os.dup2(pipes.agent_log, 1)
    os.dup2(pipes.agent_log, 2)
    try:
        link = pickle.loads(setting["link"])
        master = lay_link(link, setting["world_size"])
    except Exception as error:
        send(launch, ("refused", error))
        os._exit(1)
    for name in setting["modules"]:
        with contextlib.suppress(Exception):  # a rank that needs it will tell
            importlib.import_module(name)  # afresh for this launch, but once for all its ranks
    send(launch, ("ended", run_ranks(setting, link, master, pipes, launch)))
    os._exit(0)


def lay_link(link, world_size) -> str:
    """Make the emulated link ready, if there is one, and return the address where the ranks find the store."""
    if link is None:
        return "127.0.0.1"
    link.prepare(world_size)  # before any thread or socket: it may enter new namespaces
    die_with_parent()  # once more: Linux forgets it when a process changes its credentials
    return link.master_address()


def run_ranks(setting, link, master, pipes, launch) -> tuple:
    """Start the ranks and wait for all; returns the exit codes of those that ended badly, by rank and by process.

    The elastic launcher tells of one rank, and then ends the others with SIGTERM. Ranks that had died before that
    are found among its processes.
    """
    started = []

    def all_run():
        if not started:
            started.extend(multiprocessing.active_children())
            pipes.close()

    listener = socket.create_server((master, 0), backlog=1024)  # one address, and a port that the system picks
    place = RendezvousStoreInfo(master, listener.getsockname()[1])
    rendezvous_handler_registry.register("one-agent", lambda parameters: OneAgent(place, parameters.run_id, all_run))
    signal.pthread_sigmask(signal.SIG_BLOCK, rank.ENDINGS)  # for the ranks, which unblock them when they can obey
    tempfile.tempdir = setting["scratch"]  # so that a file is not left behind if this process is killed
    try:
        elastic_launch(config(setting["world_size"]), rank.main)(setting, link, pipes, launch, listener, os.getpid())
    except ChildFailedError as error:
        by_process = {child.pid: child.exitcode for child in started if child.exitcode not in (0, -signal.SIGTERM)}
        return {failed: failure.exitcode for failed, failure in error.failures.items()}, by_process
    return {}, {}


def config(world_size: int, start_method: str = "fork") -> LaunchConfig:
    """One agent, no restarts, no log files."""
    untouched = {"numa_options": False} if "numa_options" in LaunchConfig.__dataclass_fields__ else {}
    made = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id="launch",
        rdzv_backend="one-agent",
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        start_method=start_method,
        logs_specs=NoLogs(),
        **untouched,  # None would make it look for GPUs, and so touch CUDA before the fork
    )
    made.numa_options = None
    return made


class NoLogs(LogsSpecs):
    """No log files: ranks print into the caller's pipes.

    torch's own way to say so, a log folder named `os.devnull`, starts two threads a rank that read from it ten times
    a second, and every launch would wait for them to look once more.
    """

    def __init__(self):
        super().__init__(os.devnull)

    def reify(self, envs: dict) -> LogsDest:
        """Nothing is redirected, copied or filtered; errors go through each rank's own report."""
        nothing = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nothing, stderrs=nothing, error_files=nothing)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class OneAgent(RendezvousHandler):
    """A rendezvous of this agent with itself, which tells the ranks the address of their store.

    The ranks' own store is served by rank 0, on a socket bound here: two launches never clash, and this process has
    no thread but its main one, so that it may fork (a lock that a thread holds at a fork stays locked for ever).
    """

    def __init__(self, place: RendezvousStoreInfo, run_id: str, all_run):
        self.place, self.run_id, self.all_run = place, run_id, all_run

    def next_rendezvous(self) -> RendezvousInfo:
        """This agent is the only one; a store in memory is enough for it."""
        return RendezvousInfo(PrefixStore(self.run_id, HashStore()), 0, 1, self.place)

    def num_nodes_waiting(self) -> int:
        """None ever; but elastic asks this only while all ranks run."""
        self.all_run()
        return 0

    def get_backend(self) -> str:
        return "one-agent"

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_run_id(self) -> str:
        return self.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True
