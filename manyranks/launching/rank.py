"""What happens inside a rank: from the fork to the caller's function, and back."""

import faulthandler
import mmap
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .. import clocks, flight_recorder, linux, own_code
from ..devices.placement import settle_on
from ..errors import DeadlockError, Failure, LaunchError
from ..memory import remember_source
from ..torch_inside import after_each_group, serve_store_on
from .decision import Returned
from .pickling import CellPickler
from .protocol import Answered, Duty, Setting, Started, send
from .steps import Steps

TORCH = str(Path(torch.__file__).parent)
TORCHS_WRAPPERS = ("inner", "_fn")  # torch calls a __torch_dispatch__ from these functions.
# Errors of torch, NCCL, gloo and the system are known by these words: their types say too little.
NCCL_LOST = (
    "ncclRemoteError",
    "remote process",
    "communicator was aborted",
    "Connection closed",
    "Connection reset",
)
NO_MORE_THREADS = ("Resource temporarily unavailable", "can't start new thread")
NO_WAY_OUT = ("Name or service not known", "in name resolution", "Network is unreachable")
PEER_LOST = ("Connection closed by peer", "Connection reset", "Broken pipe", "recv failed")
UNKNOWN_USER = -1  # This stands in `linux.users_connected` for a far end that it does not find.


class Rank(Duty):
    """One rank of a launch: it calls the caller's function in a process of its own."""

    def run(self) -> None:
        """Move to this rank's place in the network, call the function, answer, and wait.

        All ranks leave together. A rank that failed waits as well, until it is killed: if it ended
        by itself, the other ranks would fail too, with a broken connection, and hide the cause.
        """
        if self.setting.link is not None:
            # This comes before any socket, as it may move this process into a network namespace.
            self.setting.link.network.enter(self.number)
        if self.meeting.clocks is not None:
            clocks.enter(self.meeting.clocks, self.number)
        send(self.files.report, Started(self.number, os.getpid()))
        faulthandler.register(signal.SIGUSR1, file=self.files.stacks, all_threads=True)
        # A segmentation fault writes a stack as well.
        faulthandler.enable(file=self.files.stacks, all_threads=False)
        feeds_bar = self.setting.progress and self.number == 0
        self.steps = Steps(self.files.report if feeds_bar else None)
        self.report_outcome()
        # The caller orders ranks to leave. If the pipe ends without an order, the caller is gone.
        with suppress(EOFError, OSError), Connection(os.dup(self.files.orders)) as orders:
            orders.recv()
        if dist.is_initialized() and "nccl" in dist.get_backend_config():
            # gloo's threads are not torn down: they end with this process.
            dist.destroy_process_group()

    def join_and_call(self) -> Returned:
        """Join the other ranks, and call the function.

        An error before the call is reported as one of the function.
        """
        self.join_group()
        flight_recorder.attach(self.launch_files.recorder, self.number, self.setting.world_size)
        redirect_output(self.files.out, self.files.err)
        return self.call_function()

    def call_function(self) -> Returned:
        """Call the function that the caller has packed, and return what it has returned."""
        with mmap.mmap(self.launch_files.call, 0, access=mmap.ACCESS_READ) as packed:
            cells, function, args, kwargs = pickle.loads(packed)
        for name, text in cells.items():
            remember_source(name, text)
        with clocks.calling(), self.emulation():
            result = function(*args, **kwargs)
        model = None if self.setting.sizes_only else self.steps.unconnected_model()
        return Returned(self.number, result, model)

    @contextmanager
    def emulation(self) -> Iterator[None]:
        """Give this rank its emulated device, and tensors with sizes only, within this block.

        It has each of the two only if the launch asks for it.
        """
        device = self.setting.emulated[self.number] if self.setting.emulated else None
        with ExitStack() as stack:
            if device is not None:
                stack.enter_context(device.emulate(self.setting.link))
            if self.setting.sizes_only:
                from ..devices.sizes import sizes_only  # Other launches do not need it.

                capacity = device.capacity if device else None
                stack.enter_context(sizes_only(capacity, self.setting.answer))
            yield

    def report_outcome(self) -> None:
        """Write what the function returned or raised to a file, and report that it is written.

        A child that the function has forked, and that comes back from the function, ends here.
        """
        own_pid = os.getpid()
        answer: Any
        try:
            answer = self.join_and_call()
        except BaseException as error:
            if os.getpid() != own_pid and not isinstance(error, SystemExit):
                traceback.print_exc()
            answer = failure_of(self.number, error)
        for stream in (sys.stdout, sys.stderr):
            # The function may have closed or replaced the stream.
            with suppress(Exception):
                stream.flush()
        if os.getpid() != own_pid:
            os._exit(0)
        try:
            pack(answer, self.files.answer)
        except BaseException as error:  # A result's own __reduce__ may raise anything.
            refusal = refusal_of(answer.result, error)
            pack(failure_of(self.number, refusal), self.files.answer)
        send(self.files.report, Answered())

    def join_group(self) -> None:
        """Choose this rank's device, set torchrun's variables, and bring the process group up."""
        choose_device(self.setting, self.number)
        world_size = self.setting.world_size
        variables = {
            "RANK": self.number,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": self.number,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.meeting.address,
            "MASTER_PORT": self.meeting.port,
        }
        os.environ.update({name: str(value) for name, value in variables.items()})
        # The launch's own timeout must come first, since its error says where each rank is.
        patience = timedelta(seconds=self.setting.timeout + 60)
        dist.init_process_group(
            self.setting.backend,
            store=self.store(patience),
            rank=self.number,
            world_size=world_size,
            timeout=patience,
        )
        clocks.refuse_plain_gloo()
        if self.meeting.store_file is not None:
            refuse_strangers()
            after_each_group(refuse_strangers)

    def store(self, patience: timedelta) -> dist.Store:
        """Serve the key-value store by which ranks find each other, or connect to it."""
        if self.meeting.store_file is not None:
            path = f"/proc/self/fd/{self.meeting.store_file}"
            store = dist.FileStore(path, self.setting.world_size)
            store.set_timeout(patience)
            return store
        if self.number == 0:
            return serve_store_on(socket.socket(fileno=self.meeting.listener), patience)
        return dist.TCPStore(self.meeting.address, self.meeting.port, timeout=patience)


