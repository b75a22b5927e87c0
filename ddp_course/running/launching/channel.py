"""What the processes of a launch say to each other, over pipes: framed messages, lines, text; and the caller's inbox.

A message is 8 bytes of length, then a pickle.
"""

import os
import pickle
import select
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any

LOOPBACK = "127.0.0.1"
PIPES_PER_RANK = 5  # they are for orders, report, stdout, stderr and stacks
HEADER = struct.Struct("<Q")
LONGEST_MESSAGE = 1 << 40  # bytes: what claims to be longer is no message
READ_AT_MOST, KEPT_AT_MOST = 1 << 16, 1 << 18
LONGEST_LINE = 1 << 20  # bytes: a longer line is shown in pieces of that length
NOISE = ("[Gloo] Rank ",)  # gloo greets every new group on standard output
MOST_DESCRIPTORS = 16  # one message carries at most so many


def write(descriptor: int, message: Any) -> None:
    """Write `message` (bytes are taken as already pickled) to a pipe or a socket; blocks until it is out."""
    pickled = message if isinstance(message, (bytes, memoryview)) else pickle.dumps(message, protocol=5)
    for part in (HEADER.pack(len(pickled)), pickled):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def read_message(descriptor: int, patience: float | None = None) -> bytes:
    """One message from a pipe, still pickled; b"" at its end, TimeoutError if none begins within so many seconds."""
    if patience is not None and not select.select([descriptor], [], [], patience)[0]:
        raise TimeoutError
    header = read_exactly(descriptor, HEADER.size)
    return read_exactly(descriptor, HEADER.unpack(header)[0]) if header else b""


def read_exactly(descriptor: int, size: int) -> bytes:
    """So many bytes from a pipe; b"" if it ends before."""
    buffer = bytearray()
    while len(buffer) < size:
        piece = os.read(descriptor, min(READ_AT_MOST, size - len(buffer)))
        if not piece:
            return b""
        buffer += piece
    return bytes(buffer)


def receive_descriptors(connection: socket.socket, count: int) -> list:
    """So many open files, which the process at the other end passes in messages of one byte."""
    received = []
    while len(received) < count:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, MOST_DESCRIPTORS)
        if not data:
            raise EOFError("the caller of this launch is gone")
        received += descriptors
    return received


def close_all(descriptors: list) -> None:
    """Close open files."""
    for descriptor in descriptors:
        os.close(descriptor)


class Inbox:
    """The pipes that the processes of a launch write to; `reader.feed` gets what arrives, `reader.close` the end."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()

    def add(self, descriptor: int, reader: Any) -> None:
        """Read from an open file from now on; the inbox closes it."""
        os.set_blocking(descriptor, False)
        file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 (closed by `remove`)
        self.selector.register(file, selectors.EVENT_READ, reader)

    def pipe(self, reader: Any) -> int:
        """Open a pipe for `reader`; returns its writing end."""
        reading, writing = os.pipe()
        self.add(reading, reader)
        return writing

    def read(self, seconds: float) -> bool:
        """Pass on what has arrived, waiting at most `seconds` for it; False if nothing came."""
        ready = self.selector.select(seconds)
        for key, _ in ready:
            try:
                piece = key.fileobj.read(READ_AT_MOST)
            except ConnectionError:
                piece = b""
            if piece:
                key.data.feed(piece)
            elif piece is not None:
                self.remove(key)
        return bool(ready)

    def remove(self, key: Any) -> None:
        """Close one pipe."""
        self.selector.unregister(key.fileobj)
        key.fileobj.close()
        key.data.close()

    def close(self) -> None:
        """Close all pipes."""
        for key in list(self.selector.get_map().values()):
            self.remove(key)
        self.selector.close()


class Lines:
    """Cuts what a rank prints into whole lines."""

    def __init__(self, show: Callable):
        self.show = show
        self.pieces, self.length = [], 0  # of the line that has not ended yet

    def feed(self, piece: bytes) -> None:
        """Show the lines that `piece` completes."""
        *lines, rest = piece.split(b"\n")
        for line in lines:
            self.say(b"".join([*self.pieces, line]))
            self.pieces, self.length = [], 0
        if rest:
            self.pieces.append(rest)
            self.length += len(rest)
        if self.length > LONGEST_LINE:
            self.close()

    def say(self, line: bytes) -> None:
        """Show one line, unless it is a library's chatter; of a progress bar, what follows its last carriage return."""
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        if not text.startswith(NOISE):
            self.show(text)

    def close(self) -> None:
        """Show what is left, whole line or not."""
        if self.pieces:
            self.say(b"".join(self.pieces))
        self.pieces, self.length = [], 0


class Pieces:
    """Hands on what arrives as it comes."""

    def __init__(self, deliver: Callable):
        self.feed = deliver

    def close(self) -> None:
        """Nothing is left to do."""


class Text:
    """Keeps the last 256 KiB of what arrived."""

    def __init__(self):
        self.bytes = b""

    def feed(self, piece: bytes) -> None:
        """Keep a piece."""
        self.bytes = (self.bytes + piece)[-KEPT_AT_MOST:]

    def text(self) -> str:
        """What came, as text."""
        return self.bytes.decode("utf-8", "replace")


class Mail:
    """Hands every message of the agent or of one rank to `deliver(pickled)`, and calls `at_end()` after the last."""

    def __init__(self, deliver: Callable, at_end: Callable):
        self.deliver, self.close = deliver, at_end
        self.buffer, self.size, self.in_header, self.damaged = bytearray(), HEADER.size, True, False

    def feed(self, piece: bytes) -> None:
        """Deliver the messages that `piece` completes; a message is never copied, however long it is."""
        rest = memoryview(piece)
        while rest and not self.damaged:
            missing = self.size - len(self.buffer)
            self.buffer += rest[:missing]
            rest = rest[missing:]
            if len(self.buffer) == self.size:
                whole, self.buffer = self.buffer, bytearray()
                self.in_header = not self.in_header
                if self.in_header:
                    self.size = HEADER.size
                    self.deliver(whole)
                else:
                    self.size = HEADER.unpack(whole)[0]
                    if self.size > LONGEST_MESSAGE:  # something else in that process wrote into the pipe
                        self.deliver(b"")
                        self.damaged = True
