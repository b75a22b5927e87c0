"""Exercise 5: buckets, the hook that tells when a gradient is ready, and the place to wait."""

import math
import threading
import time
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from ...running.devices import Device
from ...stage4_ring import ring_all_reduce
from ..probing import worlds
from . import Wrong, require, task
from .diagnose import check_line, compare_ranks, number, same, tensors


def expected_buckets(sizes, kinds, cap):
    """Indices by bucket, as the docstring of the task says."""
    filling, closed = {}, []
    for index in reversed(range(len(sizes))):
        bucket = filling.setdefault(kinds[index], [])
        bucket.append(index)
        if sum(sizes[i] * width(kinds[i]) for i in bucket) >= cap:
            closed.append(filling.pop(kinds[index]))
    return closed + list(filling.values())


def width(kind):
    """Bytes of one number."""
    return {"bfloat16": 2, "float32": 4, "float64": 8}[kind]


@task("5.1", "assign_buckets", forbidden=("ddp_course.stage5_bucketed.assign_buckets",))
class AssignBuckets:
    """Parameters into buckets, last first."""

    def draw(random, hidden):
        """Sizes and dtypes of parameters (three if `hidden`), and caps that are met exactly, passed, or never reached."""
        sizes = [random.randrange(20, 200) for _ in range(9 + 4 * hidden)]
        one, two = ["float32"] * len(sizes), ["float64" if i % 3 == 0 else "float32" for i in range(len(sizes))]
        three = [("bfloat16", "float32", "float64")[i % 3] for i in range(len(sizes))]
        exact = [25, 50, 50, 100, 25, 75]
        cases = [(sizes, one, 800), (exact, ["float32"] * 6, 400), (sizes, two, 900), (sizes, one, 10**6)]
        return {"cases": cases + [(sizes, three, 700)] * hidden}

    def probe(assign_buckets, cases):
        """The buckets as lists of the parameters' indices."""
        evidence = []
        for sizes, kinds, cap in cases:
            parameters = [nn.Parameter(torch.zeros(n, dtype=getattr(torch, k))) for n, k in zip(sizes, kinds)]  # noqa: B905
            index = {id(parameter): i for i, parameter in enumerate(parameters)}
            evidence.append([[index.get(id(p), -1) for p in bucket] for bucket in assign_buckets(parameters, cap)])
        return evidence

    def judge_plain(evidence, cases):
        """Parameters of one dtype: each in one bucket, last ones first, closed on reaching the cap."""
        for (sizes, kinds, cap), found in zip(cases, evidence, strict=True):
            if len(set(kinds)) == 1:
                check_buckets(found, sizes, kinds, cap)

    def judge_dtypes(evidence, cases):
        """Parameters of several dtypes: a bucket for each."""
        for (sizes, kinds, cap), found in zip(cases, evidence, strict=True):
            if len(set(kinds)) > 1:
                check_buckets(found, sizes, kinds, cap)

    parts = {"caps": (2, judge_plain), "dtypes": (1, judge_dtypes)}


def check_buckets(found, sizes, kinds, cap):
    """Each parameter is in one bucket, and the buckets are as the task's docstring says."""
    dtypes = f" of {len(set(kinds))} dtypes" if len(set(kinds)) > 1 else ""
    about = f"{len(sizes)} parameters{dtypes}, cap {cap} bytes"
    flat = [index for bucket in found for index in bucket]
    lost = f"{len(sizes) - len(flat)} parameters are in no bucket: is the last bucket, which never fills, kept?"
    faults = {
        "something in a bucket is not one of the parameters": -1 in flat,
        "a bucket is empty": not all(found),
        "a parameter is in two buckets": len(set(flat)) < len(flat),
        lost: len(flat) < len(sizes),
    }
    for message, wrong in faults.items():
        require(not wrong, f"{about}: {message}")
    judge_buckets(about, found, sizes, kinds, cap)


