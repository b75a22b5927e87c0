"""Exercise 5: buckets, the hook that tells when a gradient is ready, and the place to wait.

The evidence for "waiting" in 5.3 is time: the probe itself notes whether one event has happened
before another.
"""

import itertools
import threading
import time
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checking.diagnosis import kind_of
from ddp_course.checking.tasks import each_return, task
from ddp_course.errors import Wrong
from ddp_course.running.devices import Device
from ddp_course.stage4_ring import ring_all_reduce

from .shared import as_sum, in_words, require, several, tensors, worlds

NOT_THERE = (
    "is it a gradient that is not there yet? register_post_accumulate_grad_hook calls when it is"
)
STANDS_STILL = (
    "a hook waits for its ring, and backward stands still meanwhile: wait when backward is over"
)
HAND_OVER = "submit takes the function and its argument, submit(all_reduce, flat): do not call it"
RETURNS = "a hook returned something, which autograd takes for the gradient: let it return None"
ORDER = "do all ranks submit the buckets in the same order, and wait for them?"


@task(
    "5.1",
    "assign_buckets",
    {"caps": 2, "dtypes": 1},
    forbidden=("ddp_course.stage5_bucketed.assign_buckets",),
)
class AssignBuckets:
    """Parameters into buckets, last first, each closed on reaching the cap; a bucket for each
    dtype.
    """

    def draw(random):
        sizes = [random.randrange(20, 200) for _ in range(13)]
        alike = ["float32"] * len(sizes)
        mixed = [("float64", "float32", "float32")[i % 3] for i in range(len(sizes))]
        three = [("bfloat16", "float32", "float64")[i % 3] for i in range(len(sizes))]
        exact = [25, 50, 50, 100, 25, 75]
        cases = [
            (sizes, alike, 800),
            (exact, ["float32"] * 6, 400),
            (sizes, mixed, 900),
            (sizes, alike, 10**6),
        ]
        return {"cases": [*cases, (sizes, three, 700)]}

    def probe(assign_buckets, cases):
        for sizes, kinds, cap in cases:
            shapes = zip(sizes, kinds, strict=True)
            parameters = [
                nn.Parameter(torch.zeros(size, dtype=getattr(torch, kind))) for size, kind in shapes
            ]
            index = {id(parameter): i for i, parameter in enumerate(parameters)}
            dtypes = len(set(kinds))
            buckets = []
            for bucket in assign_buckets(parameters, cap):
                require(
                    isinstance(bucket, list | tuple),
                    f"a bucket is a list of parameters, not {kind_of(bucket)}",
                )
                buckets.append([index.get(id(parameter), -1) for parameter in bucket])
            part = "caps"
            about = f"{len(sizes)} parameters, cap {cap} bytes"
            if dtypes > 1:
                buckets = with_sorted_rest(buckets, parameters, cap)
                part = "dtypes"
                about = f"{len(sizes)} parameters of {dtypes} dtypes, cap {cap} bytes"
            yield part, f"{about}, buckets", fault_of_buckets(buckets, parameters, cap)
            nbytes = []
            for bucket in buckets:
                nbytes.append(sum(parameters[i].nbytes for i in bucket))
            yield part, f"{about}, bytes of the buckets", nbytes
            yield part, f"{about}, buckets of parameters (-1: none of them)", buckets


def with_sorted_rest(buckets, parameters, cap):
    """The buckets, of which those at the end that were never filled may come in any order."""
    filled = len(buckets)
    while filled and sum(parameters[i].nbytes for i in buckets[filled - 1]) < cap:
        filled -= 1
    return buckets[:filled] + sorted(buckets[filled:], reverse=True)


def fault_of_buckets(buckets, parameters, cap):
    """In words, what a list of buckets (of numbers of parameters) breaks of the rules; "" if
    nothing.
    """
    placed = [i for bucket in buckets for i in bucket]
    if -1 in placed:
        return "something in a bucket is none of the parameters"
    if sorted(placed) != list(range(len(parameters))):
        return "each parameter belongs into one bucket, and into one only"
    faults = [fault_of_bucket(bucket, parameters, cap) for bucket in buckets]
    return next(filter(None, faults), "") or fault_of_their_order(buckets, parameters, cap)


