"""Framed messages between the processes of a launch: 8 bytes of length, then a pickle."""

import os
import pickle
import select
import socket
import struct
from typing import Any

HEADER = struct.Struct("<Q")
READ_AT_MOST = 1 << 20
DESCRIPTORS_PER_MESSAGE = 200  # Linux carries at most 253


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
