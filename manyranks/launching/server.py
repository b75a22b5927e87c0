"""The server: a process that has imported torch once, and forks the agent of every launch.

It also holds what launches need of the packages in `own_code`, and reads that again once a file has
changed, so that a launch runs what stands there. It never touches CUDA, which would not survive the
fork. It is not forked from the caller (a Jupyter kernel), which is full of threads. A rank that is
not forked begins here too, with its setting on its standard input.

The server's standard input brings a byte with two open files of each new launch: its socket, and
its setting. When the input ends, the caller is gone, and all launches are killed. No process
outlives its agent, even if it has left the process group (setsid): orphans become children of the
agent, and when the agent has ended, of the server.
"""

# ruff: noqa: E402 (the folder of this script must leave the path before anything else is imported)
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# A process that a rank spawns would run this script again, as its parent's main module.
del __file__
# The second word is the folder in which Python finds this library.
_, ROLE, FOUND_IN, *NEEDED = sys.argv
sys.path[:] = [FOUND_IN, *(path for path in sys.path if os.path.abspath(path or ".") != HERE)]

import contextlib
import gc
import importlib
import pickle
import select
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from manyranks import linux, own_code
from manyranks.launching import protocol

AGENT = f"{protocol.__package__}.agent"
# These modules are not read again, for caller and server must speak the same protocol.
KEPT = (protocol.__name__, own_code.__name__)
CALLER = os.getppid()
# The server imports these before it serves.
FIRST_MODULES = ["torch.distributed", "torch.multiprocessing", "numpy", "cloudpickle"]
# It imports these after the first launch. Otherwise each rank's first optimizer would import them
# for dynamo, which takes more than a second.
LATER_MODULES = [
    "mpmath",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.utils.data",
]
# While a launch runs, the server looks this often whether the agent has ended.
POLL_SECONDS = 0.005
# A server that is idle for so long ends, and the next launch starts another.
IDLE_SECONDS = float(os.environ.get("MANYRANKS_IDLE") or 900)


def serve(control: socket.socket, forks: bool) -> None:
    """Fork an agent for each request until the caller is gone or idle.

    If agents fork their ranks (`forks`), import LATER_MODULES for all ranks after the first launch.
    """
    modules_to_load = LATER_MODULES if forks else []
    last_read: tuple = ()
    launches: dict = {}  # the socket to the caller of each launch, by its agent's process id
    last_use = time.monotonic()
    # Orphans of an ended agent become children of this process.
    linux.adopt_orphans()
    while os.getppid() == CALLER and time.monotonic() < last_use + IDLE_SECONDS:
        ready, _, _ = select.select([control], [], [], POLL_SECONDS if launches else 1.0)
        if ready:
            request, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            # Without a request the caller has closed the socket.
            if not request:
                break
            connection_file, setting_file = descriptors
            connection = socket.socket(fileno=connection_file)
            with open(setting_file, "rb") as setting:
                surroundings = pickle.load(setting)
                if forks:
                    last_read = read_packages(surroundings.packages, last_read)
                others = (control, *launches.values())
                agent = fork_agent(connection, surroundings, setting, others)
            launches[agent] = connection
        if launches:
            last_use = time.monotonic()
            reap(launches)
            if modules_to_load and not launches:
                load(modules_to_load)
                linux.use_huge_pages()
                modules_to_load = []
    # The caller is gone or idle, so all launches must end.
    for agent in launches:
        os.kill(agent, signal.SIGKILL)
    while launches:
        reap(launches)
        time.sleep(POLL_SECONDS)


def load(names: Iterable[str]) -> None:
    """Import modules; if one fails, its first user raises the error.

    Dynamo fails where its cache cannot be made.
    """
    # Modules are no garbage: not to search them saves a fifth of the time.
    gc.disable()
    for name in names:
        # Many a script is gone after its first launch.
        if os.getppid() != CALLER:
            break
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Ranks that search for garbage would otherwise copy these modules' memory.
    gc.freeze()
    gc.enable()


