"""Three ways to sum a full bucket: by the backend, by an algorithm of our own, or by your hook.

The reducer treats all three alike. `start(bucket)` begins the communication and returns at once;
the function that it returns waits for the end, and returns the tensor with the result:

    wait = start(bucket)      # the backward pass goes on
    ...
    averaged = wait()         # before backward() returns
"""

import torch.distributed as dist

from .. import wire
from ..base.torch_private import Future
from ..communication import communication_thread
from ..stage3_paramserver import views_into


class GradBucket:
    """A bucket as a communication hook sees it, with the interface of torch's `GradBucket`.

    Python cannot construct torch's own class, and torch's hooks do not ask for the type.
    """

    def __init__(self, index, buffer, parameters, is_last):
        self._index = index
        self._buffer = buffer
        self._parameters = parameters
        self._is_last = is_last

    def index(self):
        """Return the position of the bucket in the order of communication, from 0."""
        return self._index

    def buffer(self):
        """Return the gradients in one flat tensor, not yet divided by the number of ranks."""
        return self._buffer

    def gradients(self):
        """Return a view of the buffer for each parameter, with its shape and without gaps."""
        if self._buffer.is_sparse:
            return [self._buffer]
        return views_into(self._buffer, self._parameters)

    def parameters(self):
        """Return the parameters in the bucket."""
        return self._parameters

    def is_last(self):
        """Return whether no other bucket follows in this pass."""
        return self._is_last

    def set_buffer(self, tensor):
        """Put another tensor in place of the buffer."""
        self._buffer = tensor


def by_backend(group=None):
    """Return a way to sum buckets by gloo's or NCCL's own all_reduce, in its thread or stream."""

    def start(bucket):
        """Have the backend sum the bucket."""
        began = wire.now()
        flat = bucket.buffer()
        work = dist.all_reduce(flat, group=group, async_op=True)
        if wire.card.observers:
            work.get_future().then(lambda _: wire.ended("all_reduce", began, flat, group))

        def wait():
            with wire.naming_absent(group):
                work.wait()
            return bucket.buffer()

        return wait

    return start


def by_algorithm(all_reduce, group=None):
    """Return a way to sum buckets by our own `all_reduce`, such as a ring, in a thread.

    The backend sums sparse gradients.
    """
    thread = communication_thread(group)
    backend = by_backend(group)

    def start(bucket):
        """Have the communication thread sum the bucket."""
        tensor = bucket.buffer()
        if tensor.is_sparse:
            return backend(bucket)
        # The thread sends over a group of its own, the twin.
        wait_for_sum = thread.start(lambda twin: all_reduce(tensor, group=twin), tensor.device)

        def wait():
            wait_for_sum()
            return tensor

        return wait

    return start


def by_hook(hook, state):
    """Return a way to average buckets by a communication hook.

    `hook(state, bucket)` returns a future of the averaged tensor, and divides by K itself.
    """

    def start(bucket):
        """Have the hook average the bucket."""
        future = hook(state, bucket)
        if not isinstance(future, Future):
            raise TypeError(
                f"a communication hook must return a torch.futures.Future, but {hook} returned"
                f" {future!r}"
            )

        def wait():
            value = future.wait()
            # torch's own collectives have futures of a list with one tensor.
            return value[0] if isinstance(value, (list, tuple)) else value

        return wait

    return start
