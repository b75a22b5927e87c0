"""Stage 6 against torch's own class: the cases of `stage6_cases.py` judge both."""

import functools
import gc
import inspect
import random
import time
import traceback
import weakref
from functools import partial

import pytest
import stage6_cases
import torch
import torch.distributed as dist
from oracles import ALL_REDUCES, tiny_batches, tiny_model, trained_alone, weights
from stage6_cases import CASES, KNOWN_TO_TORCH, TORCH_FAILS, train_and_check
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_course import launch, stage1_single, stage6_ddp, wire
from ddp_course.stage4_ring import ring_all_reduce
from ddp_course.stage6_ddp.buckets import bucket_assignment, size_limits
from manyranks.errors import LaunchError

CLASSES = {"torch": TorchDDP, "ours": stage6_ddp.DistributedDataParallel}


def attempt(names, kind):
    """Run cases on this rank; return {name: traceback or None}."""
    return {name: failure(CASES[name], CLASSES[kind]) for name in names}


def failure(case, kind):
    try:
        case(kind)
    except Exception:
        return traceback.format_exc()


@functools.cache
def outcomes(kind, world_size):
    """Return the results of all cases from one launch.

    If that fails, one case spoilt it and each gets a launch of its own.
    """
    try:
        names = [name for name in CASES if kind != "torch" or name not in TORCH_FAILS]
        return launch(attempt, names, kind, world_size=world_size)
    except LaunchError:
        return None


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", CASES)
def test_case(name, kind, world_size):
    if kind == "torch" and name in TORCH_FAILS:
        pytest.skip(TORCH_FAILS[name])
    ranks = outcomes(kind, world_size) or launch(
        attempt, [name], kind, world_size=world_size, timeout=100
    )
    failures = [rank[name] for rank in ranks if rank[name]]
    assert not failures, "\n".join(failures)


# These tests compare buckets; the random programs compare bits.

SETTINGS = {
    "defaults": {},
    "views": {"gradient_as_bucket_view": True},
    "tiny buckets": {"bucket_cap_mb": 0.0005},
    "a list of caps": {"bucket_cap_mb_list": [0.0002, 0.001]},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
    "static": {"static_graph": True, "bucket_cap_mb": 0.0005},
}


def odd_model():
    """Return layers of several sizes, two dtypes, used in another order than defined."""
    torch.manual_seed(0)
    sizes = [(13, 37), (37, 11), (11, 64), (64, 9)]
    stack = torch.nn.Sequential(*[torch.nn.Linear(*size) for size in sizes])
    stack[2].double()

    def convert(module, inputs):
        return inputs[0].to(module.weight.dtype)

    for layer in stack:
        layer.register_forward_pre_hook(convert)
    return stack


def layouts(kind, settings, steps=3):
    """Return the shapes in each bucket, in the order of communication, over all steps."""
    seen = []
    model = odd_model()
    parallel = CLASSES[kind](model, **settings)

    def hook(state, bucket):
        seen.append([tuple(p.shape) for p in bucket.parameters()])
        return default_hooks.allreduce_hook(None, bucket)

    parallel.register_comm_hook(None, hook)
    for _ in range(steps):
        parallel(torch.ones(8, 13)).square().sum().backward()
    return seen


def compare_with_torch():
    of_both = {}
    for name, chosen in SETTINGS.items():
        if chosen.keys() <= KNOWN_TO_TORCH.keys():
            of_both[name] = [layouts(kind, chosen) for kind in CLASSES]
    return of_both


@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_are_torchs(world_size):
    for rank in launch(compare_with_torch, world_size=world_size):
        for name, (theirs, ours) in rank.items():
            assert theirs, name
            assert theirs == ours, name


def assignment_pair(seed):
    """Return torch's and our assignment of random tensors.

    They have mixed dtypes, may be sparse, and have one or more limits, and an order or none.
    """
    draw = random.Random(seed)
    dtypes = [torch.float32, torch.float64, torch.float16]
    tensors = [
        torch.empty(draw.randint(1, 300), dtype=draw.choice(dtypes))
        for _ in range(draw.randint(1, 30))
    ]
    sparse = {index for index in range(len(tensors)) if draw.random() < 0.1}
    limits = sorted(draw.randint(100, 3000) for _ in range(draw.randint(1, 3)))
    order = draw.sample(range(len(tensors)), len(tensors)) if seed % 2 else None
    flags = [index in sparse for index in range(len(tensors))]
    arranged = tensors if order is None else [tensors[index] for index in order]
    theirs, _ = dist._compute_bucket_assignment_by_size(arranged, limits, flags, order or [])
    return theirs, bucket_assignment(tensors, limits, sparse, order)


