"""Claims about how it all runs."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD, Adam
from torch.utils.data import DistributedSampler

from ...errors import RankError
from ...running import checkpoint
from ...running.torch_inside import TorchDispatchMode
from ...stage3_paramserver import broadcast_parameters, gradients
from ...stage4_ring import average_on_ring
from ...stage5_bucketed import BucketedDDP
from .. import facts
from .claim import Claim, Outcome
from .communication import backend_calls
from .models import Branches, batch_of, flat, me, on_cpu, vectors, weights


def python_work() -> int:
    """A third of a second or so in one call of Python's own."""
    return sum(range(20_000_000))


def torch_work() -> torch.Tensor:
    """A third of a second or so in one operation of torch."""
    return torch.ones(2000, 2000) @ torch.ones(2000, 2000)


def turns_of_another(work: Callable[[], Any]) -> int:
    """One rank: how often another thread gets a turn in the middle half of one call of `work`; it asks every ms."""
    torch.set_num_threads(1)
    turns, over = [], threading.Event()

    def watch():
        while not over.wait(0.001):
            turns.append(time.perf_counter())

    watching = threading.Thread(target=watch)
    watching.start()
    start = time.perf_counter()
    work()
    quarter = (time.perf_counter() - start) / 4
    over.set()
    watching.join()
    return sum(start + quarter < turn < start + 3 * quarter for turn in turns)


def blocks_other_threads(work: Callable[[], Any]) -> Outcome:
    """While one thread does `work`, must another one wait? The lock changes hands between two steps of Python code,
    so what decides is whether it is let go inside a single call."""
    turns = on_cpu(turns_of_another, work, world_size=1)[0]
    return Outcome(turns <= 1, f"another thread got {'many' if turns > 1 else 'no'} turns during one call")


def calls_on_rank(used: Any, options: dict[str, Any]) -> int:
    """One rank: how many of torch's all-reduces a step needs once the graph is known."""
    from ...stage6_ddp import DistributedDataParallel

    parallel = DistributedDataParallel(Branches(used), **options)
    inputs = torch.randn(8, 64)
    return [backend_calls(parallel, inputs) for _ in range(4)][-1]


def static_saves_work(used: Any, needs_search: bool) -> Outcome:
    """Does declaring the graph static save a collective in each step?"""
    dynamic = on_cpu(calls_on_rank, used, {"find_unused_parameters": needs_search}, world_size=2)[0]
    static = on_cpu(calls_on_rank, used, {"static_graph": True}, world_size=2)[0]
    return Outcome(static < dynamic, f"all-reduces a step: {dynamic}, and {static} with a static graph")


def memory_on_rank(how: str) -> int:
    """One rank: bytes of parameters, gradients and Adam's state after a step."""
    from ...stage7_sharded import FullyShardedDataParallel

    rank, world_size = me()
    problem, model = vectors(), vectors().model()
    wrap = {"alone": lambda module: module, "replicated": BucketedDDP, "sharded": FullyShardedDataParallel}[how]
    trained = wrap(model)
    optimizer = Adam(trained.parameters())
    inputs, targets = batch_of(problem, 8, rank, world_size)
    cross_entropy(trained(inputs), targets).backward()
    optimizer.step()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    tensors = [*parameters, *(parameter.grad for parameter in parameters if parameter.grad is not None), *state]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def saves_memory(how: str) -> Outcome:
    """Does a rank of four hold less than one device alone?"""
    alone = on_cpu(memory_on_rank, "alone", world_size=1)[0]
    shared = max(on_cpu(memory_on_rank, how, world_size=4))
    return Outcome(shared < 0.5 * alone, f"{shared / alone:.2f} of one device's memory on each of 4 ranks")


def resumable(folder: str | Path, steps: int, victim: int | None = None) -> Any:
    """One rank: train up to `steps`, from the newest checkpoint if there is one; `victim` kills itself at step 3."""
    rank, world_size = me()
    problem, model = vectors(), vectors().model()
    broadcast_parameters(model)
    optimizer, start = SGD(model.parameters(), lr=0.1), 0
    if checkpoint.checkpoints(folder):
        saved = checkpoint.load(folder)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    for step, (inputs, targets) in enumerate(problem.batches(24, steps, 0, rank, world_size, start), start):
        if step == 3 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        average_on_ring(gradients(model))
        optimizer.step()
        checkpoint.save(folder, {"model": model.state_dict(), "step": step + 1})
    return weights(model), start


def halts(victim: int | None) -> Outcome:
    """Does the run end when a rank is killed, and can it go on from the checkpoint as if nothing had been?"""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as undisturbed:
        expected, _ = on_cpu(resumable, undisturbed, 6, world_size=2)[0]
        try:
            on_cpu(resumable, folder, 6, victim, world_size=2)
        except RankError as error:
            after, start = on_cpu(resumable, folder, 6, world_size=2)[0]
            off = float((after - expected).abs().max())
            named = f"rank {victim}" in str(error)
            number = f"{'named' if named else 'did not name'} rank {victim}; resumed at step {start}, off by {off:g}"
            return Outcome(True, number)
    return Outcome(False, "the run went to its end")


def accumulate_on_rank(wrap: Callable[..., Any], forward_inside: bool) -> torch.Tensor:
    """One rank: the local gradient after a backward pass under `no_sync`."""
    rank, world_size = me()
    problem = vectors()
    parallel = wrap(problem.model())
    inputs, targets = batch_of(problem, 24, rank, world_size)
    if forward_inside:
        with parallel.no_sync():
            cross_entropy(parallel(inputs), targets).backward()
    else:
        loss = cross_entropy(parallel(inputs), targets)
        with parallel.no_sync():
            loss.backward()
    return flat(gradients(parallel.module))


