"""Communication beside compute: one thread per process group, first in first out, on a group of its own.

    backward             | bucket 0 | bucket 1 | bucket 2 |
    communication thread            | ring 0   | ring 1   | ring 2 |

Messages carry no address but their order, so two things must never mix. Two wrappers in one backward pass share the
thread of their process group: the first to queue is the first to communicate, and as backward walks the same graph on
every rank, that order is the same everywhere. What the model itself communicates (batch statistics, say) is not in this
order, so it keeps the process group, and the thread has a twin of it: same ranks, other connections.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from .torch_inside import tree_leaves, twin

_threads: WeakKeyDictionary = WeakKeyDictionary()  # the thread of each process group
_failures: WeakKeyDictionary = WeakKeyDictionary()  # {process group: the error that ended its communication}


@contextmanager
def together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Around what all ranks of `group` do together: after an exception in it all that comes later fails too.

    The other ranks may be in another collective, and this rank's next message would be taken for one of that.
    """
    group = group or dist.group.WORLD
    if group in _failures:
        raise RuntimeError(
            f"communication on this process group has failed before ({_failures[group]}), and the ranks may have "
            "stopped at different points: start the ranks again"
        )
    try:
        yield
    except BaseException as error:
        _failures[group] = f"{type(error).__name__}: {error}"
        raise


def communication_thread(group: dist.ProcessGroup | None = None) -> "CommunicationThread":
    """The communication thread of `group`; the first time, all its ranks must ask for it together."""
    group = group or dist.group.WORLD
    if group not in _threads:
        _threads[group] = CommunicationThread(group)
    return _threads[group]


class CommunicationThread:
    """Works through what `start` is given, one job after the other; messages go on `group`, a twin of the caller's."""

    def __init__(self, group):
        self.group, self.streams = twin(group), {}
        self.jobs: SimpleQueue = SimpleQueue()
        threading.Thread(target=work, args=(self.jobs,), name="communication", daemon=True).start()
        finalize(self, self.jobs.put, None)

    def start(self, function: Callable, device: torch.device) -> Callable:
        """Queue `function(group)`, without gradients; return a function that waits for its result, or raises its error.

        On CUDA it works on the thread's own stream, after all that the caller's stream holds so far; waiting for it
        holds up the caller's current stream, not the processor.
        """
        stream = self.stream(device)
        job, ready = Future(), stream and torch.cuda.current_stream(device).record_event()
        self.jobs.put((job, lambda: self.carry_out(function, ready, stream)))

        def wait():
            result, finished = job.result()
            if finished:
                finished.wait()
            return result

        return wait

    def carry_out(self, function: Callable[..., Any], ready: Any, stream: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Carry out a job in the thread; returns its result and, on CUDA, the event that marks its end."""
        on_stream = torch.cuda.stream(stream) if stream else nullcontext()
        with together(self.group), torch.no_grad(), on_stream:
            if ready:
                ready.wait()
            return function(self.group), stream and stream.record_event()

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The thread's own stream on a CUDA `device`, None on the CPU."""
        if is_queued(device) and device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
            if "nccl" in dist.get_backend_config(self.group):  # NCCL wants a collective before the first message
                self.start(lambda group: dist.all_reduce(torch.zeros(1, device=device), group=group), device)
        return self.streams.get(device)


def keep_for_backward(owner: object, outputs: Any) -> Any:
    """Let `owner` live as long as the graph behind `outputs`, and return them.

    Hooks on parameters must not keep a wrapper alive, or an old one would go on averaging when a model is wrapped anew.
    But in `BucketedDDP(model)(inputs).sum().backward()` nothing else holds the wrapper, and its gradients are still to
    come. Every node of a graph has a dict for such things.
    """
    for tensor in [outputs] if isinstance(outputs, torch.Tensor) else tree_leaves(outputs):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            kept: Any = tensor.grad_fn.metadata  # the stubs of torch take this dict for a function
            kept.setdefault("owners", []).append(owner)
    return outputs


def work(jobs: Any) -> None:
    """Run the thread. It has no reference to its owner, so that both end together; a daemon holds up no failed rank."""
    for job, call in iter(jobs.get, None):
        try:
            job.set_result(call())
        except BaseException as error:
            job.set_exception(error)
        del job, call  # a thread that waits keeps nothing alive


def is_queued(device: torch.device) -> bool:
    """Whether work on `device` is only queued when a call returns; on the CPU it is done."""
    return device.type == "cuda"
