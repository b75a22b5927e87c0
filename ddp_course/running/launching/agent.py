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
from typing import Any

from ...errors import LaunchError
from .. import linux
from .environment import SCRIPT, place, preloading_environment
from .protocol import (
    LOOPBACK,
    AgentStarted,
    LaunchFiles,
    Meeting,
    RankExited,
    RankFiles,
    Refused,
    Setting,
    send,
)


def own_ranks(launch: socket.socket, setting: Setting, files: LaunchFiles) -> None:
    """Carry out one launch: start its ranks, tell the caller how each rank ended, and exit."""
    send(launch.fileno(), AgentStarted(os.getpid()))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(files.log, 1)
    os.dup2(files.log, 2)
    os.close(files.log)
    try:
        closed = prepare_network(setting)
        table = prepare_clocks(setting)
        meeting = prepare_store(setting, closed, table)
        # this is repeated: Linux forgets it when a process changes its credentials
        linux.die_with_parent()
        ranks = start_ranks(setting, meeting, files, launch)
    except Exception as error:
        send(launch.fileno(), Refused(error))
        os._exit(1)
    wait_for(ranks, launch)
    os._exit(0)


def prepare_network(setting: Setting) -> bool:
    """Enter the network where the ranks meet, and make the emulated link ready, if there is one;
    return whether no other user can reach that network.

    All this precedes any thread or socket, as it may enter new namespaces.
    """
    link = setting.link
    virtual_hosts = link is not None and link.mode == "hosts"  # they are a network of their own
    closed = virtual_hosts or enter_own_network(setting.network)
    if link is not None:
        link.prepare(setting.world_size)
    return closed


def prepare_clocks(setting: Setting) -> Any:
    """Return the table of a launch whose time is virtual, or None if its time is real."""
    if setting.link is not None:
        return getattr(setting.link.network, "table", None)
    if setting.emulated is None:
        return None
    from ..clocks import Table  # a launch in real time does not need it

    return Table([0] * setting.world_size)


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


def prepare_store(setting: Setting, closed: bool, table: Any) -> Meeting:
    """Return where the ranks meet. The socket on which rank 0 serves their store is bound here, so
    that two launches never clash. Where other users could reach it there is none, and the store is
    a file in memory.
    """
    address = LOOPBACK if setting.link is None else setting.link.network.master_address
    if closed or setting.network == "open" or sys.platform != "linux":
        listener = socket.create_server((address, 0), backlog=1024)
        listener.set_inheritable(True)
        _, port = listener.getsockname()
        return Meeting(os.getpid(), table, address, port, listener.detach())
    store_file = os.memfd_create("store")
    os.set_inheritable(store_file, True)
    return Meeting(os.getpid(), table, address, store_file=store_file)


def start_ranks(
    setting: Setting, meeting: Meeting, files: LaunchFiles, launch: socket.socket
) -> dict[int, int]:
    """Start the ranks; return a dict from process ids to the numbers of the ranks.

    This process has only its main thread, so that it may fork (a lock that a thread holds at a fork
    stays locked for ever). Raises LaunchError if a process cannot be started.
    """
    if setting.start == "fork" and setting.computes:
        with contextlib.suppress(Exception):  # A rank that needs the module raises the error.
            importlib.import_module("torch._dynamo")  # once for all ranks: it takes a second
    ranks = {}
    for number in range(setting.world_size):
        descriptors = socket.recv_fds(launch, 1, len(RankFiles._fields))[1]
        own = RankFiles(*descriptors)
        try:
            if setting.start == "fork":
                pid = os.fork()
            else:
                pid = start_anew(setting, number, meeting, files, own)
        except BlockingIOError:
            raise LaunchError(f"rank {number} cannot be started: {linux.PROCESS_LIMIT}") from None
        if pid == 0:
            launch.close()
            be_rank(setting, number, meeting, files, own)
        ranks[pid] = number
        for descriptor in own:
            os.close(descriptor)  # no other rank may inherit it
    return ranks


def start_anew(
    setting: Setting, number: int, meeting: Meeting, files: LaunchFiles, own: RankFiles
) -> int:
    """Start one rank in a new process, which inherits its open files by their numbers; return its
    process id.
    """
    # An agent that forks its ranks need not load these.
    from ..files import open_memory
    from .pickling import dumps

    for descriptor in (files.call, files.recorder, *own):
        os.set_inheritable(descriptor, True)
    content = pickle.dumps(place()) + dumps((setting, number, meeting, files, own))
    with open_memory("rank", content) as file:
        command = [sys.executable, SCRIPT, "rank"]
        stdin = (os.POSIX_SPAWN_DUP2, file.fileno(), 0)
        return os.posix_spawn(command[0], command, preloading_environment(), file_actions=[stdin])


def be_rank(
    setting: Setting, number: int, meeting: Meeting, files: LaunchFiles, own: RankFiles
) -> None:
    """Run one rank until its last thread has ended. This never returns: gloo's threads are not torn
    down.
    """
    from .rank import Rank  # This loads torch, which an agent that forks no rank must not do.

    code = 1
    try:
        linux.die_with_parent(meeting.agent)
        Rank(setting, number, meeting, files, own).run()
        threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing's children do the same
        with contextlib.suppress(Exception):  # The function may have closed or replaced it.
            sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(ranks: dict[int, int], launch: socket.socket) -> None:
    """Tell the caller each rank's exit code as it ends; orphans of ranks become children too, and
    are only reaped.
    """
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            code = os.waitstatus_to_exitcode(status)
            send(launch.fileno(), RankExited(ranks.pop(pid), code))
