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
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import OrderError
from ..running import clocks
from ..running.clocks import group
from ..running.clocks.stalls import line_of
from ..running.devices import roofline
from ..running.torch_inside import TorchDispatchMode, around, is_wrapper

FAULTS = {  # These are by whether the network writes the memory, and whether the operation does.
    (True, False): ("touched too early", "reads a buffer that may not have arrived"),
    (True, True): ("touched too early", "writes a buffer that may not have arrived"),
    (False, True): ("overwritten too early", "overwrites a buffer that may not have left"),
}
LOOKS_AT_SHAPES = ("new_", "is_", "sym_")  # Such operations read no element of their operands.
MESSAGES = {"send": "the send to rank", "recv": "the receive from rank"}
OPERATIONS = [
    name
    for name, member in vars(group.Group).items()
    if getattr(member, "__annotations__", {}).get("return") is group.Work and name != "timed"
]


class Flight(NamedTuple):
    """A message or a collective on its way: `tensors` are pairs of a tensor and whether the network
    writes it.
    """

    name: str
    work: Any
    tensors: list
    line: str


class Watch:
    """What is on its way in this rank. What happens is written to `log`, an event a line; `delay()`
    is called before each post and each question.
    """

    def __init__(self, log: Path, delay: Callable):
        self.log = log
        self.delay = delay
        self.flights: dict[int, Flight] = {}
        self.lock = _thread.RLock()  # This lock is real: virtual time must not depend on it.
        self.threads: dict = {}  # This maps what messages share, such as a group, to its thread.
        self.doubts: set = set()

    def tell(self, kind: str, text: str, *lines: str) -> None:
        """Write an event of this rank down."""
        with self.lock, self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps([clocks.now(), dist.get_rank(), kind, text, lines]) + "\n")

    def doubt(self, reason: str) -> None:
        """Note that the program does something for which one run proves nothing."""
        if reason not in self.doubts:
            self.doubts.add(reason)
            self.tell("doubt", reason)

    def touched(self, tensor: torch.Tensor, writes: bool, name: str) -> None:
        """An operation reads or writes a tensor: refuse that if its memory is on its way."""
        with self.lock:
            for flight in list(self.flights.values()):
                for other, written in flight.tensors:
                    if (written, writes) in FAULTS and overlap(other, tensor):
                        line = line_of(sys._getframe())
                        kind, what = FAULTS[written, writes]
                        begun = (
                            f"{flight.name} was begun before ({flight.line}), and not waited for"
                        )
                        self.tell(kind, f"{name} {what} ({line}): {begun}", flight.line, line)
                        raise OrderError(what)

    def ended(self) -> None:
        """The program is over on this rank: everything must have been waited for."""
        for name, _, _, line in self.flights.values():
            self.tell(
                "not waited for", f"nobody waits for {name}, which was begun before ({line})", line
            )

    def post(self, run: Callable, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Around an operation of a group, remember what it begins. Its first argument is what the
        network writes, unless it only sends it; the second one is read.
        """
        self.delay()
        work = run(group, *args, **kwargs)
        if id(work) in self.flights:
            return work  # One operation has called another.
        name = run.__name__
        title = f"the {name.strip('_').removesuffix('_base')}"
        way: tuple = (group.number,)  # Messages on one way arrive in the order of their posts.
        if name in MESSAGES:
            title = f"{MESSAGES[name]} {group.members[args[1]]}"
            way = group.number, name, args[1], args[2]
        written = name != "send"
        if name in ("broadcast", "reduce"):
            is_root = args[1].rootRank == group.rank()
            written = is_root == (name == "reduce")
        tensors = [(tensor, written) for tensor in roofline.tensors_in(*args[:1])]
        tensors += [(tensor, False) for tensor in roofline.tensors_in(*args[1:2])]
        line = line_of(sys._getframe())
        with self.lock:
            for tensor, written in tensors:
                self.touched(tensor, written, title)
                if not tensor.untyped_storage().resizable():
                    self.doubt(f"{title}: its memory is shared with NumPy or other code")
            self.flights[id(work)] = Flight(title, work, tensors, line)
            if self.threads.setdefault(way, _thread.get_ident()) != _thread.get_ident():
                self.doubt(f"{title}: two threads use the same group")
        self.tell("post", title, line)
        return work

    def settle(self, run: Callable, work: Any) -> Any:
        """Around a wait, note that the memory is the program's again."""
        moment = run(work)
        flight = self.flights.pop(id(work), None)
        if flight is not None:
            self.tell("wait", flight.name, line_of(sys._getframe()))
        return moment

    def ask(self, run: Callable, work: Any) -> bool:
        """Around a question, note that there is one."""
        self.doubt("it asks whether a message has arrived")
        self.delay()
        return run(work)

    def receive_from_any(self, run: Callable, *args: Any) -> Any:
        """Around a receive from any rank, note that there is one."""
        self.doubt("it receives from any rank")
        return run(*args)

    def read(self, run: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Around a function that reads a tensor and is no operation."""
        self.touched(tensor, False, run.__name__)
        return run(tensor, *args, **kwargs)

    def start(self, run: Callable, thread: threading.Thread) -> None:
        """Around the start of a thread, have its operations shown as well."""
        thread.run = partial(with_mode, self, thread.run)  # type: ignore[method-assign]
        run(thread)


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
        # A thread without a clock is the transport's own.
        if self.watch.flights and touches_memory(func) and clocks.own() is not None:
            self.compare(func, args, kwargs)
        return func(*args, **kwargs)

    def compare(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Hold each operand against what is on its way."""
        name = func.overloadpacket.__name__
        parameters = func._schema.arguments
        given = dict(zip([parameter.name for parameter in parameters], args, strict=False))
        given.update(kwargs)
        for parameter in parameters:
            for tensor in roofline.tensors_in(given.get(parameter.name)):
                self.watch.touched(tensor, parameter.is_write, name)


@cache
def touches_memory(func: Any) -> bool:
    """Whether an operation reads or writes elements of its operands."""
    name = func.overloadpacket.__name__
    if name.endswith("_like") or name.startswith(LOOKS_AT_SHAPES) or name in roofline.NO_TRAFFIC:
        return False
    return func.namespace not in ("c10d", "_c10d_functional") and not func.is_view


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's memory, and the one after its last; (0, 0) without any."""
    if tensor.layout != torch.strided or not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    first = tensor.data_ptr()
    return first, first + elements * tensor.element_size()


def overlap(message: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor has an element in the memory of a message, which has no gaps."""
    first, last = memory_of(message)
    begin, end = memory_of(tensor)
    if begin >= last or first >= end:
        return False
    return tensor.is_contiguous() or any(overlap(message, part) for part in tensor)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Show `watch` what this rank's threads post, wait for and touch. A sleep takes no time: it is
    no wait.
    """
    hooks: list = [
        (threading.Thread, "start", watch.start),
        (torch.Tensor, "tolist", watch.read),
        (torch.Tensor, "numpy", watch.read),
        (time, "sleep", lambda run, seconds: None),
        (group.Work, "settle", watch.settle),
        (group.Work, "is_completed", watch.ask),
        (group.Group, "recv_anysource", watch.receive_from_any),
        *[(group.Group, name, watch.post) for name in OPERATIONS],
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
