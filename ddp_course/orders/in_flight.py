"""What is on its way in this rank, and who touches it before the wait.

From the post of a message to its wait the memory belongs to the network: what is sent must not be
written, and a buffer that receives must be neither written nor read. torch hands every operation of
every thread to a `TorchDispatchMode`, which compares the memory of its operands with what is on its
way. Views and slices have other tensors, but the same memory.
"""

import _thread
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import OrderError
from ..running import clocks
from ..running.clocks import group
from ..running.clocks.stalls import line_of
from ..running.devices import roofline
from ..running.torch_inside import TorchDispatchMode, around, is_wrapper

EARLY = "touched too early"
OVERWRITTEN = "overwritten too early"
NOT_WAITED = "not waited for"
LOOKS_AT_SHAPES = ("new_", "is_", "sym_")  # Such operations read no element of their operands.


def own_line() -> str:
    """The line of the program that this thread is at."""
    return line_of(sys._getframe())


class Flight(NamedTuple):
    """A message or a collective on its way: `tensors` are pairs of a tensor and whether the network
    writes it.
    """

    name: str
    work: Any
    tensors: list
    line: str


class Watch:
    """What is on its way in this rank. `events` are written to `log`, as they happen; `found`, if
    given, gets what is wrong, which else is raised.
    """

    def __init__(self, log: Path | None = None, found: Callable | None = None):
        self.log = log
        self.found = found
        self.flights: dict[int, Flight] = {}
        self.lock = _thread.RLock()  # This lock is real: virtual time must not depend on it.
        self.threads: dict = {}  # This maps what messages share, such as a group, to its thread.
        self.shared: set = set()  # These are addresses of memory that NumPy knows.
        self.doubts: set = set()
        self.refusal: OrderError | None = None

    def tell(self, kind: str, text: str, **details: Any) -> None:
        """Write an event of this rank down."""
        if self.log is not None:
            event = {"kind": kind, "text": text, "moment": clocks.now(), **details}
            with self.lock, self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def doubt(self, reason: str) -> None:
        """Note that the program does something for which one run proves nothing."""
        if reason not in self.doubts:
            self.doubts.add(reason)
            self.tell("doubt", reason)

    def refuse(self, kind: str, text: str, lines: list) -> None:
        """Say what is wrong: in one line, and at which lines of the program."""
        self.tell("wrong", text, wrong=kind, lines=lines)
        if self.found is not None:
            self.found(kind, text)
            return
        self.refusal = OrderError(text)
        raise self.refusal

    def started(self, work: Any, name: str, reads: list, writes: list, way: Any) -> None:
        """Something has been posted that reads and writes these tensors; it shares `way` with what
        has the same.
        """
        line = own_line()
        tensors = [(tensor, False) for tensor in reads] + [(tensor, True) for tensor in writes]
        with self.lock:
            for tensor, written in tensors:
                self.touched(tensor, written, name, line)
                if memory_of(tensor)[0] in self.shared:
                    self.doubt(f"{name}: its memory is shared with NumPy")
            self.flights[id(work)] = Flight(name, work, tensors, line)
            if self.threads.setdefault(way, _thread.get_ident()) != _thread.get_ident():
                self.doubt(f"{name}: two threads use the same group")
        self.tell("post", name, line=line)

    def waited(self, work: Any) -> None:
        """What was posted is over, and its memory is the program's again."""
        with self.lock:
            flight = self.flights.pop(id(work), None)
        if flight is not None:
            self.tell("wait", flight.name, line=own_line())

    def touched(self, tensor: torch.Tensor, writes: bool, name: str, line: str = "") -> None:
        """An operation reads or writes a tensor: refuse that if its memory is on its way."""
        for flight in list(self.flights.values()):
            for other, written in flight.tensors:
                if (writes or written) and overlap(other, tensor):
                    line = line or own_line()
                    self.refuse(*complaint(flight, written, writes, name, line))
                    return

    def ended(self) -> None:
        """The program is over on this rank: everything must have been waited for."""
        for flight in list(self.flights.values()):
            text = f"nobody waits for: {flight.name} ({flight.line})"
            self.refuse(NOT_WAITED, text, [flight.line])


def complaint(flight: Flight, written: bool, writes: bool, name: str, line: str) -> tuple:
    """What is wrong with an operation: its kind, a sentence, and the lines of both sides."""
    if written:
        kind = EARLY
        verb = "writes" if writes else "reads"
        what = f"{verb} a buffer that may not have arrived"
    else:
        kind = OVERWRITTEN
        what = "overwrites a buffer that may not have left"
    begun = f"{flight.name} was begun before ({flight.line}), and not waited for"
    text = f"{name} {what} ({line}): {begun}"
    return kind, text, [flight.line, line]


