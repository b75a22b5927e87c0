"""The network between the ranks of an answer: a switch, outside of their processes, which counts what leaves each.

A rank's only way to another one is its socket to the switch, so that no call, store or shared memory carries a byte
that is not counted. In a rank it looks like any backend of `torch.distributed`. A message leaves when its receive has
been posted, as with gloo: two neighbours that both send first wait for ever, here as on a real network.
"""

import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..errors import Wrong
from ..running.torch_inside import is_backend, torch_c10d
from .frames import read_exactly
from .plain import DTYPES
from .probing import TOO_LONG, patience_seconds

ASK = struct.Struct("<BIIQQB")  # to the switch: what, number of the request, peer, channel, bytes, dtype
TELL = struct.Struct("<IBBQ")  # from it: number of the request, whether it fits, dtype of what was sent, bytes
SEND, RECEIVE = range(2)
MOST_BYTES = 64 << 20  # a message
KINDS = [*DTYPES.values()]  # a dtype travels as its place here, any other as their number
ANOTHER_DTYPE = "a tensor of {} was sent, and received into one of {}: do both sides mean the same chunk and dtype?"
_wires: list["Wire"] = []  # this rank's


class Switch:
    """Passes messages between ranks; `sent[a][b]` are the bytes that left rank a for rank b."""

    def __init__(self, sockets: Sequence[socket.socket]):
        self.sockets = list(sockets)
        self.start_counting()
        self.nonsense: list[int] = []  # ranks that sent what is no request
        self.waiting: dict[tuple, deque] = defaultdict(deque)

    def start_counting(self) -> None:
        """Forget what has been sent so far."""
        self.sent = [[0] * len(self.sockets) for _ in self.sockets]

    def take(self, rank: int, deadline: float) -> None:
        """Read one request of a rank and do what it makes possible; OSError, EOFError or ValueError ends that rank."""
        what, number, peer, channel, length, kind = ASK.unpack(read_exactly(self.sockets[rank], ASK.size, deadline))
        if what not in (SEND, RECEIVE) or peer >= len(self.sockets) or length > MOST_BYTES or kind > len(KINDS):
            self.nonsense.append(rank)
            raise ValueError("no message")
        pair = (rank, peer, channel) if what == SEND else (peer, rank, channel)
        content = read_exactly(self.sockets[rank], length, deadline) if what == SEND else length
        if what == SEND:
            self.sent[rank][peer] += length
        others = self.waiting[(1 - what, *pair)]
        if not others:
            self.waiting[(what, *pair)].append((number, content, kind))
            return
        one, other = (number, content, kind), others.popleft()
        self.deliver(pair, *((one, other) if what == SEND else (other, one)))

    def deliver(self, pair: tuple, leaving: tuple, arriving: tuple) -> None:
        """Tell both ends of a message that it has gone over."""
        (sender, message, kind), (receiver, room, _) = leaving, arriving
        fits = len(message) <= room
        with suppress(OSError):  # a rank that has ended
            self.sockets[pair[0]].sendall(TELL.pack(sender, True, kind, 0))
        with suppress(OSError):
            self.sockets[pair[1]].sendall(TELL.pack(receiver, fits, kind, len(message) if fits else 0))
            self.sockets[pair[1]].sendall(message if fits else b"")


class Wire:
    """A rank's end: requests go out from any thread, answers come in through one of its own."""

    def __init__(self, connection: socket.socket):
        self.connection, self.lock = connection, threading.Lock()
        self.open: dict[int, Message] = {}
        self.count = 0
        threading.Thread(target=self.listen, daemon=True).start()

    def post(self, what: int, peer: int, channel: int, tensor: torch.Tensor, patience: float) -> "Message":
        """Send a tensor, or wait for one, to or from a rank of the whole job."""
        message = Message(what, peer, tensor, patience)
        content = as_bytes(tensor) if what == SEND else b""
        with self.lock:
            self.count += 1
            self.open[self.count] = message
            size = tensor.numel() * tensor.element_size()
            kind = KINDS.index(tensor.dtype) if tensor.dtype in KINDS else len(KINDS)
            self.connection.sendall(ASK.pack(what, self.count, peer, channel, size, kind) + content)
        return message

    def listen(self) -> None:
        """Finish messages as the switch tells of them, until it hangs up."""
        with suppress(OSError, EOFError):
            while True:
                number, fits, kind, length = TELL.unpack(read_exactly(self.connection, TELL.size))
                content = read_exactly(self.connection, length)
                self.open.pop(number).finish(bool(fits), [*KINDS, None][kind], content)


