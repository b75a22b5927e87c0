"""Exercise 5: buckets, the hook that tells when a gradient is ready, and the place to wait.

5.3's "waiting" and 5.5's "overlap" are judged by hand, as their evidence is time: any timeline will do in which each
bucket leaves before backward has finished, so what comes back are words.
"""

import math
import threading
import time
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.grading.attempt import tensors, worlds
from ddp_course.grading.checks import require, task
from ddp_course.grading.evidence import BUSY
from ddp_course.running.devices import Device
from ddp_course.stage4_ring import ring_all_reduce

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
ORDER = "do all ranks submit the buckets in the same order, and wait for them?"


@task("5.1", "assign_buckets", {"caps": 2, "dtypes": 1}, forbidden=("ddp_course.stage5_bucketed.assign_buckets",))
class AssignBuckets:
    """Parameters into buckets, last first, each closed on reaching the cap; a bucket for each dtype."""

    def draw(random, hidden):
        sizes = [random.randrange(20, 200) for _ in range(9 + 4 * hidden)]
        alike, mixed = ["float32"] * len(sizes), ["float64" if i % 3 == 0 else "float32" for i in range(len(sizes))]
        three = [("bfloat16", "float32", "float64")[i % 3] for i in range(len(sizes))]
        exact = [25, 50, 50, 100, 25, 75]
        cases = [(sizes, alike, 800), (exact, ["float32"] * 6, 400), (sizes, mixed, 900), (sizes, alike, 10**6)]
        return {"cases": cases + [(sizes, three, 700)] * hidden}

    def probe(assign_buckets, cases):
        """The bytes of the buckets, and the numbers of the parameters in them; of several dtypes in any order."""
        for sizes, kinds, cap in cases:
            parameters = [
                nn.Parameter(torch.zeros(n, dtype=getattr(torch, k))) for n, k in zip(sizes, kinds, strict=True)
            ]
            index, several = {id(parameter): i for i, parameter in enumerate(parameters)}, len(set(kinds))
            buckets = [[index.get(id(p), -1) for p in bucket] for bucket in assign_buckets(parameters, cap)]
            buckets = sorted(buckets, reverse=True) if several > 1 else buckets
            taken = [sum(sizes[i] * BYTES[kinds[i]] for i in bucket) for bucket in buckets]
            about = f"{len(sizes)} parameters{f' of {several} dtypes' * (several > 1)}, cap {cap} bytes"
            part = "dtypes" if several > 1 else "caps"
            yield part, f"{about}, bytes of the buckets", taken
            yield part, f"{about}, buckets of parameters (-1: none of them)", buckets


class Shared(nn.Module):
    """A model that uses one layer twice, and has a frozen one."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        """(N, 4) to (N, 4)."""
        return self.twice(self.frozen(self.twice(self.first(x).tanh()).tanh()))


@task("5.2", "tell_when_ready", {"calls": 1, "complete": 1})
class TellWhenReady:
    """A hook on every trainable parameter: one call a pass, when the gradient is complete."""

    def draw(random, hidden):
        return {"seed": random.randrange(10**6), "inputs": tensors(random, 3, 5, 4)}

    def probe(tell_when_ready, seed, inputs):
        """For which parameters `ready` is called in each backward pass, and what their gradients are at that moment."""
        torch.manual_seed(seed)
        model, calls = Shared(), []
        index = {id(parameter): i for i, parameter in enumerate(model.parameters())}

        def ready(parameter):
            grad = getattr(parameter, "grad", None)
            calls.append((index.get(id(parameter), -1), None if grad is None else grad.clone()))

        tell_when_ready(list(model.parameters()), ready)
        yield "calls", "before any backward pass, ready is called for parameters", [i for i, _ in calls]
        called = False
        for number, x in enumerate(inputs, 1):
            calls.clear()
            model.zero_grad()
            model(x).square().sum().backward()
            called, last, early = called or bool(calls), [p.grad for p in model.parameters()], []
            for i, grad in calls:
                if grad is None or not grad.equal(last[i]):
                    early.append(f"parameter {i}: {'none yet' if grad is None else 'not complete'}")
            called_for = sorted(i for i, _ in calls)
            yield "calls", f"backward pass {number}: ready is called for parameters (-1: none of them)", called_for
            about = f"backward pass {number}: gradients that are not there when ready is called"
            yield "complete", about, sorted(early)
        yield "complete", "ready was called in a backward pass", called


@task("5.3", "average_in_background", {"waiting": 1, "mean": 1, "errors": 1}, ranks=4, hang=ORDER, bound=1e-5)
class AverageInBackground:
    """Submit all, then wait for all: no bucket is touched meanwhile, and no error is lost."""

    def draw(random, hidden):
        return {"values": [[tensors(random, 1, n)[0] for n in (7, 12, 5, *([9] if hidden else []))] for _ in range(4)]}

    def probe(average_in_background, values):
        """Every rank's buckets, who reduced them and when, and what became of an error in the first, or the last."""
        for size, group in worlds(3, 2, 4):
            flats = [flat.clone() for flat in values[dist.get_rank()]]
            with ThreadPoolExecutor(1, "communication") as executor:
                notes, means = watched(average_in_background, flats, executor, group, size)
            for about, note in notes.items():
                yield "waiting", about, note
            for i, flat in enumerate(means):
                yield "mean", f"with {size} ranks, bucket {i}", flat
        for place, name in ((0, "first"), (1, "last")):
            about = f"an error in the communication thread, in the {name} bucket of two"
            yield "errors", about, error_of(average_in_background, place)