def read_packages(packages: dict, last_read: tuple) -> tuple:
    """Import what launches need of these packages, unless nothing has changed since `last_read`.

    Return the packages and the times at which their files were changed, for the next call.
    """
    times = {}
    for package in packages.values():
        for file in Path(package.folder).rglob("*.py"):
            # A file that is a link to nothing, as an editor's lock is, has no time.
            with contextlib.suppress(OSError):
                times[file] = file.stat().st_mtime_ns
    if last_read != (packages, times):
        forget(packages)
        for package in packages.values():
            if package.found_in not in sys.path:
                sys.path.insert(0, package.found_in)
            load(package.modules)
    return packages, times


def forget(packages: Iterable[str]) -> None:
    """Let the next import read the files of these packages again."""
    beginnings = tuple(f"{package}." for package in packages)
    for name in list(sys.modules):
        if f"{name}.".startswith(beginnings) and name not in KEPT:
            del sys.modules[name]


def fork_agent(
    connection: socket.socket,
    surroundings: protocol.Surroundings,
    setting: IO[bytes],
    others: Iterable[socket.socket],
) -> int:
    """Fork the agent of a launch, which closes the `others`; return its process id."""
    # Ranks that are new processes must not inherit the connection.
    connection.set_inheritable(False)
    pid = os.fork()
    if pid == 0:
        for other in others:
            other.close()
        become_agent(connection, surroundings, setting)
    # Parent and child both do this, as nobody knows which of them runs first.
    os.setpgid(pid, pid)
    return pid


def become_agent(
    connection: socket.socket, surroundings: protocol.Surroundings, setting: IO[bytes]
) -> None:
    """Own the ranks of a launch, in the forked child, and end the process."""
    try:
        # The agent, its ranks and their children form one process group.
        os.setpgid(0, 0)
        linux.die_with_parent()
        linux.adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        count = len(protocol.LaunchFiles._fields)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, count)
        # Without files the caller is gone.
        if descriptors:
            files = protocol.LaunchFiles(*descriptors)
            take_over(surroundings)
            with setting:
                own_setting = pickle.load(setting)
            importlib.import_module(AGENT).own_ranks(connection, own_setting, files)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def take_over(surroundings: protocol.Surroundings) -> None:
    """Take on the caller's paths, arguments, environment, folder and packages."""
    sys.path[:] = surroundings.path
    sys.argv[:] = surroundings.argv
    os.environ.clear()
    os.environ.update(surroundings.environ)
    own_code.packages.update(surroundings.packages)
    if os.path.isdir(surroundings.folder):
        os.chdir(surroundings.folder)


def reap(launches: dict) -> None:
    """End the launches whose agents have ended.

    Once no process of a launch is left, its caller learns that from the end of the socket.
    """
    for agent, connection in list(launches.items()):
        ended, status = os.waitpid(agent, os.WNOHANG)
        if ended:
            del launches[agent]
            end_what_is_left(agent, launches)
            if status:
                # The caller may be gone.
                with contextlib.suppress(OSError):
                    code = os.waitstatus_to_exitcode(status)
                    protocol.send(connection.fileno(), protocol.AgentExited(code))
            connection.close()


def end_what_is_left(agent: int, launches: dict) -> None:
    """Kill the process group of an ended agent, and the processes that had left the group.

    These are the children of this process that are no agents.
    """
    # The group may have no process left.
    with contextlib.suppress(OSError):
        os.killpg(agent, signal.SIGKILL)
    # Only Linux has this file, and adopts orphans.
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        strays = set(map(int, linux.read(children).split())) - launches.keys()
        if not strays:
            return
        # This process adopts the children of those that it kills, and kills them in the next round.
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    # The role is "fork" for a server whose ranks are forked, "spawn" for a server whose ranks are
    # new processes, and "rank" for such a rank. With "spawn" the server does not load torch.
    if ROLE != "spawn":
        load(FIRST_MODULES + NEEDED)
    forget(own_code.packages)
    if ROLE != "rank":
        serve(socket.socket(fileno=os.dup(0)), forks=ROLE == "fork")
        # Processes that wait for this end need not wait until torch is torn down.
        os._exit(0)
    take_over(pickle.load(sys.stdin.buffer))
    importlib.import_module(AGENT).be_rank(pickle.load(sys.stdin.buffer))