def fault_of_bucket(bucket, parameters, cap):
    """In words, what is wrong with one bucket; "" if nothing is."""
    if not bucket:
        return "a bucket is empty"
    dtypes = {str(parameters[i].dtype) for i in bucket}
    if len(dtypes) > 1:
        return f"a bucket holds {' and '.join(sorted(dtypes))}: one message has one dtype"
    if bucket != sorted(bucket, reverse=True):
        return f"a bucket holds parameters {bucket}: the last one comes first"
    before_last = sum(parameters[i].nbytes for i in bucket[:-1])
    if before_last >= cap:
        return f"a bucket has {before_last} bytes before its last parameter: it closes there"
    return ""


def fault_of_their_order(buckets, parameters, cap):
    """In words, what is wrong with the order of buckets, each of one dtype; "" if nothing is."""
    below_cap = set()
    last_closed = len(parameters)
    for bucket in buckets:
        dtype = parameters[bucket[0]].dtype
        if sum(parameters[i].nbytes for i in bucket) < cap:
            if dtype in below_cap:
                return (
                    f"two buckets of {dtype} have less than {cap} bytes: a bucket is closed by its"
                    " cap alone, and only the last of a dtype may stay below"
                )
            below_cap.add(dtype)
        elif below_cap:
            return "a bucket that was never filled stands before one that was closed"
        elif bucket[-1] > last_closed:
            return f"bucket {bucket} was closed before the one in front of it"
        else:
            last_closed = bucket[-1]
    return ""


