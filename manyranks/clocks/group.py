"""A process group over gloo whose operations take virtual time: gloo moves the data, the table says
when.

Each operation begins in gloo before it is posted in the table, so that gloo never waits for a rank
that has not come.
"""

# mypy: disable-error-code="override, attr-defined, misc, call-arg"
# The stubs of torch overload these methods in ways that no class can follow.

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Imported here, before torch's own name for the class is replaced in ranks.
from torch.distributed import ProcessGroupGloo

from .. import torch_inside
from . import events, recording, streams
from .clock import TURN, ask, own, process


class Work(dist.Work):
    """gloo's work, and a ticket for the moment of its end."""

    def __init__(self, work: Any, ticket: events.Ticket, call: recording.Call | None = None):
        super().__init__()
        self.work = work
        self.ticket = ticket
        self.call = call
        self.on_stream = streams.are_on()
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
            with torch_inside.unseen_by_modes():
                self.work.wait()
            self.finished = True

    def wait_by_clock(self) -> int:
        """Wait in virtual time, or have this thread's stream wait; return the moment of the end."""
        if self.ended is None:
            wait = streams.end_of if self.on_stream else events.wait
            self.ended = wait(self.ticket)
            if self.call is not None:
                self.call.end = self.ended
        if self.on_stream:
            streams.current().reach(self.ended)
        else:
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

    def _source_rank(self) -> int:
        return self.work._source_rank()

    def __del__(self):
        if self.ended is None and process.table is not None:
            events.drop(self.ticket)


class Future(torch.futures.Future):
    """The future of a `Work`: who waits for it, or for a future that follows from it, waits in
    virtual time.
    """

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
        if not self.work.on_stream:
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
    """How long a collective takes: it is called `name`, gloo's `method` moves the data, and each of
    its `steps`, which follow from the number of members, carries as many bytes as the argument
    number `sized_by` has, or a K-th of them if that is `shared`.
    """

    name: str
    method: str
    steps: Callable[[int], int]
    sized_by: int = 0
    shared: bool = False


FORMS = {  # These are by torch's name of the method that begins it.
    "allreduce": Form("all_reduce", "allreduce", ring_steps, shared=True),
    "allreduce_coalesced": Form("all_reduce", "allreduce_coalesced", ring_steps, shared=True),
    "broadcast": Form("broadcast", "broadcast", tree_steps),
    "reduce": Form("reduce", "reduce", tree_steps),
    "allgather": Form("all_gather", "allgather", direct_steps, sized_by=1),
    "reduce_scatter": Form("reduce_scatter", "reduce_scatter", direct_steps),
    "gather": Form("gather", "gather", direct_steps, sized_by=1),
    "scatter": Form("scatter", "scatter", direct_steps),
    "alltoall": Form("all_to_all", "alltoall", direct_steps, sized_by=1, shared=True),
    "_allgather_base": Form("all_gather", "_allgather_base", direct_steps, sized_by=1),
    "_reduce_scatter_base": Form("reduce_scatter", "_reduce_scatter_base", direct_steps),
    "alltoall_base": Form("all_to_all", "alltoall_base", direct_steps, sized_by=1, shared=True),
}
# Newer versions of torch call three of them so.
FORMS["all_gather_single"] = FORMS["_allgather_base"]
FORMS["reduce_scatter_single"] = FORMS["_reduce_scatter_base"]
FORMS["all_to_all_single"] = FORMS["alltoall_base"]


def nbytes_of(tensors: Any) -> int:
    """Return the bytes of tensors in lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(nbytes_of, tensors))


class Done:
    """The work of a message or a collective of tensors that have sizes only: nothing is moved."""

    def __init__(self, tensors: list):
        self.tensors = tensors

    def wait(self) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> torch.futures.Future:
        """Return a future that has its result."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.tensors)
        return future

    def _source_rank(self) -> int:
        return 0