def refuse_strangers() -> None:
    """Raise a LaunchError if another user of this machine is connected to this rank.

    Gloo takes whoever connects first for the rank that it expects, so nothing may be received after
    this error. If only the far end of a connection is gone, mostly since a rank ended, the error is
    a ConnectionError.
    """
    users = linux.users_connected()
    if users == {UNKNOWN_USER}:
        raise ConnectionError("the other end of a connection is gone")
    if users:
        strangers = sorted(users - {UNKNOWN_USER})
        names = ", ".join(map(str, strangers))
        raise LaunchError(
            f"user {names} of this machine has connected to this launch's ranks, which received"
            " nothing from there; where the system allows namespaces, nobody can connect"
        )


def choose_device(setting: Setting, rank: int) -> None:
    """Set this rank's device and its number of threads."""
    os.environ["MANYRANKS_DEVICE"] = device = setting.devices[rank]
    os.environ["OMP_NUM_THREADS"] = str(setting.threads)
    torch.set_num_threads(setting.threads)
    settle_on(device)


def redirect_output(out: int, err: int) -> None:
    """Send to the caller, line by line, what this rank prints from now on.

    `breakpoint()` is refused from now on, as nobody can type in a rank.
    """
    for name, pipe, descriptor in (("stdout", out, 1), ("stderr", err, 2)):
        os.dup2(pipe, descriptor)
        stream = os.fdopen(
            descriptor,
            "w",
            buffering=1,  # line by line
            encoding="utf-8",
            errors="backslashreplace",
            closefd=False,
        )
        setattr(sys, name, stream)
    sys.breakpointhook = refuse_breakpoint