class Message:
    """A message on its way: what `dist.isend` and `dist.irecv` return."""

    def __init__(self, what: int, peer: int, tensor: torch.Tensor, patience: float):
        self.what, self.peer, self.tensor, self.patience = what, peer, tensor, patience
        self.done, self.fits, self.content = threading.Event(), True, b""
        self.sent: torch.dtype | None = tensor.dtype

    def finish(self, fits: bool, sent: torch.dtype | None, content: bytes) -> None:
        """The switch has passed it on; what was `sent` had this dtype, if it is a usual one."""
        self.fits, self.sent, self.content = fits, sent, content
        self.done.set()

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return self.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has arrived, and put what was received into the tensor; RuntimeError after the patience."""
        if not self.done.wait(timeout.total_seconds() if timeout else self.patience):
            raise RuntimeError(f"Timed out waiting for {'send to' if self.what == SEND else 'recv from'} {self.peer}")
        if self.sent != self.tensor.dtype and torch.uint8 not in (self.sent, self.tensor.dtype) and self.sent:
            raise Wrong(ANOTHER_DTYPE.format(self.sent, self.tensor.dtype))
        if not self.fits:
            raise Wrong(TOO_LONG)
        if self.content:
            flat = torch.frombuffer(bytearray(self.content), dtype=self.tensor.dtype)
            with torch.no_grad():
                self.tensor.view(-1)[: len(flat)].copy_(flat)
            self.content = b""
        return True


class Group(torch_c10d.ProcessGroup):
    """A process group over the switch. Collectives are there for DDP's own needs, and each byte of them counts."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, options: Any):
        super().__init__(options.group_rank, options.group_size)
        self.me, self.named = options.group_rank, options.group_id
        self.members = options.global_ranks_in_group or list(range(options.group_size))
        self._timeout = options.timeout

    def getBackendName(self) -> str:
        """What torch calls it."""
        return "relay"

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(options=self, supports_coalescing=False)

    @property
    def group_name(self) -> str:
        """The name that all members know it by."""
        return self.named

    def post(self, what: int, tensors: Sequence[torch.Tensor], peer: int, tag: object) -> Message:
        """One message to or from a member of the group."""
        if peer == self.me:
            raise Wrong("a rank sends to itself, or receives from itself: the others are meant")
        (tensor,) = tensors
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        channel = int.from_bytes(blake2b(f"{self.named} {tag}".encode(), digest_size=8).digest(), "little")
        return _wires[0].post(what, self.members[peer], channel, tensor, patience_seconds.get())

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Message:
        """Send one tensor to a member."""
        return self.post(SEND, tensors, peer, tag)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Message:
        """Receive one tensor from a member."""
        return self.post(RECEIVE, tensors, peer, tag)

    def everyones(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all members, in rank order."""
        flat = tensor.detach().contiguous().reshape(-1)
        found = [flat.clone() for _ in range(self.size())]
        others = [peer for peer in range(self.size()) if peer != self.me]
        arriving = [self.post(RECEIVE, [found[peer]], peer, "all") for peer in others]
        for message in [*arriving, *(self.post(SEND, [flat], peer, "all") for peer in others)]:
            message.wait()
        return [one.view(tensor.shape) for one in found]

    def barrier(self, opts: Any = None) -> Any:
        """Wait until all members are here."""
        return finished(self.everyones(torch.zeros(0)))

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """The root's tensors on all members."""
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self.everyones(tensor)[opts.rootRank])
        return finished(list(tensors))

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """The sum, or the largest, on all members."""
        largest = opts is not None and opts.reduceOp == dist.ReduceOp.MAX
        with torch.no_grad():
            for tensor in tensors:
                stacked = torch.stack(self.everyones(tensor))
                tensor.copy_(stacked.amax(0) if largest else stacked.sum(0))
        return finished(list(tensors))

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """All members' tensors on all members."""
        with torch.no_grad():
            for places, tensor in zip(outputs, tensors, strict=True):
                for place, one in zip(places, self.everyones(tensor), strict=True):
                    place.copy_(one)
        return finished(outputs)


def finished(result: Any) -> Any:
    """A piece of work that is done, as torch's own code wants it."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    return torch_c10d._create_work_from_future(future)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """What a tensor holds."""
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def join(connection: socket.socket, rank: int, count: int) -> None:
    """Make the switch at the other end of `connection` the network of this process, as one rank of `count`."""
    if not is_backend("RELAY"):
        dist.Backend.register_backend("relay", lambda options, _: Group(options), extended_api=True, devices=["cpu"])
    _wires[:] = [Wire(connection)]
    dist.init_process_group("relay", store=dist.HashStore(), rank=rank, world_size=count)
