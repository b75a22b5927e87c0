"""How a full bucket is summed over the ranks: by the backend, by one of our own algorithms, or by a hook of yours.

All three look alike to the reducer. `start(bucket)` begins the communication and returns at once; the function that
it returns waits for the end, and returns the tensor with the result:

    wait = start(bucket)      # the backward pass goes on
    ...
    averaged = wait()         # before backward() returns
"""

import inspect

import torch
import torch.distributed as dist

from ..running import wire
from ..running.communication import communication_thread
from ..running.torch_inside import Future, default_group


class GradBucket:
    """What a communication hook gets to see, with the interface of `torch.distributed.GradBucket`.

    torch's own class has no constructor that Python could call, and its hooks do not ask for the type.
    """

    def __init__(self, index, buffer, gradients, parameters, is_last):
        self._index, self._buffer, self._is_last = index, buffer, is_last
        self._gradients, self._parameters = gradients, parameters

    def index(self):
        """Position of the bucket in the order of communication, from 0."""
        return self._index

    def buffer(self):
        """The bucket's gradients in one flat tensor; not yet divided by the number of ranks."""
        return self._buffer

    def gradients(self):
        """The same memory, a tensor of the parameter's shape for each parameter."""
        return self._gradients

    def parameters(self):
        """The parameters in the bucket."""
        return self._parameters

    def is_last(self):
        """Whether no other bucket follows in this pass."""
        return self._is_last

    def set_buffer(self, tensor):
        """Put another tensor in place of the buffer."""
        self._buffer = tensor


def by_backend(group=None):
    """gloo's or NCCL's own all_reduce, in the backend's own thread or stream.

    The group is asked itself: `dist.all_reduce` would check arguments anew each time, in the middle of backward.
    """
    options = dist.AllreduceOptions()
    options.asyncOp = True

    def start(bucket):
        began, flat = wire.now(), bucket.buffer()
        work = (group or default_group()).allreduce([torch.view_as_real(flat) if flat.is_complex() else flat], options)
        if wire.observed():
            work.get_future().then(lambda _: wire.ended("all_reduce", began, flat, group))

        def wait():
            work.wait()
            return bucket.buffer()

        return wait

    return start


def by_algorithm(all_reduce, group=None):
    """One of our own, such as `ring_all_reduce`, in the communication thread; sparse gradients go to the backend."""
    thread, backend = communication_thread(group), by_backend(group)

    def start(bucket):
        tensor = bucket.buffer()
        if tensor.is_sparse:
            return backend(bucket)
        done = thread.start(lambda group: all_reduce(tensor, group=group), tensor.device)

        def wait():
            done()
            return tensor

        return wait

    return start


def by_hook(hook, state):
    """A communication hook: `hook(state, bucket)` returns a future of the averaged tensor, and divides by itself."""

    def start(bucket):
        future = hook(state, bucket)
        if not isinstance(future, Future):
            raise TypeError(f"a communication hook must return a torch.futures.Future, but {hook} returned {future!r}")

        def wait():
            value = future.wait()
            return value[0] if isinstance(value, (list, tuple)) else value

        return wait

    return start


def check_hook(hook):
    """Refuse what cannot be a communication hook: the same errors as torch's."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
