"""What the processes of a launch say to each other, line by line over pipes, and the inbox where
the caller reads it.

A message is a line too: a pickle in hexadecimal digits. A call or a result may be long, so it is in
a file without a name, which both sides have open.
"""

import os
import pickle
import selectors
import tempfile
from collections.abc import Callable
from typing import IO, Any

LOOPBACK = "127.0.0.1"
FILES_PER_RANK = 6  # these files carry orders, messages, stdout, stderr, stacks and the answer
CALL, LEAVE = (
    b"c",
    b"l",
)  # CALL orders ranks to take another call, LEAVE to end, once all have answered
READ_AT_MOST = 1 << 16
LONGEST_LINE = 1 << 20  # a line of more bytes is shown in pieces of this length
NOISE = ("[Gloo] Rank ",)  # gloo prints such lines for every new group


def send(descriptor: int, *message: Any) -> None:
    """Send a short message over a pipe or a socket."""
    os.write(descriptor, pickle.dumps(message).hex().encode() + b"\n")


def parse(line: str) -> tuple:
    """Return the message in a line; raises an exception, of any type, if the line holds no
    message.
    """
    return pickle.loads(bytes.fromhex(line))


def open_memory(name: str, content: bytes = b"") -> IO[bytes]:
    """Open a new file that no folder lists, in memory where the system can do that: a full disk is
    no obstacle then.
    """
    in_memory = hasattr(os, "memfd_create")
    file = open(os.memfd_create(name), "w+b") if in_memory else tempfile.TemporaryFile()  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file


class Lines:
    """Cuts the bytes from a pipe into whole lines; at the pipe's end it shows the rest, and calls
    `at_end`.
    """

    def __init__(self, show: Callable, at_end: Callable = lambda: None):
        self.show, self.at_end, self.rest = show, at_end, b""

    def __call__(self, piece: bytes) -> None:
        """Show the lines that `piece` completes; of a progress bar, show the text after its last
        carriage return.
        """
        *lines, self.rest = (self.rest + piece).split(b"\n")
        if len(self.rest) > LONGEST_LINE or (self.rest and not piece):
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
            if not text.startswith(NOISE):
                self.show(text)
        if not piece:
            self.at_end()


class Inbox:
    """The pipes that the processes of a launch write to; each pipe has a function that gets its
    lines.
    """

    def __init__(self):
        self.selector = selectors.DefaultSelector()

    def add(self, descriptor: int, lines: Lines) -> None:
        """Read from an open file from now on; the inbox closes it."""
        self.selector.register(descriptor, selectors.EVENT_READ, lines)

    def pipe(self, show: Callable) -> int:
        """Open a pipe whose lines `show` gets; return its writing end."""
        reading, writing = os.pipe()
        self.add(reading, Lines(show))
        return writing

    def read(self, seconds: float) -> bool:
        """Pass on what has arrived, after at most `seconds` of waiting; return False if nothing
        came.
        """
        ready = self.selector.select(seconds)
        for key, _ in ready:
            try:
                piece = os.read(key.fd, READ_AT_MOST)
            except ConnectionError:
                piece = b""
            if piece:
                key.data(piece)
            else:
                self.remove(key)
        return bool(ready)

    def remove(self, key: selectors.SelectorKey) -> None:
        self.selector.unregister(key.fd)
        os.close(key.fd)
        key.data(b"")

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            self.remove(key)
        self.selector.close()
