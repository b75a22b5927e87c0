"""What is on its way in this rank, and who touches it before the wait.

From the post of a message to its wait the memory belongs to the network: what is sent must not be
written, and a buffer that receives must be neither written nor read. torch hands every operation of
every thread to a `TorchDispatchMode`, which compares the memory of its operands with what is on its
way. Views and slices have other tensors, but the same memory.
"""

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from functools import cache, partial
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from ..clocks import group as clocks_group
from ..clocks import now, own
from ..clocks.clock import TURN
from ..clocks.stalls import Line, in_words, line_of
from ..clocks.table import FOREVER
from ..devices import roofline
from ..errors import Awaited
from ..torch_inside import TorchDispatchMode, around, is_wrapper, tensors_in

LONGEST_DELAY = 5_000_000_000  # picoseconds, in which a few messages pass over the slow link
# A key says whether the network writes the memory, and whether the program's operation does. That
# both only read it is no fault.
FAULTS = {
    (True, False): ("touched too early", "reads a buffer that may not have arrived"),
    (True, True): ("touched too early", "writes a buffer that may not have arrived"),
    (False, True): ("overwritten too early", "overwrites a buffer that may not have left"),
}
FAULT = Awaited("fault")
OPERATIONS = ["send", "recv", "barrier", "allgather_into_tensor_coalesced", *clocks_group.FORMS]


class Flight(NamedTuple):
    """A message or a collective on its way, begun at `line`: `tensors` are pairs of a tensor and
    whether the network writes it.
    """

    what: Awaited
    tensors: list
    line: Line


