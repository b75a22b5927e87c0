"""Watches what is on its way in this rank, and finds what touches it before the wait.

From the post of a message to its wait the memory belongs to the network: what is sent must not be
written, and a buffer that receives must be neither written nor read. torch hands every operation of
every thread to a `TorchDispatchMode`, which compares the memory of its operands with what is on its
way. Views and slices have other tensors, but the same memory.

torch does not hand over NumPy's and native code's work, nor writes that a schema hides. So the
network works on copies: a buffer that receives holds other numbers until the wait, and at the wait
all bytes must be those of the post. So a hidden write is found at the wait, and a hidden read by
its results, which differ. Whatever else can carry an order from one rank or thread to another is a
doubt.
"""

import _thread
import ctypes
import hashlib
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from ..clocks import group as clocks_group
from ..clocks import now, own
from ..clocks.clock import TURN
from ..clocks.stalls import LIBRARIES, Line, line_of
from ..clocks.table import FOREVER
from ..devices import roofline
from ..errors import Awaited
from ..own_code import folders
from ..torch_inside import (
    OperationMode,
    around,
    parts_of,
    replaced,
    tensors_in,
    tree_map_only,
    without_modes,
)

LONGEST_DELAY = 5_000_000_000  # picoseconds, in which a few messages pass over the slow link
# A key says whether the network writes the memory, and whether the program's operation does. If
# both only read it, there is no fault.
FAULTS = {
    (True, False): ("touched too early", "reads a buffer that may not have arrived"),
    (True, True): ("touched too early", "writes a buffer that may not have arrived"),
    (False, True): ("overwritten too early", "overwrites a buffer that may not have left"),
}
FAULT = Awaited("fault")
OPERATIONS = [
    "send",
    "recv",
    "recv_anysource",
    "barrier",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    *clocks_group.COLLECTIVES,
]
STORE = ("add", "append", "check", "compare_set", "delete_key", "get", "multi_get", "set", "wait")
CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")
# Python tells of these events before they happen ("audit events"), and of each opened file.
EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "socket.connect")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# These touch no element, and at the wait it is found that the memory has moved.
RESIZES = ("resize_", "resize_as_", "resize")
LONGEST_SKEW_S = 0.005  # A skewed clock goes forward by at most so much between two readings.


class Memory:
    """The memory of a tensor on its way: its addresses, and the bytes that it held at the post.

    As long as this object lives, only the program itself can free the memory.
    """

    def __init__(self, tensor: torch.Tensor, network_writes: bool):
        self.network_writes = network_writes
        self.addresses = memory_of(tensor)
        self.storage = tensor.untyped_storage()
        self.place = self.place_now()
        self.held = self.holds()

    def place_now(self) -> tuple[int, int]:
        """Return the address of the storage, and the number of its bytes."""
        return self.storage.data_ptr(), self.storage.nbytes()

    def holds(self) -> bytes:
        """Return a digest of the bytes at the addresses."""
        size = len(self.addresses)
        return hashlib.blake2b((ctypes.c_char * size).from_address(self.addresses.start)).digest()

    def has_happened(self) -> str:
        """Return in words what the program has done to the memory since the post, or ""."""
        if self.place_now() != self.place:
            return "the memory was freed or moved"
        if self.holds() != self.held:
            return "the memory was written, though no operation of torch's says so,"
        return ""


class Flight(NamedTuple):
    """A message or a collective on its way, begun at `line`.

    `arrivals` are pairs of a tensor and of the network's copy, which is written back at the wait.
    """

    what: Awaited
    memories: list
    arrivals: list
    line: Line


