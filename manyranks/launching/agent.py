"""The agent: the process that owns the ranks of one launch. It is never the caller itself.

The server forks the agent; the agent starts the ranks and waits for them. Each rank reports to the
caller through its own pipes; the agent reports only each rank's exit code. When the agent dies, its
ranks die with it. Ranks are forked. Where a process with torch in it cannot safely be forked, they
are new processes, and neither server nor agent loads torch.
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

from .. import linux
from ..errors import LaunchError
from .environment import preloading_environment, server_command, surroundings
from .protocol import (
    AgentStarted,
    Duty,
    LaunchFiles,
    Meeting,
    RankExited,
    RankFiles,
    Refused,
    Setting,
    send,
)


def own_ranks(connection: socket.socket, setting: Setting, files: LaunchFiles) -> None:
    """Carry out one launch: start its ranks, tell the caller how each ended, and exit."""
    send(connection.fileno(), AgentStarted(os.getpid()))
    # Standard input is empty, and what the agent itself prints goes to the log.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(files.log, 1)
    os.dup2(files.log, 2)
    os.close(files.log)
    try:
        has_own_network = prepare_network(setting)
        table = prepare_clocks(setting)
        meeting = prepare_store(setting, has_own_network, table)
        # This is repeated, since Linux forgets it when a process changes its credentials.
        linux.die_with_parent()
        ranks_by_pid = start_ranks(setting, meeting, files, connection)
    except Exception as error:
        send(connection.fileno(), Refused(error))
        os._exit(1)
    wait_for(ranks_by_pid, connection)
    os._exit(0)


def prepare_network(setting: Setting) -> bool:
    """Enter the network where the ranks meet, and make the emulated link ready, if there is one.

    Return whether the network is out of reach for other users. This comes before any thread or
    socket, as it may enter new namespaces.
    """
    link = setting.link
    # Virtual hosts have a network of their own.
    virtual_hosts = link is not None and link.mode == "hosts"
    has_own_network = virtual_hosts or enter_own_network(setting.network)
    if link is not None:
        link.prepare(setting.world_size)
    return has_own_network


def prepare_clocks(setting: Setting) -> Any:
    """Return the table of a launch whose time is virtual, or None if its time is real."""
    if setting.link is not None:
        return setting.link.network.table
    if setting.emulated is None and not setting.sizes_only:
        return None
    from ..clocks import Table  # A launch in real time does not need it.

    # All ranks are on one host, without a link.
    return Table([0] * setting.world_size)


def enter_own_network(wish: str) -> bool:
    """Move this process into a network that no other process can reach; return whether it moved.

    It stays where it is if the `wish` is "open". Raises LaunchError if it cannot move but must, as
    the wish is "private".
    """
    if wish == "open":
        return False
    try:
        linux.enter_own_network()
    except OSError as error:
        if wish == "private":
            raise LaunchError(
                f"MANYRANKS_NETWORK is private, which this system forbids ({error.strerror})"
            ) from None
        return False
    return True


def prepare_store(setting: Setting, has_own_network: bool, table: Any) -> Meeting:
    """Return where the ranks meet.

    The socket on which rank 0 serves their store is bound here, so that two launches never clash.
    Where other users could reach a socket there is none, and the store is a file in memory.
    """
    address = linux.loopback() if setting.link is None else setting.link.network.master_address
    if has_own_network or setting.network == "open" or sys.platform != "linux":
        listener = linux.listen_on(address)
        listener.set_inheritable(True)
        port = listener.getsockname()[1]
        return Meeting(os.getpid(), table, address, port, listener.detach())
    store_file = os.memfd_create("store")
    os.set_inheritable(store_file, True)
    return Meeting(os.getpid(), table, address, store_file=store_file)


def start_ranks(
    setting: Setting, meeting: Meeting, files: LaunchFiles, connection: socket.socket
) -> dict[int, int]:
    """Start the ranks; return their numbers by process id.

    This process has only its main thread, so that it may fork: a lock that another thread held at a
    fork would stay locked for ever. Raises LaunchError if a process cannot be started.
    """
    if setting.start == "fork" and setting.computes:
        # This takes a second, and is done once for all ranks. If it fails, a rank that needs the
        # module raises the error.
        with contextlib.suppress(Exception):
            importlib.import_module("torch._dynamo")
    ranks_by_pid = {}
    for number in range(setting.world_size):
        _, descriptors, _, _ = socket.recv_fds(connection, 1, len(RankFiles._fields))
        duty = Duty(setting, number, meeting, files, RankFiles(*descriptors))
        try:
            pid = os.fork() if setting.start == "fork" else start_anew(duty)
        except BlockingIOError:
            raise LaunchError(f"rank {number} cannot be started: {linux.PROCESS_LIMIT}") from None
        if pid == 0:
            connection.close()
            be_rank(duty)
        ranks_by_pid[pid] = number
        # No other rank may inherit these files.
        for descriptor in descriptors:
            os.close(descriptor)
    return ranks_by_pid


def start_anew(duty: Duty) -> int:
    """Start one rank in a new process, which inherits its open files; return its process id."""
    # An agent that forks its ranks need not load these.
    from ..memory import open_memory
    from .pickling import dumps

    for descriptor in (duty.launch_files.call, duty.launch_files.recorder, *duty.files):
        os.set_inheritable(descriptor, True)
    # The end of server.py reads these two pickles, and calls `be_rank`.
    content = pickle.dumps(surroundings()) + dumps(duty)
    with open_memory("rank", content) as file:
        stdin = (os.POSIX_SPAWN_DUP2, file.fileno(), 0)
        environment = preloading_environment()
        command = server_command("rank")
        return os.posix_spawn(sys.executable, command, environment, file_actions=[stdin])


def be_rank(duty: Duty) -> None:
    """Run one rank until its last thread has ended, and end the process.

    So gloo's threads are not torn down.
    """
    from .rank import Rank  # This loads torch, which an agent that forks no rank must not do.

    code = 1
    try:
        linux.die_with_parent(duty.meeting.agent)
        Rank(*duty).run()
        # This waits for threads that are no daemons, as the end of any Python process does.
        threading._shutdown()  # type: ignore[attr-defined]
        # The function may have closed or replaced the stream.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(ranks_by_pid: dict[int, int], connection: socket.socket) -> None:
    """Tell the caller each rank's exit code as the rank ends.

    Orphans of ranks become children of this process, too, but nobody is told of their ends.
    """
    while ranks_by_pid:
        pid, status = os.wait()
        if pid in ranks_by_pid:
            code = os.waitstatus_to_exitcode(status)
            send(connection.fileno(), RankExited(ranks_by_pid.pop(pid), code))
