"""What each rank's last collective was, readable from outside when a rank hangs."""

from contextlib import contextmanager


@contextmanager
def entry(name, tensors, group=None):
    """Record one collective of this rank while it runs."""
    yield


def attach(descriptor, rank, world_size):
    """Write to the launch's recorder from now on."""
