"""Exercise 5: buckets, the hook that tells when a gradient is ready, and the place to wait.

The evidence for "waiting" in 5.3 is time: the probe itself notes whether one event has happened
before another.

A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task` says.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import accumulate, count, product

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.stage4_ring import ring_all_reduce
from ddp_exercises.diagnosis import kind_of
from ddp_exercises.errors import Wrong
from ddp_exercises.tasks import each_return, task
from manyranks.devices import Device
from manyranks.torch_inside import around

from .shared import (
    addresses,
    as_it_is,
    as_sum,
    form_of_explanation,
    in_words,
    moved,
    nothing,
    require,
    require_written,
    several,
    tensors,
    worlds,
)

NOT_THERE = (
    "is it a gradient that is not there yet? register_post_accumulate_grad_hook calls when it is"
)
STANDS_STILL = (
    "a hook waits for its ring, and backward stands still meanwhile: wait when backward is over"
)
HAND_OVER = "submit takes the function and its argument, submit(all_reduce, flat): do not call it"
NO_WAIT = "result(timeout=...) gives up before the bucket is done: wait with result(), however long it takes"
OWN_THREAD = "all_reduce runs in a thread of your own; submit it to the `executor` that was given"
RETURNS = "a hook returned something, which autograd takes for the gradient: let it return None"
ORDER = "do all ranks submit the buckets in the same order, and wait for them?"
FIVE = 5
OF_FIVE = "if world_size is 5, and the other ranks have nothing to add"
CHANGED_LIST = (
    "your answer has changed the list of parameters that it was given, and its owner still needs it: go"
    " through it, or work on a copy, list(parameters)"
)
NO_PARAMETER = -1  # This is the number of a thing that is none of the parameters.


@task(
    "5.1",
    "assign_buckets",
    {"caps": 2, "dtypes": 1},
    forbidden=(
        "ddp_course.stage5_bucketed.assign_buckets",
        "ddp_course.stage6_ddp.buckets.bucket_assignment",
    ),
)
class AssignBuckets:
    """Parameters into buckets, last first, each closed on reaching the cap; a bucket for each
    dtype.
    """

    def draw(random):
        sizes = [random.randrange(20, 200) for _ in range(13)]
        fill_exactly = [25, 50, 50, 100, 25, 75]  # From the last one on, each 100 make a bucket.
        return {
            "cases": [
                (sizes, dtypes_in_turn(13, "float32"), 800),
                (fill_exactly, dtypes_in_turn(6, "float32"), 400),
                (sizes, dtypes_in_turn(13, "float64", "float32", "float32"), 900),
                (sizes, dtypes_in_turn(13, "float32"), 10**6),
                (sizes, dtypes_in_turn(13, "bfloat16", "float32", "float64"), 700),
            ]
        }

    def probe(assign_buckets, cases):
        for sizes, dtypes, cap in cases:
            parameters = []
            for size, dtype in zip(sizes, dtypes, strict=True):
                parameters.append(nn.Parameter(torch.zeros(size, dtype=getattr(torch, dtype))))
            number_of = {id(parameter): i for i, parameter in enumerate(parameters)}
            buckets = []
            given = list(parameters)
            assigned = assign_buckets(given, cap)
            untouched = list(map(id, given)) == list(map(id, parameters))
            require(untouched, CHANGED_LIST)
            for bucket in assigned:
                require(
                    isinstance(bucket, list | tuple),
                    f"a bucket is a list of parameters, not {kind_of(bucket)}",
                )
                buckets.append([number_of.get(id(thing), NO_PARAMETER) for thing in bucket])
            part = "caps"
            about = f"{len(sizes)} parameters, cap {cap} bytes"
            several_dtypes = len(set(dtypes))
            if several_dtypes > 1:
                buckets = with_sorted_rest(buckets, parameters, cap)
                part = "dtypes"
                about = f"{len(sizes)} parameters of {several_dtypes} dtypes, cap {cap} bytes"
            yield part, f"{about}, buckets", fault_of_buckets(buckets, parameters, cap)
            nbytes = [bytes_of(bucket, parameters) for bucket in buckets]
            yield part, f"{about}, bytes of the buckets", nbytes
            yield part, f"{about}, buckets of parameters (-1: none of them)", buckets


def dtypes_in_turn(count, *names):
    """Return the names of dtypes for `count` parameters, each name in its turn."""
    return [names[i % len(names)] for i in range(count)]


def bytes_of(bucket, parameters):
    """Return the bytes of a bucket of numbers of parameters."""
    return sum(parameters[i].nbytes for i in bucket)


def with_sorted_rest(buckets, parameters, cap):
    """Return the buckets; those at the end that were never filled are sorted, as any order will
    do.
    """
    filled = len(buckets)
    while filled and bytes_of(buckets[filled - 1], parameters) < cap:
        filled -= 1
    return buckets[:filled] + sorted(buckets[filled:], reverse=True)


def fault_of_buckets(buckets, parameters, cap):
    """Return in words what a list of buckets (of numbers of parameters) breaks of the rules; ""
    if nothing.
    """
    placed = [i for bucket in buckets for i in bucket]
    if NO_PARAMETER in placed:
        return "something in a bucket is none of the parameters"
    if sorted(placed) != list(range(len(parameters))):
        return "each parameter belongs into one bucket, and into one only"
    for bucket in buckets:
        fault = fault_of_bucket(bucket, parameters, cap)
        if fault:
            return fault
    return fault_of_their_order(buckets, parameters, cap)


def fault_of_bucket(bucket, parameters, cap):
    """Return in words what is wrong with one bucket; "" if nothing is."""
    if not bucket:
        return "a bucket is empty"
    dtypes = {str(parameters[i].dtype) for i in bucket}
    if len(dtypes) > 1:
        return f"a bucket holds {' and '.join(sorted(dtypes))}: one message has one dtype"
    if bucket != sorted(bucket, reverse=True):
        return f"a bucket holds parameters {bucket}: the last one comes first"
    before_last = bytes_of(bucket[:-1], parameters)
    if before_last >= cap:
        return f"a bucket has {before_last} bytes before its last parameter: it closes there"
    return ""


def fault_of_their_order(buckets, parameters, cap):
    """Return in words what is wrong with the order of buckets, each of one dtype; "" if nothing
    is.
    """
    unfilled_dtypes = set()
    last_closed = len(parameters)
    for bucket in buckets:
        dtype = parameters[bucket[0]].dtype
        if bytes_of(bucket, parameters) < cap:
            if dtype in unfilled_dtypes:
                return (
                    f"two buckets of {dtype} have less than {cap} bytes: a bucket is closed by its"
                    " cap alone, and only the last of a dtype may stay below"
                )
            unfilled_dtypes.add(dtype)
        elif unfilled_dtypes:
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
    """A hook on every trainable parameter: one call a pass, as soon as the gradient is complete."""

    def draw(random):
        return {"seed": random.randrange(10**6), "inputs": tensors(random, 3, 5, 4)}

    def probe(tell_when_ready, seed, inputs):
        torch.manual_seed(seed)
        model = Shared()
        watch = ReadyWatch(list(model.parameters()))

        def ready(parameter):  # An answer may keep things in attributes of a function.
            watch.note_call(parameter)

        tell_when_ready(list(model.parameters()), ready)
        at_once = ""
        if watch.calls:
            at_once = f"ready is called {len(watch.calls)} times, and no gradient is ready"
        yield "calls", "before any backward pass", at_once
        ever_called = False
        for number, x in enumerate(inputs, 1):
            watch.begin()
            model.zero_grad()
            with in_words({"but hook returned": RETURNS}):
                model(x).square().sum().backward()
            ever_called = ever_called or bool(watch.calls)
            about = f"backward pass {number}: ready is called for parameters (-1: none of them)"
            yield "calls", about, sorted(i for i, _ in watch.calls)
            about = f"backward pass {number}: gradients that are not there when ready is called"
            yield "complete", about, "; ".join(watch.too_early())
            case = f"backward pass {number}: calls that come late"
            yield "complete", case, watch.fault_of_late_calls()
        yield "complete", "whether ready was called in a backward pass", ever_called


class ReadyWatch:
    """Notes in a backward pass of which parameters the gradients come, and when `ready` is called."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.number_of = {id(parameter): i for i, parameter in enumerate(parameters)}
        self.begin()
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.note_gradient)

    def begin(self):
        """Forget the pass before."""
        self.calls = []  # Each has a parameter's number and a copy of its gradient, None without one.
        self.newest = None  # This parameter's gradient has come last.
        self.late = []  # Other gradients came before the calls for parameters of these numbers.

    def note_gradient(self, parameter):
        self.newest = parameter

    def note_call(self, parameter):
        """Note that an answer calls `ready`."""
        gradient = getattr(parameter, "grad", None)
        if gradient is not None:
            gradient = gradient.clone()
        number = self.number_of.get(id(parameter), NO_PARAMETER)
        self.calls.append((number, gradient))
        if gradient is not None and self.newest is not parameter:
            self.late.append(number)

    def too_early(self):
        """Return in words each call that came before a gradient was complete, sorted."""
        faults = []
        for number, gradient in self.calls:
            if gradient is None:
                faults.append(f"parameter {number}: none yet")
            elif self.parameters[number].grad is None:
                faults.append(f"parameter {number}: cleared before the optimizer has used it")
            elif not gradient.equal(self.parameters[number].grad):
                faults.append(f"parameter {number}: not complete, or changed afterwards")
        return sorted(faults)

    def fault_of_late_calls(self):
        """Return in words that calls came after gradients of other parameters; "" if none did."""
        if not self.late:
            return ""
        return (
            f"ready is called for parameters {sorted(self.late)} when gradients of others have come"
            " meanwhile: each has a hook of its own, or there is nothing to do beside backward"
        )


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
        ((size, group),) = worlds(3)
        flats = [flat.clone() for flat in values[dist.get_rank()]]
        before = addresses(flats)
        watch = BucketWatch(flats, group)
        with ThreadPoolExecutor(1, "communication") as executor:
            executor.submit = partial(watch.submit, executor.submit)
            with in_words({"not callable": HAND_OVER, "TimeoutError": NO_WAIT}):
                average_in_background(flats, watch.all_reduce, executor, size)
            done_at_return = len(watch.threads)
            means = [flat.clone() for flat in flats]
        yield "waiting", "whether all_reduce was called", bool(watch.order)
        yield "waiting", "where all_reduce runs", fault_of_threads(set(watch.threads))
        first_was_alone = bool(watch.alone) and watch.alone[0]
        about = "whether the second bucket was submitted before the first was done"
        yield "waiting", about, not first_was_alone
        too_soon = ""
        if done_at_return < len(flats):
            missing = len(flats) - done_at_return
            too_soon = f"{missing} of {len(flats)} buckets were not done: wait for each"
        yield "waiting", "when your function returned", too_soon
        untouched = not any(watch.touched)
        yield "waiting", "whether a bucket stays as it is while it is reduced", untouched
        yield "waiting", "buckets were reduced in the order", watch.order
        yield "mean", "where the buckets are", moved(before, flats)
        for number, mean in enumerate(means):
            if len(mean) > size:
                of_ranks = [of_rank[number] for of_rank in values]
                yield "mean", f"bucket {number}, as a sum", as_sum(mean, of_ranks)
            yield "mean", f"bucket {number}", mean
        ones = torch.ones(4)
        with ThreadPoolExecutor(1) as executor:
            average_in_background([ones], nothing_to_add, executor, FIVE)
        yield "mean", OF_FIVE, ones
        for length, name in ((1, "first"), (2, "last")):
            about = f"an error in the communication thread, in the {name} bucket of two"
            yield "errors", about, fault_of_lost_error(average_in_background, length)