def judge_buckets(about, found, sizes, kinds, cap):
    """Order, kinds and closing of one case."""
    expected = expected_buckets(sizes, kinds, cap)
    mixed = [bucket for bucket in found if len({kinds[i] for i in bucket}) > 1]
    require(not mixed, f"{about}: a bucket holds two dtypes; one message has one dtype")
    if sorted(map(tuple, found)) == sorted(map(tuple, expected)):
        require(
            len(set(kinds)) > 1 or found == expected,
            f"{about}: the buckets are right, but not in the order in which they fill",
        )
        return
    require(
        found[0][0] != 0 or len(sizes) == 1,
        f"{about}: parameter 0 comes first; backward finishes the last parameters first",
    )
    require(len(found) > 1 or len(expected) == 1, f"{about}: everything is in one bucket: the cap is ignored")
    require(
        max(map(len, found)) > 1 or max(map(len, expected)) == 1, f"{about}: every parameter has a bucket of its own"
    )
    full = [sum(sizes[i] * width(kinds[i]) for i in bucket) for bucket in expected]
    got = [sum(sizes[i] * width(kinds[i]) for i in bucket) for bucket in found]
    rule = "a bucket closes when it has reached the cap, counted in bytes, with the parameter that fills it"
    raise Wrong(f"{about}: buckets of {got} bytes; {full} were expected: {rule}")


class Shared(nn.Module):
    """A model that uses one layer twice, and has a frozen one."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        """(N, 4) to (N, 4)."""
        return self.twice(self.frozen(self.twice(self.first(x).tanh()).tanh()))


@task("5.2", "tell_when_ready")
class TellWhenReady:
    """A hook on every trainable parameter."""

    def draw(random, hidden):
        """A seed for the model, and inputs of three passes."""
        return {"seed": random.randrange(10**6), "inputs": tensors(random, 3, 5, 4)}

    def probe(tell_when_ready, seed, inputs):
        """In each backward pass the calls of `ready`, with the gradient at that moment and at the end."""
        torch.manual_seed(seed)
        model, calls, passes = Shared(), [], []
        index = {id(parameter): i for i, parameter in enumerate(model.parameters())}

        def ready(parameter):
            grad = getattr(parameter, "grad", None)
            calls.append((index.get(id(parameter), -1), None if grad is None else grad.clone()))

        tell_when_ready(list(model.parameters()), ready)
        passes.append({"calls": list(calls), "gradients": []})
        for one in inputs:
            calls.clear()
            model.zero_grad()
            model(one).square().sum().backward()
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            passes.append({"calls": list(calls), "gradients": gradients})
        return passes

    def judge_calls(evidence, seed, inputs):
        """One call a pass for each trainable parameter."""
        before = "ready is called before any backward pass: give the hook a function, do not call it"
        require(not evidence[0]["calls"], before)
        for pass_number, of_pass in enumerate(evidence[1:], 1):
            called, about = [index for index, _ in of_pass["calls"]], f"backward pass {pass_number}"
            twice = sorted({index for index in called if called.count(index) > 1})
            trained = "0, 1, 2 and 3 are trainable"
            faults = {
                "ready was not called; a hook stays for all passes": not called and pass_number > 1,
                "ready was never called": not called,
                "ready gets something that is not a parameter: hand it the parameter, not its gradient": -1 in called,
                "ready always gets the same parameter: a function made in a loop sees the loop's last value": len(
                    set(called)
                )
                == 1,
                f"ready is called twice for parameter {twice[:1]}, which two layers use: wait until its gradient "
                "is complete": twice,
                f"ready is called for parameters {sorted(set(called))}; {trained}": set(called) != {0, 1, 2, 3},
            }
            for message, wrong in faults.items():
                require(not wrong, f"{about}: {message}")

    def judge_complete(evidence, seed, inputs):
        """When ready is called, the gradient is complete."""
        require(any(of_pass["calls"] for of_pass in evidence[1:]), "ready was never called")
        for pass_number, of_pass in enumerate(evidence[1:], 1):
            for index, grad in of_pass["calls"]:
                about = f"backward pass {pass_number}: when ready is called,"
                none_yet = f"parameter {index} has no gradient yet: which hook runs after it is accumulated?"
                require(grad is not None, f"{about} {none_yet}")
                complete = same(grad, of_pass["gradients"][index])
                require(complete, f"{about} the gradient of parameter {index} is not complete")

    parts = {"calls": (1, judge_calls), "complete": (1, judge_complete)}


@task(
    "5.3",
    "average_in_background",
    ranks=4,
    private=("values",),
    hang="do all ranks submit the buckets in the same order, and wait for them?",
)
class AverageInBackground:
    """Submit all, then wait for all."""

    def draw(random, hidden):
        """Buckets of three lengths (four if `hidden`), different on every rank."""
        return {"values": [[tensors(random, 1, n)[0] for n in (7, 12, 5, *([9] if hidden else []))] for _ in range(4)]}

    def probe(average_in_background, values):
        """Every rank's buckets, who reduced them and when, and what became of an error."""
        evidence = {}
        for size, group in worlds(3, 2, 4):
            flats = [flat.clone() for flat in values[torch.distributed.get_rank()]]
            with ThreadPoolExecutor(1, "communication") as executor:
                evidence[size] = watched(average_in_background, flats, executor, group, size)
        evidence["error"] = lost_error(average_in_background)
        return evidence

    def judge_mean(evidence, values):
        """The mean of every bucket on every rank."""
        for size in (3, 2, 4):
            found = [evidence[rank][size] for rank in range(size)]
            require(all(one["reduced"] for one in found), f"with {size} ranks: all_reduce was never called")
            for bucket in range(len(values[0])):
                total = sum(values[rank][bucket] for rank in range(size))
                guesses = [
                    ("you have the sum: is there a division by K?", [total] * size),
                    ("it was divided by K twice", [total / size / size] * size),
                    ("it was divided, but not reduced", [values[rank][bucket] / size for rank in range(size)]),
                    ("it was divided by 4: K is world_size", [total / 4] * size),
                    (
                        "the bucket has not changed: the mean must end up in it, in place",
                        [of[bucket] for of in values[:size]],
                    ),
                ]
                about, flats = f"with {size} ranks, bucket {bucket}", [one["flats"][bucket] for one in found]
                compare_ranks(flats, [total / size] * size, about, guesses, 1e-5, "the mean")

    def judge_waiting(evidence, values):
        """All submitted before any is awaited, in the executor's thread and in order, and all awaited."""
        for size in (3, 2, 4):
            for one in (evidence[rank][size] for rank in range(size)):
                check_waiting(one, len(values[0]), f"with {size} ranks")

    def judge_error(evidence, values):
        """No error is lost."""
        lost = "an error in the communication thread is lost: ask every future for its result()"
        require(evidence[0]["error"] != "nothing", lost)

    parts = {"waiting": (1, judge_waiting), "mean": (1, judge_mean), "errors": (1, judge_error)}