def test_assignment_is_torchs_for_any_tensors():
    for seed in range(300):
        theirs, ours = assignment_pair(seed)
        assert ours == [list(bucket) for bucket in theirs], f"seed {seed}"


def test_size_limits():
    assert size_limits(None) == [2**20, 25 * 2**20]
    assert size_limits(25) == [25 * 2**20], "only the default cap has a small first bucket"
    assert size_limits(None, [1, 2]) == [2**20, 2**21]
    for bad in (0, -1):
        with pytest.raises(
            ValueError, match=f"bucket_cap_mb is {bad}; it must be a positive number"
        ):
            size_limits(bad)
        with pytest.raises(ValueError, match=rf"bucket_cap_mb is \[1, {bad}\]; it must be"):
            size_limits(None, [1, bad])


# These tests are of what only our wrapper has.


def bf16_hook(DDP):
    """torch refuses this hook without NCCL; here it runs on the CPU."""
    model = stage6_cases.seeded(stage6_cases.Net)
    parallel = DDP(model)
    parallel.register_comm_hook(None, default_hooks.bf16_compress_hook)
    stage6_cases.squared(parallel, dist.get_rank()).backward()
    stage6_cases.assert_mean(model, stage6_cases.squared, slack=2**16)


def half_the_bytes(DDP):
    """Assert that reduce_dtype=bfloat16 halves the bytes, and that float32 weights stay float32.

    A param_dtype alone does not halve them if reduce_dtype is float32.
    """
    sent = {}
    for name, compute, communicate in (
        ("float32", None, None),
        ("both", torch.bfloat16, torch.bfloat16),
        ("buckets", None, torch.bfloat16),
        ("computing", torch.bfloat16, torch.float32),
    ):
        half = _MixedPrecision(param_dtype=compute, reduce_dtype=communicate)
        model = torch.nn.Linear(64, 64)
        parallel = DDP(model, mixed_precision=half, all_reduce=ring_all_reduce)
        with wire.counting() as traffic:
            parallel(torch.ones(4, 64)).float().sum().backward()
        sent[name] = traffic.bytes_sent
        assert (
            {p.dtype for p in model.parameters()}
            == {p.grad.dtype for p in model.parameters()}
            == {torch.float32}
        )
    assert sent["both"] == sent["buckets"] == sent["float32"] / 2, sent
    assert sent["computing"] == sent["float32"], sent


def nothing_left_behind(DDP):
    """Assert that the wrapper leaves no hooks on the module, and can be collected."""
    model = stage6_cases.Net()
    parallel = DDP(model)
    stage6_cases.squared(parallel, 0).backward()
    there = weakref.ref(parallel.reducer)
    del parallel
    gc.collect()
    assert there() is None
    model.zero_grad()
    stage6_cases.squared(model, dist.get_rank()).backward()
    mine = stage6_cases.alone(model, stage6_cases.squared, dist.get_rank())
    assert torch.equal(model.first.weight.grad, mine["first.weight"])


def sparse(DDP):
    """Use sparse gradients where torch has nothing or raises.

    That is with our all-reduce, and on a rank that has nothing to add or no data.
    """
    rank = dist.get_rank()
    plugged = DDP(stage6_cases.seeded(stage6_cases.Words), all_reduce=ring_all_reduce)
    unused = DDP(stage6_cases.seeded(stage6_cases.Words), find_unused_parameters=True)
    for step in range(3):
        stage6_cases.check_sparse(plugged, step)
        some = lambda rank, step: None if rank == step % 2 else stage6_cases.first_words(rank, step)  # noqa: E731
        stage6_cases.check_sparse(unused, step, some)
    parallel = DDP(stage6_cases.seeded(stage6_cases.Words))
    with parallel.join():
        for step in range(1 + rank):
            parallel.zero_grad()
            parallel(stage6_cases.first_words(rank, step)).square().sum().backward()
    last = dist.get_world_size() - 1
    if rank == last:  # in its last step all the others were out of data
        loss = lambda module, rank: module(stage6_cases.first_words(rank, last)).square().sum()  # noqa: E731
        mine = stage6_cases.alone(parallel.module, loss, rank)["words.weight"].to_dense()
        error = (parallel.module.words.weight.grad.to_dense() - mine / (last + 1)).abs()
        assert (error <= 1e-6 * mine.abs()).all()


