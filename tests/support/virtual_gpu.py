"""A GPU that only keeps time: streams, events and the memory of streams, for code that runs on the
CPU meanwhile.

Work on a stream begins when what was queued there before is done, and takes the time that `work` is
told. An event marks such a moment; who waits for it goes on no earlier. Memory comes from the pool
of the stream that is current when it is taken, as CUDA's allocator has it, and goes back there at
once, although work that was queued may still use it: whoever writes too early into what it got is
found in `collisions`.
"""

import threading
import time
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from ddp_course.running import communication


class Stream:
    """A queue of work; `done` is when the last of it will be done."""

    def __init__(self, gpu, device=None):
        self.gpu = gpu
        self.device = device
        self.done = 0.0

    def record_event(self):
        """Mark the end of what was queued so far."""
        return Event(self.gpu, self.done)


class Event:
    """A moment on a stream."""

    def __init__(self, gpu, at):
        self.gpu, self.at = gpu, at

    def wait(self):
        """Let the current stream go on no earlier."""
        stream = self.gpu.current_stream()
        stream.done = max(stream.done, self.at)


class Piece:
    """A piece of memory; its last use ends at `busy`."""

    def __init__(self, pool):
        self.pool, self.busy = pool, 0.0


class VirtualGPU:
    """Streams for each thread, pools of memory, and a `log` of (what, start, end) of all work."""

    def __init__(self, lag=0.0):
        self.default, self.here, self.lag = Stream(self), threading.local(), lag
        self.pools, self.pieces, self.log, self.collisions = {}, {}, [], []

    def current_stream(self, device=None):
        """The stream on which this thread queues work."""
        return getattr(self.here, "stream", self.default)

    @contextmanager
    def stream(self, stream):
        """Queue work on `stream`; a thread that is not the first comes late, by `lag` seconds."""
        if threading.current_thread() is not threading.main_thread():
            time.sleep(self.lag)
        before, self.here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self.here.stream = before

    def work(self, what, duration, reads=(), writes=()):
        """Queue work on the current stream that reads and writes pieces of memory."""
        stream = self.current_stream()
        begin, stream.done = stream.done, stream.done + duration
        self.log.append((what, begin, stream.done))
        self.collisions += [what for piece in writes if begin < piece.busy]
        for piece in (*reads, *writes):
            piece.busy = max(piece.busy, stream.done)

    def take(self, kind):
        """A piece of memory for a whole `kind` of thing, out of the current stream's pool."""
        pool = self.pools.setdefault((self.current_stream(), kind), [])
        if not pool:
            self.pieces[kind] = self.pieces.get(kind, 0) + 1
        return pool.pop() if pool else Piece(pool)

    def give(self, piece):
        """Let a piece go."""
        piece.pool.append(piece)

    @contextmanager
    def in_place_of_cuda(self):
        """Let the code that trains on the CPU believe that its tensors are on this GPU."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(communication, "is_queued", lambda device: True))
            for name, mine in {
                "Stream": lambda device=None: Stream(self),
                "stream": self.stream,
                "current_stream": self.current_stream,
                "set_device": lambda device: None,
            }.items():
                stack.enter_context(patch.object(torch.cuda, name, mine))
            yield self