def watched(function, flats, executor, group, size):
    """Call the answer with an all-reduce that notes who calls it, and what else was submitted by then.

    With 3 ranks the first bucket waits for the second to be submitted, and each takes its time.
    """
    order, threads, touched, finished, submitted, alone = [], [], [], [], [], []
    begun, several, submit, delays = threading.Event(), threading.Event(), executor.submit, []

    def counted(*args, **kwargs):
        future = submit(*args, **kwargs)
        submitted.append(1)
        if len(submitted) > 1:
            several.set()
        elif size == 3:
            begun.wait(0.5)  # an answer that goes on to change the bucket does so while it is being reduced
        return future

    def all_reduce(flat):
        order.append([bucket.numel() for bucket in flats].index(flat.numel()))
        threads.append(threading.current_thread().name)
        before = flat.clone()
        begun.set()
        if size == 3:
            alone.append(not several.wait(0.5))
            several.set()
            start = time.perf_counter()
            time.sleep(0.03)
            delays.append(time.perf_counter() - start)
        touched.append(not before.equal(flat))
        ring_all_reduce(flat, group)
        finished.append(1)

    executor.submit = counted
    function(flats, all_reduce, executor, size)
    done, means, about = len(finished), [flat.clone() for flat in flats], f"with {size} ranks"
    notes = {
        f"{about}: all_reduce was called": bool(order),
        f"{about}: all_reduce runs in the executor's thread": all(name.startswith("communication") for name in threads),
    }
    require(max(delays, default=0) < 0.5, BUSY)
    if size == 3:
        notes[f"{about}: the second bucket was submitted before the first was done"] = not any(alone[:1])
        notes[f"{about}: buckets that were done when your function returned"] = done
        notes[f"{about}: nobody changed a bucket while it was reduced"] = not any(touched)
    executor.shutdown()
    return notes | {f"{about}: buckets were reduced in the order": list(order)}, means


def error_of(function, place):
    """What a failing all-reduce of one bucket becomes in the caller."""
    calls = []

    def all_reduce(flat):
        calls.append(flat)
        if len(calls) == place + 1:
            raise ConnectionError("the network is gone")

    with ThreadPoolExecutor(1) as executor:
        try:
            function([torch.zeros(3), torch.zeros(3)], all_reduce, executor, 2)
        except ConnectionError:
            return "is raised where you wait"
    return "is lost"


@task("5.4", ("the_bug", "departures"), {"the line": 1, "mended": 1}, secret=("the line",))
class FindTheBugInTheOrder:
    """Buckets leave by index, on all ranks alike, none before its gradients are there, and none later."""

    def draw(random, hidden):
        cases = []
        for count in (6, 9, *([14] if hidden else [])):
            parameters = list(range(count))[::-1]
            cuts = sorted(random.sample(range(1, count), 2))
            buckets = [parameters[: cuts[0]], parameters[cuts[0] : cuts[1]], parameters[cuts[1] :]]
            orders = [parameters, *(random.sample(parameters, count) for _ in range(2)), parameters[::-1]]
            cases.append((buckets, orders))
        return {"cases": cases}

    def probe(the_bug, departures, cases):
        """The line that is named, and the departures on each rank of each case."""
        yield "the line", "the faulty line", the_bug()
        for buckets, orders in cases:
            for ready in orders:
                about = f"buckets {buckets}, gradients ready in the order {ready}"
                yield "mended", about, departures([list(bucket) for bucket in buckets], list(ready))


