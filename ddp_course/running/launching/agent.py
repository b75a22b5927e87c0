"""The agent: the process that owns the ranks of one launch. It is never the caller itself.

The server forks the agent; the agent starts the ranks and waits for them. Each rank reports to the
caller through its own pipes; the agent only reports each rank's exit code. When the agent dies, so
do its ranks. Ranks are forked. Where a process with torch in it cannot safely be forked, they are
new processes, and neither server nor agent loads torch.
"""

import contextlib
import importlib
import os
import pickle
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from ...errors import LaunchError
from .. import linux
from .channel import FILES_PER_RANK, LOOPBACK, open_memory, send

SCRIPT = str(Path(__file__).with_name("preloaded.py"))
# Linux starts no program with an environment variable of much more than this many bytes
LONGEST_VARIABLE = 100_000


def own_ranks(launch: socket.socket, setting: dict, log: int, shared: list) -> None:
    """Carry out one launch: start its ranks, tell the caller how each rank ended, and exit."""
    send(launch.fileno(), "agent", None, os.getpid())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        link = pickle.loads(setting["link"])
        master = prepare_network(setting, link)
    except Exception as error:
        send(launch.fileno(), "refused", None, error)
        os._exit(1)
    # this is repeated: Linux forgets it when a process changes its credentials
    linux.die_with_parent()
    wait_for(start_ranks(setting, link, master, shared, launch), launch)
    os._exit(0)


def prepare_network(setting: dict, link: Any) -> str:
    """Enter the network where the ranks meet, and make the emulated link ready, if there is one;
    return the address where the ranks find the store.

    All this precedes any thread or socket, as it may enter new namespaces.
    """
    if link is not None and link.carries_torch:  # virtual hosts are a network of their own
        setting["closed"] = True
    else:
        setting["closed"] = enter_own_network(setting["network"])
    if link is not None:
        link.prepare(setting["world_size"])
        return link.network.master_address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if probe.connect_ex((LOOPBACK, 9)):  # this sends nothing, and only looks for a route
            raise LaunchError(
                "ranks meet on 127.0.0.1, but this machine's loopback is down; run: ip link set"
                " lo up"
            )
    return LOOPBACK


def enter_own_network(wish: str) -> bool:
    """Move this process into a network that no other process can reach, unless the `wish` is
    "open"; return whether it is there. Raises LaunchError if "private" cannot be had.
    """
    if wish == "open":
        return False
    try:
        linux.enter_own_network()
    except OSError as error:
        if wish == "private":
            raise LaunchError(
                f"DDP_COURSE_NETWORK is private, which this system forbids ({error.strerror})"
            ) from None
        return False
    return True


def start_ranks(setting: dict, link: Any, master: str, shared: list, launch: socket.socket) -> dict:
    """Start the ranks; return a dict from process ids to the numbers of the ranks.

    Rank 0 serves the ranks' store, on a socket that is bound here, so that two launches never
    clash. Where other users could reach that socket, the store is a file in memory. This process
    has only its main thread, so that it may fork (a lock that a thread holds at a fork stays locked
    for ever).
    """
    listener, setting["store_file"] = None, None
    if setting["closed"] or setting["network"] == "open" or sys.platform != "linux":
        listener = socket.create_server((master, 0), backlog=1024)
        setting["store"] = listener.getsockname()
    else:
        setting["store"], setting["store_file"] = (master, 0), os.memfd_create("store")
        os.set_inheritable(setting["store_file"], True)
    if setting["start"] == "fork":
        for name in ("ddp_course.running.launching.rank", *setting["modules"]):
            with contextlib.suppress(Exception):  # A rank that needs the module raises the error.
                importlib.import_module(
                    name
                )  # each launch reads these modules again, once for all its ranks
    setting["agent"], ranks = os.getpid(), {}
    for number in setting["ranks"]:
        own = socket.recv_fds(launch, 1, FILES_PER_RANK)[1]
        files = [*shared, *own]
        pid = (
            os.fork()
            if setting["start"] == "fork"
            else start_anew(setting, number, link, files, listener)
        )
        if pid == 0:
            launch.close()
            be_rank(setting, number, link, files, listener)
        ranks[pid] = number
        for descriptor in own:
            os.close(descriptor)  # no other rank may inherit it
    return ranks


def start_anew(
    setting: dict, number: int, link: Any, files: list, listener: socket.socket | None
) -> int:
    """Start one rank in a new process, which inherits its open files by their numbers; return its
    process id.
    """
    port = listener.fileno() if listener is not None and number == 0 else None
    for descriptor in files if port is None else [*files, port]:
        os.set_inheritable(descriptor, True)
    own = {**setting, "link": pickle.dumps(link), "rank": (number, files, port)}
    with open_memory("rank", pickle.dumps(own)) as file:
        command, stdin = [sys.executable, SCRIPT, "rank"], (os.POSIX_SPAWN_DUP2, file.fileno(), 0)
        return os.posix_spawn(command[0], command, preloading_environment(), file_actions=[stdin])


def preloading_environment() -> dict:
    """Return the environment for a process that loads torch; its ranks get the caller's whole
    environment later.
    """
    short = {name: value for name, value in os.environ.items() if len(value) < LONGEST_VARIABLE}
    return {**short, "TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1"}


def be_rank(
    setting: dict, number: int, link: Any, files: list, listener: socket.socket | None
) -> None:
    """Run one rank until its last thread has ended. This never returns: gloo's threads are not torn
    down.
    """
    from .rank import main  # This loads torch, which an agent that forks no rank must not do.

    code = 1
    try:
        linux.die_with_parent(setting["agent"])
        main(setting, number, link, files, listener)
        threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing's children do the same
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def be_new_rank(setting: dict) -> None:
    """Run one rank in a process that was started for it. This never returns."""
    number, files, port = setting["rank"]
    listener = None if port is None else socket.socket(fileno=port)
    be_rank(setting, number, pickle.loads(setting["link"]), files, listener)


def wait_for(ranks: dict, launch: socket.socket) -> None:
    """Tell the caller each rank's exit code as it ends; orphans of ranks become children too, and
    are only reaped.
    """
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            send(launch.fileno(), "exited", ranks.pop(pid), os.waitstatus_to_exitcode(status))
