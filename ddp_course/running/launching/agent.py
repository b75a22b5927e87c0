"""The agent: the process that owns the ranks of one launch. It is never the caller itself.

The server forks it; it forks the ranks and waits for them. Each rank reports straight to the caller through its own
pipes; the agent only tells with which code each one ended. When the agent dies, so do its ranks.
"""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import socket
from typing import Any

from ...errors import LaunchError
from .. import linux
from . import rank
from .channel import receive_descriptors, write
from .setting import PIPES_PER_RANK, SHARED_PIPES

LOOPBACK = "127.0.0.1"


def own_ranks(launch: socket.socket, setting: dict) -> None:
    """Carry out one launch: start its ranks, tell the caller how each one ended, and exit."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    descriptors = receive_descriptors(launch, setting["descriptors"])
    log, *shared = descriptors[:SHARED_PIPES]
    own = [descriptors[first:][:PIPES_PER_RANK] for first in range(SHARED_PIPES, len(descriptors), PIPES_PER_RANK)]
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        link = pickle.loads(setting["link"])
        if setting["private"] and link is None and not setting["store"]:
            leave_the_common_network()
        master = lay_link(link, setting["world_size"])
    except Exception as error:
        write(launch.fileno(), ("refused", error))
        os._exit(1)
    for name in setting["modules"]:
        with contextlib.suppress(Exception):  # a rank that needs it will tell
            importlib.import_module(name)  # afresh for this launch, but once for all its ranks
    pipes = dict(zip(setting["ranks"], own, strict=True))
    wait_for(start_ranks(setting, link, master, shared, pipes, launch), launch)
    os._exit(0)


def leave_the_common_network() -> None:
    """Enter a network that has nothing but a loopback of its own, where nobody else can reach the ranks."""
    try:
        linux.unshare_as_anyone(linux.CLONE_NEWNET)
        linux.raise_loopback()
    except OSError as error:
        raise LaunchError(f"DDP_COURSE_NETWORK is private, which this system forbids ({error.strerror})") from None
    linux.die_with_parent()  # once more: Linux forgets it when a process changes its credentials


def lay_link(link: Any, world_size: int) -> str:
    """Make the emulated link ready, if there is one, and return the address where the ranks find the store."""
    if link is None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if probe.connect_ex((LOOPBACK, 9)):  # sends nothing: it only looks for a way
                raise LaunchError(
                    "ranks meet on 127.0.0.1, but this machine's loopback is down; run: ip link set lo up"
                )
        return LOOPBACK
    link.prepare(world_size)  # before any thread or socket: it may enter new namespaces
    linux.die_with_parent()  # once more: Linux forgets it when a process changes its credentials
    return link.master_address()


def start_ranks(setting: dict, link: Any, master: str, shared: list, pipes: dict, launch: socket.socket) -> dict:
    """Fork the ranks; returns their processes by rank. `shared`: the open files with the call and the recorder.

    Rank 0 serves their store, on a socket that is bound here: two launches never clash, and this process has no
    thread but its main one, so that it may fork (a lock that a thread holds at a fork stays locked for ever).
    """
    listener = None if setting["store"] else socket.create_server((master, 0), backlog=1024)
    setting["store"] = setting["store"] or listener.getsockname()
    fork = multiprocessing.get_context("fork").Process
    ranks = {
        number: fork(target=rank.main, args=(setting, number, link, shared, pipes, launch, listener, os.getpid()))
        for number in setting["ranks"]
    }
    for process in ranks.values():
        process.start()
    rank.close_pipes(pipes)
    return ranks


def wait_for(ranks: dict, launch: socket.socket) -> None:
    """Tell the caller each rank's exit code as it ends; return when all have ended.

    What a rank has started and left alone becomes a child of this process, and is only reaped.
    """
    running = dict(ranks)
    while running:
        for number, process in list(running.items()):
            if process.exitcode is not None:
                del running[number]
                write(launch.fileno(), ("ended", (number, process.exitcode)))
        if running:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
            if ended not in {process.pid for process in running.values()}:
                os.waitpid(ended, 0)
