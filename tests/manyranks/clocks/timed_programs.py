"""Random programs of futures, groups, threads, timers and event loops, and what they should see.

A program has a list of steps for the main thread of each rank; durations are picoseconds:

    sleep DURATION
    sum KEY GROUP COUNT      an asynchronous sum of COUNT float32 over a group
    then KEY DURATION        a callback of the sum KEY, which sleeps
    wait KEY                 for the sum KEY, and so for its callbacks
    wait_then KEY            for the future of its last callback
    wait_all KEYS            for the futures of several sums at once
    timer DURATION           calls a function
    thread DURATIONS         starts a thread that sleeps several times
    join                     the oldest thread that was not joined
    event DURATION LIMIT     waits at most LIMIT for an event that a timer sets
    loop LISTS               an event loop with a task for each list of durations

Durations are drawn to the picosecond, so hardly two things happen at one moment. Then no rule for
ties and turns is needed, and the model is a short one.
"""

import asyncio
import random
import threading
import time
from typing import Any

import simpy
import torch
import torch.distributed as dist

from manyranks import clocks

WORLD_SIZE = 3
GROUPS = ((0, 1, 2), (0, 1), (1, 2))
BANDWIDTH = 1e9
LATENCY = 1_000_000  # picoseconds
COUNTS = (31, 300, 12_000)  # float32


class Writer:
    """Draws a program; `pending` has the sums for which a rank has still to wait."""

    def __init__(self, number: int):
        self.draw = random.Random(f"timed program {number}")
        self.steps: list = [[] for _ in range(WORLD_SIZE)]
        self.pending: list = [[] for _ in range(WORLD_SIZE)]

    def write(self) -> list:
        """The steps of each rank."""
        for key in range(self.draw.randint(4, 12)):
            for own in self.steps:
                own.append(("sleep", self.duration()))
            self.sum(key)
            for rank in range(WORLD_SIZE):
                self.alone(rank)
                self.wait_for_one(rank)
        for own, keys in zip(self.steps, self.pending, strict=True):
            if keys and self.draw.random() < 0.5:
                own.append(("wait_all", keys))
            own += [("wait", key) for key in keys]
        return self.steps

    def duration(self) -> int:
        return self.draw.randrange(1, 40_000_000)

    def several(self) -> list:
        return [self.duration() for _ in range(self.draw.randint(1, 3))]

    def apart(self) -> list:
        """An event loop does at once what is due within a nanosecond."""
        return [2000 * self.draw.randrange(1, 20_000) for _ in range(self.draw.randint(1, 3))]

    def sum(self, key: int) -> None:
        """A sum over a group, on some ranks with callbacks."""
        group = self.draw.randrange(len(GROUPS))
        count = self.draw.choice(COUNTS)
        for rank in GROUPS[group]:
            self.steps[rank].append(("sum", key, group, count))
            self.pending[rank].append(key)
            for _ in range(self.draw.choice([0, 0, 1, 2])):
                self.steps[rank].append(("then", key, self.draw.choice([0, self.duration()])))

    def alone(self, rank: int) -> None:
        """What a rank does without others."""
        things = [
            ("timer", self.duration()),
            ("thread", self.several()),
            ("event", self.duration(), self.duration()),
            ("loop", [self.apart() for _ in range(self.draw.randint(1, 3))]),
            ("join",),
        ]
        self.steps[rank] += self.draw.sample(things, self.draw.randint(0, 3))

    def wait_for_one(self, rank: int) -> None:
        """A rank waits for one of its sums."""
        if self.pending[rank] and self.draw.random() < 0.5:
            chosen = self.draw.choice(self.pending[rank])
            self.pending[rank].remove(chosen)
            self.steps[rank].append((self.draw.choice(["wait", "wait_then"]), chosen))


def draw_program(number: int) -> list:
    """The steps of each rank of the program with this number."""
    return Writer(number).write()


def play_all(programs: list) -> list:
    """On a rank: run programs one after the other; return what it saw of each."""
    groups = [dist.new_group(list(members)) for members in GROUPS]
    results = []
    for steps in programs:
        dist.barrier()  # All clocks are equal, and all links are free.
        results.append(Player(groups).play(steps[dist.get_rank()]))
    return results