class Shared(nn.Module):
    """A model that uses one layer twice, and has a frozen one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        """(N, 4) to (N, 4)."""
        return self.twice(self.frozen(self.twice(self.first(x).tanh()).tanh()))


@task("5.2", "tell_when_ready", {"calls": 1, "complete": 1})
class TellWhenReady:
    """A hook on every trainable parameter: one call a pass, when the gradient is complete."""

    def draw(random):
        return {"seed": random.randrange(10**6), "inputs": tensors(random, 3, 5, 4)}

    def probe(tell_when_ready, seed, inputs):
        torch.manual_seed(seed)
        model = Shared()
        calls = []
        index = {id(parameter): i for i, parameter in enumerate(model.parameters())}

        def ready(parameter):
            grad = getattr(parameter, "grad", None)
            if grad is not None:
                grad = grad.clone()
            calls.append((index.get(id(parameter), -1), grad))

        tell_when_ready(list(model.parameters()), ready)
        at_once = ""
        if calls:
            at_once = f"ready is called {len(calls)} times, and no gradient is ready"
        yield "calls", "before any backward pass", at_once
        called = False
        for number, x in enumerate(inputs, 1):
            calls.clear()
            model.zero_grad()
            with in_words({"but hook returned": RETURNS}):
                model(x).square().sum().backward()
            called = called or bool(calls)
            last = [parameter.grad for parameter in model.parameters()]
            early = []
            for i, grad in calls:
                if grad is None:
                    early.append(f"parameter {i}: none yet")
                elif not grad.equal(last[i]):
                    early.append(f"parameter {i}: not complete")
            called_for = sorted(i for i, _ in calls)
            yield (
                "calls",
                f"backward pass {number}: ready is called for parameters (-1: none of them)",
                called_for,
            )
            about = f"backward pass {number}: gradients that are not there when ready is called"
            yield "complete", about, "; ".join(sorted(early))
        yield "complete", "ready was called in a backward pass", called


@task(
    "5.3",
    "average_in_background",
    {"waiting": 1, "mean": 1, "errors": 1},
    ranks=3,
    hang=ORDER,
    bound=1e-5,
    every_order="waiting",
)
class AverageInBackground:
    """Submit all, then wait for all: no bucket is touched meanwhile, and no error is lost."""

    def draw(random):
        values = []
        for _ in range(3):
            values.append([tensors(random, 1, n)[0] for n in (7, 12, 5, 9, 2)])
        return {"values": values}

    def probe(average_in_background, values):
        flats = [flat.clone() for flat in values[dist.get_rank()]]
        with ThreadPoolExecutor(1, "communication") as executor:
            order, threads, touched, alone = watched(average_in_background, flats, executor)
            done = len(threads)
            means = [flat.clone() for flat in flats]
        in_background = all(name.startswith("communication") for name in threads)
        yield "waiting", "all_reduce was called", bool(order)
        yield "waiting", "all_reduce runs in the executor's thread", in_background
        yield (
            "waiting",
            "the second bucket was submitted before the first was done",
            not any(alone[:1]),
        )
        too_soon = ""
        if done < len(flats):
            too_soon = f"{len(flats) - done} of {len(flats)} buckets were not done: wait for each"
        yield "waiting", "when your function returned", too_soon
        yield "waiting", "nobody changed a bucket while it was reduced", not any(touched)
        yield "waiting", "buckets were reduced in the order", order
        for index, flat in enumerate(means):
            if len(flat) > dist.get_world_size():
                of_ranks = [of_rank[index] for of_rank in values]
                yield "mean", f"bucket {index}, as a sum", as_sum(flat, of_ranks)
            yield "mean", f"bucket {index}", flat
        for length, name in ((1, "first"), (2, "last")):
            about = f"an error in the communication thread, in the {name} bucket of two"
            yield "errors", about, error_of(average_in_background, length)


def watched(function, flats, executor):
    """In which order buckets are reduced, and in which threads; which changed meanwhile, and which
    ran alone.

    The first bucket waits, at most 0.5 s, until the second one is submitted; then each takes 0.03 s
    and its sum.
    """
    ((size, group),) = worlds(3)
    order = []
    threads = []
    touched = []
    alone = []
    begun = threading.Event()
    second = threading.Event()
    submit = executor.submit

    def submitted(*args, **kwargs):
        if begun.is_set():
            second.set()
        future = submit(*args, **kwargs)
        # An answer that changes the bucket now changes it while it is being reduced.
        begun.wait(0.5)
        return future

    def all_reduce(flat):
        sizes = [bucket.numel() for bucket in flats]
        require(flat.numel() in sizes, "all_reduce takes a bucket: hand over one after the other")
        order.append(sizes.index(flat.numel()))
        before = flat.clone()
        begun.set()
        alone.append(not second.wait(0.5))
        second.set()
        time.sleep(0.03)
        touched.append(not before.equal(flat))
        ring_all_reduce(flat, group)
        threads.append(threading.current_thread().name)

    executor.submit = submitted
    with in_words({"not callable": HAND_OVER}):
        function(flats, all_reduce, executor, size)
    return order, threads, touched, alone


def error_of(function, length):
    """What becomes of an error in the all-reduce of the bucket with this length."""

    def all_reduce(flat):
        if len(flat) == length:
            raise ConnectionError("the network is gone")

    with ThreadPoolExecutor(1) as executor:
        try:
            function([torch.zeros(1), torch.zeros(2)], all_reduce, executor, 2)
        except ConnectionError:
            return ""
    return "it is lost"


@task("5.4", ("the_bug", "departures"), {"the line": 1, "mended": 1}, secret=("the line",))
class FindTheBugInTheOrder:
    """Buckets leave by index, on all ranks alike, none before its gradients are there, and none
    later.
    """

    def draw(random):
        cases = []
        for count in (6, 9, 14):
            parameters = list(range(count))[::-1]
            cuts = sorted(random.sample(range(1, count), 2))
            buckets = [parameters[: cuts[0]], parameters[cuts[0] : cuts[1]], parameters[cuts[1] :]]
            orders = [
                parameters,
                *(random.sample(parameters, count) for _ in range(2)),
                parameters[::-1],
            ]
            cases.append((buckets, orders))
        return {"cases": cases}

    def probe(the_bug, departures, cases):
        yield "the line", "the faulty line", the_bug()
        for buckets, orders in cases:
            for ready in orders:
                about = f"buckets {buckets}, gradients ready in the order {ready}"
                left = departures([list(bucket) for bucket in buckets], list(ready))
                yield "mended", about, fault_of_departures(left, buckets, ready)
                yield "mended", f"{about}, departures", left


def fault_of_departures(left, buckets, ready):
    """In words, what a list of departures breaks of the rules; "" if nothing, or if it is none."""
    if not isinstance(left, list | tuple) or not all(map(is_pair, left)):
        return ""
    numbers = [number for _, number in left]
    if numbers != sorted(numbers):
        return f"the buckets leave in the order {numbers}: all ranks take them by index"
    if len(set(numbers)) < len(numbers):
        return f"the buckets {numbers} leave: each leaves once"
    departed = {number: count for count, number in left}
    earliest = 0
    for number, bucket in enumerate(buckets):
        earliest = max(earliest, *(ready.index(parameter) + 1 for parameter in bucket))
        when = departed.get(number)
        if when is None:
            return f"bucket {number} never leaves: after {earliest} gradients it could"
        if when < earliest:
            return (
                f"bucket {number} leaves after {when} gradients: it is full, and its turn, after"
                f" {earliest}"
            )
        if when > earliest:
            return f"bucket {number} leaves after {when} gradients: after {earliest} it could"
    return ""


def is_pair(thing):
    """Whether something is a pair of whole numbers."""
    return isinstance(thing, list | tuple) and [type(item) for item in thing] == [int, int]


LAYERS = 8
WIDTH = 8


def buckets_of(model):
    """Four buckets of two layers each, those that backward finishes first in front."""
    parameters = list(model.parameters())[::-1]
    return [parameters[i : i + 2] for i in range(0, LAYERS, 2)]


@task(
    "5.5",
    "Bucketed",
    {"mean": 1, "every pass": 1, "overlap": 2},
    ranks=3,
    hang=ORDER,
    bound=1e-5,
    every_order="mean",
)
class AssembleBucketedDDP:
    """Hooks, buckets and a thread, put together: right, in every pass, and beside the backward
    pass.
    """

    def draw(random):
        return {
            "seed": random.randrange(10**6),
            "inputs": [tensors(random, 3, 8, WIDTH) for _ in range(3)],
        }

    def probe(Bucketed, seed, inputs):
        ((size, group),) = worlds(3)
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for layer in model:
            layer.weight.data *= (
                3**0.5
            )  # Else activations shrink, and gradients to next to nothing.
        watch = Watch(model, group)
        with ThreadPoolExecutor(1, "communication") as executor:
            executor.submit = partial(watch.submitted, executor.submit)
            parallel = Bucketed(buckets_of(model), watch.all_reduce, executor, size)
            for number, x in enumerate(inputs[dist.get_rank()], 1):
                watch.begin()
                model.zero_grad()
                try:
                    with in_words({"but hook returned": RETURNS}):
                        parallel.backward(model(x).square().mean())
                except AttributeError as error:
                    cause = NOT_THERE
                    if number > 1:
                        cause = (
                            f"what pass {number - 1} has counted must begin anew, and hooks are"
                            " registered once"
                        )
                    raise Wrong(f"backward pass {number}: {error}: {cause}") from error
                about = f"backward pass {number}"
                running = sum(not future.done() for future in watch.futures)
                gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                part = "mean" if number == 1 else "every pass"
                too_soon = ""
                if running:
                    too_soon = f"it returned before {running} of its rings had ended: wait for each"
                yield part, f"{about}, rings", too_soon
                yield part, about, gradient
                threads = sorted(set(watch.threads))
                yield "overlap", f"{about}, messages for 4 buckets", len(watch.threads)
                yield "overlap", f"{about}, threads that call all_reduce", threads
                case = f"{about}, buckets that leave before backward has finished"
                yield "overlap", case, sum(watch.early[:2])
                yield "overlap", f"{about}, hooks", watch.stands_still


class Watch:
    """What happens in a backward pass: gradients that are ready, threads that sum, what was
    submitted, and whether early, and whether a hook waits for it.
    """

    def __init__(self, model, group):
        self.group = group
        self.begin()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.note_ready)

    def begin(self):
        """Forget the pass before."""
        self.ready = 0
        self.threads = []
        self.futures = []
        self.early = []
        self.stands_still = ""

    def note_ready(self, _):
        self.ready += 1

    def all_reduce(self, flat):
        self.threads.append(threading.current_thread().name)
        time.sleep(0.01)  # So it is not over by chance when nobody waits for it.
        ring_all_reduce(flat, self.group)

    def submitted(self, submit, *args, **kwargs):
        """Submit something, and note whether backward still runs, now and when somebody waits."""
        self.early.append(self.ready < LAYERS)
        future = submit(*args, **kwargs)
        self.futures.append(future)
        result = future.result

        def noted_result(timeout=None):
            if self.ready < LAYERS:
                self.stands_still = STANDS_STILL
            return result(timeout)

        future.result = noted_result
        return future


SIGNS = {
    "each on its own": "several rings follow each other, the first from when backward ends, give or"
    " take 2 ms",
    "one bucket": "there is a single ring, which begins when backward ends, give or take 2 ms",
    "hidden": "rings begin long before backward ends, and there are pauses between them, since the"
    " link waits for backward; the last ring may end later",
    "slow link": "rings begin long before backward ends, and each begins as soon as the one before"
    " it is over, since it finds the link busy",
}


def timeline_of(random, setting):
    """Spans (name, start_ms, end_ms) of one step, shuffled."""
    start = random.uniform(0, 30)
    slots = [random.uniform(12, 20) for _ in range(random.randrange(3, 7))]
    end = start + sum(slots)
    spans = [
        ("forward", start - 12, start),
        ("backward", start, end),
        ("update", end + 200, end + 203),
    ]
    if setting == "one bucket":
        spans.append(("communication", end - random.uniform(0.5, 2), end + random.uniform(20, 60)))
    now = end - random.uniform(0.5, 2) if setting == "each on its own" else start
    for index in range(len(slots) if setting != "one bucket" else 0):
        full = now if setting == "each on its own" else start + sum(slots[: index + 1])
        now = max(now + 0.3, full)
        took = {"hidden": random.uniform(3, 6), "slow link": random.uniform(22, 40)}.get(
            setting, random.uniform(5, 9)
        )
        spans.append(("communication", now, now + took))
        now += took
    return random.sample([(name, round(a, 2), round(b, 2)) for name, a, b in spans], len(spans))


@task("5.6", "setting_of", {"after backward": 1, "beside backward": 1})
class WhichTimeline:
    """Four settings and their timelines: where nothing runs beside backward, and where
    communication does.
    """

    def draw(random):
        settings = random.sample(list(SIGNS) * 6, len(SIGNS) * 6)
        timelines = [timeline_of(random, setting) for setting in settings]
        in_order = [sorted(timeline, key=lambda span: span[1]) for timeline in timelines]
        return {"settings": settings, "cases": [(one,) for one in timelines + in_order]}

    def probe(setting_of, settings, cases):
        return each_return(setting_of, cases)

    def read(returned, settings, cases):
        count = len(settings)
        for setting, (timeline,), answer, of_sorted in zip(
            settings, cases[:count], returned[:count], returned[count:], strict=True
        ):
            part = "beside backward" if setting in ("hidden", "slow link") else "after backward"
            why = ""
            if answer in SIGNS and answer != setting:
                why = f"{answer!r} was returned, but {SIGNS[setting]}"
            if answer != setting == of_sorted:
                why = "right for the spans in order of time, but they come in any order: sort them"
            yield part, as_sentence(timeline), why
            yield part, f"{as_sentence(timeline)}, the setting", answer


def as_sentence(timeline):
    """A timeline as a sentence."""
    backward = next(
        f"{start:.0f} to {end:.0f}" for name, start, end in timeline if name == "backward"
    )
    rings = sorted((start, end) for name, start, end in timeline if name == "communication")
    return (
        f"backward {backward} ms, communication"
        f" {', '.join(f'{a:.0f} to {b:.0f}' for a, b in rings)} ms (and a forward before, an update"
        " after: neither is communication)"
    )


@cache
def backward_seconds(width, rate, memory, samples):
    """The emulated device's time for the backward pass of three layers."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    loss = model(torch.zeros(samples, width)).sum()
    with Device(rate, memory).emulate(sleep=False) as emulation:
        loss.backward()
    return emulation.busy_s