def backward_inside_is_enough(forward_inside: bool) -> Outcome:
    """Do gradients stay local under `no_sync`? Asked of torch's DDP and of ours."""
    from ...stage6_ddp import DistributedDataParallel

    local = []
    for wrap in (TorchDDP, DistributedDataParallel):
        ranks = on_cpu(accumulate_on_rank, wrap, forward_inside, world_size=2)
        local.append(not torch.equal(*ranks))
    state = "local" if all(local) else "synchronised all the same" if not any(local) else "local in one of the two"
    return Outcome(all(local), f"gradients are {state} (torch's DDP and ours)")


def shuffles_anew(set_epoch: bool) -> Outcome:
    """Does `DistributedSampler` give another order in the second epoch?"""
    hundred: Any = range(100)  # a sampler wants no more of a data set than its length
    sampler, orders = DistributedSampler(hundred, num_replicas=2, rank=0), []
    for epoch in range(2):
        if set_epoch:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    kept = sum(a == b for a, b in zip(*orders, strict=True))
    shares = [list(DistributedSampler(hundred[:10], num_replicas=4, rank=rank)) for rank in range(4)]
    twice = sum(map(len, shares)) - 10
    return Outcome(
        orders[0] != orders[1], f"{kept} of 50 samples in the same place; 10 samples on 4 ranks: {twice} twice"
    )


class CountOperations(TorchDispatchMode):
    """Counts the tensor operations of this thread."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def cost_on_rank(wrapped: bool) -> Any:
    """One rank of one: operations of a step and the times of 30, plain and (if `wrapped`) under DDP, alternated."""
    problem = vectors()
    inputs, targets = batch_of(problem, 96)
    models = [problem.model(), TorchDDP(problem.model()) if wrapped else problem.model()]
    counts, times = [], ([], [])
    for model in models:
        for _ in range(2):
            with CountOperations() as operations:
                cross_entropy(model(inputs), targets).backward()
        counts.append(operations.count)
    for _ in range(30):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            cross_entropy(model(inputs), targets).backward()
            taken.append(time.perf_counter() - start)
    return counts, times


def is_free(wrapped: bool) -> Outcome:
    """Does a step of DDP on one device do no more operations than a plain one?"""
    (plain, parallel), times = on_cpu(cost_on_rank, wrapped, world_size=1)[0]
    low, middle, high = quantiles((100 * (after / before - 1) for before, after in zip(*times, strict=True)), n=4)
    extra = f"a step of this small model took {middle:+.0f} % time (quartiles {low:+.0f} to {high:+.0f})"
    return Outcome(parallel <= plain, f"{parallel - plain} operations more than {plain}; {extra}")


def published_overhead() -> list[float]:
    """The least and the largest overhead of torch's DDP on one GPU in the published table, in %."""
    return [
        100 * f(row["gpus_1"] / row["no_ddp"] - 1 for row in facts.rows("ddp_step_seconds_v100")) for f in (min, max)
    ]


CLAIMS = [
    Claim(
        5,
        "A single Python process can use only one core.",
        "measured",
        {
            "the work is Python's own": partial(blocks_other_threads, python_work),
            "the work is torch's": partial(blocks_other_threads, torch_work),
        },
        "holds only if the work is Python's own",
        "Python holds its global lock (GIL) while it works and hands it over between two steps of code: threads take "
        "turns, and never run at once. torch lets go of the lock inside its operations, forward and backward.",
    ),
    Claim(
        6,
        "DDP makes dynamic graphs slower; static graphs are faster.",
        "counted",
        {
            "parameters go unused": partial(static_saves_work, ("left",), True),
            "all parameters are used": partial(static_saves_work, ("left", "right"), False),
        },
        "holds only if parameters go unused",
        "Only the search for unused parameters costs: an all-reduce and a walk through the graph in each step.",
    ),
    Claim(
        8,
        "DDP helps when the model is too big for one device.",
        "counted",
        {
            "every rank keeps everything": partial(saves_memory, "replicated"),
            "parameters and state are sharded": partial(saves_memory, "sharded"),
        },
        "holds only if parameters and state are sharded",
        "Data parallel training copies parameters, gradients and optimizer state to every rank; sharding divides them.",
    ),
    Claim(
        10,
        "If one device fails, the whole run halts; use checkpoints.",
        "measured",
        {"a rank is killed": partial(halts, 1)},
        "holds",
        "The others wait for a partner that is gone, so all must end. From the checkpoint the run goes on bit for bit.",
        {"nobody is killed": partial(halts, None)},
    ),
    Claim(
        12,
        "no_sync around the backward pass is enough.",
        "measured",
        {
            "the forward pass is inside too": partial(backward_inside_is_enough, True),
            "only the backward pass is inside": partial(backward_inside_is_enough, False),
        },
        "holds only if the forward pass is inside too",
        "The forward pass decides whether the next backward pass synchronises: it gets the buckets ready.",
    ),
    Claim(
        13,
        "DistributedSampler shuffles anew in each epoch by itself.",
        "counted",
        {
            "set_epoch is called": partial(shuffles_anew, True),
            "set_epoch is forgotten": partial(shuffles_anew, False),
        },
        "holds only if set_epoch is called",
        "The order is drawn from seed + epoch, and the sampler cannot know the epoch. It also pads with duplicates, "
        "which count twice in an evaluation.",
    ),
    Claim(
        18,
        "DDP on one device is free.",
        "counted",
        {"K = 1": partial(is_free, True)},
        "false",
        "Gradients are still copied into buckets, scaled and watched by hooks: {:.0f} to {:.0f} % of a step on a V100 "
        "(ResNets; PyTorch's published DDP table), more of a small model's.".format(*published_overhead()),
        {"the model is not wrapped": partial(is_free, False)},
    ),
]