def fault_of_threads(names):
    """Return in words that not all threads of these names are the executor's; else ""."""
    others = {name for name in names if not name.startswith("communication")}
    if not others:
        return ""
    if threading.current_thread().name in others:
        return "all_reduce runs in the thread that trains; submit it to the executor"
    return OWN_THREAD


class BucketWatch:
    """Notes what happens to buckets (`flats`) that are submitted and reduced.

    Of each reduction it keeps the bucket's number in `order`, in `alone` whether no second bucket
    was submitted meanwhile, in `touched` whether somebody else changed the bucket, and when it is
    done its thread's name in `threads`.
    """

    # An answer that submits no second bucket, or no bucket at all, is waited for so long.
    PATIENCE_S = 0.5

    def __init__(self, flats, group):
        self.flats = flats
        self.group = group
        self.order = []
        self.alone = []
        self.touched = []
        self.threads = []
        self.training = threading.current_thread().name
        self.begun = threading.Event()
        self.second_submitted = threading.Event()

    def submit(self, submit, *args, **kwargs):
        """Submit a bucket with `submit`, and return when the first one is being reduced."""
        if self.begun.is_set():
            self.second_submitted.set()
        future = submit(*args, **kwargs)
        # An answer that changes the bucket now changes it while it is being reduced.
        self.begun.wait(self.PATIENCE_S)
        return future

    def all_reduce(self, flat):
        """Sum a bucket over the ranks, the first one when a second one was submitted."""
        lengths = [len(bucket) for bucket in self.flats]
        require(flat.numel() in lengths, "all_reduce takes a bucket: hand over one after the other")
        self.order.append(lengths.index(flat.numel()))
        name = threading.current_thread().name
        if name != self.training and not name.startswith("communication"):
            self.threads.append(name)
            raise Wrong(OWN_THREAD)
        before = flat.clone()
        self.begun.set()
        self.alone.append(not self.second_submitted.wait(self.PATIENCE_S))
        self.second_submitted.set()  # The other buckets wait for nothing.
        # An answer that does not wait has time to return meanwhile, or to change the bucket.
        time.sleep(0.03)
        self.touched.append(not before.equal(flat))
        ring_all_reduce(flat, self.group)
        self.threads.append(threading.current_thread().name)


