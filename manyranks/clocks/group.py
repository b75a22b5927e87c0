"""A process group over gloo whose operations take virtual time.

Gloo moves the data, the table says when.

Each operation begins in gloo before it is posted in the table, so that gloo never waits for a rank
that has not come.
"""

# mypy: disable-error-code="override, attr-defined, misc, call-arg"
# The stubs of torch overload these methods in ways that no class can follow.

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import torch_inside
from . import events
from .clock import TURN, ask, own, process


class Work(torch_inside.WorkOfGloo):
    """gloo's work, and a ticket for the moment of its end."""

    def __init__(self, work: Any, ticket: events.Ticket):
        super().__init__(work)
        self.ticket = ticket
        self.ended: int | None = None
        self.finished = False

    def wait(self, timeout: Any = None) -> bool:
        """Wait in virtual time, then for gloo."""
        if own() is not None:
            self.wait_by_clock()
        self.finish()
        return True

    def finish(self) -> None:
        """Wait for gloo, once: a second wait for one message would be for the next."""
        if not self.finished:
            self.work.wait()
            self.finished = True

    def wait_by_clock(self) -> int:
        """Wait in virtual time; return the moment of the end."""
        if self.ended is None:
            self.ended = events.wait(self.ticket)
        own().advance(self.ended)
        return self.ended

    def is_completed(self) -> bool:
        """Return whether the operation has ended by now; a "no" takes 10 microseconds."""
        clock = own()
        if self.ended is None and clock is not None:
            clock.sleep_until(clock.moment, TURN)
            if not ask(events.has_ended(self.ticket)):
                return False
            self.finish()
        return True

    def get_future(self) -> torch.futures.Future:
        """Return a future; its callbacks run at the moment of the operation's end."""
        future = Future(self)
        # DDP's reducer will wait for it in C++, where no clock can see it.
        if torch_inside.backward_pass() != -1:
            torch_inside.after_backward(future.complete)
        return future

    def result(self) -> Any:
        """Return gloo's result."""
        self.wait()
        return self.work.get_future().value()

    def __del__(self):
        if self.ended is None and process.table is not None:
            events.drop(self.ticket)


class Future(torch.futures.Future):
    """The future of a `Work`, or one that follows from it: its `wait` takes virtual time."""

    def __init__(self, work: Work):
        super().__init__()
        self.work = work

    def complete(self) -> None:
        """Wait for the work, and let the callbacks run at the moment of its end."""
        if super().done():
            return
        clock = own()
        ended = self.work.wait_by_clock()
        self.work.finish()
        present = clock.moment
        clock.moment = ended  # This may be earlier.
        try:
            self.set_result(self.work.work.get_future().value())
        finally:
            clock.moment = max(present, clock.moment)

    def wait(self) -> Any:
        """Wait for the result, and return it."""
        self.complete()
        return super().wait()

    def done(self) -> bool:
        """Return whether the operation has ended by now."""
        if not super().done() and self.work.is_completed():
            self.complete()
        return super().done()

    def then(self, callback: Any) -> torch.futures.Future:
        """Return the future of `callback(self)`."""
        following = Following(self)

        def run(future):
            try:
                following.set_result(callback(future))
            except Exception as error:
                following.set_exception(error)

        super().then(run)
        return following


class Following(Future):
    """The future of a callback, which runs when the future `before` is complete."""

    def __init__(self, before: Future):
        super().__init__(before.work)
        self.before = before

    def complete(self) -> None:
        """Wait for what the callback waits for; then it runs."""
        self.before.complete()


def direct_steps(size: int) -> int:
    """Return the steps in which a member sends something to each other one."""
    return size - 1


def ring_steps(size: int) -> int:
    """Return the steps of a ring all-reduce: once around to add up, once more to hand out."""
    return 2 * (size - 1)


def tree_steps(size: int) -> int:
    """Return the steps of a binary tree: log2 K, rounded up."""
    return (size - 1).bit_length()


class Form(NamedTuple):
    """How long a collective takes.

    It is called `name`, and each of its `steps`, which follow from
    the number of members, carries as many bytes as the argument number `sized_by` has, or a K-th of
    them if that is `shared`.
    """

    name: str
    steps: Callable[[int], int]
    sized_by: int = 0
    shared: bool = False


