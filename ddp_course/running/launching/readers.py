"""What arrives from the processes of a launch, read piece by piece: lines to show, text to keep, messages."""

import io
from collections.abc import Callable
from typing import Any

from .channel import Frames, read_into

READ_AT_MOST, KEPT_AT_MOST = 1 << 16, 1 << 18
LONGEST_LINE = 1 << 20  # bytes: what is printed without line ends is shown in pieces of that length
NOISE = ("[Gloo] Rank ",)  # gloo greets every new group on standard output


def read_some(file: io.RawIOBase) -> bytes | None:
    """Some bytes of an unbuffered file, b"" at its end, None if there is nothing now."""
    buffer = bytearray(READ_AT_MOST)
    count = read_into(file, buffer)
    return None if count is None else bytes(buffer[:count])


class Lines:
    """What a rank prints, cut into whole lines."""

    def __init__(self, file: Any, show: Callable):
        self.file, self.show, self.ended = file, show, False
        self.pieces, self.length = [], 0  # of the line that has not ended yet

    def read(self) -> None:
        """Take what is there."""
        taken = read_some(self.file)
        self.ended = taken == b""
        self.feed(taken or b"")

    def feed(self, taken: bytes) -> None:
        """Show the lines that `taken` completes."""
        *lines, rest = taken.split(b"\n")
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


class Text:
    """The last 256 KiB of what arrived."""

    def __init__(self, file: Any):
        self.file, self.ended, self.bytes = file, False, b""

    def read(self) -> None:
        """Take what is there."""
        taken = read_some(self.file)
        self.ended = taken == b""
        self.bytes = (self.bytes + (taken or b""))[-KEPT_AT_MOST:]

    def text(self) -> str:
        """What came, as text."""
        return self.bytes.decode("utf-8", "replace")

    def close(self) -> None:
        """Nothing is left to do."""


class Mail:
    """Messages of the agent or of one rank, each handed to `deliver(message)`; `at_end()` when the stream ends.

    The message is None where the stream is damaged.
    """

    def __init__(self, file: io.RawIOBase, deliver: Callable, at_end: Callable):
        self.frames, self.deliver, self.at_end = Frames(file), deliver, at_end
        self.ended = False

    def read(self) -> None:
        """Deliver all messages that are complete."""
        for pickled in self.frames.read():
            self.deliver(pickled)
        if self.frames.damaged:
            self.deliver(None)
        if self.frames.ended:
            self.ended = True
            self.at_end()

    def close(self) -> None:
        """Nothing is left to do."""
