"""Frames: how the grader's processes talk. Eight bytes of length and one of kind, then the content; never a pickle."""

import math
import socket
import struct
import sys
import time

HEAD = struct.Struct("<QB")
ORDER, EVIDENCE, FAILURE, LATE, COUNTED, READY = range(6)


def send_frame(connection: socket.socket, kind: int, content: bytes) -> None:
    """Send one frame."""
    connection.sendall(HEAD.pack(len(content), kind) + content)


def read_frame(connection: socket.socket, most: int = sys.maxsize, deadline: float = math.inf) -> tuple[int, bytes]:
    """The next frame as (kind, content); EOFError at the end, ValueError if it is longer than `most` bytes.

    TimeoutError if it is not there at `deadline`, seconds of the monotonic clock.
    """
    length, kind = HEAD.unpack(read_exactly(connection, HEAD.size, deadline))
    if length > most:
        raise ValueError(f"{length >> 20} MiB came back; at most {most >> 20} are taken")
    return kind, read_exactly(connection, length, deadline)


def read_exactly(connection: socket.socket, count: int, deadline: float = math.inf) -> bytes:
    """`count` bytes; EOFError if the other end closes before."""
    content = bytearray()
    while len(content) < count:
        if deadline < math.inf:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(min(count - len(content), 1 << 20))
        if not part:
            raise EOFError
        content += part
    return bytes(content)