LAYERS, WIDTH = 6, 48
BESIDE = "each bucket leaves in the communication thread, before backward has finished what comes after it"


def deep_model(seed):
    """Six layers of the same size, so that backward takes equally long for each."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def buckets_of(model):
    """Three buckets of two layers each, those that backward finishes first in front."""
    parameters = list(model.parameters())[::-1]
    return [parameters[i : i + 2] for i in range(0, LAYERS, 2)]


@task("5.5", "Bucketed", {"mean": 1, "every pass": 1, "overlap": 2}, ranks=4, hang=ORDER, bound=1e-5)
class AssembleBucketedDDP:
    """Hooks, buckets and a thread, put together: right, in every pass, and beside the backward pass."""

    def draw(random, hidden):
        return {"seed": random.randrange(10**6), "inputs": [tensors(random, 2 + hidden, 8, WIDTH) for _ in range(4)]}

    def probe(Bucketed, seed, inputs):
        """For each pass the gradients, and how many were ready when each bucket left; on an emulated device."""
        for size, group in worlds(3):
            model, ready, left, submitted = deep_model(seed), [], [], []
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(ready.append)

            def all_reduce(flat, group=group, ready=ready, left=left):
                left.append((threading.current_thread().name, flat.numel()))
                time.sleep(0.002)  # the link keeps up with backward
                ring_all_reduce(flat, group)

            device = Device(f"{2 * 2 * 8 * WIDTH**2 / 0.006:.0f}FLOP/s")  # the backward pass of a layer takes 6 ms
            with ThreadPoolExecutor(1, "communication") as executor:
                executor.submit = noted(executor.submit, lambda ready=ready, to=submitted: to.append(len(ready)))
                parallel = Bucketed(buckets_of(model), all_reduce, executor, size)
                with device.emulate():
                    for number, x in enumerate(inputs[dist.get_rank()], 1):
                        for notes in (ready, left, submitted):
                            notes.clear()
                        model.zero_grad()
                        parallel.backward(model(x).square().mean())
                        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                        yield "mean" if number == 1 else "every pass", f"backward pass {number}", gradient
                        yield "overlap", f"backward pass {number}", overlap_in_words(left, submitted)


def overlap_in_words(left, ready):
    """One rank's notes of a pass, which thread took a bucket of which size, and after how many gradients: in words."""
    if not left:
        return "all_reduce was never called"
    if not all(name.startswith("communication") for name, _ in left):
        return "all_reduce runs in the thread that trains; submit it to the executor"
    if len(left) != 3:
        advice = "pack a bucket into one tensor" if len(left) > 3 else "one per bucket, as soon as it is full"
        return f"{len(left)} messages for 3 buckets: {advice}"
    late = 2 - sum(count < LAYERS for count in ready[:2])
    line = "; ".join(f"bucket {i} left after {n}" for i, n in enumerate(ready))
    full = f"your timeline: {line} of {LAYERS} gradients; they were full after 2, 4 and 6"
    return f"{late} of 3 rings that could hide behind backward do not; {full}" if late else BESIDE


def noted(function, note):
    """`function`, with a note made of each call before it."""
    return lambda *args, **kwargs: (note(), function(*args, **kwargs))[1]


SETTINGS = ("each on its own", "one bucket", "hidden", "slow link")


def timeline_of(random, setting):
    """Spans (name, start_ms, end_ms) of one step, shuffled."""
    start, count = random.uniform(0, 30), random.randrange(3, 7)
    slots = [random.uniform(12, 20) for _ in range(count)]
    end = start + sum(slots)
    spans = [("forward", start - 12, start), ("backward", start, end), ("update", end + 200, end + 203)]
    if setting == "one bucket":
        spans.append(("communication", end + random.uniform(-2, 2), end + random.uniform(20, 60)))
    now = end + random.uniform(-2, 2) if setting == "each on its own" else start
    for index in range(len(slots) if setting != "one bucket" else 0):
        full = now if setting == "each on its own" else start + sum(slots[: index + 1])
        now = max(now + 0.3, full)
        took = {"hidden": random.uniform(3, 6), "slow link": random.uniform(22, 40)}.get(setting, random.uniform(5, 9))
        spans.append(("communication", now, now + took))
        now += took
    return random.sample([(name, round(a, 2), round(b, 2)) for name, a, b in spans], len(spans))