def nothing_to_add(flat):
    """Sum as if the other ranks had zeros."""
    return flat


def fault_of_lost_error(average_in_background, length):
    """Return in words that an error in the all-reduce of the bucket with this length is lost;
    else "".
    """

    def all_reduce(flat):
        if len(flat) == length:
            raise ConnectionError("the network is gone")

    buckets = [torch.zeros(1), torch.zeros(2)]
    with ThreadPoolExecutor(1) as executor:
        try:
            average_in_background(buckets, all_reduce, executor, 2)
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
        for number in (6, 9, 14):
            parameters = list(range(number))[::-1]
            first, second = sorted(random.sample(range(1, number), 2))
            buckets = [parameters[:first], parameters[first:second], parameters[second:]]
            orders = [
                parameters,
                random.sample(parameters, number),
                random.sample(parameters, number),
                parameters[::-1],
            ]
            cases.append((buckets, orders))
        return {"cases": cases}

    def probe(the_bug, departures, cases):
        yield "the line", "the faulty line", the_bug()
        for buckets, orders in cases:
            for ready in orders:
                about = f"buckets {buckets}, gradients ready in the order {ready}"
                pairs = departures([list(bucket) for bucket in buckets], list(ready))
                yield "mended", about, fault_of_departures(pairs, buckets, ready)
                yield "mended", f"{about}, departures", pairs


