"""Communication beside compute, by one thread for each process group, first in first out.

    backward             | bucket 0 | bucket 1 | bucket 2 |
    communication thread            | ring 0   | ring 1   | ring 2 |

Messages are matched by their order alone, so that order must be the same on all ranks. Two wrappers
in one backward pass share the thread of their process group, which sends in the order of its queue;
backward walks the same graph on all ranks, so their queues are the same. The model's own messages,
such as batch statistics, are not in this order. So they stay on the process group, while the thread
has a twin of the group, with the same ranks and other connections.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from manyranks.torch_inside import tensors_in

from .base.torch_private import group_like
from .wire import warm_up

_threads: WeakKeyDictionary = WeakKeyDictionary()  # the thread of each process group
_failures: WeakKeyDictionary = WeakKeyDictionary()  # the error of each group that has failed


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Mark a block that all ranks of `group` run together.

    After an exception in such a block all later blocks fail, too: the other ranks may be in another
    collective, and would take this rank's next message for a part of it. Raises RuntimeError in a
    block that comes after such an exception.
    """
    group = group or dist.group.WORLD
    if group in _failures:
        raise RuntimeError(
            f"communication on this process group has failed before ({_failures[group]}), and the"
            " ranks may have stopped at different points: start the ranks again"
        )
    try:
        yield
    except BaseException as error:
        _failures[group] = f"{type(error).__name__}: {error}"
        raise


def communication_thread(group: dist.ProcessGroup | None = None) -> "CommunicationThread":
    """Return the communication thread of `group`.

    On the first call, all ranks of the group must call this together.
    """
    group = group or dist.group.WORLD
    if group not in _threads:
        _threads[group] = CommunicationThread(group)
    return _threads[group]


class CommunicationThread:
    """Carries out the jobs that `start` queues, one by one.

    Messages go over `group`, a twin of the caller's group.
    """

    def __init__(self, group):
        self.group = group_like(group)
        self.streams = {}  # by device
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()  # pairs of a future and a function
        threading.Thread(
            target=run_jobs, args=(self.jobs,), name="communication", daemon=True
        ).start()
        # The job None ends the thread.
        finalize(self, self.jobs.put, None)

    def start(self, function: Callable, device: torch.device) -> Callable:
        """Queue `function(group)`; return a function that waits for its result or raises its error.

        The queued function runs without recording gradients. On CUDA it works on the thread's own
        stream, after all work that is already on the caller's stream; to wait for its result holds
        up the caller's current stream, not the processor.
        """
        stream = self.stream(device)
        ready = torch.cuda.current_stream(device).record_event() if stream else None
        future = Future()
        self.jobs.put((future, lambda: self.carry_out(function, ready, stream)))

        def wait():
            result, finished = future.result()
            if finished:
                finished.wait()
            return result

        return wait

    def carry_out(
        self, function: Callable[..., Any], ready: Any, stream: Any
    ) -> tuple[Any, torch.cuda.Event | None]:
        """Carry out a job in the thread; return its result and, on CUDA, the event of its end."""
        # A new thread begins on GPU 0, where leaving the stream would open a context.
        if stream:
            torch.cuda.set_device(stream.device)
        on_stream = torch.cuda.stream(stream) if stream else nullcontext()
        with failing_together(self.group), torch.no_grad(), on_stream:
            if ready:
                ready.wait()
            result = function(self.group)
            finished = stream.record_event() if stream else None
            return result, finished

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the thread's own stream on a CUDA `device`, or None on the CPU."""
        if is_queued(device) and device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
            # The first job on the new stream connects the ranks.
            nothing = torch.empty(0, device=device)
            self.start(lambda group: warm_up(nothing, group), device)
        return self.streams.get(device)


def keep_for_backward(owner: object, outputs: Any) -> Any:
    """Keep `owner` alive as long as the graph behind `outputs`, and return `outputs`.

    Hooks on parameters must not keep a wrapper alive, or an old wrapper would go on averaging after
    a model is wrapped again. But in `BucketedDDP(model)(inputs).sum().backward()` nothing else
    holds the wrapper, which must still average the gradients. So a dict that every node of a graph
    has holds the wrapper.
    """
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            # The stubs of torch take this dict for a function.
            metadata: Any = tensor.grad_fn.metadata
            metadata.setdefault("owners", []).append(owner)
    return outputs


def run_jobs(jobs: Any) -> None:
    """Do one job after the other until one is None.

    The thread has no reference to its owner, so that both end together; a failed rank never waits
    for the thread.
    """
    for future, function in iter(jobs.get, None):
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        # A thread that waits for its next job must keep no object alive.
        del future, function


def is_queued(device: torch.device) -> bool:
    """Return whether a call returns when its work on `device` is only queued, as on a GPU."""
    return device.type == "cuda"