class Player:
    """Runs the steps of one rank.

    `seen` has (name, moment since the start) of all that happens, in no order.
    """

    def __init__(self, groups: list):
        self.groups = groups
        self.began = clocks.moment()
        self.seen: list = []
        self.works: dict = {}
        self.futures: dict = {}  # the future of the last callback of each sum
        self.threads: list = []  # all that end
        self.to_join: list = []

    def note(self, name: str) -> None:
        self.seen.append((name, clocks.moment() - self.began))

    def play(self, steps: list) -> list:
        for place, (kind, *details) in enumerate(steps):
            getattr(self, f"do_{kind}")(place, *details)
            self.note(f"{place} {kind}")
        for thread in self.threads:
            thread.join()
        self.note("end")
        return sorted(self.seen)

    def do_sleep(self, place: int, duration: int) -> None:
        time.sleep(duration / 1e12)

    def do_sum(self, place: int, key: int, group: int, count: int) -> None:
        self.works[key] = dist.all_reduce(
            torch.ones(count), group=self.groups[group], async_op=True
        )

    def do_then(self, place: int, key: int, duration: int) -> None:
        def callback(future: Any) -> None:
            time.sleep(duration / 1e12)
            self.note(f"{place} callback")

        before = self.futures.get(key) or self.works[key].get_future()
        self.futures[key] = before.then(callback)

    def do_wait(self, place: int, key: int) -> None:
        self.works[key].wait()

    def do_wait_then(self, place: int, key: int) -> None:
        (self.futures.get(key) or self.works[key]).wait()

    def do_wait_all(self, place: int, keys: list) -> None:
        torch.futures.collect_all([self.works[key].get_future() for key in keys]).wait()

    def do_timer(self, place: int, duration: int) -> None:
        self.start(threading.Timer(duration / 1e12, self.note, (f"{place} called",)))

    def do_thread(self, place: int, durations: list) -> None:
        def sleep_often() -> None:
            for number, duration in enumerate(durations):
                time.sleep(duration / 1e12)
                self.note(f"{place} slept {number}")

        self.start(threading.Thread(target=sleep_often))
        self.to_join.append(self.threads[-1])

    def start(self, thread: threading.Thread) -> None:
        self.threads.append(thread)
        thread.start()

    def do_join(self, place: int) -> None:
        if self.to_join:
            self.to_join.pop(0).join()

    def do_event(self, place: int, duration: int, limit: int) -> None:
        event = threading.Event()
        self.start(threading.Timer(duration / 1e12, event.set))
        event.wait(limit / 1e12)

    def do_loop(self, place: int, lists: list) -> None:
        async def sleep_often(task: int, durations: list) -> None:
            for number, duration in enumerate(durations):
                await asyncio.sleep(duration / 1e12)
                self.note(f"{place} task {task} slept {number}")

        async def run() -> None:
            await asyncio.gather(*[sleep_often(*each) for each in enumerate(lists)])

        asyncio.run(run())


class Sum:
    """A sum in the model: how many have come, when it ends, and what is called back then."""

    def __init__(self, clock: simpy.Environment):
        self.posts = 0
        self.booked = clock.event()
        self.end = 0
        self.callbacks: list = [[] for _ in range(WORLD_SIZE)]  # what `sleeps` takes
        self.calling: list = [None] * WORLD_SIZE  # the process that calls them


