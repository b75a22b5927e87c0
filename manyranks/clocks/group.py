"""A process group over gloo whose operations take virtual time.

Gloo moves the data, and the table says when. Each operation begins in gloo before it is posted in
the table, so that gloo never waits for a rank that has not come.
"""

# mypy: disable-error-code="override, attr-defined, misc, call-arg"
# The stubs of torch overload these methods in ways that no class can follow.

import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from .. import torch_inside
from . import events, recording, streams, threads
from .clock import TURN, ask, in_real_time, own, process, take_turn
from .table import ANY, POLL_S, plain_lock, real_sleep


class Work(torch_inside.WorkOfGloo):
    """Gloo's work, with a ticket for the moment of its end in virtual time."""

    def __init__(self, work: Any, ticket: events.Ticket, call: recording.Call | None = None):
        super().__init__(work)
        self.ticket = ticket
        self.call = call
        self.on_stream = streams.are_on()
        self.ended: int | None = None
        self.finished = False
        self.future: Future | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Wait in virtual time, then for gloo. Raises RuntimeError after the `timeout`, if any."""
        if own() is not None:
            if timeout:
                self.wait_at_most(timeout.total_seconds())
            self.wait_by_clock()
        self.finish()
        if self.future is not None:
            self.future.complete()
        return True

    def wait_at_most(self, seconds: float) -> None:
        """Wait for the end to be known; raises RuntimeError if it does not come in time."""
        clock: Any = own()
        until = clock.moment + round(seconds * 1e12)
        if self.ended is None and not events.ends_by(self.ticket, until):
            clock.advance(until)
            raise RuntimeError(
                f"timed out after {seconds:g} s of virtual time, waiting {self.ticket.what}"
            )

    def finish(self) -> None:
        """Wait for gloo, but only once: a second wait would be for the next message."""
        if not self.finished:
            with torch_inside.unseen_by_modes():
                self.work.wait()
            self.finished = True

    def wait_by_clock(self) -> int:
        """Wait in virtual time, or have this thread's stream wait; return the moment of the end."""
        if self.future is not None:
            # The callbacks' thread may have waited already, and given up the ticket.
            take_turn()
        if self.ended is None:
            wait = streams.end_of if self.on_stream else events.wait
            self.ended = wait(self.ticket)
            if self.call is not None:
                self.call.end = self.ended
        if self.on_stream:
            streams.current().reach(self.ended)
        else:
            own().advance(self.ended)
            # What threads do after their waits comes in the order of virtual time, too. It may post
            # something, which is to be booked with all that is posted at this moment.
            take_turn(to_post=True)
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
        future = self.future = self.future or Future(self)
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

    has_thread = False  # True once a thread completes this future, so that its callbacks run.

    def __init__(self, work: Work | None):
        super().__init__()
        self.work = work
        # Who waits while another thread runs the callbacks goes on when they have returned.
        self.completing = threads.RLock()

    def complete(self) -> None:
        """Wait for the work, and let the callbacks run at the moment of its end."""
        clock = own()
        if clock is None:
            return
        ended = self.work.wait_by_clock()
        with self.completing:
            # Another thread may have been first, or a callback asks.
            if super().done():
                return
            self.work.finish()
            present = clock.moment
            if not self.work.on_stream:
                # The callbacks run as of the operation's end, which may be earlier than now.
                clock.moment = ended
            try:
                self.set_result(self.work.work.get_future().value())
            finally:
                clock.moment = max(present, clock.moment)

    def has_ended(self) -> bool:
        """Return whether the work has ended by now; this is no question of the program's."""
        return events.has_ended(self.work.ticket)

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
        """Return the future of `callback(self)`.

        It runs here if the work has ended by now, and else in a thread of its own, at the end.
        """
        if not (super().done() or self.has_thread) and torch_inside.backward_pass() == -1:
            take_turn()
            if own() is not None and self.has_ended():
                self.complete()
            else:
                self.has_thread = True
                threading.Thread(target=self.complete, daemon=True).start()
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

    has_thread = True  # The thread of the future before completes this one, too.

    def __init__(self, before: Future):
        super().__init__(before.work)
        self.before = before

    def complete(self) -> None:
        """Wait for the future before, whose end lets the callback run."""
        self.before.complete()