def fault_of_departures(pairs, buckets, ready):
    """Return in words what departures, pairs of (gradients that were there, number of the
    bucket), break of the rules; "" if nothing, or if they are no such pairs.
    """
    if not isinstance(pairs, list | tuple) or not all(map(is_pair, pairs)):
        return ""
    numbers = [number for _, number in pairs]
    if numbers != sorted(numbers):
        return f"the buckets leave in the order {numbers}: all ranks take them by index"
    if len(set(numbers)) < len(numbers):
        return f"the buckets {numbers} leave: each leaves once"
    departures = {number: gradients for gradients, number in pairs}
    earliest = 0
    for number, bucket in enumerate(buckets):
        last_of_bucket = max(ready.index(parameter) for parameter in bucket)
        earliest = max(earliest, last_of_bucket + 1)
        when = departures.get(number)
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
    """Return whether something is a pair of whole numbers."""
    return isinstance(thing, list | tuple) and [type(item) for item in thing] == [int, int]


LAYERS = 8
WIDTH = 8


def buckets_of(model):
    """Return four buckets of two layers each, those that backward finishes first in front."""
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
        require_written(Bucketed.backward)
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for layer in model:
            # nn.Linear draws weights of the variance 1 / (3 WIDTH). With those activations shrink
            # from layer to layer, and gradients to next to nothing.
            layer.weight.data *= 3**0.5
        watch = PassWatch(model, group)
        with ThreadPoolExecutor(1, "communication") as executor:
            executor.submit = partial(watch.submit, executor.submit)
            calls_of_first = 0
            with around(torch.Tensor, "register_post_accumulate_grad_hook", watch.register):
                parallel = Bucketed(buckets_of(model), watch.all_reduce, executor, size)
            for number, x in enumerate(inputs[dist.get_rank()], 1):
                watch.begin()
                model.zero_grad()
                try:
                    registering = around(
                        torch.Tensor, "register_post_accumulate_grad_hook", watch.register
                    )
                    with in_words({"but hook returned": RETURNS}), registering:
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
                still_running = sum(not future.done() for future in watch.futures)
                gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                part = "mean" if number == 1 else "every pass"
                too_soon = ""
                if still_running:
                    too_soon = (
                        f"it returned before {still_running} of its rings had ended: wait for each"
                    )
                yield part, f"{about}, rings", too_soon
                calls_of_first = calls_of_first or watch.hook_calls
                yield part, f"{about}, calls of hooks", watch.fault_of_calls(calls_of_first)
                yield part, about, gradient
                threads = sorted(set(watch.threads))
                yield "overlap", f"{about}, messages for 4 buckets", len(watch.threads)
                yield "overlap", f"{about}, threads that call all_reduce", threads
                # An answer may hand over a bucket when the next is complete: so two are asked for.
                leave_early = sum(watch.early[:2])
                case = f"{about}, buckets that leave before backward has finished the next one"
                yield "overlap", case, leave_early
                yield "overlap", f"{about}, hooks", watch.fault_of_hooks
            small = nn.Linear(WIDTH, 1)
            parallel = Bucketed([[small.bias], [small.weight]], nothing_to_add, executor, FIVE)
            parallel.backward(small(torch.ones(1, WIDTH)).sum())
            yield "mean", OF_FIVE, small.weight.grad.clone()