class Watch(OperationMode, ContextDecorator):
    """The watch over what is on its way in this rank.

    torch shows it every operation of a thread that has entered it. It writes each event as a line
    of `log`. Where delays are drawn (`draw`), a thread that begins a message or asks for one first
    waits for a drawn time.

    Each method whose first argument is `run` stands around a function of torch or of Python, and
    calls it as `run`.
    """

    def __init__(self, log: IO):
        super().__init__()
        self.log = log
        self.draw: random.Random | None = None
        self.flights: dict[Any, Flight] = {}  # by torch's handle (`Work`) of the operation
        self.doubts: set = set()
        self.early: Any = 2  # the number that a buffer which receives holds until the wait
        self.skew_s: float | None = None  # by how much clocks go ahead; None for right clocks

    def perform(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Compare an operation's operands with what is on its way, and perform it."""
        # A thread without a clock is the transport's own.
        if self.flights and own() is not None and touches_memory(operation):
            parameters = operation._schema.arguments
            names = [parameter.name for parameter in parameters]
            # There may be fewer arguments than parameters, as some parameters have defaults.
            operands = kwargs | dict(zip(names, args, strict=False))
            for parameter in parameters:
                for tensor in tensors_in(operands.get(parameter.name)):
                    self.touched(tensor, parameter.is_write, operation.overloadpacket.__name__)
        return operation(*args, **kwargs)

    def tell(self, kind: str, text: str, *lines: Line, what: Awaited | None = None) -> None:
        """Log an event of this rank, in one `write`, as all ranks append to one file."""
        event = [now(), dist.get_rank(), kind, text, lines, what]
        self.log.write((json.dumps(event) + "\n").encode())

    def fault(self, kind: str, text: str, *lines: Line) -> None:
        """Log a fault, in whose text {0} and {1} stand for its lines, and stop this thread.

        The other ranks go on as far as they can, so that the verdict does not depend on which is
        the fastest.
        """
        # This flight is never over, so a program that catches the deadlock's error cannot end well.
        self.flights[self] = Flight(FAULT, [], [], lines[0])
        self.tell(kind, f"rank {dist.get_rank()}: {text}", *lines)
        clock = own()
        if clock is not None:
            clock.sleep_until(FOREVER, FAULT)

    def doubt(self, reason: str) -> None:
        """Note that the program does something for which one run proves nothing."""
        if reason not in self.doubts:
            self.doubts.add(reason)
            self.tell("doubt", reason, line_of(sys._getframe()))

    def delay(self) -> None:
        """Let the other ranks go first for a while, mostly for a short one."""
        clock = own()
        if self.draw is not None and clock is not None:
            longest = LONGEST_DELAY * self.draw.choice((1, 1, 1, 100))
            clock.sleep_until(clock.moment + self.draw.randrange(longest), TURN)

    def touched(self, tensor: torch.Tensor, writes: bool, name: str) -> None:
        """Log a fault if an operation reads or writes a tensor whose memory is on its way."""
        for flight in list(self.flights.values()):
            for memory in flight.memories:
                touch_of = memory.network_writes, writes
                if touch_of in FAULTS and overlap(memory.addresses, tensor):
                    line = line_of(sys._getframe())
                    kind, touch = FAULTS[touch_of]
                    begun = f"begun ({{0}}) {flight.what}, and not waited for"
                    self.fault(kind, f"{name} {touch} ({{1}}): {begun}", flight.line, line)

    def ended(self) -> None:
        """Log a fault if the program has ended on this rank and has not waited for all it began."""
        for flight in self.flights.values():
            text = f"nobody waits for what was begun ({{0}}) {flight.what}"
            self.fault("not waited for", text, flight.line)

    def post(self, run: Callable, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin an operation of a group on copies of its tensors, and remember what is on its way.

        The network writes to the tensors in the first argument (a barrier has none), unless it only
        sends them, and it reads those in the second.
        """
        self.delay()
        with without_modes(), torch.no_grad():
            copies = tree_map_only(torch.Tensor, torch.clone, args[:2])
        work = run(group, *copies, *args[2:], **kwargs)
        name = run.__name__
        is_root = name == "broadcast" and args[1].rootRank == group.rank()
        arriving = tensors_in(*args[:1])
        sent = tensors_in(*args[1:2])
        if name == "send" or is_root:
            sent += arriving
            arriving = []
        flight = Flight(work.ticket.what, [], [], line_of(sys._getframe()))
        with without_modes(), torch.no_grad():
            self.take(flight, name, group.rank(), arriving, sent)
            homes = [home_of(tensor) for tensor in arriving]
        if arriving:
            flight.arrivals.extend(zip(homes, tensors_in(*copies[:1]), strict=True))
        self.flights[work] = flight
        self.tell("post", str(flight.what), flight.line, what=flight.what)
        return work

    def take(self, flight: Flight, name: str, rank: int, arriving: list, sent: list) -> None:
        """Hand the memory of an operation's tensors to the network."""
        kept = self.apart(flight, name, rank, arriving, sent)
        parts = [(part, True) for part in parts_of(arriving)]
        parts += [(part, False) for part in parts_of(kept)]
        for part, network_writes in parts:
            self.touched(part, network_writes, name)
            if not part.untyped_storage().resizable():
                self.doubt("NumPy or other code has a part in the memory of a message")
        with torch.inference_mode():
            for tensor in arriving:
                if not tensor.is_sparse:
                    tensor.detach().fill_(self.early)
        for part, network_writes in parts:
            if part.numel():
                flight.memories.append(Memory(part, network_writes))

    def apart(self, flight: Flight, name: str, rank: int, arriving: list, sent: list) -> list:
        """Return the sent tensors that do not lie where this rank's own part arrives.

        Those that do are on their way as what arrives. To receive into any other sent tensor is a
        fault.
        """
        kept = []
        for number, tensor in enumerate(sent):
            addresses = memory_of(tensor)
            places = [place for place, each in enumerate(arriving) if overlap(addresses, each)]
            for place in places:
                received = memory_of(arriving[place])
                if not is_own_part(received, addresses, rank, max(place, number)):
                    text = f"{name} receives into what it sends ({{0}})"
                    self.fault("touched too early", text, flight.line)
            if not places:
                kept.append(tensor)
        return kept

    def settle(self, run: Callable, work: Any) -> None:
        """End a wait: the memory is the program's again, and gets what has arrived.

        If the program has written it in the meantime, that is a fault.
        """
        run(work)
        flight = self.flights.pop(work, None)
        if flight is None:
            return
        line = line_of(sys._getframe())
        for memory in flight.memories:
            happened = memory.has_happened()
            if happened:
                kind, _ = FAULTS[memory.network_writes, True]
                begun = f"begun ({{0}}) {flight.what}"
                self.fault(kind, f"{happened} before the wait ({{1}}): {begun}", flight.line, line)
        with without_modes(), torch.inference_mode():
            for tensor, arrived in flight.arrivals:
                tensor.copy_(arrived)
        self.tell("wait", str(flight.what), line, what=flight.what)

    def question(self, reason: str, run: Callable, *args: Any) -> Any:
        """Call a function whose answer may depend on the order; note the `reason` as a doubt."""
        self.doubt(reason)
        self.delay()
        return run(*args)

    def read(self, run: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call a function that reads a tensor, though it is no operation of torch."""
        self.touched(tensor, writes=False, name=run.__name__)
        return run(tensor, *args, **kwargs)

    def share(self, run: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call a function that lets other code read and write a tensor's memory: a doubt."""
        self.doubt("other code has a part in a tensor's memory")
        return self.read(run, tensor, *args, **kwargs)

    def store(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call a function of torch's key-value stores, by which ranks could speak: a doubt."""
        if called_by_program():
            self.doubt("it uses a store")
            self.delay()
        return run(*args, **kwargs)

    def save(self, run: Callable, obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """Call `torch.save`, and note a doubt if it writes a file."""
        if isinstance(file, (str, os.PathLike)):
            self.doubt("it writes files or opens a connection")
        run(obj, file, *args, **kwargs)

    def heard(self, event: str, args: tuple) -> None:
        """Note a doubt if what Python is about to do changes files or opens a connection."""
        changes = event in EVENTS
        if event == "open":
            path, _, flags = args
            named = not isinstance(path, int) and not os.fsdecode(path).startswith("/dev/")
            changes = named and flags & WRITES
        if changes and not is_importing():
            self.doubt("it writes files or opens a connection")

    def then(self, run: Callable, future: Any, callback: Callable) -> Any:
        """Call `Future.then`, and note that the order decides when a callback of the program runs.

        Callbacks of libraries only convert values, and are no doubt.
        """
        code = getattr(callback, "__code__", None)
        if code is None or is_the_programs(code):
            self.doubt("a callback runs once its message has arrived")
        return run(future, callback)

    def clock(self, run: Callable) -> Any:
        """Read a clock, which is a doubt; a skewed clock shows which results depend on it."""
        reading = run()
        if not called_by_program():
            return reading
        self.doubt("it asks a clock")
        if self.skew_s is None:
            return reading
        self.skew_s += random.SystemRandom().uniform(0, LONGEST_SKEW_S)
        # A whole number is in nanoseconds.
        if isinstance(reading, int):
            return reading + int(self.skew_s * 1e9)
        return reading + self.skew_s

    def start(self, run: Callable, thread: threading.Thread) -> None:
        """Start a thread whose operations are shown as well, and note the doubt."""
        self.doubt("a rank has several threads, and not all orders of theirs were tried")
        thread.run = self(thread.run)  # type: ignore[method-assign]
        run(thread)


def called_by_program() -> bool:
    """Return whether the program's own code has called the function around which a hook stands."""
    # The frames 0 to 2 are of this function, of the hook, and of the function that calls the hook.
    return is_the_programs(sys._getframe(3).f_code)


def is_the_programs(code: Any) -> bool:
    """Return whether code is the program's own, and no library's."""
    return not code.co_filename.startswith(folders() + LIBRARIES)


def is_importing() -> bool:
    """Return whether this thread imports a module, which may write files that no rank reads."""
    frames = traceback.walk_stack(sys._getframe())
    return any(frame.f_code.co_filename.startswith("<frozen importlib") for frame, _ in frames)


def home_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor to which the network writes: one that shares the memory of `tensor`.

    It keeps that memory, whatever the program does with `tensor`. Of a sparse tensor whole parts
    are replaced, so it is the same one.
    """
    return tensor if tensor.is_sparse else tensor.detach()


def is_own_part(receives: range, sends: range, rank: int, place: int) -> bool:
    """Return whether what is sent is this rank's part of what is received, or the other way round.

    `place` is the tensor's number among several.
    """
    size = min(len(receives), len(sends))
    if receives == sends and place == rank:
        return True
    return len(receives) != len(sends) and abs(sends.start - receives.start) == rank * size


@cache
def touches_memory(func: Any) -> bool:
    """Return whether an operation reads or writes elements of its operands, not only shapes."""
    name = func.overloadpacket.__name__
    if name in RESIZES or name.startswith("new_") or name.endswith("_like"):
        return False
    return roofline.has_traffic(func)


def memory_of(tensor: torch.Tensor) -> range:
    """Return the addresses from a tensor's first element to its last."""
    if tensor.layout != torch.strided or not tensor.numel():
        return range(0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return range(tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size())


def overlap(sent: range, tensor: torch.Tensor) -> bool:
    """Return whether a tensor has an element at the addresses of a message, which has no gaps."""
    used = memory_of(tensor)
    if max(sent.start, used.start) >= min(sent.stop, used.stop):
        return False
    # The addresses of a tensor with gaps may lie around the message: its rows decide, one by one.
    return tensor.is_contiguous() or any(overlap(sent, row) for row in tensor)


# Python keeps an audit hook for ever, so all watches share one, which tells the present watch.
audit: Any = SimpleNamespace(is_hooked=False, watch=None)


def hear(event: str, args: tuple) -> None:
    """Tell the watch, if there is one, that Python is about to do something."""
    if audit.watch is not None:
        audit.watch.heard(event, args)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Show `watch` what this rank's threads post, wait for and touch, within this block.

    A sleep is made short, since it is no wait for a message.
    """
    asks = partial(watch.question, "it asks whether a message has arrived")
    receives = partial(watch.question, "it receives from any rank")
    below = partial(watch.question, "it starts a thread below threading")
    hooks: list = [
        (threading.Thread, "start", watch.start),
        (_thread, "start_new_thread", below),
        (torch.Tensor, "tolist", watch.read),
        (torch.Tensor, "numpy", watch.read),
        (torch.Tensor, "__reduce_ex__", watch.read),
        (torch.Tensor, "__dlpack__", watch.share),
        (torch, "save", watch.save),
        (time, "sleep", lambda run, seconds: run(1e-5)),
        (clocks_group.Work, "finish", watch.settle),
        (clocks_group.Work, "is_completed", asks),
        (clocks_group.Future, "then", watch.then),
    ]
    hooks += [(clocks_group.Group, name, watch.post) for name in OPERATIONS]
    hooks.append((clocks_group.Group, "recv_anysource", receives))
    hooks += [(dist.Store, name, watch.store) for name in STORE]
    hooks += [(time, name, watch.clock) for name in CLOCKS]
    if not audit.is_hooked:
        audit.is_hooked = True
        sys.addaudithook(hear)
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(around(*hook))
        stack.enter_context(watch)
        stack.enter_context(replaced(audit, watch=watch))
        yield