class Group(dist.ProcessGroup):
    """A process group with clocks; torch makes it where a program asks for gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)
        self.store = store
        self.patience = timeout
        # torch writes down here what it tells a new group of gloo after it was made.
        self.options = SimpleNamespace(_timeout=timeout, global_ranks_in_group=[], group_name="")
        self.supports_coalescing = False
        self.number = 0

    def _set_sequence_number_for_group(self) -> None:
        """Make the group: torch calls this once it has told who is in it."""
        self.members = list(self.options.global_ranks_in_group) or list(range(self.size()))
        if self.options.global_ranks_in_group:
            self.number = events.join_new_group(self.options.group_name, self.members)
        self.inner = ProcessGroupGloo(self.store, self.rank(), self.size(), timeout=self.patience)
        self.inner._set_sequence_number_for_group()

    def _get_sequence_number_for_group(self) -> int:
        return self.inner._get_sequence_number_for_group()

    def _get_backend(self, device: Any) -> "Group":
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

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

    def begun(self, begin: Callable, *arguments: Any) -> Any:
        """Have gloo `begin` an operation, and return its work; of tensors that have sizes only
        nothing is moved.
        """
        tensors = torch_inside.tensors_in(*arguments)
        if any(isinstance(tensor, torch_inside.FakeTensor) for tensor in tensors):
            return Done(torch_inside.tensors_in(arguments[0]))
        with torch_inside.unseen_by_modes():  # What gloo copies is no work of the device.
            return begin(*arguments)

    def timed(self, name: str, work: Any, nbytes: float, steps: int) -> Work:
        """Join a collective of so many `steps`, each of which takes as long as a message of
        `nbytes`; gloo's `work` has begun.
        """
        table = process.table
        duration = steps * table.step_takes(nbytes, self.members)

        def join() -> Work:
            call = recording.note_call(name, tuple(self.members), steps * nbytes, duration)
            ticket = events.join(self.number, self.members, duration, nbytes > 0, name)
            return Work(work, ticket, call)

        return streams.at_its_start(join)

    def message(self, sending: bool, work: Any, tensors: list, peer: int, tag: int) -> Work:
        """Post a send or a receive, which gloo's `work` has begun."""
        table = process.table
        nbytes = nbytes_of(tensors)
        rank = self.members[peer]

        def post() -> Work:
            name = "send" if sending else "receive"
            duration = table.step_takes(nbytes, (table.rank, rank))
            call = recording.note_call(name, (table.rank, rank), nbytes, duration)
            ticket = events.post(sending, nbytes, rank, self.number, tag)
            return Work(work, ticket, call)

        return streams.at_its_start(post)

    def send(self, tensors: list, peer: int, tag: int) -> Work:
        """Post a send."""
        work = self.begun(self.inner.send, tensors, peer, tag)
        return self.message(True, work, tensors, peer, tag)

    def recv(self, tensors: list, peer: int, tag: int) -> Work:
        """Post a receive."""
        work = self.begun(self.inner.recv, tensors, peer, tag)
        return self.message(False, work, tensors, peer, tag)

    def recv_anysource(self, tensors: list, tag: int) -> Any:
        """Wait for the oldest message from any rank, and post its receive."""
        sender = events.oldest_sender(self.number, tag)
        return self.recv(tensors, self.members.index(sender), tag)

    def allgather_into_tensor_coalesced(self, outputs: list, inputs: list, *opts: Any) -> Work:
        """Gather each of the `inputs` from all members into one of the `outputs`."""
        parts = [output.chunk(self.size()) for output in outputs]
        # gloo wants a list for each member, not for each output.
        by_member = [list(parts_of_member) for parts_of_member in zip(*parts, strict=True)]
        work = self.begun(self.inner.allgather_coalesced, by_member, inputs, *opts)
        steps = direct_steps(self.size())
        return self.timed("all_gather", work, nbytes_of(inputs), steps)

    def barrier(self, **opts: Any) -> Work:
        """Wait for all members; where there are streams, the host waits for them first."""
        streams.synchronize()
        work = self.inner.barrier(**opts)
        barrier = self.timed("barrier", work, nbytes=0, steps=tree_steps(self.size()))
        barrier.on_stream = False
        return barrier

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members; if one never comes, the deadlock is reported, with all names."""
        self.barrier().wait()


def add_collective(torch_name: str, form: Form) -> None:
    """Give `Group` the method that torch calls for a collective."""

    def collective(self: Group, *arguments: Any) -> Work:
        work = self.begun(getattr(self.inner, form.method), *arguments)
        nbytes: float = nbytes_of(arguments[form.sized_by])
        if form.shared:
            nbytes /= self.size()
        return self.timed(form.name, work, nbytes, form.steps(self.size()))

    collective.__name__ = torch_name
    setattr(Group, torch_name, collective)


for torch_name, form in FORMS.items():
    add_collective(torch_name, form)