class Model:
    """A program on its way in simpy, whose clock counts picoseconds."""

    def __init__(self, steps: list):
        self.clock = simpy.Environment(initial_time=0)
        self.sums: dict = {}
        self.free = [0] * WORLD_SIZE  # from these moments on the ranks' links are free
        self.seen: list = [[] for _ in steps]
        self.running: list = [[] for _ in steps]  # the threads of each rank
        self.to_join: list = [[] for _ in steps]
        for rank, own in enumerate(steps):
            self.clock.process(self.main(rank, own))
        self.clock.run()

    def note(self, rank: int, name: str) -> None:
        self.seen[rank].append((name, int(self.clock.now)))

    def until(self, moment: int) -> Any:
        return self.clock.timeout(max(0, moment - self.clock.now))

    def main(self, rank: int, steps: list) -> Any:
        """The main thread of a rank."""
        for place, (kind, *details) in enumerate(steps):
            yield from getattr(self, f"do_{kind}")(rank, place, *details)
            self.note(rank, f"{place} {kind}")
        yield self.clock.all_of(self.running[rank])
        self.note(rank, "end")

    def do_sleep(self, rank: int, place: int, duration: int) -> Any:
        yield self.clock.timeout(duration)

    def do_sum(self, rank: int, place: int, key: int, group: int, count: int) -> Any:
        self.post(key, group, count)
        yield self.clock.timeout(0)

    def do_then(self, rank: int, place: int, key: int, duration: int) -> Any:
        """A callback is left for the end of a sum; after that it is called at once."""
        total = self.sums[key]
        callback = ([duration], [f"{place} callback"])
        if total.calling[rank] and not total.calling[rank].is_alive:
            yield from self.sleeps(rank, *callback)
        else:
            total.callbacks[rank].append(callback)

    def do_wait(self, rank: int, place: int, key: int) -> Any:
        """Wait for a sum, and for its callbacks."""
        total = self.sums[key]
        if not total.booked.triggered:
            yield total.booked
        yield total.calling[rank]

    do_wait_then = do_wait

    def do_wait_all(self, rank: int, place: int, keys: list) -> Any:
        for key in keys:
            yield from self.do_wait(rank, place, key)

    def do_timer(self, rank: int, place: int, duration: int) -> Any:
        self.start(rank, [duration], [f"{place} called"])
        yield self.clock.timeout(0)

    def do_thread(self, rank: int, place: int, durations: list) -> Any:
        names = [f"{place} slept {number}" for number in range(len(durations))]
        self.start(rank, durations, names)
        self.to_join[rank].append(self.running[rank][-1])
        yield self.clock.timeout(0)

    def do_join(self, rank: int, place: int) -> Any:
        if self.to_join[rank]:
            yield self.to_join[rank].pop(0)

    def do_event(self, rank: int, place: int, duration: int, limit: int) -> Any:
        self.start(rank, [duration], [])
        yield self.clock.timeout(min(duration, limit))

    def do_loop(self, rank: int, place: int, lists: list) -> Any:
        yield self.clock.all_of(list(self.tasks(rank, place, lists)))

    def start(self, rank: int, durations: list, names: list) -> None:
        """Start something that sleeps."""
        self.running[rank].append(self.clock.process(self.sleeps(rank, durations, names)))

    def tasks(self, rank: int, place: int, lists: list) -> Any:
        """The tasks of an event loop."""
        for task, durations in enumerate(lists):
            names = [f"{place} task {task} slept {number}" for number in range(len(durations))]
            yield self.clock.process(self.sleeps(rank, durations, names))

    def sleeps(self, rank: int, durations: list, names: list) -> Any:
        """Something that sleeps several times."""
        for number, duration in enumerate(durations):
            yield self.clock.timeout(duration)
            if names:
                self.note(rank, names[number])

    def post(self, key: int, group: int, count: int) -> None:
        """A member takes part in a sum; the last one books it."""
        total = self.sums.setdefault(key, Sum(self.clock))
        total.posts += 1
        members = GROUPS[group]
        if total.posts < len(members):
            return
        size = len(members)
        steps = 2 * (size - 1)
        duration = steps * (LATENCY + round(4 * count / size * (8e12 / BANDWIDTH)))
        total.end = max(self.clock.now, *[self.free[rank] for rank in members]) + duration
        for rank in members:
            self.free[rank] = total.end
            total.calling[rank] = self.clock.process(self.call_back(rank, total))
        total.booked.succeed()

    def call_back(self, rank: int, total: Sum) -> Any:
        """The callbacks of a sum on a rank, one after the other."""
        yield self.until(total.end)
        for callback in total.callbacks[rank]:
            yield from self.sleeps(rank, *callback)


def model(steps: list) -> list:
    """What each rank sees: (name, moment) of all that happens, sorted."""
    return [sorted(seen) for seen in Model(steps).seen]
