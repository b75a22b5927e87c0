"""The agent: the process that owns the ranks of one launch. It is never the caller itself.

The server forks it; it forks the ranks and waits for them. Each rank reports straight to the caller through its own
pipes; the agent only tells with which code each one ended. When the agent dies, so do its ranks. Where processes cannot
safely be forked there is no agent: each spare hears the same, and is a rank itself (`be_rank`).
"""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import shutil
import socket
import threading
from typing import Any

from ...errors import LaunchError
from .. import linux
from . import rank
from .channel import close_all, receive_descriptors, write
from .setting import LOOPBACK, PIPES_PER_RANK, SHARED_FILES


def own_ranks(launch: socket.socket, setting: dict) -> None:
    """Carry out one launch: start its ranks, tell the caller how each one ended, and exit."""
    write(launch.fileno(), ("agent", None, os.getpid()))
    shared, pipes = open_files(launch, setting)
    try:
        link = pickle.loads(setting["link"])
        if setting["private"] and link is None and not setting["store"]:
            leave_the_common_network()
        master = lay_link(link, setting["world_size"])
    except Exception as error:
        write(launch.fileno(), ("refused", None, error))
        os._exit(1)
    for name in setting["modules"]:
        with contextlib.suppress(Exception):  # a rank that needs it will tell
            importlib.import_module(name)  # afresh for this launch, but once for all its ranks
    wait_for(start_ranks(setting, link, master, shared, pipes, launch), launch)
    os._exit(0)


def be_rank(launch: socket.socket, setting: dict) -> None:
    """Be the one rank that a spare becomes; end as soon as the caller does."""
    shared, [(number, pipes)] = open_files(launch, setting)
    threading.Thread(target=end_with_caller, args=(launch, setting["link_folder"]), daemon=True).start()
    rank.main(setting, number, pickle.loads(setting["link"]), shared, pipes)


def open_files(launch: socket.socket, setting: dict) -> tuple[list, list]:
    """The open files with call and recorder, and of each own rank its number and pipes. A log gets our output."""
    descriptors = receive_descriptors(launch, setting["descriptors"])
    log, *shared = descriptors[:SHARED_FILES]
    firsts = range(SHARED_FILES, len(descriptors), PIPES_PER_RANK)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return shared, list(zip(setting["own"], [descriptors[f : f + PIPES_PER_RANK] for f in firsts], strict=True))


def end_with_caller(launch: socket.socket, folder: str | None) -> None:
    """In a thread: when the caller is gone, end this process, and leave nothing behind."""
    launch.recv(1)
    import psutil  # most launches end without it

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


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


def start_ranks(setting: dict, link: Any, master: str, shared: list, pipes: list, launch: socket.socket) -> dict:
    """Fork the ranks; returns their processes by rank. `shared`: the open files with the call and the recorder.

    Rank 0 serves their store, on a socket that is bound here: two launches never clash, and this process has no
    thread but its main one, so that it may fork (a lock that a thread holds at a fork stays locked for ever).
    """
    listener = None if setting["store"] else socket.create_server((master, 0), backlog=1024)
    setting["store"] = setting["store"] or listener.getsockname()
    fork, agent, ranks = multiprocessing.get_context("fork").Process, os.getpid(), {}
    for number, own in pipes:
        arguments = (agent, launch, pipes, setting, number, link, shared, own, listener)
        ranks[number] = fork(target=be_forked_rank, args=arguments)
        ranks[number].start()
    for _, own in pipes:
        close_all(own)
    return ranks


def be_forked_rank(agent: int, launch: socket.socket, pipes: list, setting: dict, number: int, *arguments: Any) -> None:
    """Be one rank, forked by `agent`, with no pipes but its own: a rank's end shows as the end of its pipes."""
    linux.die_with_parent(agent)
    launch.close()
    for other, descriptors in pipes:
        if other != number:
            close_all(descriptors)
    rank.main(setting, number, *arguments)


def wait_for(ranks: dict, launch: socket.socket) -> None:
    """Tell the caller each rank's exit code as it ends; return when all have ended.

    What a rank has started and left alone becomes a child of this process, and is only reaped.
    """
    running = dict(ranks)
    while running:
        for number, process in list(running.items()):
            if process.exitcode is not None:
                del running[number]
                write(launch.fileno(), ("exited", number, process.exitcode))
        if running:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
            if ended not in {process.pid for process in running.values()}:
                os.waitpid(ended, 0)