class Watch(TorchDispatchMode, ContextDecorator):
    """What is on its way in this rank. torch shows it every operation of a thread that has entered
    it. What happens is written to `log`, an event a line. Where delays are drawn (`draw`), whatever
    begins a message or asks for one waits that long.

    `post`, `settle`, `question`, `read` and `start` each stand around a function, and call it as
    `run`.
    """

    def __init__(self, log: IO):
        super().__init__()
        self.log = log
        self.draw: random.Random | None = None
        self.flights: dict[Any, Flight] = {}  # by torch's handle (`Work`) of the operation
        self.doubts: set = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compare an operation's operands with what is on its way, and perform it."""
        kwargs = kwargs or {}
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented  # The tensors inside it come here next.
        # A thread without a clock is the transport's own.
        if self.flights and touches_memory(func) and own() is not None:
            parameters = func._schema.arguments
            names = [parameter.name for parameter in parameters]
            operands = kwargs | dict(zip(names, args, strict=False))  # Some have defaults.
            for parameter in parameters:
                for tensor in tensors_in(operands.get(parameter.name)):
                    self.touched(tensor, parameter.is_write, func.overloadpacket.__name__)
        return func(*args, **kwargs)

    def tell(self, kind: str, text: str, *lines: Line, what: Awaited | None = None) -> None:
        """Write an event of this rank down. All ranks append to one file, so it is one `write`."""
        event = [now(), dist.get_rank(), kind, text, lines, what]
        self.log.write((json.dumps(event) + "\n").encode())

    def fault(self, kind: str, text: str, *lines: Line) -> None:
        """Write a fault down, in whose text {0} and {1} are its lines, and stop: the other ranks go
        on as far as they can, so that it does not matter which of them is the fastest.
        """
        # This flight is never over: a program that catches what the last line raises does not end.
        self.flights[self] = Flight(FAULT, [], lines[0])
        self.tell(kind, f"rank {dist.get_rank()}: {text}", *lines)
        own().sleep_until(FOREVER, FAULT)  # type: ignore[union-attr]

    def doubt(self, reason: str) -> None:
        """Note that the program does something for which one run proves nothing."""
        if reason not in self.doubts:
            self.doubts.add(reason)
            self.tell("doubt", reason, line_of(sys._getframe()))

    def delay(self) -> None:
        """Let the other ranks go first for a while."""
        if self.draw is not None:
            clock: Any = own()
            clock.sleep_until(clock.moment + self.draw.randrange(LONGEST_DELAY), TURN)

    def touched(self, tensor: torch.Tensor, writes: bool, name: str) -> None:
        """An operation reads or writes a tensor: refuse that if its memory is on its way."""
        for flight in list(self.flights.values()):
            for message, network_writes in flight.tensors:
                if (network_writes, writes) in FAULTS and overlap(message, tensor):
                    line = line_of(sys._getframe())
                    kind, touch = FAULTS[network_writes, writes]
                    begun = f"begun ({{0}}) {in_words(flight.what)}, and not waited for"
                    self.fault(kind, f"{name} {touch} ({{1}}): {begun}", flight.line, line)

    def ended(self) -> None:
        """The program is over on this rank: everything must have been waited for."""
        for flight in self.flights.values():
            text = f"nobody waits for what was begun ({{0}}) {in_words(flight.what)}"
            self.fault("not waited for", text, flight.line)

    def post(self, run: Callable, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Around an operation of a group, remember what it begins. Its first argument (a barrier
        has none) is what the network writes, unless it only sends it; tensors in the second one are
        read.
        """
        self.delay()
        work = run(group, *args, **kwargs)
        name = run.__name__
        is_root = name == "broadcast" and args[1].rootRank == group.rank()
        writes_first = name != "send" and not is_root
        tensors = [(tensor, writes_first) for tensor in tensors_in(*args[:1])]
        tensors += [(tensor, False) for tensor in tensors_in(*args[1:2])]
        flight = Flight(work.ticket.what, tensors, line_of(sys._getframe()))
        for tensor, network_writes in tensors:
            self.touched(tensor, network_writes, name)
            if not tensor.untyped_storage().resizable():
                self.doubt("NumPy or other code has a part in the memory of a message")
        self.flights[work] = flight
        self.tell("post", in_words(flight.what), flight.line, what=flight.what)
        return work

    def settle(self, run: Callable, work: Any) -> Any:
        """Around a wait, note that the memory is the program's again."""
        moment = run(work)
        flight = self.flights.pop(work, None)
        if flight is not None:
            line = line_of(sys._getframe())
            self.tell("wait", in_words(flight.what), line, what=flight.what)
        return moment

    def question(self, reason: str, run: Callable, *args: Any) -> Any:
        """Around a call whose answer may depend on the order, note that one run proves nothing."""
        self.doubt(reason)
        self.delay()
        return run(*args)

    def read(self, run: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Around a function that reads a tensor and is no operation."""
        self.touched(tensor, writes=False, name=run.__name__)
        return run(tensor, *args, **kwargs)

    def start(self, run: Callable, thread: threading.Thread) -> None:
        """Around the start of a thread, have its operations shown as well."""
        self.doubt("a rank has several threads, and not all orders of theirs were tried")
        thread.run = self(thread.run)  # type: ignore[method-assign]
        run(thread)


@cache
def touches_memory(func: Any) -> bool:
    """Whether an operation reads or writes elements of its operands, and not only their shapes."""
    name = func.overloadpacket.__name__
    return roofline.has_traffic(func) and not name.startswith("new_") and not name.endswith("_like")


def memory_of(tensor: torch.Tensor) -> range:
    """The addresses from a tensor's first element to its last."""
    if tensor.layout != torch.strided or not tensor.numel():
        return range(0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return range(tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size())


def overlap(message: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor has an element in the memory of a message, which has no gaps."""
    sent = memory_of(message)
    used = memory_of(tensor)
    if max(sent.start, used.start) >= min(sent.stop, used.stop):
        return False
    # The addresses of a tensor with gaps may lie around the message: its rows decide, one by one.
    return tensor.is_contiguous() or any(overlap(message, row) for row in tensor)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Show `watch` what this rank's threads post, wait for and touch. A sleep takes next to no
    time: it is no wait.
    """
    asks = partial(watch.question, "it asks whether a message has arrived")
    receives = partial(watch.question, "it receives from any rank")
    hooks: list = [
        (threading.Thread, "start", watch.start),
        (torch.Tensor, "tolist", watch.read),
        (torch.Tensor, "numpy", watch.read),
        (time, "sleep", lambda run, seconds: run(1e-5)),
        (clocks_group.Work, "wait_by_clock", watch.settle),
        (clocks_group.Work, "is_completed", asks),
        (clocks_group.Group, "recv_anysource", receives),
    ]
    hooks += [(clocks_group.Group, name, watch.post) for name in OPERATIONS]
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(around(*hook))
        stack.enter_context(watch)
        yield