class PassWatch:
    """Notes what happens in a backward pass.

    It counts gradients that are `ready`, and keeps the names of `threads` that sum, the `futures`
    of what was submitted, for each of these in `early` whether backward was not beyond the next
    bucket, and in `fault_of_hooks`, in words, that a hook waited for one; else "".
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
        self.fault_of_hooks = ""
        self.hook_calls = 0

    def register(self, register, parameter, hook):
        """Register a hook of the answer's with `register`, so that its calls are counted."""

        def counted(parameter):
            self.hook_calls += 1
            return hook(parameter)

        return register(parameter, counted)

    def fault_of_calls(self, first):
        """Return in words that hooks are called more often than `first`, in the first pass; else ""."""
        if self.hook_calls <= first:
            return ""
        return (
            f"{self.hook_calls}, and {first} in the first pass: a hook stays until it is removed, so those"
            " of each pass pile up; register them once, in __init__"
        )

    def note_ready(self, _):
        """Count one more gradient, as the hook of a parameter."""
        self.ready += 1

    def all_reduce(self, flat):
        """Sum a tensor over the ranks."""
        self.threads.append(threading.current_thread().name)
        time.sleep(0.01)  # Else it might be over by chance when nobody waits for it.
        ring_all_reduce(flat, self.group)

    def submit(self, submit, *args, **kwargs):
        """Submit something with `submit`; note how far backward is, and whether it still runs when
        somebody waits.
        """
        of_this_and_next = 2 * (len(self.early) + 2)  # A bucket has two gradients.
        self.early.append(self.ready <= of_this_and_next)
        future = submit(*args, **kwargs)
        self.futures.append(future)
        result = future.result

        def noted_result(timeout=None):
            if self.ready < LAYERS:
                self.fault_of_hooks = STANDS_STILL
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