def limited(measure, most=40):
    """The function `measure`, which raises Wrong when it is called more than `most` times."""
    times = itertools.count(1)

    def limited_measure(samples):
        too_often = (
            f"measured more than {most} times; halve the range each time, and a dozen are enough"
        )
        require(next(times) <= most, too_often)
        return measure(samples)

    return limited_measure


@task(
    "5.7",
    "when_it_hides",
    {"predicted": 1, "measured": 1, "explained": 1},
    secret=("explained",),
    seconds=30,
)
class WhenItHides:
    """The prediction of a straight line, a measurement, and the cause of their difference."""

    def draw(random):
        cases = [(32, 200, 100, 0.8), (48, 100, 10, 0.6), (48, 100, 10, 0.05), (48, 100, 10, 0.12)]
        cases += [(48, 100, 10, 0.03)]  # Here the line meets the ring below one sample.
        cases.append((64, 100, 1, 0.2))
        drawn = [(*device, part * random.uniform(0.9, 1.1)) for *device, part in cases]
        # Here the predicted number of samples has another bound than the measured one.
        return {"cases": [*drawn, (64, 100, 10, 0.066)]}

    def probe(when_it_hides, cases):
        for width, rate, memory, part in cases:
            backward = partial(backward_seconds, width, f"{rate}MFLOP/s", f"{memory}MB/s")
            ring = part * backward(512)
            about = f"a device of {rate}MFLOP/s and {memory}MB/s, a ring of {1000 * ring:.3g} ms"
            answer = when_it_hides(limited(backward), ring)
            predicted, measured, why = several(
                answer, 3, "return three things: predicted, measured, why"
            )
            yield "predicted", f"{about}, predicted samples", predicted
            yield "measured", f"{about}, measured samples", measured
            hides = 1 + bisect_left(range(1, 1025), ring, key=backward)
            share = backward(max(1, hides // 2)) / backward(hides)
            half = (
                f"with half of {hides} samples backward takes {share:.0%} of the time; what"
                " bounds it"
            )
            yield "explained", f"{about}: {half}", why


@task("5.8", "most_ranks", {"small machines": 1, "large machines": 1})
class MostRanks:
    """Backward is tokens / K, the ring 2(K-1)/K: K is at most 1 + 2 tokens W / (bytes R)."""

    def draw(random):
        cases = []
        for gradient_bytes in (2, 4):
            for ranks in (5, 40, 700, 9000):
                tokens = random.randrange(2**14, 2**22)
                rate = random.randrange(50, 900) * 10**12
                # This bandwidth puts the limit half way between two whole numbers.
                bandwidth = (ranks - 0.5) * gradient_bytes * rate / (2 * tokens)
                cases.append((tokens, rate, bandwidth, gradient_bytes, ranks))
        for tokens, rate, bandwidth, gradient_bytes, ranks in cases:
            part = "small machines" if ranks < 100 else "large machines"
            about = (
                f"{tokens} tokens, {rate / 1e12:g} TFLOP/s, {bandwidth / 1e9:.3g} GB/s,"
                f" {gradient_bytes} bytes per gradient"
            )
            yield part, about, (tokens, rate, bandwidth, gradient_bytes)
