"""The agent: the process that owns the ranks of one launch. It is never the caller itself.

The server forks it, torch's elastic launcher (what torchrun runs on) starts and watches the ranks from here, and
each rank reports straight to the caller through its own pipes. When the agent dies, so do its ranks.
"""

import logging
import os
import pickle
import socket
import warnings
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
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

MONITOR_SECONDS = 0.01


def run(launch: socket.socket, setting: dict) -> None:
    """Run one launch to its end, tell the caller which ranks ended badly and how, and exit."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.disable(logging.CRITICAL)  # the elastic launcher's own reports: ours name the culprit
    warnings.simplefilter("ignore")
    pipes = rank.Pipes.unpack(receive_descriptors(launch, setting["descriptors"]), setting["world_size"])
    os.dup2(pipes.agent_log, 1)
    os.dup2(pipes.agent_log, 2)
    link = pickle.loads(setting["link"])
    if link is not None:
        link.prepare(setting["world_size"])  # before any thread or socket: it may enter new namespaces
    master = link.master_address() if link is not None else "127.0.0.1"
    rendezvous_handler_registry.register("own-store", lambda parameters: OwnStore(master, parameters.run_id, pipes))
    ended = start_ranks(setting, link, pipes, launch)
    send(launch, ("ended", ended))
    os._exit(0)


def start_ranks(setting, link, pipes, launch) -> dict:
    """Start the ranks and wait for all; returns the exit code of each rank that ended badly."""
    try:
        elastic_launch(config(setting["world_size"]), rank.main)(setting, link, pipes, launch, os.getpid())
    except ChildFailedError as error:
        return {failed: failure.exitcode for failed, failure in error.failures.items()}
    return {}


def config(world_size: int) -> LaunchConfig:
    """One node, our own store on a free port, no restarts, no log folder."""
    untouched = {"numa_options": False} if "numa_options" in LaunchConfig.__dataclass_fields__ else {}
    made = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id="launch",
        rdzv_backend="own-store",
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        **untouched,  # None would make it look for GPUs, and so touch CUDA before the fork
    )
    made.numa_options = None
    return made


class OwnStore(RendezvousHandler):
    """A rendezvous of this agent with itself, around a key-value store on a port that the system picks.

    The socket is bound by us, to one address and port 0, so two launches never clash and no other machine gets in.
    """

    def __init__(self, master: str, run_id: str, pipes):
        self.master, self.run_id, self.pipes, self.store = master, run_id, pipes, None

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store; its address is what the ranks connect to."""
        listener = socket.create_server((self.master, 0), backlog=1024)
        port = listener.getsockname()[1]
        self.store = TCPStore(
            self.master,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=600),
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(PrefixStore(self.run_id, self.store), 0, 1, RendezvousStoreInfo(self.master, port))

    def num_nodes_waiting(self) -> int:
        """None ever; elastic asks this when all ranks run, which is the time to let go of their pipes."""
        self.pipes.close()
        return 0

    def get_backend(self) -> str:
        return "own-store"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True
