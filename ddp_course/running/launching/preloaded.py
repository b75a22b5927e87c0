"""A process that has imported torch once, and waits: a server forks the agent of every launch, a spare becomes a rank.

A script, not a part of the package: it imports nothing of the course and nothing of the learner's, so that every
launch reads both afresh, and it never touches CUDA, which would not survive the fork. It is a child of the
caller's, but not its fork, because the caller (a Jupyter kernel) is full of threads.

A spare's standard input is the socket of its launch, when that comes. A server's brings 9 bytes a request: b"L" and a
number, with a socket for a new launch, or b"K" and the number of a launch to be killed. When the socket ends, the
caller is gone: all is killed. Nothing outlives its launch, not even what has left the process group (setsid): orphans
become the agent's children, and when that has ended, the server's.
"""

# ruff: noqa: E402 (the folder of this script must leave the path before anything else is imported)
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = os.path.abspath(f"{HERE}/../../..")
sys.path[:] = [PACKAGES, *(path for path in sys.path if os.path.abspath(path or ".") != HERE)]

import atexit
import contextlib
import gc
import importlib
import pickle
import select
import signal
import socket
import struct
import time

from ddp_course.running import linux

for name in [name for name in sys.modules if name.startswith("ddp_course")]:
    del sys.modules[name]  # every launch reads the package afresh

AT_ONCE = ["torch.distributed", "torch.multiprocessing", "numpy", "cloudpickle"]
LATER = [  # what every rank would import for more than a second with its first optimizer: dynamo
    *("mpmath", "sympy", "torch.fx.experimental.symbolic_shapes", "torch.distributed.fsdp", "torch._dynamo"),
    "torch.utils.data",
]  # an idle server loads them one by one, as a launch has to wait meanwhile, and all of them before its second launch
IDLE_SECONDS = float(os.environ.get("DDP_COURSE_IDLE") or 900)  # then this process ends; the next launch starts another


def wait_as_spare(control: socket.socket) -> None:
    """Become a rank when a launch comes; end if the caller is gone, or wants nothing for long."""
    for name in LATER:
        if not select.select([control], [], [], 0)[0]:
            load([name])
    if select.select([control], [], [], IDLE_SECONDS)[0]:
        take_part(control, "be_rank")
        atexit.register(os._exit, 0)  # this comes when its threads have ended, but before gloo's would be torn down


def serve(control: socket.socket) -> None:
    """Fork an agent for each request, reap what has ended, until the caller is gone, or wants nothing for long."""
    launches, ended, later = {}, {}, list(LATER)  # launches are {process id of the agent: (number, launch socket)}
    wakeup = wake_on_child()
    watched: list = [control, wakeup]
    linux.adopt_orphans()  # what an agent leaves behind becomes ours
    caller, first_launch_over, last_use = os.getppid(), False, time.monotonic()
    while os.getppid() == caller and time.monotonic() < last_use + IDLE_SECONDS:
        idle = first_launch_over and not launches
        ready, _, _ = select.select(watched, [], [], 0.02 if ended or (later and idle) else 1.0)
        if wakeup in ready:
            os.read(wakeup, 4096)
        if control in ready and not answer(control, launches, later if idle else []):
            break
        first_launch_over |= reap(launches, ended)
        if launches or control in ready:
            last_use = time.monotonic()
        if later and idle and not ready:  # while a launch ran, its end would have to wait
            load(later[:1])
            del later[0]
            if not later:
                linux.take_large_pages()
    ended.update(dict.fromkeys(launches, 0))  # the caller is gone: all launches are to end
    while launches:
        reap(launches, ended)
        time.sleep(0.002)


def load(names: list) -> None:
    """Import modules; those that have been imported already cost nothing.

    A module that cannot be imported, as Dynamo where its cache cannot be made, is an error only for a rank that needs
    it. What modules define is no garbage: without a search for any, a fifth of the time is saved, and what is
    frozen is not copied into ranks that search.
    """
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def wake_on_child() -> int:
    """A descriptor that becomes readable whenever a child ends."""
    wakeup, signalled = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wakeup


def answer(control: socket.socket, launches: dict, needed: list) -> bool:
    """Carry out one request, a launch with the modules `needed` loaded; False when the caller has closed the socket."""
    request, descriptors, _, _ = socket.recv_fds(control, 9, 1)
    if not request:
        return False
    order, number = struct.unpack("<cQ", request)
    if order == b"K":
        for pid, (known, _) in launches.items():
            if known == number:
                kill_group(pid)
        return True
    launch = socket.socket(fileno=descriptors[0])
    load(needed)  # its ranks need not do it, each for itself
    pid = os.fork()
    if pid == 0:
        control.close()
        for _, other in launches.values():
            other.close()
        become_agent(launch)
    os.setpgid(pid, pid)
    launches[pid] = (number, launch)
    return True


def become_agent(launch: socket.socket) -> None:
    """In the forked child: own the ranks of a launch. Never returns."""
    try:
        os.setpgid(0, 0)  # a launch has one process group: the agent, its ranks and theirs
        linux.die_with_parent()
        linux.adopt_orphans()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        take_part(launch, "own_ranks")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def take_part(launch: socket.socket, role: str) -> None:
    """Take on the caller's folder, paths and environment, and play this role, a function of `agent`, in its launch."""
    header = launch.recv(8, socket.MSG_WAITALL)
    if not header:
        return  # the caller is gone
    (length,) = struct.unpack("<Q", header)
    setting = pickle.loads(launch.recv(length, socket.MSG_WAITALL))
    sys.path[:], sys.argv[:] = setting["path"], setting["argv"]
    os.environ.clear()
    os.environ.update(setting["environ"])
    if os.path.isdir(setting["folder"]):
        os.chdir(setting["folder"])
    getattr(importlib.import_module("ddp_course.running.launching.agent"), role)(launch, setting)


def reap(launches: dict, ended: dict) -> bool:
    """Collect ended children; close the sockets of launches of which nothing is left. True if a launch is over.

    `ended`: the wait status of each agent that has ended.
    """
    pid = -1
    while pid:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid in launches:
            ended[pid] = status
    over = [agent for agent in ended if not kill_group(agent)]
    if not over or kill_strays(launches):
        return False
    for agent in over:
        _, launch = launches.pop(agent)
        if status := ended.pop(agent):
            words = pickle.dumps(("agent exited", None, os.waitstatus_to_exitcode(status)))
            with contextlib.suppress(OSError):  # the caller may be gone
                launch.sendall(struct.pack("<Q", len(words)) + words)
        launch.close()
    return True


def kill_group(pid: int) -> bool:
    """Kill a launch's whole process group; False when none of it is left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_strays(launches: dict) -> bool:
    """Kill our children that are no agents: orphans that had left their launch's group. True if there was any."""
    children = f"/proc/self/task/{os.getpid()}/children"  # this process has one thread
    if not os.path.exists(children):
        return False  # without /proc this is not Linux, and orphans do not come here
    with open(children) as file:
        strays = {int(pid) for pid in file.read().split()} - launches.keys()
    for pid in strays:
        os.kill(pid, signal.SIGKILL)
    return bool(strays)


if __name__ == "__main__":
    orders = socket.socket(fileno=os.dup(0))
    load(AT_ONCE + sys.argv[2:])
    serve(orders) if sys.argv[1] == "server" else wait_as_spare(orders)