class All(Future):
    """The future that is complete once all of some futures are."""

    def __init__(self, futures: list):
        super().__init__(None)
        self.futures = futures

    def complete(self) -> None:
        """Wait for all of the futures."""
        for future in self.futures:
            future.wait()
        take_turn()
        if not torch.futures.Future.done(self):
            self.set_result(self.futures)

    def has_ended(self) -> bool:
        """Return whether all are complete; others' futures may have no clock."""
        return all(torch.futures.Future.done(future) for future in self.futures)

    def done(self) -> bool:
        """Return whether all of the futures are complete by now."""
        return all([future.done() for future in self.futures])


def wait_by_lock(run: Callable, future: torch.futures.Future) -> Any:
    """Wait by the clock for a future that another thread sets, then by torch's own `run`."""
    if own() is not None and not future.done():
        is_set = threads.Waiter()
        is_set.acquire()
        torch.futures.Future.then(future, lambda _: is_set.release())
        is_set.acquire()
    return run(future)


class FromAny:
    """A receive from any rank; gloo's own would choose the sender by real time.

    Once a message is matched in virtual time, gloo receives from its sender. A thread begins that
    receive where the program does not wait yet: the sender waits for it in gloo.
    """

    # These are the process's receives without a message, in the order of their posts.
    unmatched: ClassVar[list["FromAny"]] = []
    lock = plain_lock()

    def __init__(self, group: "Group", tensors: list, tag: int, ticket: events.Ticket):
        self.group = group
        self.tensors = tensors
        self.tag = tag
        self.ticket = ticket
        self.work: Any = None
        with self.lock:
            self.unmatched.append(self)
            if len(self.unmatched) == 1:
                helper = threading.Thread(target=self.look_after_all, daemon=True)
                in_real_time(threads.plain_start, helper)

    @classmethod
    def look_after_all(cls) -> None:
        """Begin receives as they are matched, until none is left."""
        while cls.begin_matched():
            real_sleep(POLL_S)

    @classmethod
    def begin_matched(cls) -> int:
        """Begin all receives that are matched, in order; return how many are left."""
        with cls.lock:
            for receive in list(cls.unmatched):
                sender = receive.ticket.entry.first
                if sender != ANY:  # Its message has been chosen.
                    receive.begin(sender)
                    cls.unmatched.remove(receive)
            return len(cls.unmatched)

    def begin(self, sender: int) -> None:
        """Have gloo receive from the sender."""
        group = self.group
        events.count_received(sender, group.number, self.tag)
        peer = group.members.index(sender)
        self.work = group.begin_in_gloo(group.gloo.recv, self.tensors, peer, self.tag)
        # The sender has been read, once; who waits still reads the end.
        events.give_back(self.ticket.entry)

    def wait(self) -> None:
        """Wait until gloo has received the message, which is matched by now."""
        self.begin_matched()
        self.work.wait()

    def _source_rank(self) -> int:
        return self.work._source_rank()

    @classmethod
    def make_room(cls, group: int, tag: int) -> None:
        """Begin the receives from any rank that come before a receive from a named rank.

        Raises RuntimeError if one of them has no message yet.
        """
        if not cls.unmatched:
            return
        clock: Any = own()
        clock.sleep_until(clock.moment, TURN)
        cls.begin_matched()
        if any((each.group.number, each.tag) == (group, tag) for each in cls.unmatched):
            raise RuntimeError(
                "a receive from any rank waits for a message with this tag, so it is open which"
                " message a receive from one rank gets: wait for it first, or use another tag"
            )


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
    """What the time of a collective called `name` depends on.

    `steps` returns the number of its steps for a number of members. Each step carries as many bytes
    as the argument number `sized_by` has, or, if `shared`, a K-th of them for K members.
    """

    name: str
    steps: Callable[[int], int]
    sized_by: int = 0
    shared: bool = False


