"""What happens inside a rank: from the fork to the caller's function, and its result on the way back."""

import ctypes
import faulthandler
import linecache
import logging
import mmap
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from . import flight_recorder
from .channel import write
from .limits import PIPES_A_RANK
from .progress import count_steps

PR_SET_PDEATHSIG = 1
ENDINGS = [
    signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if name in signal.Signals.__members__
]  # Windows has two of them
OWN_FILES = tuple(str(Path(__file__).with_name(name)) for name in ("rank.py", "cell.py", "spawned.py"))  # not shown


@dataclass
class Pipes:
    """Open files that came from the caller: shared ones, and each rank's report, stdout, stderr and stacks."""

    agent_log: int
    payload: int
    recorder: int
    ranks: list

    @classmethod
    def unpack(cls, descriptors, world_size):
        """Give the descriptors their names, in the order in which `launch` sent them."""
        shared, rest = descriptors[:3], descriptors[3:]
        return cls(*shared, [rest[PIPES_A_RANK * rank :][:PIPES_A_RANK] for rank in range(world_size)])

    def close(self, keep=None):
        """Close all ranks' pipes but those of rank `keep`, so that a rank's end shows as the end of its pipes."""
        for rank, pipes in enumerate(self.ranks):
            if rank != keep:
                for descriptor in pipes:
                    os.close(descriptor)
                self.ranks[rank] = []


def main(setting, link, pipes, launch, listener, agent):
    """Be one rank: reach the caller's function with the process group up, report what became of it.

    Returns only after success. A rank that failed waits to be killed: if it ended by itself, the others would fail
    too, with a broken connection, and hide the cause.
    """
    rank = int(os.environ["RANK"])
    die_with(agent)
    logging.disable(logging.NOTSET)  # the agent had disabled it
    tempfile.tempdir = None  # the agent's is gone at the end of the launch
    if link is not None:
        link.enter(rank)  # before any socket: it may move this process into a network namespace of its own
    launch.close()
    pipes.close(keep=rank)
    report, out, err, stacks = pipes.ranks[rank]
    write(report, ("started", os.getpid()))
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # asked for when time runs out
    faulthandler.enable(file=stacks, all_threads=False)  # segmentation faults and the like
    try:
        join_group(setting, rank, listener)
        flight_recorder.attach(pipes.recorder, rank, setting["world_size"])
        redirect_output(out, err)
        tell_steps = count_steps(report) if setting["progress"] and rank == 0 else lambda: None
        answer = pack_result(call(pipes.payload))
        if tell_steps:
            tell_steps()
    except BaseException as error:
        failure = describe(error)
        sys.stdout.flush()
        write(report, ("failed", failure))
        while True:
            signal.pause()
    sys.stdout.flush()
    sys.stderr.flush()
    write(report, answer)


def die_with(agent):
    """See to it that this rank ends when its agent does, and that SIGTERM works in the middle of a collective.

    Until here the endings are blocked: one that came while the agent's handlers were still in place would be lost.
    """
    for number in ENDINGS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    die_with_parent()
    if os.getppid() != agent:
        os._exit(1)


def die_with_parent():
    """Have the system kill this process as soon as its parent ends; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def choose_device(setting, rank):
    """Set this rank's device, its number of threads, and the network card that gloo uses."""
    os.environ["DDP_COURSE_DEVICE"] = device = setting["devices"][rank]
    os.environ["OMP_NUM_THREADS"] = str(setting["threads"])
    torch.set_num_threads(setting["threads"])
    if setting["backend"] == "gloo" and sys.platform != "win32":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)


def join_group(setting, rank, listener):
    """Choose this rank's device and bring the process group up."""
    choose_device(setting, rank)
    patience = timedelta(seconds=setting["timeout"] + 60)  # the launch's own timeout comes first
    store = join_store(rank, listener, patience)
    dist.init_process_group(
        setting["backend"], store=store, rank=rank, world_size=setting["world_size"], timeout=patience
    )


def join_store(rank, listener, patience):
    """The key-value store through which ranks find each other: rank 0 serves it on the socket that the agent bound."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=listener.detach()
        )
    listener.close()
    return dist.TCPStore(address, port, is_master=False, timeout=patience)


def redirect_output(out, err):
    """From here on, what this rank prints goes to the caller, line by line."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def call(payload):
    """Unpickle the caller's function with its arguments and the source of its cells, and call it."""
    with mmap.mmap(payload, 0, access=mmap.ACCESS_READ) as packed:
        length = int.from_bytes(packed[:8], "little")
        sources = pickle.loads(packed[8 : 8 + length])
        linecache.cache.update({name: (len(text), None, text.splitlines(True), name) for name, text in sources.items()})
        with memoryview(packed) as view:
            function, args, kwargs = pickle.loads(view[8 + length :])
    return function(*args, **kwargs)


def pack_result(result):
    """The message that carries a result to the caller."""
    try:
        return cloudpickle.dumps(("result", result), protocol=5)
    except Exception as error:
        raise TypeError(
            f"the result is a {type(result).__qualname__}, which cannot be sent to the caller ({error}); "
            "return numbers, tensors, lists or dicts of them"
        ) from None


def describe(error):
    """An exception as plain data: name, message, the traceback from the caller's function on, and the time."""
    now = time.monotonic()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in OWN_FILES:
        frames = frames.tb_next
    try:
        message = str(error)
    except Exception:
        message = "(its message could not be made)"
    if isinstance(error, SystemExit):
        message = f"sys.exit was called with {error.code!r}"
    return {
        "type_name": type(error).__name__,
        "message": message,
        "traceback": "".join(traceback.format_exception(type(error), error, frames)),
        "time": now,
        "consequence": is_broken_connection(error, message),
    }


def is_broken_connection(error, message):
    """Whether this exception only says that another rank has gone."""
    marks = ("Connection closed by peer", "Connection reset", "Broken pipe", "recv failed", "gloo/transport", "NCCL")
    network = isinstance(error, (dist.DistNetworkError, ConnectionError))
    return network or (isinstance(error, RuntimeError) and any(mark in message for mark in marks))
