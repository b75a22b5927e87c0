"""Join the job that torchrun or Slurm has started, or be a job of one rank."""

import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from ..devices.placement import backend_for, gpu_identity, placement, settle_on
from ..errors import LaunchError
from ..linux import listen_on, loopback
from ..torch_inside import serve_store_on
from .parent import end_with_torchrun

# The ranks of each Slurm job meet at a port of their own.
FIRST_PORT = 20_000
PORTS = 10_000
CONNECT_SECONDS = 5.0  # The port of a store that does not answer for so long may be outdated.
# A job of one rank has this environment, and opens its store at any free port.
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_PORT": "0",
}


def join(device: str = "auto", timeout: float = 1800.0) -> tuple[int, int]:
    """Bring up the process group of this process's job; return (rank, world size).

    `device` is as in `launch`, for the ranks of each machine; a collective may take `timeout`
    seconds. Under torchrun the environment says everything, and that of Slurm's `srun` is
    translated to torchrun's; anywhere else this process is the only rank. A process group that is
    up already is left alone. A rank of torchrun ends when torchrun ends.
    """
    if not dist.is_initialized():
        end_with_torchrun()
        # Without RANK it was not torchrun that started this process.
        if "RANK" not in os.environ:
            alone = {**ALONE, "MASTER_ADDR": loopback()}
            os.environ.update(from_slurm(os.environ) or alone)
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        one_machine = local_world_size == world_size
        _, devices = placement(device, local_world_size)
        own_device = devices[int(os.environ.get("LOCAL_RANK", 0))]
        os.environ["MANYRANKS_DEVICE"] = own_device
        settle_on(own_device)
        if one_machine and sys.platform == "linux":
            # The machine's name may belong to another network card.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        patience = timedelta(seconds=timeout)
        store = fresh_store(rank, patience, one_machine)
        check_step(store, rank)
        backend = common_backend(store, rank, world_size, own_device)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=patience
        )
    return dist.get_rank(), dist.get_world_size()


def slurm_step(environ: Mapping[str, str]) -> list[int]:
    """Return the numbers of a process's job, step and restart in Slurm; zeros outside of Slurm."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return [int(environ.get(name, 0)) for name in names]


def check_step(store: dist.Store, rank: int) -> None:
    """Raise LaunchError if the store belongs to another step of Slurm.

    Two steps may have drawn the same port, and each would train the other's model.
    """
    own = ".".join(map(str, slurm_step(os.environ)))
    if rank == 0:
        store.set("manyranks/step", own)
    owner = store.get("manyranks/step").decode()
    if owner != own:
        raise LaunchError(
            f"the port {os.environ['MASTER_PORT']} belongs to step {owner} of Slurm (job, step,"
            f" restart), and this rank to {own}: set MASTER_PORT to a free port for one of them"
        )


def common_backend(store: dist.Store, rank: int, world_size: int, device: str) -> str:
    """Return the backend that suits all ranks.

    Each rank names its GPU by `gpu_identity`, as under Slurm every rank may have a `cuda:0`.
    """
    store.set(f"manyranks/gpu/{rank}", gpu_identity(device))
    gpus = [store.get(f"manyranks/gpu/{other}").decode() for other in range(world_size)]
    return backend_for(gpus)


def fresh_store(rank: int, patience: timedelta, one_machine: bool) -> dist.Store:
    """Return a key-value store that no earlier ranks of this job have used.

    torchrun, up to torch 2.15, keeps one store over all restarts, with the addresses of ranks that
    are gone: restarted ranks would sometimes connect to those. So rank 0 opens a new store and
    leaves its port in the old store. A rank that reads an outdated port is refused, and reads
    again.

    Any process that reaches a store can write into it, so on one machine the store listens on the
    loopback only.
    """
    host = loopback() if one_machine else os.environ["MASTER_ADDR"]
    job_port = int(os.environ["MASTER_PORT"])

    def open_store(port):
        if one_machine:
            return serve_store_on(listen_on(host, port), patience)
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=patience)

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if rank == 0:
            return open_store(job_port)
        return dist.TCPStore(host, job_port, timeout=patience)
    old_store = dist.TCPStore(os.environ["MASTER_ADDR"], job_port, timeout=patience)
    if rank > 0:
        return look_up(old_store, host, patience)
    # Port 0 stands for any free port.
    store = open_store(0)
    old_store.set("manyranks/store", str(store.port))
    return store


def look_up(old_store: dist.Store, host: str, patience: timedelta) -> dist.TCPStore:
    """Return a connection to the store whose port is in `old_store`, once that store answers."""
    end = time.monotonic() + patience.total_seconds()
    while True:
        port = int(old_store.get("manyranks/store"))
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            store = dist.TCPStore(host, port, timeout=timedelta(seconds=CONNECT_SECONDS))
            store.set_timeout(patience)
            return store
        except (OSError, dist.DistError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def from_slurm(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the environment that torchrun would give a task of `srun`; None outside of a task.

    Only `srun` sets SLURM_STEP_…: the batch script itself is no task, although it has a
    SLURM_PROCID, too.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "localhost")
    job, step, restart = slurm_step(environ)
    # Each job, step and restart has a port of its own, far from those of the next jobs.
    number = job + 1009 * step + 3001 * restart
    node = int(environ.get("SLURM_NODEID", 0))
    tasks_here = tasks_on_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"), node)
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks_here),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_node(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(FIRST_PORT + number % PORTS),
    }


def first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list: "gpu03" for "gpu[03-07,11],login"."""
    # A node list begins with a name, perhaps numbers in brackets, and perhaps more before a comma.
    first = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(first.groups(default=""))


def tasks_on_node(counts: str, node: int) -> int:
    """Return how many tasks a node has; in Slurm's short form "2(x3),1" means 2, 2, 2, 1."""
    tasks = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        tasks += [int(count)] * int(times or 1)
    return tasks[node]
