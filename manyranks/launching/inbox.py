"""The caller's inbox: it reads the pipes to which the processes of a launch write.

One loop reads all of them, without threads or signal handlers on which a cell could hang.
"""

import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

READ_AT_MOST = 1 << 16  # A pipe holds so many bytes.
LONGEST_LINE = 1 << 20  # A line of more bytes is shown in pieces.
LONGEST_MESSAGE = 1 << 16  # No message has more bytes.
NOISE = "[Gloo] Rank "  # gloo prints lines that begin like this for every new group.


class Lines:
    """Reads what a rank prints, cuts it into lines, and calls `show` with each whole line."""

    def __init__(self, show: Callable[[str], None]):
        self.show = show
        self.rest = b""  # the beginning of a line

    def read(self, descriptor: int) -> bool:
        """Read what has arrived; return False at the end."""
        piece = os.read(descriptor, READ_AT_MOST)
        self.show_lines(piece)
        return bool(piece)

    def show_lines(self, piece: bytes) -> None:
        """Show the lines that `piece` completes.

        An empty piece is the end, where the rest is shown. Of a line with carriage returns, such as
        a progress bar's, the text after the last one is shown.
        """
        *lines, self.rest = (self.rest + piece).split(b"\n")
        if len(self.rest) > LONGEST_LINE or (self.rest and not piece):
            lines.append(self.rest)
            self.rest = b""
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r")
            _, _, text = text.rpartition("\r")
            if not text.startswith(NOISE):
                self.show(text)


class Messages:
    """Reads the messages of a process, and calls `deliver` with each.

    In place of a message that cannot be read, `deliver` gets an exception, and at the end None.

    A message is written in one piece. A message that is not there whole was written by something
    else: to wait for more of it would raise BlockingIOError.
    """

    def __init__(self, deliver: Callable[[Any], None]):
        self.deliver = deliver

    def read(self, descriptor: int) -> bool:
        """Read one message; return False at the end, or after a message that cannot be read."""
        message: Any = None
        with Connection(os.dup(descriptor)) as connection:
            try:
                message = pickle.loads(connection.recv_bytes(LONGEST_MESSAGE))
            except (EOFError, ConnectionError):
                pass
            except Exception as error:
                message = error
        self.deliver(message)
        return not (message is None or isinstance(message, Exception))


class Inbox:
    """The files to which the processes of a launch write, with a reader for each descriptor.

    The inbox closes the files.
    """

    def __init__(self) -> None:
        self.readers: dict[int, Lines | Messages] = {}

    def pipe(self, reader: Lines | Messages) -> int:
        """Open a pipe for a reader; return its writing end."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.readers[reading] = reader
        return writing

    def read(self, seconds: float) -> bool:
        """Pass on what arrives within `seconds`; return False if nothing came."""
        ready: list[Any] = wait(list(self.readers), seconds)
        for descriptor in ready:
            if not self.readers[descriptor].read(descriptor):
                self.remove(descriptor)
        return bool(ready)

    def remove(self, descriptor: int) -> None:
        """Read from this file no more, and close it."""
        del self.readers[descriptor]
        os.close(descriptor)

    def close(self) -> None:
        """Show the lines that have no end yet, and close all files."""
        for descriptor, reader in list(self.readers.items()):
            if isinstance(reader, Lines):
                reader.show_lines(b"")
            self.remove(descriptor)
