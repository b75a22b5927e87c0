"""Streams, events and contexts, with a vector clock for each stream: what is known to be over
when work begins.

A clock is {stream: how many pieces of its work are over}. Work that is queued knows what its
stream waited for, and
what the host had waited for when it queued it. Two uses of one piece of memory, one of which
writes, are a race if
neither is known to the other: on a real GPU they may come in either order.
"""

import ctypes
import os
import sys
import threading
import time
from collections import defaultdict

import torch

from . import build
from .report import note

TORCH = os.path.dirname(torch.__file__)
HOME = os.path.dirname(os.path.abspath(__file__))
GPUS = int(os.environ["PRETEND_GPUS"])
LOCK = threading.RLock()
clocks = defaultdict(dict)  # what each stream knows, by (device, number)
host = {}  # what the processor has waited for
contexts = {}  # this maps each GPU that the process uses to the line that came first
_events = {}  # what torch's own events know, by number; the newest ten thousand
_count = [0]
native = ctypes.CDLL(str(build.library()))
native.pretend_stream.restype = native.pretend_new_stream.restype = ctypes.c_long
native.pretend_set_stream.argtypes = [ctypes.c_int, ctypes.c_long]
native.pretend_set_stream.restype = native.pretend_set_device.restype = None
native.pretend_start.restype = None


def place():
    """The line of code that is at work, outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, HOME)):
        frame = frame.f_back
    if frame is None:
        return "the backward pass"
    file = "/".join(frame.f_code.co_filename.rsplit("/", 2)[-2:])
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"


def merge(clock, other):
    """Let a clock know what another one knows."""
    for key, count in other.items():
        if clock.get(key, 0) < count:
            clock[key] = count


def visible():
    """How many GPUs this process can see."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return GPUS
    return min(GPUS, len([name for name in names.split(",") if name]))


def physical(index):
    """The machine's number of the GPU that this process calls `index`."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return int(names.split(",")[index]) if names else index


def open_context(index):
    """Use a GPU: the first use opens a context there, which on a real one takes half a GB."""
    if not 0 <= index < visible():
        raise torch.AcceleratorError(
            f"CUDA error: invalid device ordinal {index}: there are {visible()}"
        )
    if _bad_fork:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    if index not in contexts:
        thread = threading.current_thread().name
        contexts[index] = place()
        note("context", f"{physical(index)}\t{place()} in thread {thread}")
    return index


_bad_fork = []


def forget_contexts():
    """In a forked process: CUDA cannot be used if it was used before the fork."""
    if contexts:
        _bad_fork.append(True)


os.register_at_fork(after_in_child=forget_contexts)


def index_of(device=None):
    """The number of a device: a number, a name, a device or None for the current one."""
    if isinstance(device, int):
        return device
    device = torch.device(device) if isinstance(device, str) else device
    if device is None or device.index is None:
        return native.pretend_device()
    return device.index


def current(index):
    """The key of this thread's current stream of a GPU."""
    return index, native.pretend_stream(index)


def queue_work(key):
    """Queue a piece of work on a stream; return the stream's clock with that piece in it."""
    merge(clocks[key], host)
    clocks[key][key] = clocks[key].get(key, 0) + 1
    return clocks[key]


def host_waits(clock, why):
    """The processor waits until everything in a clock is over."""
    merge(host, clock)
    note("sync", f"{why} at {place()}")


class Event:
    """A moment on a stream."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.clock = {}
        self.at = None

    def record(self, stream=None):
        """Mark the end of what was queued so far."""
        stream = stream or current_stream()
        open_context(stream.device_index)
        self.clock = dict(clocks[stream.key])
        self.at = time.perf_counter()

    def wait(self, stream=None):
        """Let a stream go on no earlier."""
        merge(clocks[(stream or current_stream()).key], self.clock)

    def query(self):
        """Whether the moment is over: work here runs at once."""
        return True

    def synchronize(self):
        """Let the processor wait."""
        host_waits(self.clock, "event.synchronize")

    def elapsed_time(self, other):
        """Milliseconds of the processor: no forecast of a GPU's."""
        if self.at is None or other.at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (other.at - self.at)


class Stream:
    """A queue of work on a GPU."""

    def __init__(self, device=None, priority=0, number=None):
        index = index_of(device)
        if number is None:
            number = native.pretend_new_stream()
            open_context(index)
        self.key = (index, number)
        self.device = torch.device("cuda", index)
        self.device_index = index
        self.stream_id = number
        self.cuda_stream = number

    def __eq__(self, other):
        return isinstance(other, Stream) and self.key == other.key

    def __hash__(self):
        return hash(self.key)

    def record_event(self, event=None):
        """Mark the end of what was queued so far."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        """Go on no earlier than the event."""
        event.wait(self)

    def wait_stream(self, other):
        """Go on no earlier than all that is on another stream now."""
        merge(clocks[self.key], clocks[other.key])

    def synchronize(self):
        """Let the processor wait."""
        host_waits(clocks[self.key], "stream.synchronize")

    def query(self):
        """Whether all is over."""
        return True

    def __enter__(self):
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error):
        self._context.__exit__(*error)


class StreamContext:
    """`with torch.cuda.stream(stream)`, as torch's own does it: the old stream, and its device, are
    set again.
    """

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.before = current_stream()
            self.before_there = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *error):
        if self.stream is not None:
            if self.before.device_index != self.stream.device_index:
                set_stream(self.before_there)
            set_stream(self.before)


def current_stream(device=None):
    """This thread's current stream of a GPU."""
    index = index_of(device)
    return Stream(index, number=native.pretend_stream(index))


def set_stream(stream):
    """Make a stream, and its device, this thread's current ones."""
    set_device(stream.device_index)
    native.pretend_set_stream(*stream.key)


def set_device(device):
    """Make a GPU this thread's current one, which opens a context there."""
    index = index_of(device)
    if index >= 0:
        native.pretend_set_device(open_context(index))


def start():
    """Tell the C++ half whom to call for the events that torch itself records and waits for."""

    def record(device, stream):
        _count[0] += 1
        _events[_count[0]] = dict(clocks[(device, stream)])
        _events.pop(_count[0] - 10_000, None)
        return _count[0]

    def block(event, device, stream):
        merge(clocks[(device, stream)], _events.get(event, {}))

    recorded = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.c_long)(record)
    blocked = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_int, ctypes.c_long)(block)
    _keep.extend([recorded, blocked])
    native.pretend_start(recorded, blocked)


_keep = []