def check_waiting(one, buckets, about):
    """One rank's notes on who reduced which bucket, where, and when."""
    done, reduced, order = one["finished"], one["reduced"], one["order"]
    outside = not all(name.startswith("communication") for name in one["threads"])
    faults = {
        "all_reduce was never called": not reduced,
        "all_reduce runs in the thread that trains; submit it to the executor": outside,
        "the second bucket is submitted only when the first is done: submit all, then wait for all": one["alone"],
        f"returned after {done} of {reduced} buckets were done: wait for all of them": done != reduced,
        f"{reduced} of {buckets} buckets were reduced": reduced != buckets,
        f"buckets were reduced in the order {order}; all ranks must take them by index": order != sorted(order),
    }
    for message, wrong in faults.items():
        require(not wrong, f"{about}: {message}")


def watched(function, flats, executor, group, size):
    """Call the answer with an all-reduce that notes who calls it, when, and what else was submitted by then."""
    notes = {"order": [], "threads": [], "finished": 0, "alone": False}
    several, submit, submitted = threading.Event(), executor.submit, []

    def counted(*args, **kwargs):
        submitted.append(1)
        if len(submitted) > 1:
            several.set()
        return submit(*args, **kwargs)

    def all_reduce(flat):
        index = next((i for i, one in enumerate(flats) if one is flat), -1)
        notes["order"].append(index)
        notes["threads"].append(threading.current_thread().name)
        if not several.wait(0.5):
            notes["alone"] = True
            several.set()
        ring_all_reduce(flat, group)
        notes["finished"] += 1

    executor.submit = counted
    function(flats, all_reduce, executor, size)
    result = {**notes, "reduced": len(flats) if notes["finished"] < len(notes["order"]) else len(notes["order"])}
    result["order"], result["threads"] = list(notes["order"]), list(notes["threads"])
    if notes["finished"] < len(submitted):
        result["reduced"] = max(result["reduced"], len(submitted))
    result["flats"] = [flat.clone() for flat in flats]
    return result


def lost_error(function):
    """What a failing all-reduce becomes in the caller."""

    def all_reduce(flat):
        raise ConnectionError("the network is gone")

    with ThreadPoolExecutor(1) as executor:
        try:
            function([torch.zeros(3), torch.zeros(3)], all_reduce, executor, 2)
        except ConnectionError:
            return "raised"
    return "nothing"


