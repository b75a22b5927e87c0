"""NCCL's rules, imposed on CPU tensors that pose as a GPU's, with gloo underneath.

`with imposed():` inside a rank replaces what `torch.distributed` offers to the course. The rules,
as they can be read in ProcessGroupNCCL.cpp of torch 2.13:

- A group's communicator is made by its first collective or its first batched message: all ranks
  must come to it.
- A message outside of a batch goes over a communicator of two: the first one blocks the host until
  its peer comes, too.
- What is given to one communicator runs in that order, one after the other; a batch is one piece of
  work.
- Two threads must not use one communicator at the same time: the order would not be the same on all
  ranks.
- Nothing is refused for being late: who waits for a message that cannot come, hangs. Here that ends
  after `PATIENCE`.
- A future is complete as soon as its work was queued; who uses its value waits for the work, as a
  stream would.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_course.running import wire

PATIENCE = 15.0  # seconds after which waiting counts as hanging
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "barrier",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all",
)
REAL = {name: getattr(dist, name) for name in ("isend", "irecv", *COLLECTIVES)}


class Queued(torch.futures.Future):
    """The future of queued work: complete at once, but its value is there when the work is done."""

    def __init__(self, work):
        super().__init__()
        self.work = work
        self.set_result(work.value)

    def then(self, callback):
        """Call back on a stream that waits for the work."""
        self.work.wait()
        return super().then(callback)

    def wait(self):
        """The value, after the work."""
        self.work.wait()
        return super().wait()


class Work:
    """Something that was given to a communicator; `value` is what it works on."""

    def __init__(self, patience, value=None):
        self.finished, self.error, self.patience, self.value = (
            threading.Event(),
            None,
            patience,
            value,
        )

    def wait(self, timeout=None):
        """Block until the work is done, as the stream would that waits for it."""
        if not self.finished.wait(self.patience):
            raise TimeoutError(f"this would hang: nothing came in {self.patience:g} s")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self):
        """Whether the work is done."""
        return self.finished.is_set()

    def get_future(self):
        """A future that is complete at once, although the work is only queued."""
        return Queued(self)


class Communicator:
    """Runs what it is given in order, on a thread that stands for its stream."""

    def __init__(self, name, members, patience):
        rendezvous(name, members, patience)
        self.patience = patience
        self.pending, self.queue, self.lock = [], SimpleQueue(), threading.Lock()
        threading.Thread(target=self.run, name=f"nccl {name}", daemon=True).start()

    @torch.no_grad()
    def run(self):
        """One piece of work after the other; a GPU knows nothing of gradients."""
        while True:
            work, function = self.queue.get()
            try:
                function()
            except Exception as error:  # raised where the work is waited for
                work.error = error
            work.finished.set()

    def submit(self, function, value=None):
        """Queue `function()`, which works on `value`, and return its `Work`."""
        me, work = threading.get_ident(), Work(self.patience, value)
        with self.lock:
            self.pending = [
                (thread, other) for thread, other in self.pending if not other.is_completed()
            ]
            if any(thread != me for thread, _ in self.pending):
                raise RuntimeError("two threads use one NCCL communicator at the same time")
            self.pending.append((me, work))
            self.queue.put((work, function))
        return work


def rendezvous(name, members, patience):
    """Block until all members have come."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"fake_nccl/{name}/{dist.get_rank()}", "here")
    try:
        store.wait(
            [f"fake_nccl/{name}/{member}" for member in members], timedelta(seconds=patience)
        )
    except dist.DistError as error:
        raise TimeoutError(
            f"this would hang: not all of ranks {members} came to communicator {name}"
        ) from error


class Operation(NamedTuple):
    """A message of a batch, as `dist.P2POp`, which takes torch's own functions only."""

    op: Callable
    tensor: torch.Tensor
    peer: int
    group: object = None


class Library:
    """What one process knows of NCCL: its communicators."""

    def __init__(self, patience):
        self.communicators, self.batching, self.patience = {}, {}, patience

    def of(self, group, peer=None):
        """The communicator of a whole group, or of this rank and `peer` in it."""
        group = group or dist.group.WORLD
        members = dist.get_process_group_ranks(group)
        pair = members if peer is None else sorted({dist.get_rank(), peer})
        name = f"{group.group_name}/{'all' if peer is None else '-'.join(map(str, pair))}"
        if self.batching.get(group, threading.get_ident()) != threading.get_ident():
            raise RuntimeError("a second thread uses an NCCL group while another is inside a batch")
        if name not in self.communicators:
            self.communicators[name] = Communicator(name, pair, self.patience)
        return self.communicators[name]

    def single(self, name):
        """`dist.isend` or `dist.irecv` outside of a batch."""

        def post(tensor, peer, group=None, tag=0):
            return self.of(group, peer).submit(lambda: REAL[name](tensor, peer, group, 2).wait())

        return post

    def batch(self, operations):
        """`dist.batch_isend_irecv`: one piece of work for the group's communicator."""
        names = {post: name for name, post in self.patched.items()}
        group = operations[0].group or dist.group.WORLD
        self.batching[group] = threading.get_ident()
        try:
            communicator = self.of(group)
        finally:
            del self.batching[group]

        def together():
            posted = [REAL[names[one.op]](one.tensor, one.peer, one.group, 1) for one in operations]
            for work in posted:
                work.wait()

        return [communicator.submit(together)]

    def collective(self, name):
        """A collective: queued, and waited for unless `async_op` is set."""

        def call(*args, group=None, async_op=False, **kwargs):
            work = self.of(group).submit(
                lambda: REAL[name](*args, group=group, **kwargs), [args[0]] if args else None
            )
            return work if async_op else work.wait() and None

        return call


@contextmanager
def imposed(patience=PATIENCE):
    """Replace what `torch.distributed` offers by functions that keep NCCL's rules."""
    library = Library(patience)
    library.patched = {name: library.single(name) for name in ("isend", "irecv")}
    library.patched |= {name: library.collective(name) for name in COLLECTIVES}
    with patch.multiple(dist, **library.patched, batch_isend_irecv=library.batch, P2POp=Operation):
        with patch.object(wire, "on_nccl", lambda tensor, group=None: True):
            yield