class Touches(TorchDispatchMode):
    """Shows the watch every operation of a thread."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Compare an operation's operands with what is on its way, and perform it."""
        kwargs = kwargs or {}
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented  # The tensors inside it come here next.
        if self.watch.flights and touches_memory(func):
            self.compare(func, args, kwargs)
        return func(*args, **kwargs)

    def compare(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Hold each operand against what is on its way."""
        name = func.overloadpacket.__name__
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in roofline.tensors_in(value):
                with self.watch.lock:
                    self.watch.touched(tensor, writes, name)


@cache
def touches_memory(func: Any) -> bool:
    """Whether an operation reads or writes elements of its operands."""
    name = func.overloadpacket.__name__
    if name.endswith("_like") or name.startswith(LOOKS_AT_SHAPES) or name in roofline.NO_TRAFFIC:
        return False
    return func.namespace not in ("c10d", "_c10d_functional") and not func.is_view


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's memory, and the one after its last; (0, 0) without any."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    first = tensor.data_ptr()
    return first, first + elements * tensor.element_size()


def overlap(message: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor has an element in the memory of a message, which has no gaps."""
    (first, last) = memory_of(message)
    (begin, end) = memory_of(tensor)
    if begin >= last or first >= end:
        return False
    if tensor.numel() * tensor.element_size() == end - begin:
        return True
    addresses = torch.full((), begin)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        addresses = addresses[..., None] + tensor.element_size() * stride * torch.arange(size)
    inside = (addresses < last) & (addresses + tensor.element_size() > first)
    return bool(inside.any())


PARTS: dict[
    str, tuple
] = {  # Operations of a group: the places of what they read, of what they write.
    "send": ((0,), ()),
    "recv": ((), (0,)),
    "allreduce": ((), (0,)),
    "allreduce_coalesced": ((), (0,)),
    "broadcast": ((), (0,)),
    "reduce": ((), (0,)),
    "allgather": ((1,), (0,)),
    "_allgather_base": ((1,), (0,)),
    "allgather_into_tensor_coalesced": ((1,), (0,)),
    "reduce_scatter": ((1,), (0,)),
    "_reduce_scatter_base": ((1,), (0,)),
    "gather": ((1,), (0,)),
    "scatter": ((1,), (0,)),
    "alltoall_base": ((1,), (0,)),
    "alltoall": ((1,), (0,)),
    "barrier": ((), ()),
}
MESSAGES = {"send": "the send to rank {}", "recv": "the receive from rank {}"}


def posting(watch: Watch, delay: Callable, name: str) -> Callable:
    """Return what is done around a group's operation `name`: the watch learns what it began."""
    reads, writes = PARTS[name]

    def post(run: Callable, group: Any, *args: Any, **kwargs: Any) -> Any:
        delay()
        work = run(group, *args, **kwargs)
        way: tuple = (group.number,)
        title = f"the {name.strip('_').removesuffix('_base')}"
        if name in MESSAGES:
            peer = args[1]
            tag = args[2]
            way = group.number, name, peer, tag
            title = MESSAGES[name].format(group.members[peer])
        read = operands(args, reads)
        written = operands(args, writes)
        if name in ("broadcast", "reduce") and root_keeps(name, group, args[1]):
            read, written = written, read
        watch.started(work, title, read, written, way)
        return work

    return post


def operands(args: tuple, places: tuple) -> list:
    """The tensors at these places of the arguments."""
    return [tensor for place in places for tensor in roofline.tensors_in(args[place])]


def root_keeps(name: str, group: Any, options: Any) -> bool:
    """Whether this rank's tensor is only read: the root's of a broadcast, all others' of a
    reduce.
    """
    is_root = options.rootRank == group.rank()
    return is_root if name == "broadcast" else not is_root


@contextmanager
def watching(watch: Watch, delay: Callable) -> Iterator[None]:
    """Show `watch` what this rank's threads post, wait for and touch; `delay()` is called before
    each post and each question.
    """

    def start(run: Callable, thread: threading.Thread) -> None:
        thread.run = partial(with_mode, watch, thread.run)  # type: ignore[method-assign]
        run(thread)

    def to_list(run: Callable, tensor: torch.Tensor) -> Any:
        watch.touched(tensor, False, "tolist")
        return run(tensor)

    def to_numpy(run: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        watch.touched(tensor, False, "numpy")
        watch.shared.add(memory_of(tensor)[0])
        return run(tensor, *args, **kwargs)

    def settle(run: Callable, work: Any) -> Any:
        moment = run(work)
        watch.waited(work)
        return moment

    def ask(run: Callable, work: Any) -> bool:
        watch.doubt("it asks whether a message has arrived")
        delay()
        return run(work)

    def from_any(run: Callable, *args: Any) -> Any:
        watch.doubt("it receives from any rank")
        return run(*args)

    hooks: list = [
        (threading.Thread, "start", start),
        (torch.Tensor, "tolist", to_list),
        (torch.Tensor, "numpy", to_numpy),
        (group.Work, "settle", settle),
        (group.Work, "is_completed", ask),
        (group.Group, "recv_anysource", from_any),
        *((group.Group, name, posting(watch, delay, name)) for name in PARTS),
    ]
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(around(*hook))
        stack.enter_context(Touches(watch))
        yield


def with_mode(watch: Watch, run: Callable) -> None:
    """Run a thread's function, and show the watch its operations."""
    with Touches(watch):
        run()