ORDER_LINES = {
    2: "what each bucket waits for is right",
    4: "counting the gradients is right",
    6: "that a gradient is no longer missing is right",
    8: "this notes what leaves; but is it this bucket's turn?",
    9: "the list is right if what goes in is",
}


@task("5.4", ("the_bug", "departures"))
class FindTheBugInTheOrder:
    """Buckets leave by index, on all ranks alike."""

    def draw(random, hidden):
        """Buckets, and four ranks' orders in which gradients become ready: shuffled a little, then altogether."""
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
        found = [[departures([list(b) for b in buckets], list(one)) for one in orders] for buckets, orders in cases]
        return {"line": the_bug(), "found": found}

    def judge_line(evidence, cases):
        """Line 7 lets a bucket go before its turn."""
        check_line(evidence["line"], 7, ORDER_LINES)

    def judge_order(evidence, cases):
        """The same buckets in the same order on all ranks, each once, none before its gradients are there."""
        for (buckets, orders), found in zip(cases, evidence["found"], strict=True):
            for ready, one in zip(orders, found, strict=True):
                about = f"buckets {buckets}, gradients ready in the order {ready}"
                require(isinstance(one, list | tuple), f"{about}: a list of pairs was expected")
                pairs = [isinstance(pair, list | tuple) and len(pair) == 2 for pair in one]
                require(all(pairs), f"{about}: each departure is a pair (gradients that are ready, bucket)")
                order = [bucket for _, bucket in one]
                turn = "all ranks must take buckets by index, or they add up different ones"
                require(sorted(order) == list(range(len(buckets))), f"{about}: buckets {order} leave; each leaves once")
                require(order == sorted(order), f"{about}: buckets leave in the order {order}; {turn}")
                for count, bucket in one:
                    early = set(buckets[bucket]) - set(ready[:count])
                    require(
                        not early,
                        f"{about}: bucket {bucket} leaves after {count}, without gradient {min(early, default='')}",
                    )

    def judge_early(evidence, cases):
        """No bucket waits longer than for its gradients and its turn."""
        FindTheBugInTheOrder.judge_order(evidence, cases)
        for (buckets, orders), found in zip(cases, evidence["found"], strict=True):
            for ready, one in zip(orders, found, strict=True):
                latest = 0
                for count, bucket in one:
                    latest = max(latest, *(ready.index(p) + 1 for p in buckets[bucket]))
                    about = (
                        f"buckets {buckets}, gradients ready in the order {ready}: bucket {bucket} leaves after {count}"
                    )
                    require(count == latest, f"{about} gradients; after {latest} it could")

    parts = {"the line": (1, judge_line), "mended": (1, judge_early)}


LAYERS, WIDTH = 6, 48