def refuse_breakpoint(*args: Any, **kwargs: Any) -> None:
    """Raise a LaunchError in place of `breakpoint()`."""
    raise LaunchError(
        "breakpoint() cannot be used in a rank: nobody can type there. Print instead, or call the"
        " function without launch: after join() your own process is a job of one rank"
    )


def refusal_of(result: Any, error: BaseException) -> TypeError:
    """Return the error that says that a result cannot be packed, because of `error`."""
    reason = words_of(error) or type(error).__name__
    return TypeError(
        f"the result is a {type(result).__qualname__}, which cannot be sent to the caller"
        f" ({reason}); return numbers, tensors, lists or dicts of them"
    )


def pack(answer: Returned | Failure, descriptor: int) -> None:
    """Replace the content of an open file by a rank's answer."""
    with open(descriptor, "wb", closefd=False) as file:
        file.seek(0)
        file.truncate()
        AnswerPickler(file, protocol=5).dump(answer)


class AnswerPickler(CellPickler):
    """Packs tensors on a GPU as tensors on the CPU: the caller need not have a GPU, nor use it."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(5)
        return super().reducer_override(obj)


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return an exception as a rank's failure, with a traceback from the function on."""
    now = time.monotonic()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in own_code.CALLING:
        frames = frames.tb_next
    message = words_of(error)
    if "initialize the default process group twice" in message:
        message = (
            "launch has brought the process group up already: leave out dist.init_process_group"
        )
    if isinstance(error, SystemExit):
        message = f"sys.exit was called with {error.code!r}"
    if any(words in message for words in NO_WAY_OUT) and linux.alone_in_network():
        message += (
            " (ranks have a network of their own: download before the launch, or set"
            " MANYRANKS_NETWORK=open)"
        )
    if any(words in message for words in NO_MORE_THREADS):
        message += f" ({linux.PROCESS_LIMIT})"
    return Failure(
        rank,
        type(error).__name__,
        message,
        traceback=as_text(error, frames),
        time=now,
        consequence=is_broken_connection(error, message),
        waits=error.waits if isinstance(error, DeadlockError) else [],
    )


def as_text(error: BaseException, frames: TracebackType | None) -> str:
    """Return a traceback, without an operation's way to torch through an emulated device."""
    whole = traceback.TracebackException(type(error), error, frames)
    names = [frame.name for frame in whole.stack]
    if "__torch_dispatch__" in names and whole.stack[-1].filename.endswith("_ops.py"):
        begin = names.index("__torch_dispatch__")
        while names[begin - 1] in TORCHS_WRAPPERS:
            begin -= 1
        del whole.stack[begin:]
    return "".join(whole.format())


def words_of(error: BaseException) -> str:
    """Return the message of an exception, even if its own `__str__` fails."""
    try:
        return str(error)
    except BaseException as second:
        return f"(its message cannot be shown: __str__ raised {type(second).__name__})"


def is_broken_connection(error: BaseException, message: str) -> bool:
    """Return whether an exception only says that another rank is gone.

    An exception that the program itself raises says more.
    """
    if isinstance(error, dist.DistNetworkError):
        return True
    # NCCL raises this class for all errors, also for causes such as "Duplicate GPU detected".
    if isinstance(error, dist.DistBackendError):
        return any(words in message for words in NCCL_LOST)
    sounds_so = isinstance(error, ConnectionError)
    if isinstance(error, RuntimeError):
        if "gloo" in message and "transport" in message:
            return True
        sounds_so = any(words in message for words in PEER_LOST)
    frames = list(traceback.walk_tb(error.__traceback__))
    if not (sounds_so and frames):
        return False
    innermost, _ = frames[-1]
    return innermost.f_code.co_filename.startswith((*own_code.folders(), TORCH))
