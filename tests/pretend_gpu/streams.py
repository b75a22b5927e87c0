"""Streams, events and contexts of pretended GPUs, with a vector clock for each stream.

A clock is {stream: how many pieces of its work are over}: it says what is known to be over when
work begins. Work that is queued knows what its stream has waited for, and what the host had waited
for when it queued the work. Two uses of one piece of memory, one of which writes, are a race if
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
MOST_EVENTS = 10_000  # So many of torch's own events are remembered, the newest ones.
clocks = defaultdict(dict)  # what each stream knows, by (device, number)
host = {}  # what the host has waited for, as a clock
contexts = {}  # this maps each GPU that the process uses to the line that came first
fork_is_bad = False  # True in a child that was forked after its parent had used CUDA
native = ctypes.CDLL(str(build.library()))
native.pretend_stream.restype = native.pretend_new_stream.restype = ctypes.c_long
native.pretend_set_stream.argtypes = [ctypes.c_int, ctypes.c_long]
native.pretend_set_stream.restype = native.pretend_set_device.restype = None
native.pretend_start.restype = None


def place():
    """Return the line of code that is at work, outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, HOME)):
        frame = frame.f_back
    if frame is None:
        return "the backward pass"
    file = "/".join(frame.f_code.co_filename.rsplit("/", 2)[-2:])
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"


def merge(clock, other):
    """Let `clock` know what `other` knows."""
    for key, count in other.items():
        if clock.get(key, 0) < count:
            clock[key] = count


def visible():
    """Return how many GPUs this process can see."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return GPUS
    return min(GPUS, len([name for name in names.split(",") if name]))


def physical(index):
    """Return the machine's number of the GPU that this process calls `index`."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return int(names.split(",")[index]) if names else index


def open_context(index):
    """Use a GPU, and return its number.

    The first use opens a context there, which takes half a GB of a real GPU's memory.
    """
    if not 0 <= index < visible():
        raise torch.AcceleratorError(
            f"CUDA error: invalid device ordinal {index}: there are {visible()}"
        )
    if fork_is_bad:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    if index not in contexts:
        thread = threading.current_thread().name
        contexts[index] = place()
        note("context", f"{physical(index)}\t{contexts[index]} in thread {thread}")
    return index


def refuse_cuda_after_fork():
    """Make CUDA unusable in a forked child, as it is if the parent had used it before."""
    global fork_is_bad
    fork_is_bad = fork_is_bad or bool(contexts)


os.register_at_fork(after_in_child=refuse_cuda_after_fork)


def index_of(device=None):
    """Return the number of a device, given as number, name or torch.device; None is the current."""
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if device is None or device.index is None:
        return native.pretend_device()
    return device.index


def current(index):
    """Return the key of this thread's current stream of a GPU, as `clocks` has it."""
    return index, native.pretend_stream(index)


def queue_work(key):
    """Queue a piece of work on a stream; return the stream's clock with that piece in it."""
    merge(clocks[key], host)
    clocks[key][key] = clocks[key].get(key, 0) + 1
    return clocks[key]


def host_waits(clock, why):
    """Note that the host waits until everything in a clock is over; `why` names the call."""
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
        """Return True, for the moment is always over: work here runs at once."""
        return True

    def synchronize(self):
        """Let the host wait."""
        host_waits(self.clock, "event.synchronize")

    def elapsed_time(self, other):
        """Return milliseconds of the processor, which foretell none of a GPU's."""
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
        """Let the host wait."""
        host_waits(clocks[self.key], "stream.synchronize")

    def query(self):
        """Return True, for all is always over."""
        return True

    def __enter__(self):
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error):
        self._context.__exit__(*error)


class StreamContext:
    """What `torch.cuda.stream(stream)` returns, for `with`.

    As with torch's own, the old stream and its device are set again at the end.
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
    """Return this thread's current stream of a GPU."""
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


class EventsOfTorch:
    """What the events know that torch itself records, by number: the newest MOST_EVENTS.

    The C++ half calls `record` and `block`.
    """

    def __init__(self):
        self.count = 0
        self.clocks = {}
        # C++ calls these for as long as the process lives, so this object keeps them.
        record_type = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_int, ctypes.c_long)
        block_type = ctypes.CFUNCTYPE(None, ctypes.c_long, ctypes.c_int, ctypes.c_long)
        self.callbacks = (record_type(self.record), block_type(self.block))

    def record(self, device, stream):
        """Remember what a stream knows now; return the number of the event."""
        self.count += 1
        self.clocks[self.count] = dict(clocks[(device, stream)])
        self.clocks.pop(self.count - MOST_EVENTS, None)
        return self.count

    def block(self, event, device, stream):
        """Let a stream wait for an event."""
        merge(clocks[(device, stream)], self.clocks.get(event, {}))


events_of_torch = EventsOfTorch()


def start():
    """Tell the C++ half whom to call for the events that torch itself records and waits for."""
    native.pretend_start(*events_of_torch.callbacks)