# Milliseconds, from and to: a ring's, and a bucket's share of backward. In the uneven timelines rings
# of both settings are as long, and neither a ring's length nor the sum of all tells them apart.
RING_MS = {"each on its own": (5, 9), "hidden": (3, 6), "slow link": (22, 40)}
UNEVEN_RING_MS = {"each on its own": (5, 9), "hidden": (10, 15), "slow link": (10, 15)}
UNEVEN_SLOT_MS = {"hidden": (30, 50), "slow link": (6, 9)}


def timeline_of(random, setting, uneven):
    """Return the spans (name, start_ms, end_ms) of one step, shuffled.

    Where it is `uneven`, the last ring of "hidden" is long, and the first bucket of "slow link" late.
    """
    start = random.uniform(0, 30)
    slot_ms = UNEVEN_SLOT_MS.get(setting, (12, 20)) if uneven else (12, 20)
    slots = [random.uniform(*slot_ms) for _ in range(random.randrange(3, 7))]
    if uneven and setting == "slow link":
        slots[0] = random.uniform(60, 90)
    _, *ready = accumulate(slots, initial=start)  # when each bucket has all of its gradients
    end = ready[-1]
    rings = rings_of(random, setting, ready, UNEVEN_RING_MS if uneven else RING_MS)
    if uneven and setting == "hidden":
        begin, _ = rings[-1]
        rings[-1] = (begin, begin + (end - start) / 2)
    spans = [
        ("forward", start - 12, start),
        ("backward", start, end),
        ("update", end + 200, end + 203),
    ]
    for ring_start, ring_end in rings:
        spans.append(("communication", ring_start, ring_end))
    rounded = [(name, round(begin, 2), round(end, 2)) for name, begin, end in spans]
    return random.sample(rounded, len(rounded))


def rings_of(random, setting, ready, ring_ms):
    """Return (start_ms, end_ms) of a step's rings, if its buckets are `ready` at these times."""
    end_of_backward = ready[-1]
    just_before = end_of_backward - random.uniform(0.5, 2)
    if setting == "one bucket":
        return [(just_before, end_of_backward + random.uniform(20, 60))]
    if setting == "each on its own":
        ready = [just_before] * len(ready)
    shortest, longest = ring_ms[setting]
    rings = []
    link_is_free = 0.0
    for bucket_is_ready in ready:
        start = max(bucket_is_ready, link_is_free + 0.3)
        link_is_free = start + random.uniform(shortest, longest)
        rings.append((start, link_is_free))
    return rings


@task("5.6", "setting_of", {"after backward": 1, "beside backward": 1})
class WhichTimeline:
    """Four settings and their timelines: where nothing runs beside backward, and where
    communication does.
    """

    def draw(random):
        settings = random.sample(list(SIGNS) * 6, len(SIGNS) * 6)
        timelines = []
        seen = Counter()
        for setting in settings:
            seen[setting] += 1
            timelines.append(timeline_of(random, setting, uneven=seen[setting] % 2 == 0))
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
            fault = ""
            if answer in SIGNS and answer != setting:
                fault = f"{answer!r} was returned, but {SIGNS[setting]}"
            if answer != setting and of_sorted == setting:
                fault = (
                    "right for the spans in order of time, but they come in any order: sort them"
                )
            yield part, as_sentence(timeline), fault
            yield part, f"{as_sentence(timeline)}, the setting", answer


