"""Send and receive between ranks, with every byte and message counted.

All algorithms of the course send through here, never through `torch.distributed` directly. That
gives three things for free: traffic can be counted and compared with a formula, spans can be drawn
on a timeline, and a slower link can be emulated. All three are settings of the one `card` that a
process has.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from manyranks import clocks, flight_recorder
from manyranks.devices import emulation
from manyranks.torch_inside import tensors_in

from .base.event_clock import EventClock
from .base.torch_private import as_plain_tensors, default_store, group_like

Group = dist.ProcessGroup | None
SECONDS_TO_SAY = 1.0  # Ranks of a collective that has failed have this long to say that they came.


@dataclass(frozen=True)
class Event:
    """Something that happened on the wire: a "send", a "recv", or a named "span" around several.

    `start` and `end` are seconds of `time.perf_counter`, or marks of the card's clock. Spans have 0
    `bytes` and no `peer`.
    """

    kind: str
    name: str
    start: float
    end: float
    bytes: int = 0
    peer: int | None = None
    thread: str = ""


@dataclass
class Traffic:
    """Bytes and messages that this process sent and received."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0

    def add(self, event: Event) -> None:
        """Count one event; spans are not traffic."""
        if event.kind == "send":
            self.bytes_sent += event.bytes
            self.messages_sent += 1
        elif event.kind == "recv":
            self.bytes_received += event.bytes
            self.messages_received += 1


# The network card of this process has the functions that are told each Event, and the clock that
# marks its times; while a GPU is recorded, that clock works by CUDA events.
card = SimpleNamespace(observers=[], clock=EventClock(torch.device("cpu")))
_connected: WeakSet = WeakSet()  # the groups whose ranks NCCL has connected


def now(device: torch.device | None = None) -> Any:
    """Return this moment by the card's clock; on a GPU, when the queued work will be done."""
    return card.clock.now(device)


@contextmanager
def observing(callback: Callable[[Event], None], clock: EventClock | None = None) -> Iterator[None]:
    """Call `callback(event)` after every message and span of this process, within this block.

    Events of all threads count, and `clock` marks their times.
    """
    before = card.clock
    card.clock = clock or card.clock
    card.observers.append(callback)
    try:
        yield
    finally:
        card.observers.remove(callback)
        card.clock = before


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count what this process sends and receives: `with counting() as traffic: …`."""
    traffic = Traffic()
    with observing(traffic.add):
        yield traffic


@contextmanager
def span(name: str) -> Iterator[None]:
    """Tell the observers when the block began and ended."""
    start = now()
    try:
        yield
    finally:
        tell("span", name, start)


emulation.listeners.append(span)


def ended(name: str, start: Any, tensor: torch.Tensor, group: Group = None) -> None:
    """Tell the observers that a backend's collective on `tensor` has just ended.

    It began at `start` (by `now`), and ran in a thread of the backend, not in the one that noticed
    its end. gloo computes on the processor, even where the tensor is on a GPU: the work that was
    queued on that GPU meanwhile does not matter.
    """
    end = now() if on_nccl(tensor, group) else clocks.now()
    tell("span", name, start, end, thread="communication")


def collective(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an algorithm in which all ranks of a `group` take part.

    The algorithm's first argument is a tensor or several. Each call becomes a span for the timeline
    and an entry of the flight recorder, by which mismatched shapes and hangs are reported with the
    numbers of the ranks. Within the call torch treats a tensor of a subclass as an ordinary one.
    """
    parameters = signature(function)
    name = function.__name__

    @wraps(function)
    def announced(tensors, *args, **kwargs):
        """Take part, and tell observers and the flight recorder."""
        group = parameters.bind(tensors, *args, **kwargs).arguments.get("group")
        with span(name), flight_recorder.entry(name, tensors, group), as_plain_tensors():
            if found := tensors_in(tensors):
                warm_up(found[0], group)
            return function(tensors, *args, **kwargs)

    return announced


@contextmanager
def naming_absent(group: Group = None) -> Iterator[None]:
    """Name the absent ranks if a backend's collective in this block waits in vain.

    A rank whose collective fails says so in the job's store. A rank that came late fails with the
    first that gives up, because that one closes its connections. Raises RuntimeError with the
    numbers of the absent ranks in place of the backend's error.
    """
    try:
        yield
    except RuntimeError as error:
        members = dist.get_process_group_ranks(group)
        key = f"ddp_course/waited/{members}/"
        store = default_store()
        store.set(f"{key}{dist.get_rank()}", "")
        # Only gloo's words tell its errors apart.
        if "timed out" not in str(error).lower():
            raise
        time.sleep(SECONDS_TO_SAY)
        absent = [rank for rank in members if not store.check([f"{key}{rank}"])]
        raise RuntimeError(
            f"ranks {absent} have not come to the collective that the others wait in (if there are"
            f" none here, the ranks are in different ones): {error}"
        ) from error


class Transfer:
    """A message on its way, once `begin` has started it.

    `wait()` returns when a sent tensor may be used again, or a received one may be read.
    """

    def __init__(self, kind: str, tensor: torch.Tensor, peer: int, group: Group = None):
        self.kind = kind
        self.tensor = tensor
        self.peer = peer
        self.buffer = _buffer_for(kind, tensor, group)
        self.start = now()
        self.works: list[Any] = []

    def wait(self) -> None:
        """Block until the message has left (send) or arrived (receive).

        An empty tensor sends nothing. Raises RuntimeError, with the peer's name, if the connection
        is lost or the time is up.
        """
        if not self.works:
            return
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            # A deadlock's error and NCCL's errors, which are subclasses, say more.
            if type(error) is not RuntimeError:
                raise
            late = "timed out" in str(error).lower()
            fault = "has not come to" if late else "broke off"
            raise RuntimeError(f"rank {self.peer} {fault} this {self.kind}: {error}") from error
        # With no works left, another wait does nothing.
        self.works = []
        if self.kind == "recv" and self.buffer is not self.tensor:
            self.tensor.copy_(self.buffer)
        tell(self.kind, self.kind, self.start, bytes=self.tensor.nbytes, peer=self.peer)


