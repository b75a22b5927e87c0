"""Exercise 5: buckets, the hook that tells when a gradient is ready, and the place to wait."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from ...stage4_ring import ring_all_reduce
from ..examine import worlds
from . import Wrong, require, task
from .diagnose import compare_ranks, same, tensors


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

    def judge(evidence, cases):
        """Each parameter in one bucket, last ones first, closed on reaching the cap, one dtype each."""
        for (sizes, kinds, cap), found in zip(cases, evidence, strict=True):
            dtypes = f" of {len(set(kinds))} dtypes" if len(set(kinds)) > 1 else ""
            about = f"{len(sizes)} parameters{dtypes}, cap {cap} bytes"
            flat = [index for bucket in found for index in bucket]
            require(-1 not in flat, f"{about}: something in a bucket is not one of the parameters")
            require(all(found), f"{about}: a bucket is empty")
            require(len(set(flat)) == len(flat), f"{about}: a parameter is in two buckets")
            require(
                len(flat) == len(sizes),
                f"{about}: {len(sizes) - len(flat)} parameters are in no bucket: is the last bucket, which never fills, kept?",
            )
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

    def judge(evidence, seed, inputs):
        """One call a pass for each trainable parameter, when its gradient is complete."""
        trained = {0, 1, 2, 3}
        require(
            not evidence[0]["calls"],
            "ready is called before any backward pass: give the hook a function, do not call it",
        )
        for number, of_pass in enumerate(evidence[1:], 1):
            called = [index for index, _ in of_pass["calls"]]
            about = f"backward pass {number}"
            require(called or number == 1, f"{about}: ready was not called; a hook stays for all passes")
            require(called, f"{about}: ready was never called")
            require(
                -1 not in called,
                f"{about}: ready gets something that is not a parameter: hand it the parameter, not its gradient",
            )
            require(
                len(set(called)) > 1,
                f"{about}: ready always gets the same parameter: a function made in a loop sees the loop's last value",
            )
            twice = sorted({index for index in called if called.count(index) > 1})
            require(
                not twice,
                f"{about}: ready is called twice for parameter {twice[:1]}, which two layers use: wait until its gradient is complete",
            )
            require(
                set(called) == trained,
                f"{about}: ready is called for parameters {sorted(set(called))}; {sorted(trained)} are trainable",
            )
            for index, grad in of_pass["calls"]:
                require(
                    grad is not None,
                    f"{about}: when ready is called, parameter {index} has no gradient yet: which hook runs after it is accumulated?",
                )
                final = of_pass["gradients"][index]
                require(
                    same(grad, final),
                    f"{about}: when ready is called, the gradient of parameter {index} is not complete",
                )


@task(
    "5.3",
    "average_in_background",
    ranks=4,
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

    def judge(evidence, values):
        """The mean everywhere, all submitted before any is awaited, all awaited, no error lost."""
        for size in (3, 2, 4):
            found = [evidence[rank][size] for rank in range(size)]
            about = f"with {size} ranks"
            buckets = len(values[0])
            for one in found:
                require(one["reduced"], f"{about}: all_reduce was never called")
                require(
                    all(name.startswith("communication") for name in one["threads"]),
                    f"{about}: all_reduce runs in the thread that trains; submit it to the executor",
                )
                require(
                    not one["alone"],
                    f"{about}: the second bucket is submitted only when the first is done: submit all, then wait for all",
                )
                require(
                    one["finished"] == one["reduced"],
                    f"{about}: returned after {one['finished']} of {one['reduced']} buckets were done: wait for all of them",
                )
                require(one["reduced"] == buckets, f"{about}: {one['reduced']} of {buckets} buckets were reduced")
                require(
                    one["order"] == sorted(one["order"]),
                    f"{about}: buckets were reduced in the order {one['order']}; all ranks must take them by index",
                )
            sums = [sum(values[rank][bucket] for rank in range(size)) for bucket in range(buckets)]
            for bucket, total in enumerate(sums):
                guesses = [
                    ("you have the sum: is there a division by K?", [total] * size),
                    ("it was divided by K twice", [total / size / size] * size),
                    ("it was divided, but not reduced", [values[rank][bucket] / size for rank in range(size)]),
                    ("it was divided by 4: K is world_size", [total / 4] * size),
                ]
                compare_ranks(
                    [one["flats"][bucket] for one in found],
                    [total / size] * size,
                    f"{about}, bucket {bucket}",
                    guesses,
                    1e-5,
                    "the mean",
                )
        require(
            evidence[0]["error"] != "nothing",
            "an error in the communication thread is lost: ask every future for its result()",
        )


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
