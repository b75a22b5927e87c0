"""The two links of a rank in a ring: tensors go to the right, and come from the left, in order.

gloo sends messages: for each message it asks whether the receiver is ready, and wakes up a thread
of its own to move it, which takes long when there are more threads than cores. In a ring no rank
needs to ask, because each knows what comes next. So a plain TCP stream is enough: one thread
writes, the caller reads, and nothing but the tensors travels.

    with streams.to_neighbours(group, nbytes) as links:
        links.send(tensor)                          # returns at once; leave `tensor` alone until
                                                    the end of the block
        for tensor in links.received(tensors):      # in the order in which the left neighbour sends
                                                    them
            ...
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ddp_course import wire
from ddp_course.base.torch_private import timeout_of

ADDRESS_BYTES = 128  # "host port password" is filled up to this length with spaces.
PASSWORD_BYTES = 16
SIZE_BYTES = 8
PASSWORD_SECONDS = 5.0  # A connection that sends no password for this many seconds is closed.
_open: WeakKeyDictionary = WeakKeyDictionary()  # {process group: its streams}


@contextmanager
def to_neighbours(group: dist.ProcessGroup | None, nbytes: int) -> Iterator["Streams"]:
    """Yield the links of this rank in the ring of `group`, for tensors of `nbytes` in all.

    The block ends when all have left. All ranks must enter together, because the first time they
    connect. A ValueError says that the left neighbour's tensor has another size. After an error the
    streams are closed, because parts of a tensor may still be in them, and the neighbours get a
    ConnectionError. If all ranks go on nevertheless, they connect anew.
    """
    group = group or dist.group.WORLD
    if group not in _open:
        _open[group] = Streams(group)
    links = _open[group]
    try:
        links.agree(nbytes)
        yield links
        links.finish()
    except BaseException:
        _open.pop(group, None)
        links.close()
        raise


class Streams:
    """Two TCP connections, and the thread that writes into one of them."""

    def __init__(self, group):
        _, _, self.left, self.right = wire.neighbours(group)
        self.incoming, self.outgoing = connect(self.left, self.right, group)
        self.writer = ThreadPoolExecutor(1, "send")
        self.leaving = []  # These are the futures of what has not left for sure.

    def agree(self, nbytes: int) -> None:
        """Raise ValueError if the left neighbour is about to sum another number of bytes.

        A stream does not mark where a message ends, so nothing else would show this.
        """
        own_size = nbytes.to_bytes(SIZE_BYTES, "little")
        self.leaving.append(self.writer.submit(self.outgoing.sendall, own_size))
        left_size = bytearray(SIZE_BYTES)
        self.fill(memoryview(left_size))
        left_bytes = int.from_bytes(left_size, "little")
        if left_bytes != nbytes:
            raise ValueError(
                f"rank {self.left} sums a tensor of {left_bytes} bytes, this rank one of {nbytes}"
            )

    def send(self, tensor: torch.Tensor) -> None:
        """Send a flat `tensor` as soon as those before it have left."""
        self.leaving.append(self.writer.submit(self.write, tensor))

    def write(self, tensor: torch.Tensor) -> None:
        """Put all bytes of `tensor` into the stream, in the writer's thread."""
        start = perf_counter()
        try:
            self.outgoing.sendall(bytes_of(tensor))
        except BaseException:
            self.close()  # This wakes up the reader, whose bytes may never come.
            raise
        report("send", tensor, start, self.right)

    def received(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Fill the flat `tensors` one after the other; yield each when it is full."""
        for tensor in tensors:
            start = perf_counter()
            self.fill(bytes_of(tensor))
            report("recv", tensor, start, self.left)
            yield tensor

    def fill(self, rest: memoryview) -> None:
        """Read until all the bytes of `rest` have come."""
        while rest:
            try:
                count = self.incoming.recv_into(rest)
            except TimeoutError:
                seconds = self.incoming.gettimeout()
                raise TimeoutError(
                    f"rank {self.left} has sent nothing for {seconds:g} s; is it running?"
                ) from None
            if count == 0:
                raise ConnectionError(
                    f"Connection closed by peer: rank {self.left}, or one that it waited for, has"
                    " failed"
                )
            rest = rest[count:]

    def finish(self) -> None:
        """Wait until everything has left."""
        leaving = self.leaving
        self.leaving = []
        for sent in leaving:
            sent.result()

    def close(self) -> None:
        """End both connections, for the neighbours too."""
        for stream in (self.incoming, self.outgoing):
            with suppress(OSError):  # The neighbour may have closed it before.
                stream.shutdown(socket.SHUT_RDWR)


def connect(left: int, right: int, group: dist.ProcessGroup) -> tuple[socket.socket, socket.socket]:
    """Return the stream from rank `left` and that to rank `right`, with the group's own timeout.

    Each rank opens a door, tells its left neighbour where that is, and connects to the right
    neighbour's.
    """
    seconds = timeout_of(group).total_seconds()
    family, address = own_address()
    password = secrets.token_bytes(PASSWORD_BYTES)
    with socket.create_server((address, 0), family=family) as door:
        _, own_port, *_ = door.getsockname()
        text = f"{address} {own_port} {password.hex()}".encode().ljust(ADDRESS_BYTES)
        mine = torch.tensor(list(text), dtype=torch.uint8)
        theirs = torch.empty_like(mine)
        arriving = dist.irecv(theirs, right, group)
        leaving = dist.isend(mine, left, group)
        arriving.wait()
        host, port, their_password = bytes(theirs.tolist()).decode().split()
        outgoing = socket.create_connection((host, int(port)), timeout=seconds)
        outgoing.sendall(bytes.fromhex(their_password))
        incoming = let_in(door, password, time.monotonic() + seconds)
        leaving.wait()
    incoming.settimeout(seconds)
    for stream in (incoming, outgoing):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return incoming, outgoing


def let_in(door: socket.socket, password: bytes, deadline: float) -> socket.socket:
    """Return the first connection that begins with the password, and close the others.

    Only the left neighbour has the password.
    """
    while True:
        door.settimeout(max(deadline - time.monotonic(), 0.001))
        stream, _ = door.accept()
        stream.settimeout(PASSWORD_SECONDS)
        with suppress(OSError):
            if secrets.compare_digest(stream.recv(PASSWORD_BYTES, socket.MSG_WAITALL), password):
                return stream
        stream.close()


def own_address() -> tuple[socket.AddressFamily, str]:
    """Return the address, with its family, under which other ranks reach this one.

    It is that from which this rank reaches MASTER_ADDR.
    """
    # The first answer will do; nothing listens at port 1, and nothing has to.
    places = socket.getaddrinfo(os.environ["MASTER_ADDR"], port=1, type=socket.SOCK_DGRAM)
    family, kind, _, _, there = places[0]
    with socket.socket(family, kind) as probe:
        # This sends nothing: for datagrams, `connect` only looks up the route.
        probe.connect(there)
        return family, probe.getsockname()[0]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a flat `tensor` as bytes."""
    # An array is a buffer, but its type does not say so.
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array)


def report(kind: str, tensor: torch.Tensor, start: float, peer: int) -> None:
    """Report one message to the observers of the wire; an empty tensor is no message."""
    if tensor.numel():
        wire.tell(kind, kind, start, bytes=tensor.numel() * tensor.element_size(), peer=peer)