def another_grad_dtype(DDP):
    """torch refuses it; here buckets have the parameters' dtype, and gradients keep theirs."""
    model = stage6_cases.seeded(stage6_cases.Net).bfloat16()
    parallel = DDP(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    loss = lambda module, rank: module(stage6_cases.data(rank).bfloat16()).float().square().sum()  # noqa: E731
    for _ in range(2):
        model.zero_grad()
        loss(parallel, dist.get_rank()).backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        stage6_cases.assert_mean(model, loss)


def seen_on_the_timeline(DDP):
    """Both ways to communicate report their spans, and so does the wait at the end."""
    for all_reduce, name in ((None, "all_reduce"), (ring_all_reduce, "ring_all_reduce")):
        parallel = DDP(stage6_cases.Net(), all_reduce=all_reduce)
        events = []
        with wire.observing(events.append):
            stage6_cases.squared(parallel, 0).backward()
            deadline = time.monotonic() + 60
            while name not in [event.name for event in events] and time.monotonic() < deadline:
                time.sleep(0.001)  # gloo's thread reports a moment after it has finished
        assert {event.name for event in events if event.kind == "span"} == {name, "wait"}


def the_loop(DDP):
    model = tiny_model(seed=dist.get_rank())
    losses = stage6_ddp.train(model, tiny_batches(dist.get_rank(), dist.get_world_size()), 0.1)
    assert (weights(model) - trained_alone()).abs().max() < 1e-14
    # Equal shares: K divides 24.
    mean = torch.tensor(losses, dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean)
    expected = stage1_single.train(tiny_model(), tiny_batches(), 0.1)
    assert (mean - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12


def channels_last_after_wrapping(DDP):
    """Change the gradients' strides behind the wrapper's back.

    torch's class then mixes their elements up.
    """

    def make():
        return nn.Sequential(
            nn.Linear(5, 48), nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 4, 3), nn.Flatten()
        )

    for as_view in (False, True):
        model = stage6_cases.seeded(make)
        parallel = DDP(model, gradient_as_bucket_view=as_view)
        model[2].to(memory_format=torch.channels_last)
        for step in range(3):
            model.zero_grad()
            stage6_cases.squared(parallel, dist.get_rank(), step).backward()
            stage6_cases.assert_mean(
                model, lambda module, rank, step=step: stage6_cases.squared(module, rank, step)
            )


def static_graph_after_no_sync(DDP):
    """The first pass is not synchronised, so the graph is learnt from the second one."""
    model = stage6_cases.seeded(stage6_cases.Net)
    parallel = DDP(model, static_graph=True)
    for _ in range(3):
        model.zero_grad()
        with parallel.no_sync():
            stage6_cases.squared(parallel, dist.get_rank(), 0).backward()
        stage6_cases.squared(parallel, dist.get_rank(), 1).backward()
        both = lambda module, rank: sum(stage6_cases.squared(module, rank, step) for step in (0, 1))  # noqa: E731
        stage6_cases.assert_mean(model, both, slack=2)


def no_finalizing_by_hand(DDP):
    """torch 2.15 has a mode in which backward leaves the rest to the caller; ours refuses it."""
    parallel = DDP(stage6_cases.seeded(stage6_cases.Net), lazy_bucket_allocation=True)
    parallel.require_manual_backward_finalization = False
    with pytest.raises(NotImplementedError, match="when backward"):
        parallel.require_manual_backward_finalization = True


SPECIALS = {
    function.__name__: function
    for function in (
        bf16_hook,
        half_the_bytes,
        nothing_left_behind,
        sparse,
        another_grad_dtype,
        seen_on_the_timeline,
        the_loop,
        channels_last_after_wrapping,
        no_finalizing_by_hand,
        static_graph_after_no_sync,
    )
}
for name, all_reduce in {"ring": ring_all_reduce, **ALL_REDUCES}.items():
    views = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002}
    SPECIALS[name] = partial(train_and_check, all_reduce=all_reduce)
    SPECIALS[f"{name} in views"] = partial(train_and_check, all_reduce=all_reduce, **views)


@functools.cache
def special_outcomes(world_size):
    def attempt_all():
        return {name: failure(special, CLASSES["ours"]) for name, special in SPECIALS.items()}

    return launch(attempt_all, world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", SPECIALS)
def test_ours(name, world_size):
    failures = [rank[name] for rank in special_outcomes(world_size) if rank[name]]
    assert not failures, "\n".join(failures)


def test_the_constructor_has_torchs_arguments_and_defaults():
    theirs = inspect.signature(TorchDDP.__init__).parameters
    mine = inspect.signature(stage6_ddp.DistributedDataParallel.__init__).parameters
    if "forward_sync_buffers" not in theirs:
        pytest.skip(f"torch {torch.__version__} has fewer arguments, and other defaults")
    assert list(mine)[: len(theirs)] == list(theirs)
    assert all(mine[name].default == theirs[name].default for name in theirs)