# The keys are torch's newest names of the methods that begin the collectives.
FORMS = {
    "allreduce": Form("all_reduce", ring_steps, shared=True),
    "allreduce_coalesced": Form("all_reduce", ring_steps, shared=True),
    "broadcast": Form("broadcast", tree_steps),
    "reduce": Form("reduce", tree_steps),
    "allgather": Form("all_gather", direct_steps, sized_by=1),
    "reduce_scatter": Form("reduce_scatter", direct_steps),
    "gather": Form("gather", direct_steps, sized_by=1),
    "gather_single": Form("gather", direct_steps, sized_by=1),
    "scatter": Form("scatter", direct_steps),
    "alltoall": Form("all_to_all", direct_steps, sized_by=1, shared=True),
    "all_gather_single": Form("all_gather", direct_steps, sized_by=1),
    "reduce_scatter_single": Form("reduce_scatter", direct_steps),
    "all_to_all_single": Form("all_to_all", direct_steps, sized_by=1, shared=True),
}

ROOTS = {"broadcast": "from", "reduce": "to", "gather": "to", "scatter": "from"}


def nbytes_of(tensors: Any) -> int:
    """Return the bytes of all tensors in nested lists."""
    if not isinstance(tensors, torch.Tensor):
        return sum(map(nbytes_of, tensors))
    parts = torch_inside.parts_of([tensors])
    return sum(part.numel() * part.element_size() for part in parts)