def deep_model(seed):
    """Six layers of the same size, so that backward takes equally long for each."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def buckets_of(model):
    """Three buckets of two layers each, those that backward finishes first in front."""
    parameters = list(model.parameters())[::-1]
    return [parameters[i : i + 2] for i in range(0, LAYERS, 2)]


@task(
    "5.5",
    "Bucketed",
    ranks=4,
    private=("inputs",),
    hang="do all ranks submit the buckets in the same order, and wait for them?",
)
class AssembleBucketedDDP:
    """Hooks, buckets and a thread, put together: right, in every pass, and beside the backward pass."""

    def draw(random, hidden):
        """A seed for the model, and two passes' inputs for each rank (three if `hidden`)."""
        return {"seed": random.randrange(10**6), "inputs": [tensors(random, 2 + hidden, 8, WIDTH) for _ in range(4)]}

    def probe(Bucketed, seed, inputs):
        """For each pass the gradients, and how many were ready when each bucket left; on an emulated device."""
        evidence = []
        for size, group in worlds(3):
            model, ready, left, submitted = deep_model(seed), [], [], []
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(ready.append)

            def all_reduce(flat, group=group, ready=ready, left=left):
                left.append((threading.current_thread().name, flat.numel()))
                time.sleep(0.004)  # a link that keeps up with backward
                ring_all_reduce(flat, group)

            device = Device(f"{2 * 2 * 8 * WIDTH**2 / 0.012:.0f}FLOP/s")  # 12 ms a layer's backward
            with ThreadPoolExecutor(1, "communication") as executor:
                executor.submit = noted(executor.submit, lambda ready=ready, to=submitted: to.append(len(ready)))
                parallel = Bucketed(buckets_of(model), all_reduce, executor, size)
                with device.emulate():
                    for one in inputs[dist.get_rank()]:
                        for notes in (ready, left, submitted):
                            notes.clear()
                        model.zero_grad()
                        parallel.backward(model(one).square().mean())
                        gradients = [p.grad.clone() for p in model.parameters()]
                        evidence.append({"gradients": gradients, "left": list(left), "ready": list(submitted)})
        return evidence

    def judge_mean(evidence, seed, inputs):
        """After the first pass each gradient is the mean over the ranks."""
        check_pass(evidence, seed, inputs, 0)

    def judge_again(evidence, seed, inputs):
        """And after each pass that follows."""
        for later in range(1, len(inputs[0])):
            check_pass(evidence, seed, inputs, later)

    def judge_overlap(evidence, seed, inputs):
        """Each bucket leaves in the communication thread, before backward has finished what comes after it."""
        for rank in range(3):
            for pass_number, one in enumerate(evidence[rank], 1):
                about = f"backward pass {pass_number}, rank {rank}"
                require(one["left"], f"{about}: all_reduce was never called")
                outside = [name for name, _ in one["left"] if not name.startswith("communication")]
                require(not outside, f"{about}: all_reduce runs in the thread that trains; submit it to the executor")
                sizes = [size for _, size in one["left"]]
                require(
                    len(sizes) >= 3,
                    f"{about}: {len(sizes)} messages for 3 buckets: one a bucket, as soon as it is full",
                )
                require(len(sizes) <= 3, f"{about}: {len(sizes)} messages for 3 buckets: pack a bucket into one tensor")
                line = "; ".join(f"bucket {i} left after {n}" for i, n in enumerate(one["ready"]))
                early = [count for count in one["ready"][:2] if count < LAYERS]
                full = f"your timeline: {line} of {LAYERS} gradients; they were full after 2, 4 and 6"
                require(
                    len(early) == 2,
                    f"{about}: {2 - len(early)} of 3 rings that could hide behind backward do not; {full}",
                )

    parts = {"mean": (1, judge_mean), "every pass": (1, judge_again), "overlap": (2, judge_overlap)}


def noted(function, note):
    """`function`, with a note made of each call before it."""
    return lambda *args, **kwargs: (note(), function(*args, **kwargs))[1]


def check_pass(evidence, seed, inputs, number):
    """The gradients of one pass on all three ranks."""
    model = deep_model(seed)
    own = []
    for rank in range(3):
        model.zero_grad()
        model(inputs[rank][number]).square().mean().backward()
        own.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    total, about = sum(own), f"backward pass {number + 1}"
    found = [torch.cat([one.reshape(-1) for one in evidence[rank][number]["gradients"]]) for rank in range(3)]
    guesses = [
        ("each rank has its own gradient: after the sum, put the bucket's pieces back into .grad", own),
        ("that is the sum: divide by the number of ranks", [total] * 3),
        ("it was divided by K twice", [total / 9] * 3),
        ("each rank has its own gradient, divided: put the bucket's pieces back into .grad", [one / 3 for one in own]),
    ]
    compare_ranks(found, [total / 3] * 3, about, guesses, 1e-5, "the mean")


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


@task("5.6", "setting_of")
class WhichTimeline:
    """Four settings, told by their timelines."""

    def draw(random, hidden):
        """Three timelines of each setting (six if `hidden`), shuffled."""
        settings = random.sample(SETTINGS * (3 + 3 * hidden), len(SETTINGS) * (3 + 3 * hidden))
        return {"cases": [(timeline_of(random, setting), setting) for setting in settings]}

    def probe(setting_of, cases):
        """The setting that is named for each timeline."""
        return [setting_of(list(timeline)) for timeline, _ in cases]

    def judge_some(evidence, cases, which=SETTINGS):
        """Every setting by its name, for the timelines that have it."""
        for found, (timeline, setting) in zip(evidence, cases, strict=True):
            if setting in which:
                words = ", ".join(f'"{one}"' for one in SETTINGS)
                require(found is not None, "the result is None: is there a `return`?")
                require(found in SETTINGS, f"{str(found)[:40]!r} is none of {words}")
                require(found == setting, f'{in_words(timeline)}: "{found}" does not look like that')

    def judge_after(evidence, cases):
        """Those in which nothing runs beside backward."""
        WhichTimeline.judge_some(evidence, cases, ("each on its own", "one bucket"))

    def judge_beside(evidence, cases):
        """Those in which communication runs beside backward, with pauses or without."""
        WhichTimeline.judge_some(evidence, cases, ("hidden", "slow link"))

    parts = {"after backward": (1, judge_after), "beside backward": (1, judge_beside)}


