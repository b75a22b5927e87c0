"""Random programs of ranks and threads, as data, and a player that really runs them in a launch.

A program has a list of steps for each (rank, thread); thread 0 is the rank's main thread:

    compute N                a matrix product of 128 N floating-point operations
    sleep NANOSECONDS
    send / recv              PEER COUNT TAG GROUP VALUE: a message of COUNT float32, done when the
    step is over
    isend / irecv            KEY PEER COUNT TAG GROUP VALUE: the same, posted only
    collective NAME COUNT GROUP VALUE,  icollective KEY NAME COUNT GROUP VALUE
    wait KEY                 for what was posted with this key
    start / join             THREAD: of the same rank
    put / get QUEUE,  lock / unlock LOCK,  set / await EVENT: what threads of a rank share

Steps are drawn in an order in which all of them can be done, so few programs wait for ever: those
in which threads share a way may, as who comes first in virtual time gets what was drawn for another
one. `draw_program` leaves them out. Durations are drawn from few values: many things happen at the
same moment, and the rules for ties are tried as well.
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from manyranks import clocks

# torch 2.13 renamed this function.
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
WIDTH = 8  # A row of N is multiplied by a matrix of WIDTH x WIDTH.
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "barrier",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
SHARED_TAG = 8  # Messages between any threads of two ranks have this tag.
SHARED = 3  # Any thread of a rank may take part in sums of this group.
COUNTS = (125, 250, 31)  # So many float32 take 4, 8 and 0.992 microseconds at 1 Gbit/s.


class Setting(NamedTuple):
    """What the programs of one launch have in common; `groups` are lists of ranks, the first is
    the whole job.
    """

    world_size: int
    bandwidth: float
    latency_s: float
    hosts: int | None
    rate: float
    groups: tuple

    def host(self, rank: int) -> int:
        """Return the host of a rank: blocks of neighbours."""
        return rank * (self.hosts or self.world_size) // self.world_size


def draw_setting(number: int) -> Setting:
    """Return the setting with this number."""
    draw = random.Random(f"setting {number}")
    world_size = 2 + number % 7
    everyone = tuple(range(world_size))
    # Group 1 has two ranks or more; group 2 is for the second threads, of all ranks, and the last
    # one for any thread.
    part = tuple(sorted(draw.sample(everyone, draw.randint(2, world_size))))
    hosts = draw.choice([None, None, max(1, world_size // 2)])
    latency_s = draw.choice([0.0, 1e-6, 3e-7])
    return Setting(world_size, 1e9, latency_s, hosts, 128e6, (everyone, part, everyone, everyone))


class Writer:
    """Writes a program: the steps so far, what was posted and not waited for, and which threads
    run.
    """

    def __init__(self, setting: Setting, draw: random.Random):
        self.setting = setting
        self.draw = draw
        self.steps: dict = {(rank, 0): [] for rank in range(setting.world_size)}
        self.pending: list = []  # These are pairs of a thread and the key it will wait for.
        self.running: set = set(self.steps)
        self.keys = 0

    def add(self, thread: tuple, *step: Any) -> None:
        """Append a step."""
        self.steps[thread].append(step)

    def key(self) -> int:
        """Return a number for what is posted."""
        self.keys += 1
        return self.keys

    def write(self, length: int) -> dict:
        """Draw `length` things that happen, and end all that was begun; return the steps."""
        kinds = [self.local_work] * 4 + [self.message] * 6 + [self.collective] * 2
        kinds += [self.wait_for_some, self.start, self.hand_over, self.hand_over, self.locked_work]
        for _ in range(length):
            self.draw.choice(kinds)()
        while self.pending:
            self.wait_for_some()
        for rank, thread in sorted(self.running):
            if thread:
                self.add((rank, 0), "join", thread)
        return self.steps

    def local_work(self) -> None:
        """Let some threads compute or sleep."""
        for thread in sorted(self.running):
            if self.draw.random() < 0.5:
                self.add(thread, "compute", self.draw.choice([1, 2, 4, 7]))
            if self.draw.random() < 0.2:
                self.add(thread, "sleep", self.draw.choice([1000, 2000, 4000, 992]))

    def message(self) -> None:
        """Draw one message between threads of two ranks, posted and waited for later, or both at
        once.
        """
        sender, receiver = self.draw.sample(sorted(self.running), 2)
        if sender[0] == receiver[0]:
            return
        count = self.draw.choice(COUNTS)
        members = set(self.setting.groups[1])
        group = self.draw.choice([0, 1]) if {sender[0], receiver[0]} <= members else 0
        # No two threads share a way, but for that of one tag, whose messages are alike.
        tag = 4 * self.draw.choice([0, 1]) + 2 * sender[1] + receiver[1]
        if self.draw.random() < 0.3:
            tag = SHARED_TAG
            count = COUNTS[0]
        value = self.key()
        ends = [(sender, "send", receiver[0]), (receiver, "recv", sender[0])]
        if self.draw.random() < 0.5:
            ends.reverse()
        for thread, kind, peer in ends:
            if self.draw.random() < 0.4:
                self.add(thread, kind, peer, count, tag, group, value)
            else:
                key = self.key()
                self.add(thread, f"i{kind}", key, peer, count, tag, group, value)
                self.pending.append((thread, key))

    def collective(self) -> None:
        """Let all members of a group take part in a collective, some of them without waiting for
        it.
        """
        group = self.draw.choice([0, 0, 1, 2, SHARED])
        thread_number = 1 if group == 2 else 0
        members = [(rank, thread_number) for rank in self.setting.groups[group]]
        if not set(members) <= self.running:
            return
        name = self.draw.choice(COLLECTIVES)
        count = self.draw.choice(COUNTS)
        value = 0
        if group == SHARED:
            name = "all_reduce"
            count = COUNTS[0]
            value = self.key()
            second = [(rank, 1) for rank, _ in members if (rank, 1) in self.running]
            members = [self.draw.choice([one, two]) for one, two in paired(members, second)]
        for member in members:
            if self.draw.random() < 0.5:
                self.add(member, "collective", name, count, group, value)
            else:
                key = self.key()
                self.add(member, "icollective", key, name, count, group, value)
                self.pending.append((member, key))

    def wait_for_some(self) -> None:
        """Wait for some of what was posted, in any order."""
        self.draw.shuffle(self.pending)
        for _ in range(self.draw.randint(1, 4)):
            if self.pending:
                thread, key = self.pending.pop()
                self.add(thread, "wait", key)

    def start(self) -> None:
        """Let some ranks, or all of them, start their second thread."""
        chance = self.draw.choice([0.3, 1.0])
        for rank in range(self.setting.world_size):
            if (rank, 1) not in self.steps and self.draw.random() < chance:
                self.steps[rank, 1] = []
                self.running.add((rank, 1))
                self.add((rank, 0), "start", 1)

    def hand_over(self) -> None:
        """Let a thread hand something to the other one of its rank."""
        pairs = [rank for rank, thread in self.running if thread]
        if not pairs:
            return
        rank = self.draw.choice(sorted(pairs))
        giver = self.draw.choice([0, 1])
        if self.draw.random() < 0.5:
            self.add((rank, giver), "put", f"to {1 - giver}")
            self.add((rank, 1 - giver), "get", f"to {1 - giver}")
        else:
            event = f"event {self.key()}"
            self.add((rank, giver), "set", event)
            self.add((rank, 1 - giver), "await", event)

    def locked_work(self) -> None:
        """Let both threads of a rank do something for which they need the same lock."""
        for thread in sorted(self.running):
            if (thread[0], 1) in self.running and self.draw.random() < 0.7:
                self.add(thread, "lock", "lock")
                self.add(thread, "compute", self.draw.choice([1, 2, 4]))
                self.add(thread, "unlock", "lock")


def paired(members: list, second: list) -> list:
    """Return each member, with the second thread of its rank, or itself if that does not run."""
    threads = dict(second)
    return [(member, (member[0], threads.get(member[0], 0))) for member in members]


def draw_program(setting: Setting, number: int, replay: Callable) -> dict:
    """Return the steps of the program with this number, by (rank, thread); its `replay` comes to an
    end.
    """
    draw = random.Random(f"program {number}")
    while True:
        steps = Writer(setting, draw).write(draw.randint(5, 25))
        with suppress(AssertionError):
            replay(setting, steps)
            return steps


def play_all(setting: Setting, programs: list) -> list:
    """Run every program on this rank; return for each, by thread, the moments after all steps,
    since its start, and then the values that it received.
    """
    rank = dist.get_rank()
    groups = [None, *(dist.new_group(list(members)) for members in setting.groups[1:])]
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    results = []
    for steps in programs:
        dist.barrier()  # All clocks are equal, and all links are free.
        own = {thread: mine for (of_rank, thread), mine in steps.items() if of_rank == rank}
        player = Player(rank, setting, own, groups, layer)
        player.play(0)
        results.append({thread: player.moments[thread] + player.values[thread] for thread in own})
    return results


class Player:
    """Runs the steps of one rank; `moments` are picoseconds since the start, after each step, by
    thread.
    """

    def __init__(self, rank: int, setting: Setting, steps: dict, groups: list, layer: Any):
        self.rank = rank
        self.setting = setting
        self.steps = steps
        self.groups = groups
        self.layer = layer
        self.began = clocks.moment()
        self.moments: dict = {thread: [] for thread in steps}
        self.values: dict = {thread: [] for thread in steps}
        self.works: dict = {}
        self.threads: dict = {}
        every_step = [step for own in steps.values() for step in own]
        names = {step[1] for step in every_step if isinstance(step[1], str)}
        self.queues = {name: queue.Queue() for name in names}
        self.locks = {name: threading.Lock() for name in names}
        self.events = {name: threading.Event() for name in names}

    def play(self, thread: int) -> None:
        """Run the steps of one thread."""
        for kind, *details in self.steps[thread]:
            value = getattr(self, f"do_{kind}")(*details)
            if value is not None:
                self.values[thread].append(value)
            self.moments[thread].append(clocks.moment() - self.began)

    def do_compute(self, rows: int) -> None:
        with torch.no_grad():
            self.layer(torch.ones(rows, WIDTH))

    def do_sleep(self, nanoseconds: int) -> None:
        time.sleep(nanoseconds * 1e-9)

    def do_start(self, thread: int) -> None:
        self.threads[thread] = threading.Thread(target=self.play, args=(thread,))
        self.threads[thread].start()

    def do_join(self, thread: int) -> None:
        self.threads[thread].join()

    def do_put(self, name: str) -> None:
        self.queues[name].put(None)

    def do_get(self, name: str) -> None:
        self.queues[name].get()

    def do_lock(self, name: str) -> None:
        self.locks[name].acquire()

    def do_unlock(self, name: str) -> None:
        self.locks[name].release()

    def do_set(self, name: str) -> None:
        self.events[name].set()

    def do_await(self, name: str) -> None:
        self.events[name].wait()

    def do_send(self, *message: int) -> None:
        work, _ = self.posted("isend", *message)
        work.wait()

    def do_recv(self, *message: int) -> int | None:
        return self.finished(*self.posted("irecv", *message))

    def do_isend(self, key: int, *message: int) -> None:
        self.works[key] = self.posted("isend", *message)

    def do_irecv(self, key: int, *message: int) -> None:
        self.works[key] = self.posted("irecv", *message)

    def do_wait(self, key: int) -> int | None:
        return self.finished(*self.works.pop(key))

    def do_collective(self, *what: Any) -> int | None:
        return self.finished(*self.joined(*what, asynchronous=False))

    def do_icollective(self, key: int, *what: Any) -> None:
        self.works[key] = self.joined(*what, asynchronous=True)

    def finished(self, work: Any, arriving: Any) -> int | None:
        """Wait for an operation; return the value that has come, if one comes."""
        if work is not None:
            work.wait()
        return None if arriving is None else int(arriving[0].item())

    def posted(
        self, kind: str, peer: int, count: int, tag: int, group: int, value: int
    ) -> tuple[Any, Any]:
        """Post a message; return its work, and the tensor that it arrives in, if any."""
        tensor = torch.full((count,), float(value))
        if kind == "isend":
            return dist.isend(tensor, peer, self.groups[group], tag), None
        return dist.irecv(tensor.zero_(), peer, self.groups[group], tag), tensor

    def joined(
        self, name: str, count: int, group: int, value: int, asynchronous: bool
    ) -> tuple[Any, Any]:
        """Take part in a collective; `count` is the p of the definition's table, or p / K for
        all_to_all. Return its work, and the tensor with the sum, where that is compared.
        """
        members = self.setting.groups[group]
        size = len(members)
        first = members[0]
        own = torch.full((count,), float(value or 1))
        parts = [torch.ones(count) for _ in members]
        of_all = parts if self.rank == first else None
        ways: dict = {
            "all_reduce": (dist.all_reduce, own),
            "broadcast": (dist.broadcast, own, first),
            "reduce": (dist.reduce, own, first),
            "barrier": (dist.barrier,),
            "all_gather": (dist.all_gather, parts, own),
            "gather": (dist.gather, own, of_all, first),
            "scatter": (dist.scatter, own, of_all, first),
            "reduce_scatter": (reduce_scatter, own, torch.ones(size * count)),
            "all_to_all": (
                dist.all_to_all_single,
                torch.ones(size * count),
                torch.ones(size * count),
            ),
        }
        function, *arguments = ways[name]
        work = function(*arguments, group=self.groups[group], async_op=asynchronous)
        summed = own if value else None
        return work, summed
