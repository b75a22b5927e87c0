"""What the processes of a launch say to each other, over pipes: framed messages, lines, text; and the caller's inbox.

A message is 8 bytes of length, then a pickle.
"""

import os
import pickle
import select
import selectors
import struct
from collections.abc import Callable
from typing import Any

LOOPBACK = "127.0.0.1"
PIPES_PER_RANK = 5  # they are for orders, report, stdout, stderr and stacks
HEADER = struct.Struct("<Q")
LONGEST_MESSAGE = 1 << 40  # bytes: what claims to be longer is no message
READ_AT_MOST = 1 << 16
LONGEST_LINE = 1 << 20  # bytes: a longer line is shown in pieces of that length
NOISE = ("[Gloo] Rank ",)  # gloo greets every new group on standard output


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


def close_all(descriptors: list) -> None:
    """Close open files."""
    for descriptor in descriptors:
        os.close(descriptor)


class Inbox:
    """The pipes that the processes of a launch write to; `reader(piece)` gets what arrives, b"" at the end."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()

    def add(self, descriptor: int, reader: Callable) -> None:
        """Read from an open file from now on; the inbox closes it."""
        os.set_blocking(descriptor, False)
        file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 (closed by `remove`)
        self.selector.register(file, selectors.EVENT_READ, reader)

    def pipe(self, reader: Callable) -> int:
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
                key.data(piece)
            elif piece is not None:
                self.remove(key)
        return bool(ready)

    def remove(self, key: Any) -> None:
        """Close one pipe."""
        self.selector.unregister(key.fileobj)
        key.fileobj.close()
        key.data(b"")

    def close(self) -> None:
        """Close all pipes."""
        for key in list(self.selector.get_map().values()):
            self.remove(key)
        self.selector.close()


class Lines:
    """Cuts what a rank prints into whole lines; at the end it shows what is left."""

    def __init__(self, show: Callable):
        self.show, self.rest = show, b""

    def __call__(self, piece: bytes) -> None:
        """Show the lines that `piece` completes. Of a progress bar, that is what follows its last carriage return."""
        *lines, self.rest = (self.rest + piece).split(b"\n")
        if len(self.rest) > LONGEST_LINE or (self.rest and not piece):
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
            if not text.startswith(NOISE):
                self.show(text)


class Mail:
    """Hands every message of the agent or of one rank to `deliver(pickled)`, and calls `at_end()` after the last."""

    def __init__(self, deliver: Callable, at_end: Callable = lambda: None):
        self.deliver, self.at_end, self.buffer = deliver, at_end, bytearray()

    def __call__(self, piece: bytes) -> None:
        """Deliver the messages that `piece` completes; b"" for what is none, as another program wrote it."""
        if not piece:
            self.at_end()
        self.buffer += piece
        while len(self.buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self.buffer)[0]
            if end > LONGEST_MESSAGE:
                self.buffer.clear()
                self.deliver(b"")
            elif len(self.buffer) < end:
                break
            else:
                message, self.buffer = self.buffer, self.buffer[end:]
                del message[end:], message[: HEADER.size]  # a bytearray copies nothing for this, however long it is
                self.deliver(message)