FORMS = {  # These are by torch's newest name of the method that begins it.
    "allreduce": Form("all_reduce", ring_steps, shared=True),
    "allreduce_coalesced": Form("all_reduce", ring_steps, shared=True),
    "broadcast": Form("broadcast", tree_steps),
    "reduce": Form("reduce", tree_steps),
    "allgather": Form("all_gather", direct_steps, sized_by=1),
    "reduce_scatter": Form("reduce_scatter", direct_steps),
    "gather": Form("gather", direct_steps, sized_by=1),
    "scatter": Form("scatter", direct_steps),
    "alltoall": Form("all_to_all", direct_steps, sized_by=1, shared=True),
    "all_gather_single": Form("all_gather", direct_steps, sized_by=1),
    "reduce_scatter_single": Form("reduce_scatter", direct_steps),
    "all_to_all_single": Form("all_to_all", direct_steps, sized_by=1, shared=True),
}


def nbytes_of(tensors: Any) -> int:
    """Return the bytes of tensors in lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(nbytes_of, tensors))


class Group(torch_inside.InPlaceOfGloo):
    """A process group with clocks; torch makes it where a program asks for gloo."""

    number = 0  # of the group of all ranks

    def begin(self, of_some_ranks: bool) -> None:
        """Meet the other members in virtual time."""
        if of_some_ranks:
            self.number = events.join_new_group(self.options.group_name, self.members)

    def getBackendName(self) -> str:
        """Return a name that C++ does not take for gloo itself; programs see "gloo"."""
        return "virtual"

    def name(self) -> str:
        """Return the name by which programs ask for this group."""
        return "gloo"

    def getGroupName(self) -> str:
        """Return torch's name for this group."""
        return self.options.group_name or "0"

    group_name = property(getGroupName)

    def timed(self, name: str, work: Any, nbytes: float, steps: int) -> Work:
        """Join a collective of so many `steps`, each as long as a message of `nbytes`.

        Gloo's `work` has begun.
        """
        table = process.table
        duration = steps * (table.latency + table.bytes_take(nbytes))
        ticket = events.join(self.number, self.members, duration, nbytes > 0, name)
        return Work(work, ticket)

    def send(self, tensors: list, peer: int, tag: int) -> Work:
        """Post a send."""
        work = self.gloo.send(tensors, peer, tag)
        nbytes = nbytes_of(tensors)
        ticket = events.post(True, nbytes, self.members[peer], self.number, tag)
        return Work(work, ticket)

    def recv(self, tensors: list, peer: int, tag: int) -> Work:
        """Post a receive."""
        work = self.gloo.recv(tensors, peer, tag)
        nbytes = nbytes_of(tensors)
        ticket = events.post(False, nbytes, self.members[peer], self.number, tag)
        return Work(work, ticket)

    def recv_anysource(self, tensors: list, tag: int) -> Any:
        """Wait for the oldest message from any rank, and post its receive."""
        sender = events.oldest_sender(self.number, tag)
        return self.recv(tensors, self.members.index(sender), tag)

    def allgather_into_tensor_coalesced(self, outputs: list, inputs: list, *opts: Any) -> Work:
        """Gather each of the `inputs` from all members into one of the `outputs`."""
        parts = [output.chunk(self.size()) for output in outputs]
        # gloo wants a list for each member, not for each output.
        by_member = [list(parts_of_member) for parts_of_member in zip(*parts, strict=True)]
        work = self.gloo.allgather_coalesced(by_member, inputs, *opts)
        steps = direct_steps(self.size())
        return self.timed("all_gather", work, nbytes_of(inputs), steps)

    def barrier(self, **opts: Any) -> Work:
        """Wait for all members."""
        work = self.gloo.barrier(**opts)
        return self.timed("barrier", work, nbytes=0, steps=tree_steps(self.size()))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members; if one never comes, the deadlock is reported, with all names."""
        self.barrier().wait()


def add_collective(torch_name: str, gloo_name: str, form: Form) -> None:
    """Give `Group` the method that torch calls for a collective."""

    def collective(self: Group, *arguments: Any) -> Work:
        work = getattr(self.gloo, gloo_name)(*arguments)
        nbytes: float = nbytes_of(arguments[form.sized_by])
        if form.shared:
            nbytes /= self.size()
        return self.timed(form.name, work, nbytes, form.steps(self.size()))

    collective.__name__ = torch_name
    setattr(Group, torch_name, collective)


for collective, form in FORMS.items():
    for torch_name, gloo_name in torch_inside.methods_of(collective).items():
        add_collective(torch_name, gloo_name, form)