class Done:
    """The work of an operation on tensors that have sizes only, of which nothing is moved."""

    def __init__(self, tensors: list):
        self.tensors = tensors

    def wait(self) -> bool:
        """Return at once, since there is nothing to wait for."""
        return True

    def get_future(self) -> torch.futures.Future:
        """Return a future that already has the tensors as its result."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.tensors)
        return future

    def _source_rank(self) -> int:
        return 0


class Several(Done):
    """The work of several operations of gloo, which have `tensors` as their result."""

    def __init__(self, tensors: list, works: list):
        super().__init__(tensors)
        self.works = works

    def wait(self) -> bool:
        """Wait for all of them."""
        for work in self.works:
            work.wait()
        return True


class Group(torch_inside.InPlaceOfGloo):
    """A process group with clocks; torch makes it where a program asks for gloo."""

    number = 0  # This is the number of the group of all ranks.
    table: Any = None  # the launch's, once `clocks.enter` has given clocks to this process

    def begin(self, of_some_ranks: bool) -> None:
        """Meet the other members in virtual time."""
        if of_some_ranks:
            self.number = events.join_new_group(self.options.group_name, self.members)

    @property
    def partners(self) -> list[int]:
        """The members that join a collective: all of them."""
        return self.members

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

    def begin_in_turn(self, begin: Callable, *arguments: Any) -> Any:
        """Have gloo `begin` an operation in this thread's turn; return its work."""
        take_turn(to_post=True)
        return self.begin_in_gloo(begin, *arguments)

    def begin_in_gloo(self, begin: Callable, *arguments: Any) -> Any:
        """Have gloo `begin` an operation; return its work.

        If the tensors have sizes only, there is nothing to move, and the work is done.
        """
        tensors = torch_inside.tensors_in(*arguments)
        if any(isinstance(tensor, torch_inside.FakeTensor) for tensor in tensors):
            return Done(torch_inside.tensors_in(arguments[0]))
        # What gloo copies is no work of the device.
        with torch_inside.unseen_by_modes():
            return begin(*arguments)

    def timed(self, name: str, work: Any, nbytes: float, steps: int, root: str = "") -> Work:
        """Join a collective of so many `steps`, each as long as a message of `nbytes`.

        Gloo's `work` on it has begun. Members that name unlike roots never meet.
        """
        duration = steps * self.table.step_takes(nbytes, self.members)

        def join() -> Work:
            call = recording.note_call(name, tuple(self.members), steps * nbytes, duration)
            ticket = events.join(self.number, self.partners, duration, nbytes > 0, name + root)
            return Work(work, ticket, call)

        return streams.at_its_start(join)

    def root_in(self, name: str, arguments: tuple) -> str:
        """Return in words which rank a collective goes to, or comes from; "" if no single one."""
        if name not in ROOTS:
            return ""
        root = self.members[arguments[-1].rootRank]
        return f" {ROOTS[name]} rank {root}"

    def message(self, sending: bool, work: Any, tensors: list, peer: int, tag: int) -> Work:
        """Post a send or a receive, which gloo's `work` has begun."""
        nbytes = nbytes_of(tensors)
        rank = self.members[peer]
        ranks = (self.table.rank, rank)

        def post() -> Work:
            name = "send" if sending else "receive"
            duration = self.table.step_takes(nbytes, ranks)
            call = recording.note_call(name, ranks, nbytes, duration)
            ticket = events.post(sending, nbytes, rank, self.number, tag)
            return Work(work, ticket, call)

        return streams.at_its_start(post)

    def send(self, tensors: list, peer: int, tag: int) -> Work:
        """Post a send."""
        work = self.begin_in_turn(self.gloo.send, tensors, peer, tag)
        return self.message(True, work, tensors, peer, tag)

    def recv(self, tensors: list, peer: int, tag: int) -> Work:
        """Post a receive.

        Raises RuntimeError if one from any rank has the same tag, and no message yet: it would be
        open which of the two gets the next message.
        """
        take_turn(to_post=True)
        FromAny.make_room(self.number, tag)
        work = self.begin_in_gloo(self.gloo.recv, tensors, peer, tag)
        return self.message(False, work, tensors, peer, tag)

    def recv_anysource(self, tensors: list, tag: int) -> Work:
        """Post a receive of the oldest message from any rank."""
        take_turn(to_post=True)
        ticket = events.post(False, 0, ANY, self.number, tag)
        return Work(FromAny(self, tensors, tag, ticket), ticket)

    def allgather_into_tensor_coalesced(self, outputs: list, inputs: list, *opts: Any) -> Work:
        """Gather each of the `inputs` from all members into one of the `outputs`."""
        parts = [output.chunk(self.size()) for output in outputs]
        # gloo wants a list for each member, not for each output.
        by_member = [list(parts_of_member) for parts_of_member in zip(*parts, strict=True)]
        work = self.begin_in_turn(self.gloo.allgather_coalesced, by_member, inputs, *opts)
        steps = direct_steps(self.size())
        return self.timed("all_gather", work, nbytes_of(inputs), steps)

    def reduce_scatter_tensor_coalesced(self, outputs: list, inputs: list, *opts: Any) -> Work:
        """Sum each of the `inputs` up; this member's chunk of it goes to one of the `outputs`."""
        [name] = set(torch_inside.methods_of("reduce_scatter_single").values())
        begin = getattr(self.gloo, name)
        take_turn(to_post=True)
        works = [
            self.begin_in_gloo(begin, output, source, *opts)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        steps = direct_steps(self.size())
        return self.timed("reduce_scatter", Several(outputs, works), nbytes_of(outputs), steps)

    def barrier(self, **opts: Any) -> Work:
        """Wait for all members; where the device has streams, the host first waits for those."""
        streams.synchronize()
        take_turn(to_post=True)
        work = self.gloo.barrier(**opts)
        barrier = self.timed("barrier", work, nbytes=0, steps=tree_steps(self.size()))
        barrier.on_stream = False
        return barrier

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members; if one never comes, a DeadlockError names all ranks."""
        self.barrier().wait()


def add_collective(torch_name: str, gloo_name: str, form: Form) -> None:
    """Give `Group` the method that torch calls for a collective."""

    def collective(self: Group, *arguments: Any) -> Work:
        work = self.begin_in_turn(getattr(self.gloo, gloo_name), *arguments)
        nbytes: float = nbytes_of(arguments[form.sized_by])
        if form.shared:
            nbytes /= self.size()
        root = self.root_in(form.name, arguments)
        return self.timed(form.name, work, nbytes, form.steps(self.size()), root)

    collective.__name__ = torch_name
    setattr(Group, torch_name, collective)


COLLECTIVES: list[str] = []  # by all names by which this torch calls them
for collective, form in FORMS.items():
    for torch_name, gloo_name in torch_inside.methods_of(collective).items():
        add_collective(torch_name, gloo_name, form)
        COLLECTIVES.append(torch_name)
