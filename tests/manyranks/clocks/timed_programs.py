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


def draw_program(number: int) -> list:
    """The steps of each rank of the program with this number."""
    draw = random.Random(f"timed program {number}")
    steps: list = [[] for _ in range(WORLD_SIZE)]
    pending: list = [[] for _ in range(WORLD_SIZE)]  # the sums that a rank has still to wait for

    def duration() -> int:
        return draw.randrange(1, 40_000_000)

    def several() -> list:
        return [duration() for _ in range(draw.randint(1, 3))]

    def apart() -> list:
        """An event loop does at once what is due within a nanosecond."""
        return [2000 * draw.randrange(1, 20_000) for _ in range(draw.randint(1, 3))]

    for key in range(draw.randint(4, 12)):
        for own in steps:
            own.append(("sleep", duration()))
        group = draw.randrange(len(GROUPS))
        count = draw.choice(COUNTS)
        for rank in GROUPS[group]:
            steps[rank].append(("sum", key, group, count))
            pending[rank].append(key)
            for _ in range(draw.choice([0, 0, 1, 2])):
                steps[rank].append(("then", key, draw.choice([0, duration()])))
        for rank, own in enumerate(steps):
            alone = [
                ("timer", duration()),
                ("thread", several()),
                ("event", duration(), duration()),
                ("loop", [apart() for _ in range(draw.randint(1, 3))]),
            ]
            own += draw.sample(alone, draw.randint(0, 2))
            if draw.random() < 0.3:
                own.append(("join",))
            if pending[rank] and draw.random() < 0.5:
                chosen = draw.choice(pending[rank])
                pending[rank].remove(chosen)
                own.append((draw.choice(["wait", "wait_then"]), chosen))
    for rank, own in enumerate(steps):
        if pending[rank] and draw.random() < 0.5:
            own.append(("wait_all", pending[rank]))
        own += [("wait", key) for key in pending[rank]]
    return steps


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
        self.callbacks: list = [[] for _ in range(WORLD_SIZE)]  # names and durations
        self.calling: list = [None] * WORLD_SIZE  # the process that calls them


class Model:
    """A program on its way in simpy, whose clock counts picoseconds."""

    def __init__(self, steps: list):
        self.clock = simpy.Environment(initial_time=0)
        self.sums: dict = {}
        self.free = [0] * WORLD_SIZE  # from these moments on the ranks' links are free
        self.seen: list = [[] for _ in steps]
        for rank, own in enumerate(steps):
            self.clock.process(self.main(rank, own))
        self.clock.run()

    def note(self, rank: int, name: str) -> None:
        self.seen[rank].append((name, int(self.clock.now)))

    def until(self, moment: int) -> Any:
        return self.clock.timeout(max(0, moment - self.clock.now))

    def main(self, rank: int, steps: list) -> Any:
        """The main thread of a rank."""
        running: list = []
        to_join: list = []
        for place, (kind, *details) in enumerate(steps):
            if kind == "sleep":
                yield self.clock.timeout(*details)
            elif kind == "sum":
                self.post(*details)
            elif kind == "then":
                key, duration = details
                yield from self.then(rank, self.sums[key], f"{place} callback", duration)
            elif kind in ("wait", "wait_then"):
                yield from self.wait(rank, details[0])
            elif kind == "wait_all":
                for key in details[0]:
                    yield from self.wait(rank, key)
            elif kind == "timer":
                running.append(self.clock.process(self.sleeps(rank, details, [f"{place} called"])))
            elif kind == "thread":
                names = [f"{place} slept {number}" for number in range(len(details[0]))]
                to_join.append(self.clock.process(self.sleeps(rank, details[0], names)))
                running.append(to_join[-1])
            elif kind == "join" and to_join:
                yield to_join.pop(0)
            elif kind == "event":
                running.append(self.clock.process(self.sleeps(rank, details[:1], [])))
                yield self.clock.timeout(min(details))
            elif kind == "loop":
                yield self.clock.all_of(list(self.tasks(rank, place, details[0])))
            self.note(rank, f"{place} {kind}")
        yield self.clock.all_of(running)
        self.note(rank, "end")

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

    def then(self, rank: int, total: Sum, name: str, duration: int) -> Any:
        """A callback is left for the end of a sum; after that it is called at once."""
        if total.calling[rank] and not total.calling[rank].is_alive:
            yield from self.sleeps(rank, [duration], [name])
        else:
            total.callbacks[rank].append((name, duration))

    def call_back(self, rank: int, total: Sum) -> Any:
        """The callbacks of a sum on a rank, one after the other."""
        yield self.until(total.end)
        for name, duration in total.callbacks[rank]:
            yield from self.sleeps(rank, [duration], [name])

    def wait(self, rank: int, key: int) -> Any:
        """Wait for a sum, and for its callbacks."""
        total = self.sums[key]
        if not total.booked.triggered:
            yield total.booked
        yield total.calling[rank]


def model(steps: list) -> list:
    """What each rank sees: (name, moment) of all that happens, sorted."""
    return [sorted(seen) for seen in Model(steps).seen]