def begin(transfers: list[Transfer], group: Group = None) -> list[Transfer]:
    """Start messages, and return them; nothing is sent for an empty tensor.

    NCCL is given all of them as one batch: two neighbours that both send first would wait for each
    other, and a message outside of a batch blocks until the peer is ready.
    """
    started = [transfer for transfer in transfers if transfer.tensor.numel()]
    posts = {"send": dist.isend, "recv": dist.irecv}
    if any(on_nccl(transfer.tensor, group) for transfer in started):
        batch = [dist.P2POp(posts[each.kind], each.tensor, each.peer, group) for each in started]
        works = dist.batch_isend_irecv(batch)
        for transfer in started:
            transfer.works = works
        return transfers
    for transfer in started:
        post = posts[transfer.kind]
        transfer.works = [post(transfer.buffer, transfer.peer, group, flight_recorder.tag())]
    return transfers


def isend(tensor: torch.Tensor, dst: int, group: Group = None) -> Transfer:
    """Start sending a contiguous `tensor` to global rank `dst`; write to it only after `wait()`."""
    return begin([Transfer("send", tensor, dst, group)], group)[0]


def irecv(tensor: torch.Tensor, src: int, group: Group = None) -> Transfer:
    """Start receiving a contiguous `tensor` from global rank `src`; read it only after `wait()`."""
    return begin([Transfer("recv", tensor, src, group)], group)[0]


def send(tensor: torch.Tensor, dst: int, group: Group = None) -> None:
    """Send `tensor` to global rank `dst` and wait until it has left."""
    isend(tensor, dst, group).wait()


def recv(tensor: torch.Tensor, src: int, group: Group = None) -> None:
    """Receive into `tensor` from global rank `src`."""
    irecv(tensor, src, group).wait()


def exchange(
    outgoing: torch.Tensor, dst: int, incoming: torch.Tensor, src: int, group: Group = None
) -> None:
    """Send `outgoing` to `dst` while receiving `incoming` from `src` (global ranks)."""
    exchange_all([(outgoing, dst)], [(incoming, src)], group)


def exchange_all(outgoing: list, incoming: list, group: Group = None) -> None:
    """Send and receive several messages at once, and wait for all of them.

    Each message is a pair of a tensor and a global rank. The receives are posted before the sends:
    gloo's sender waits until the receiver is ready, and with the sends first two neighbours would
    wait for each other's turn, at half the speed.
    """
    arriving = [Transfer("recv", tensor, src, group) for tensor, src in incoming]
    leaving = [Transfer("send", tensor, dst, group) for tensor, dst in outgoing]
    for transfer in begin(arriving + leaving, group):
        transfer.wait()


def on_nccl(tensor: torch.Tensor, group: Group = None) -> bool:
    """Return whether NCCL carries `tensor`: a group may have one backend for GPUs, and another."""
    return tensor.is_cuda and "cuda:nccl" in dist.get_backend_config(group)


def warm_up(tensor: torch.Tensor, group: Group = None) -> None:
    """Connect `group`, with a tensor like those that will be sent.

    All its ranks call this before the group's first message. NCCL connects all ranks of a group at
    once, in the group's first operation; if that were a message between two ranks, both would wait
    for the others. So an all-reduce of a zero connects them first. With gloo nothing happens.
    """
    group = group or dist.group.WORLD
    if group not in _connected and on_nccl(tensor, group):
        _connected.add(group)
        dist.all_reduce(tensor.detach().new_zeros(1), group=group)


def neighbours(group: Group = None) -> tuple[int, int, int, int]:
    """Return this rank in `group`, the group's size, and the neighbours left and right.

    The neighbours are global ranks.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    left = global_rank((rank - 1) % world_size, group)
    right = global_rank((rank + 1) % world_size, group)
    return rank, world_size, left, right


def global_rank(rank: int, group: Group = None) -> int:
    """Return the rank in the whole job of member `rank` of `group`."""
    return rank if group is None else dist.get_global_rank(group, rank)


def others(rank: int, group: Group = None) -> list[int]:
    """Return the global ranks of all members of `group` but its member `rank`, in rank order."""
    return [global_rank(peer, group) for peer in range(dist.get_world_size(group)) if peer != rank]


# The members of a group make the group of some of them when they first ask. Each new one would keep
# its threads and sockets until the job ends.
group_of = cache(group_like)


def _buffer_for(kind, tensor, group):
    """Return the tensor that the backend sends, or into which it receives.

    It is the tensor itself. For a tensor on a GPU, where gloo can use host memory only, it is a
    copy in pinned memory.
    """
    if not tensor.is_cuda or on_nccl(tensor, group):
        return tensor
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return buffer.copy_(tensor) if kind == "send" else buffer


def tell(kind: str, name: str, start: Any, end: Any = None, **details: Any) -> None:
    """Tell the observers of a message or a span.

    It began at `start` (by `now`), and ended at `end` or just now.
    """
    if card.observers:
        details = {"thread": threading.current_thread().name, **details}
        event = Event(kind, name, start, now() if end is None else end, **details)
        # The loop goes over a copy, as an observer may leave the list meanwhile.
        for callback in list(card.observers):
            callback(event)
