"""Framed messages between the processes of a launch: 8 bytes of length, then a pickle."""

import io
import os
import pickle
import select
import socket
import struct
from contextlib import suppress
from typing import IO, Any

HEADER = struct.Struct("<Q")
READ_AT_MOST = 1 << 20
DESCRIPTORS_PER_MESSAGE = 200  # Linux carries at most 253


def frame(message: Any) -> list:
    """The length and the pickle of `message`, ready to be written one after the other."""
    pickled = message if isinstance(message, (bytes, memoryview)) else pickle.dumps(message, protocol=5)
    return [HEADER.pack(len(pickled)), pickled]


def send(connection: socket.socket, message: Any) -> None:
    """Send `message` (bytes are taken as already pickled); blocks until it is out."""
    for part in frame(message):
        connection.sendall(part)


def write(descriptor: int, message: Any) -> None:
    """Write `message` (bytes are taken as already pickled) to a pipe; blocks until it is out."""
    for part in frame(message):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def put(file: IO[bytes], message: Any) -> None:
    """Write `message` to a process that may have ended."""
    with suppress(OSError):
        for part in frame(message):
            file.write(part)
        file.flush()


def read_frame(descriptor: int, patience: float | None = None) -> bytes:
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


def send_descriptors(connection: socket.socket, descriptors: list) -> None:
    """Pass open files to the process at the other end."""
    for first in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
        socket.send_fds(connection, [b"f"], descriptors[first : first + DESCRIPTORS_PER_MESSAGE])


def receive_descriptors(connection: socket.socket, count: int) -> list:
    """The other end of `send_descriptors`."""
    received = []
    while len(received) < count:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, DESCRIPTORS_PER_MESSAGE)
        if not data:
            raise EOFError("the caller of this launch is gone")
        received += descriptors
    return received


class Frames:
    """Collects the messages that arrive from an unbuffered file, piece by piece, whatever their size."""

    def __init__(self, file: io.RawIOBase):
        self.file, self.ended, self.damaged = file, False, False
        self._expect(HEADER.size, reading_header=True)

    def _expect(self, size, reading_header):
        self.buffer, self.filled, self.reading_header = bytearray(size), 0, reading_header

    def read(self) -> list:
        """The pickles of all messages that are complete by now; sets `ended` at the end, and `damaged` at nonsense."""
        complete = []
        while not self.ended:
            with memoryview(self.buffer)[self.filled : self.filled + READ_AT_MOST] as view:
                count = read_into(self.file, view)
            if count is None:
                break
            self.ended = count == 0
            self.filled += count
            if self.filled == len(self.buffer):
                complete += self._next()
        return complete

    def _next(self):
        whole, was_header = self.buffer, self.reading_header
        size = HEADER.unpack(whole)[0] if was_header else HEADER.size
        try:
            self._expect(size, reading_header=not was_header)
        except (MemoryError, OverflowError):  # no message is that long
            self.ended = self.damaged = True
        return [] if was_header else [whole]


def read_into(file: io.RawIOBase, view: Any) -> int | None:
    """How many bytes were there for `view`: 0 at the end of the stream, None if there is nothing now."""
    try:
        return file.readinto(view)
    except ConnectionError:
        return 0