def in_words(timeline):
    """A timeline as a sentence."""
    backward = next(f"{start:.0f} to {end:.0f}" for name, start, end in timeline if name == "backward")
    rings = sorted((start, end) for name, start, end in timeline if name == "communication")
    return f"backward {backward} ms, communication {', '.join(f'{a:.0f} to {b:.0f}' for a, b in rings)} ms"


def backward_seconds(samples, width, device):
    """The emulated device's time for the backward pass of three layers."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    loss = model(torch.zeros(samples, width)).sum()
    with device.emulate(sleep=False) as emulation:
        loss.backward()
    return emulation.busy_s


@task("5.7", "when_it_hides")
class WhenItHides:
    """A straight line, a measurement, and what stands between them."""

    def draw(random, hidden):
        """Devices whose backward is bound by computing, by memory, or by both where it meets the ring."""
        cases = [(32, 200, 100, 0.8), (48, 100, 10, 0.6), (48, 100, 10, 0.05), (48, 100, 10, 0.12)]
        cases += [(64, 100, 1, 0.2)] * hidden
        return {
            "cases": [
                (width, f"{rate}MFLOP/s", f"{memory}MB/s", part * random.uniform(0.9, 1.1))
                for width, rate, memory, part in cases
            ]
        }

    def probe(when_it_hides, cases):
        """The answer in each case, and how often it measured."""
        evidence = []
        for width, rate, memory, part in cases:
            count, device = [], Device(rate, memory)

            def measure(samples, width=width, device=device, count=count):
                count.append(samples)
                return backward_seconds(samples, width, device)

            ring = part * backward_seconds(512, width, device)
            evidence.append((when_it_hides(measure, ring), len(count)))
        return evidence

    def judge_predicted(evidence, cases):
        """Where the straight line through 64 and 128 samples meets the ring."""
        for (found, count), (about, predicted, _, _) in zip(evidence, map(expected_hiding, cases), strict=True):
            check_triple(found, count, about)
            require(abs(found[0] - predicted) <= 1, f"{about}: predicted {found[0]}; the line gives {predicted}")

    def judge_measured(evidence, cases):
        """The smallest number for which backward takes as long as the ring."""
        for (found, count), (about, predicted, measured, _) in zip(evidence, map(expected_hiding, cases), strict=True):
            check_triple(found, count, about)
            copied = f"{about}: {found[1]} was predicted, not measured: with so many samples backward is not yet, or long since, there"
            require(found[1] == measured or found[1] != predicted, copied)
            require(
                found[1] == measured, f"{about}: measured {found[1]}; {measured} is the first number that is enough"
            )

    def judge_why(evidence, cases):
        """What bounds the device there: computing, memory, or each in turn."""
        for (found, count), (about, _, measured, share) in zip(evidence, map(expected_hiding, cases), strict=True):
            check_triple(found, count, about)
            why = "computing" if share < 0.6 else "memory" if share > 0.75 else "both"
            said = f"with half of {measured} samples backward takes {share:.0%} of the time"
            require(found[2] == why, f"{about}: {said}; that is not {str(found[2])[:20]!r}")

    parts = {"predicted": (1, judge_predicted), "measured": (1, judge_measured), "explained": (1, judge_why)}


@cache
def expected_hiding(case):
    """What to call a case, the predicted and the measured number, and half the samples' share of the time."""
    width, rate, memory, part = case
    device = Device(rate, memory)

    @cache
    def measure(samples):
        return backward_seconds(samples, width, device)

    ring = part * measure(512)
    predicted = max(1, math.ceil(64 + (ring - measure(64)) * 64 / (measure(128) - measure(64))))
    measured = 1 + bisect_left(range(1, 1025), ring, key=measure)
    share = measure(max(1, measured // 2)) / measure(measured)
    return f"a device of {rate} and {memory}, a ring of {1000 * ring:.3g} ms", predicted, measured, share


def check_triple(found, count, about):
    """Two whole numbers and a word, after at most 40 measurements."""
    require(
        isinstance(found, tuple | list) and len(found) == 3, f"{about}: return three things: predicted, measured, why"
    )
    number(found[0], int, f"{about}: what was predicted")
    number(found[1], int, f"{about}: what was measured")
    require(count <= 40, f"{about}: measured {count} times; halve the range each time, and a dozen are enough")