def as_sentence(timeline):
    """Return a timeline as a sentence."""
    backward = spans_in_words(timeline, "backward")
    rings = spans_in_words(timeline, "communication")
    return (
        f"backward {backward} ms, communication {rings} ms (and a forward before, an update after:"
        " neither is communication)"
    )


def spans_in_words(timeline, name):
    """Return when the spans of one name are, in order, such as "3 to 8, 9 to 11"."""
    spans = sorted((start, end) for of_name, start, end in timeline if of_name == name)
    return ", ".join(f"{start:.0f} to {end:.0f}" for start, end in spans)


@cache
def backward_seconds(width, rate, memory, samples):
    """Return the emulated device's time for the backward pass of three layers."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    loss = model(torch.zeros(samples, width)).sum()
    with Device(rate, memory).emulate(sleep=False) as emulation:
        loss.backward()
    return emulation.busy_s


def limited(measure, most=40):
    """Return the function `measure`, which raises Wrong when it is called more than `most`
    times.
    """
    calls = count(1)

    def limited_measure(samples):
        too_often = (
            f"measured more than {most} times; halve the range each time, and a dozen are enough"
        )
        require(next(calls) <= most, too_often)
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
        # A case has the width of the layers, the device's MFLOP/s and MB/s, and how long the ring
        # takes, as a share of the backward pass of 512 samples.
        cases = []
        for width, rate, memory, share in (
            (32, 200, 100, 0.8),
            (48, 100, 10, 0.6),
            (48, 100, 10, 0.05),
            (48, 100, 10, 0.12),
            (48, 100, 10, 0.03),  # Here the line meets the ring below one sample.
            (64, 100, 1, 0.2),
        ):
            cases.append((width, rate, memory, share * random.uniform(0.9, 1.1)))
        # Here the predicted number of samples has another bound than the measured one.
        cases.append((64, 100, 10, 0.066))
        return {"cases": cases}

    def probe(when_it_hides, cases):
        for width, rate, memory, share in cases:
            backward = partial(backward_seconds, width, f"{rate}MFLOP/s", f"{memory}MB/s")
            ring = share * backward(512)
            about = f"a device of {rate}MFLOP/s and {memory}MB/s, a ring of {1000 * ring:.3g} ms"
            answer = when_it_hides(limited(backward), ring)
            predicted, measured, why = several(
                answer, 3, "return three things: predicted, measured, why"
            )
            yield "predicted", f"{about}, predicted samples", predicted
            yield "measured", f"{about}, measured samples", measured
            # The ring hides from the first of 1 to 1,024 samples on whose backward is as long.
            hides = 1 + bisect_left(range(1, 1025), ring, key=backward)
            of_half = backward(max(1, hides // 2)) / backward(hides)
            half = (
                f"with half of {hides} samples backward takes {of_half:.0%} of the time; what"
                " bounds it"
            )
            yield "explained", f"{about}: {half}", why


@task("5.8", "most_ranks", {"small machines": 1, "large machines": 1})
class MostRanks:
    """K is at most 1 + 2 tokens W / (bytes R): for P parameters backward takes 4 tokens P / (R K),
    and the ring of their gradients 2 (K-1)/K bytes P / W.
    """

    def draw(random):
        for gradient_bytes, ranks in product((2, 4), (1, 5, 40, 700, 9000)):
            tokens = random.randrange(2**14, 2**22)
            rate = random.randrange(50, 900) * 10**12
            # With this bandwidth the limit, 1 + 2 tokens W / (bytes R), is ranks + 0.4, and twice what is
            # beyond 1 is no whole number, which rounding would move up or down.
            bandwidth = (ranks - 0.6) * gradient_bytes * rate / (2 * tokens)
            part = "small machines" if ranks < 100 else "large machines"
            about = (
                f"{tokens} tokens, {rate / 1e12:g} TFLOP/s, {bandwidth / 1e9:.3g} GB/s,"
                f" {gradient_bytes} bytes per gradient"
            )
            yield part, about, (tokens, rate, bandwidth, gradient_bytes)


@task("5.9", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """A figure in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation
