"""Framed messages between the processes of a launch: 8 bytes of length, then a pickle."""

import io
import os
import pickle
import socket
import struct
from typing import Any

HEADER = struct.Struct("<Q")
READ_AT_MOST = 1 << 20
DESCRIPTORS_A_MESSAGE = 200  # Linux carries at most 253


def frame(message: Any) -> list:
    """The length and the pickle of `message`, ready to be written one after the other."""
    pickled = message if isinstance(message, bytes) else pickle.dumps(message, protocol=5)
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


def send_descriptors(connection: socket.socket, descriptors: list) -> None:
    """Pass open files to the process at the other end."""
    for first in range(0, len(descriptors), DESCRIPTORS_A_MESSAGE):
        socket.send_fds(connection, [b"f"], descriptors[first : first + DESCRIPTORS_A_MESSAGE])


def receive_descriptors(connection: socket.socket, count: int) -> list:
    """The other end of `send_descriptors`."""
    received = []
    while len(received) < count:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, DESCRIPTORS_A_MESSAGE)
        if not data:
            raise EOFError("the caller of this launch is gone")
        received += descriptors
    return received


class Frames:
    """Collects the messages that arrive from an unbuffered file, piece by piece, whatever their size."""

    def __init__(self, file: io.RawIOBase):
        self.file, self.ended = file, False
        self._expect(HEADER.size, reading_header=True)

    def _expect(self, size, reading_header):
        self.buffer, self.filled, self.reading_header = bytearray(size), 0, reading_header

    def read(self) -> list:
        """The pickles of all messages that are complete by now; sets `ended` at the end of the stream."""
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
        self._expect(HEADER.unpack(whole)[0] if was_header else HEADER.size, reading_header=not was_header)
        return [] if was_header else [whole]


def read_into(file: io.RawIOBase, view: Any) -> int | None:
    """How many bytes were there for `view`: 0 at the end of the stream, None if there is nothing now."""
    try:
        return file.readinto(view)
    except ConnectionError:
        return 0