@task("5.6", "setting_of", {"after backward": 1, "beside backward": 1})
class WhichTimeline:
    """Four settings, told by their timelines: where nothing runs beside backward, and where communication does."""

    def draw(random, hidden):
        settings = random.sample(SETTINGS * (3 + 3 * hidden), len(SETTINGS) * (3 + 3 * hidden))
        return {"cases": [(timeline_of(random, setting), setting) for setting in settings]}

    def probe(setting_of, cases):
        """For each timeline whether the right setting is named, in words; those without anything beside backward first."""
        names = ", ".join(f'"{name}"' for name in SETTINGS)
        for timeline, setting in cases:
            answer = setting_of(list(timeline))
            wrong = (
                f'"{answer}" does not look like that' if answer in SETTINGS else f"{answer!r:.40} is none of {names}"
            )
            part = "after backward" if setting in ("each on its own", "one bucket") else "beside backward"
            yield part, in_words(timeline), answer and ("that setting" if answer == setting else wrong)


def in_words(timeline):
    """A timeline as a sentence."""
    backward = next(f"{start:.0f} to {end:.0f}" for name, start, end in timeline if name == "backward")
    rings = sorted((start, end) for name, start, end in timeline if name == "communication")
    return f"backward {backward} ms, communication {', '.join(f'{a:.0f} to {b:.0f}' for a, b in rings)} ms"


@cache
def backward_seconds(samples, width, rate, memory):
    """The emulated device's time for the backward pass of three layers."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    loss = model(torch.zeros(samples, width)).sum()
    with Device(rate, memory).emulate(sleep=False) as emulation:
        loss.backward()
    return emulation.busy_s


MOST_MEASURED, HALVE = 40, "halve the range each time, and a dozen are enough"


@task("5.7", "when_it_hides", {"predicted": 1, "measured": 1, "explained": 1}, secret=("explained",), seconds=30)
class WhenItHides:
    """A straight line, a measurement, and what stands between them."""

    def draw(random, hidden):
        cases = [(32, 200, 100, 0.8), (48, 100, 10, 0.6), (48, 100, 10, 0.05), (48, 100, 10, 0.12)]
        cases += [(48, 100, 10, 0.03)]  # the line meets the ring below one sample
        cases += [(64, 100, 1, 0.2)] * hidden
        return {
            "cases": [
                (width, f"{rate}MFLOP/s", f"{memory}MB/s", part * random.uniform(0.9, 1.1))
                for width, rate, memory, part in cases
            ]
        }

    def probe(when_it_hides, cases):
        """The answer in each case, a prediction that is rounded another way being the same; Wrong if it measures on."""
        for width, rate, memory, share in cases:
            count, (about, predicted, measured, part) = [], expected_hiding((width, rate, memory, share))

            def measure(samples, on=(width, rate, memory), count=count):
                count.append(samples)
                require(len(count) <= MOST_MEASURED, f"measured more than {MOST_MEASURED} times; {HALVE}")
                return backward_seconds(samples, *on)

            answer = when_it_hides(measure, share * backward_seconds(512, width, rate, memory))
            triple = isinstance(answer, tuple | list) and len(answer) == 3
            require(triple, "return three things: predicted, measured, why")
            line, number, why = answer
            near = type(line) is int and line > 0 and abs(line - predicted) <= 1
            yield "predicted", f"{about}, predicted samples", predicted if near else line
            yield "measured", f"{about}, measured samples", number
            half = f"with half of {measured} samples backward takes {part:.0%} of the time; what bounds it"
            yield "explained", f"{about}: {half}", why


@cache
def expected_hiding(case):
    """What to call a case, the predicted and the measured number, and half the samples' share of the time."""
    width, rate, memory, part = case

    def measure(samples):
        return backward_seconds(samples, width, rate, memory)

    ring = part * measure(512)
    predicted = max(1, math.ceil(64 + (ring - measure(64)) * 64 / (measure(128) - measure(64))))
    measured = 1 + bisect_left(range(1, 1025), ring, key=measure)
    share = measure(max(1, measured // 2)) / measure(measured)
    return f"a device of {rate} and {memory}, a ring of {1000 * ring:.3g} ms", predicted, measured, share
