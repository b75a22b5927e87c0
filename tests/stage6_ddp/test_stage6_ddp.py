"""Stage 6 against torch's own class: the cases of `stage6_cases.py` judge both."""

import functools
import gc
import inspect
import random
import time
import traceback
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import stage6_cases
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model, trained_alone, weights
from stage6_cases import CASES, KNOWN_TO_TORCH, TORCH_FAILS, assert_replicas_agree, train_and_check
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_course import launch, stage1_single, stage6_ddp
from ddp_course.collectives import halving_doubling_all_reduce, hierarchical_all_reduce, tree_all_reduce
from ddp_course.errors import CourseError, MismatchError, RankError
from ddp_course.running import wire
from ddp_course.stage4_ring import ring_all_reduce
from ddp_course.stage6_ddp import buckets, uneven
from ddp_course.stage6_ddp.buckets import assign_buckets, size_limits
from ddp_course.stage6_ddp.buffers import batches
from ddp_course.stage6_ddp.checks import UNSUPPORTED

ALL_REDUCES = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "halving-doubling": halving_doubling_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}
CLASSES = {"torch": TorchDDP, "ours": stage6_ddp.DistributedDataParallel}


def attempt(names, kind):
    """Run cases on this rank; return {name: traceback or None}."""
    with small_on_odd_ranks():
        return {name: failure(CASES[name], CLASSES[kind]) for name in names}


def small_on_odd_ranks():
    """A context in which no gradient counts as small on even ranks: the models here would have no large ones."""
    return patch.object(buckets, "SMALL", buckets.SMALL * (dist.get_rank() % 2))


def failure(case, kind):
    try:
        case(kind)
    except Exception:
        return traceback.format_exc()


@functools.cache
def outcomes(kind, world_size):
    """Results of all cases from one launch; if that fails, one case spoilt it and each gets a launch of its own."""
    try:
        names = [name for name in CASES if kind != "torch" or name not in TORCH_FAILS]
        return launch(attempt, names, kind, world_size=world_size, timeout=120)
    except CourseError:
        return None


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", CASES)
def test_case(name, kind, world_size):
    if kind == "torch" and name in TORCH_FAILS:
        pytest.skip(TORCH_FAILS[name])
    ranks = outcomes(kind, world_size) or launch(attempt, [name], kind, world_size=world_size, timeout=100)
    failures = [rank[name] for rank in ranks if rank[name]]
    assert not failures, "\n".join(failures)


# Bit for bit, and bucket for bucket

SETTINGS = {
    "defaults": {},
    "views": {"gradient_as_bucket_view": True},
    "tiny buckets": {"bucket_cap_mb": 0.0005},
    "a list of caps": {"bucket_cap_mb_list": [0.0002, 0.001]},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
    "static": {"static_graph": True, "bucket_cap_mb": 0.0005},
}


def odd_model():
    """Layers of several sizes, two dtypes, used in another order than defined."""
    torch.manual_seed(0)
    sizes = [(13, 37), (37, 11), (11, 64), (64, 9)]
    stack = torch.nn.Sequential(*[torch.nn.Linear(*size) for size in sizes])
    stack[2].double()

    def convert(module, inputs):
        return inputs[0].to(module.weight.dtype)

    for layer in stack:
        layer.register_forward_pre_hook(convert)
    return stack


def trained_bits(kind, settings, steps=4):
    """Weights after a few steps."""
    model = odd_model()
    parallel = CLASSES[kind](model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + step)
        parallel(torch.randn(8, 13, generator=generator)).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in model.parameters()])


def layouts(kind, settings, steps=3):
    """The shapes in each bucket, in the order of communication, over all steps."""
    seen, model = [], odd_model()
    parallel = CLASSES[kind](model, **settings)

    def hook(state, bucket):
        seen.append([tuple(p.shape) for p in bucket.parameters()])
        return default_hooks.allreduce_hook(None, bucket)

    parallel.register_comm_hook(None, hook)
    for _ in range(steps):
        parallel(torch.ones(8, 13)).square().sum().backward()
    return seen


class Forked(stage6_cases.Branches):
    """Two branches with a BatchNorm between them and the last layer."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(5)

    def forward(self, inputs, which):
        return self.norm(super().forward(inputs, which))


UNEVEN = {  # what takes part in the passes of rank 0 and the others inside `join`, and of all ranks after it
    "PowerSGD": ("both", "both", None, {}),  # after it, or in several buckets, torch hangs: its hook waits in callbacks
    "PowerSGD in views": ("both", "both", None, {"gradient_as_bucket_view": True}),
    "a branch unused after it": ("both", "both", "a", {"find_unused_parameters": True}),
    "a branch of the early ranks": ("a", "b", "b", {"find_unused_parameters": True}),
    "no branch": ("neither", "neither", "both", {"find_unused_parameters": True}),
}


def joined(kind, name):
    """All gradients (None where there is none) and buffers after each pass in a `join` and after it."""
    first, others, after, settings = UNEVEN[name]
    model, seen = stage6_cases.seeded(Forked), []
    if "PowerSGD" in name:
        model.never.requires_grad_(False)
    parallel = CLASSES[kind](model, bucket_cap_mb=25 if "PowerSGD" in name else 0.0001, **settings)
    if "PowerSGD" in name:
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step(which, number):
        model.zero_grad()
        parallel(stage6_cases.data(dist.get_rank(), number), which).square().sum().backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        seen.append([buffer.clone() for buffer in model.buffers()])

    with parallel.join():
        for number in range(4 + dist.get_rank()):
            step(others if dist.get_rank() else first, number)
    for number in range(7, 10) if after else ():
        step(after, number)
    return seen


def compare_joins():
    return {name: [joined(kind, name) for kind in CLASSES] for name in UNEVEN}


@functools.cache
def joins(world_size):
    return launch(compare_joins, world_size=world_size, timeout=100)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", UNEVEN)
def test_after_join_everything_is_torchs_bit_for_bit(name, world_size):
    for rank in joins(world_size):
        theirs, ours = rank[name]
        assert len(theirs) == len(ours) >= 8
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            for a, b in zip(one, other, strict=True):
                assert (a is None) == (b is None), f"look {number}: a gradient that the other has not"
                assert a is None or torch.equal(a, b), f"look {number}: {(a - b).abs().max()} off"


def compare_with_torch():
    known = {name: chosen for name, chosen in SETTINGS.items() if chosen.keys() <= KNOWN_TO_TORCH.keys()}
    pairs = {name: [trained_bits(kind, chosen) for kind in CLASSES] for name, chosen in known.items()}
    return pairs, {name: [layouts(kind, chosen) for kind in CLASSES] for name, chosen in known.items()}


@functools.cache
def compared_with_torch(world_size):
    return launch(compare_with_torch, world_size=world_size)


def compared(name, world_size):
    """What all ranks found with these settings; a skip where this torch does not know them."""
    if lacking := SETTINGS[name].keys() - KNOWN_TO_TORCH.keys():
        pytest.skip(f"torch {torch.__version__} has no {', '.join(lacking)}")
    return [(trained[name], buckets[name]) for trained, buckets in compared_with_torch(world_size)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_torchs_bit_for_bit(name, world_size):
    """Always at K=2; at K=3 as well, because the buckets and so the order of additions are the same."""
    for (theirs, ours), _ in compared(name, world_size):
        assert torch.equal(theirs, ours)
        assert torch.isfinite(ours).all()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_buckets_are_torchs(name, world_size):
    for _, (theirs, ours) in compared(name, world_size):
        assert theirs and theirs == ours


def assignment_pair(seed):
    """torch's and our assignment of random tensors: mixed dtypes, sparse ones, one or more limits, an order or none."""
    draw = random.Random(seed)
    dtypes = [torch.float32, torch.float64, torch.float16]
    tensors = [torch.empty(draw.randint(1, 300), dtype=draw.choice(dtypes)) for _ in range(draw.randint(1, 30))]
    sparse = {index for index in range(len(tensors)) if draw.random() < 0.1}
    limits = sorted(draw.randint(100, 3000) for _ in range(draw.randint(1, 3)))
    order = draw.sample(range(len(tensors)), len(tensors)) if seed % 2 else None
    flags = [index in sparse for index in range(len(tensors))]
    arranged = tensors if order is None else [tensors[index] for index in order]
    theirs, _ = dist._compute_bucket_assignment_by_size(arranged, limits, flags, order or [])
    return theirs, assign_buckets(tensors, limits, sparse, order)


def test_assignment_is_torchs_for_any_tensors():
    for seed in range(300):
        theirs, ours = assignment_pair(seed)
        assert ours == [list(bucket) for bucket in theirs], f"seed {seed}"


def test_many_buffers_travel_in_few_messages():
    sizes, kinds = (3, 4, 9, 2, 2), (torch.float32, torch.float32, torch.float32, torch.int64, torch.float32)
    tensors = [torch.zeros(size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)]
    messages = [[len(tensor) for tensor in batch] for batch in batches(tensors, limit=28)]
    assert sorted(messages) == [[2], [2], [3, 4], [9]]  # one dtype each, 28 bytes at most or a single tensor
    full = [torch.zeros(size) for size in (7, 3, 4, 1)]
    assert [[len(tensor) for tensor in batch] for batch in batches(full, limit=28)] == [[7], [3, 4], [1]]


def test_size_limits():
    assert size_limits(None) == [2**20, 25 * 2**20]
    assert size_limits(25) == [25 * 2**20], "only the default cap has a small first bucket"
    assert size_limits(None, [1, 2]) == [2**20, 2**21]
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"bucket_cap_mb is {bad}; it must be a positive number"):
            size_limits(bad)
        with pytest.raises(ValueError, match=rf"bucket_cap_mb is \[1, {bad}\]; it must be"):
            size_limits(None, [1, bad])


# Negative controls: each mutant must fail a case


class NoDivision(CLASSES["ours"]):
    def before_backward(self, outputs):
        self.reducer.divisor = 1
        return super().before_backward(outputs)


class NotOnRank1(CLASSES["ours"]):
    """Rank 1 takes part in the collectives but keeps its own gradients."""

    def make_reducer(self):
        super().make_reducer()
        start = self.reducer.start

        def start_and_forget(bucket):
            mine = bucket.buffer().clone()
            wait = start(bucket)
            return (
                wait
                if dist.get_rank() != 1
                else lambda: (wait(), bucket.buffer().copy_(mine * dist.get_world_size()))[1]
            )

        self.reducer.start = start_and_forget


class IgnoresCap(CLASSES["ours"]):
    def __init__(self, module, **settings):
        super().__init__(module, **{**settings, "bucket_cap_mb": None})


class NoInitialSync(CLASSES["ours"]):
    def sync_model(self, src, with_buffers):
        pass


class NoBuffers(CLASSES["ours"]):
    def syncs_buffers(self, location):
        return False


class TouchesUnused(CLASSES["ours"]):
    def make_reducer(self):
        super().make_reducer()
        self.reducer.unused_everywhere = tuple


class SyncsInNoSync(CLASSES["ours"]):
    @contextmanager
    def no_sync(self):
        yield


class AlwaysDividesByK(CLASSES["ours"]):
    def join(self, divide_by_initial_world_size=True, **settings):
        return super().join(**settings)


class OwnOrder(CLASSES["ours"]):
    """Every rank rebuilds by its own order."""

    def forward(self, *inputs):
        with patch.object(dist, "broadcast", lambda *args, **kwargs: None) if self.reducer.order else nullcontext():
            return super().forward(*inputs)


class ForgetsTheFuture(CLASSES["ours"]):
    def register_comm_hook(self, state, hook):
        super().register_comm_hook(state, hook)
        start = self.reducer.start
        self.reducer.start = lambda bucket: (start(bucket), lambda: bucket.buffer())[1]


class WithBuckets(CLASSES["ours"]):
    """A parent of mutants: it calls `mutate` for every bucket that is made."""

    def make_reducer(self):
        super().make_reducer()
        make = self.reducer.make_buckets

        def make_buckets(layout):
            make(layout)
            for bucket in self.reducer.buckets:
                self.mutate(bucket)

        self.reducer.make_buckets = make_buckets
        for bucket in self.reducer.buckets:
            self.mutate(bucket)


class NeverNewMemory(WithBuckets):
    """Gradients of the last pass stay in a memory that the next pass overwrites."""

    def mutate(self, bucket):
        bucket.allocate = lambda: None


class LendsToAll(WithBuckets):
    """Gradients that exist already move too."""

    def mutate(self, bucket):
        bucket.lend = lambda grad, view: setattr(grad, "data", view)


class LendsAnotherTensor(WithBuckets):
    """The parameter gets a new gradient instead of the old one in new memory."""

    def mutate(self, bucket):
        def lend(grad, view):
            owner = next(parameter for parameter in bucket.parameters if parameter.grad is grad)
            owner.grad = view.detach()

        bucket.lend = lend


class SharesStorage(WithBuckets):
    """The gradients are windows of one storage."""

    def mutate(self, bucket):
        own = bucket.allocate

        def allocate():
            own()
            pieces = bucket.flat.split([view.numel() for view in bucket.views])
            bucket.views = [piece.view_as(view) for piece, view in zip(pieces, bucket.views, strict=True)]

        bucket.allocate = allocate
        allocate()


class LeavesUnfilled(WithBuckets):
    """Small gradients wait for ever."""

    def mutate(self, bucket):
        bucket.fill = lambda divisor: bucket.waiting.clear()


class DividesTheRestAgain(WithBuckets):
    """Those that waited are divided together with all that was there before."""

    def mutate(self, bucket):
        fill = bucket.fill

        def divide_all(divisor):
            fill(1)
            bucket.flat.div_(divisor)

        bucket.fill = divide_all


class GivesToThoseThatHave(WithBuckets):
    """Who has no gradient at the end gets none."""

    def mutate(self, bucket):
        give = bucket.give
        bucket.give = lambda untouched=(): give({p for p in bucket.parameters if p.grad is None})


MUTANTS = [
    (NoDivision, "gradients_are_the_mean"),
    (NoDivision, "no_sync_accumulates"),
    (NotOnRank1, "gradients_are_the_mean"),
    (NotOnRank1, "unused_parameters_that_change"),
    (IgnoresCap, "buckets_leave_in_order_and_keep_to_the_cap"),
    (NoInitialSync, "rank_0_decides_the_weights_unless_init_sync_is_off"),
    (NoBuffers, "buffers_come_from_rank_0"),
    (NoBuffers, "buffer_hooks"),
    (TouchesUnused, "globally_unused_gradients_stay_untouched"),
    (SyncsInNoSync, "no_sync_accumulates"),
    (SyncsInNoSync, "no_sync_goes_by_the_forward_pass"),
    (AlwaysDividesByK, "join_divides_by_all_or_by_the_active"),
    (OwnOrder, "bucket_layout_follows_rank_0"),
    (ForgetsTheFuture, "futures_are_honoured"),
    (NeverNewMemory, "gradients_of_older_passes_keep_their_values"),
    (LendsToAll, "gradients_stay_where_their_owner_laid_them"),
    (LendsAnotherTensor, "a_gradient_stays_the_same_object"),
    (SharesStorage, "gradients_are_views_or_not"),
    (LeavesUnfilled, "many_small_gradients_beside_large_ones"),
    (DividesTheRestAgain, "many_small_gradients_beside_large_ones"),
    (GivesToThoseThatHave, "gradients_cleared_before_the_end"),
]


def run_mutant(index):
    mutant, name = MUTANTS[index]
    with small_on_odd_ranks():
        CASES[name](mutant)


@pytest.mark.parametrize("index", range(len(MUTANTS)), ids=[f"{mutant.__name__}-{name}" for mutant, name in MUTANTS])
def test_the_cases_reject_mutants(index):
    """By an assertion; where every rank has an order of its own, the backend may give up first."""
    with pytest.raises(RankError) as caught:
        launch(run_mutant, index, world_size=2, timeout=30)
    kinds = [failure.type_name for failure in caught.value.failures]
    assert "AssertionError" in kinds or MUTANTS[index][0] is OwnOrder, caught.value


# What only ours has


def ours(*args, **settings):
    return CLASSES["ours"](*args, **settings)


def only_ours():
    found = {}
    for name, all_reduce in ALL_REDUCES.items():
        found[name] = failure(lambda DDP, all_reduce=all_reduce: train_and_check(DDP, all_reduce=all_reduce), ours)
        views = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002, "all_reduce": all_reduce}
        found[name + " in views"] = failure(lambda DDP, views=views: train_and_check(DDP, **views), ours)
    found["bf16 hook"] = failure(bf16_hook, ours)
    found["half the bytes"] = failure(half_the_bytes, ours)
    found["automatic cap"] = failure(automatic_cap, ours)
    found["names the difference"] = failure(names_the_difference, ours)
    found["refuses what it cannot do"] = failure(refuses, ours)
    found["own state"] = failure(nothing_left_behind, ours)
    found["lent memory"] = failure(lent_memory, ours)
    found["sparse"] = failure(sparse, ours)
    found["another grad_dtype"] = failure(another_grad_dtype, ours)
    found["the loop"] = failure(the_loop, ours)
    found["seen on the timeline"] = failure(seen_on_the_timeline, ours)
    return found


def bf16_hook(DDP):
    """torch refuses this hook without NCCL; here it runs on the CPU."""
    model = stage6_cases.seeded(stage6_cases.Net)
    parallel = DDP(model)
    parallel.register_comm_hook(None, default_hooks.bf16_compress_hook)
    stage6_cases.squared(parallel, dist.get_rank()).backward()
    stage6_cases.assert_mean(model, stage6_cases.squared, slack=2**16)


def half_the_bytes(DDP):
    """mixed_precision sends two bytes for a number, and float32 weights stay float32; half of it alone does not."""
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
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert sent["both"] == sent["buckets"] == sent["float32"] / 2 and sent["computing"] == sent["float32"], sent


def automatic_cap(DDP):
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    parallel = DDP(model, bucket_cap_mb="auto", all_reduce=ring_all_reduce)
    for _ in range(3):
        parallel.zero_grad()
        parallel(torch.randn(64, 128)).square().sum().backward()
    layout = [bucket.parameters for bucket in parallel.reducer.buckets]
    assert parallel.reducer.rebuilt and len(layout) >= 1
    sizes = stage6_cases.gathered([len(bucket) for bucket in layout])
    assert sizes.count(sizes[0]) == len(sizes), "ranks chose different buckets"
    assert_replicas_agree([parameter.grad for parameter in model.parameters()])


def names_the_difference(DDP):
    width = 8 if dist.get_rank() == 1 else 7
    words = ("first.weight", "(7, 5)", "(8, 5)", "rank 1")
    stage6_cases.assert_raises(lambda: DDP(stage6_cases.Net(width)), MismatchError, *words)
    layers = [torch.nn.Linear(5, 5) for _ in range(2 if dist.get_rank() == 1 else 3)]
    words = ("rank 0 has 6 parameters and rank 1 has 4", "2.weight, 2.bias")
    stage6_cases.assert_raises(lambda: DDP(torch.nn.Sequential(*layers)), RuntimeError, *words)
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    stage6_cases.assert_raises(lambda: DDP(torch.nn.Linear(5, 5, dtype=dtype)), RuntimeError, "dtype", "float64")


def refuses(DDP):
    for name in UNSUPPORTED:
        stage6_cases.assert_raises(
            lambda name=name: DDP(torch.nn.Linear(2, 2), **{name: []}), NotImplementedError, name
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = torch.nn.Linear(2, 1)
        DDP(model, check_reduction=True, dim=1, batched_grad_copy=True, skip_all_reduce_unused_params=True)
        parallel = DDP(model)
        parallel(torch.ones(1, 2)).sum().pow(2).backward(create_graph=True)
    said = " ".join(str(warning.message) for warning in caught)
    assert "check_reduction" in said and "create_graph" in said


def nothing_left_behind(DDP):
    """The wrapper leaves no hooks on the module, and can be collected."""
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


def lent_memory(DDP):
    """Large gradients of a pass live in its buckets, and the next pass uses the same memory if they are gone."""
    model = stage6_cases.seeded(partial(stage6_cases.Net, buckets.SMALL))
    parallel, places, kept = DDP(model), [], []
    for step in range(5):
        model.zero_grad()
        stage6_cases.squared(parallel, dist.get_rank(), step).backward()
        (bucket,) = parallel.reducer.buckets
        inside = range(bucket.flat.data_ptr(), bucket.flat.data_ptr() + bucket.flat.nbytes)
        large = [p for p in model.parameters() if p.nbytes > buckets.SMALL]
        assert len(large) == 3 and all(p.grad.data_ptr() in inside for p in large), "gradients were copied out"
        places.append(bucket.flat.data_ptr())
        kept += [model.first.bias.grad] * (step == 3)
    assert places[1] == places[2] == places[3], "memory was free and not used again"
    assert places[4] != places[3], "the memory of a gradient that lives was used"


def sparse(DDP):
    """Where torch has nothing or raises: with our all-reduce, and on a rank that has nothing to add or no data."""
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
        parallel, events = DDP(stage6_cases.Net(), all_reduce=all_reduce), []
        with wire.observing(events.append):
            stage6_cases.squared(parallel, 0).backward()
            deadline = time.monotonic() + 10
            while name not in [event.name for event in events] and time.monotonic() < deadline:
                time.sleep(0.001)  # gloo's thread reports a moment after it has finished
        assert {event.name for event in events if event.kind == "span"} == {name, "wait"}


def the_loop(DDP):
    model = tiny_model(seed=dist.get_rank())
    losses = stage6_ddp.train(model, tiny_batches(dist.get_rank(), dist.get_world_size()), 0.1)
    assert (weights(model) - trained_alone()).abs().max() < 1e-14
    mean = torch.tensor(losses, dtype=torch.float64) / dist.get_world_size()  # equal shares: K divides 24
    dist.all_reduce(mean)
    expected = stage1_single.train(tiny_model(), tiny_batches(), 0.1)
    assert (mean - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12


@functools.cache
def only_ours_outcomes(world_size):
    return launch(only_ours, world_size=world_size, timeout=60)


SPECIALS = [
    "bf16 hook",
    "half the bytes",
    "automatic cap",
    "names the difference",
    "refuses what it cannot do",
    "own state",
    "lent memory",
    "another grad_dtype",
    "sparse",
    "the loop",
    "seen on the timeline",
]
PLUGGED = [name + views for name in ALL_REDUCES for views in ("", " in views")]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", SPECIALS + PLUGGED)
def test_ours(name, world_size):
    failures = [rank[name] for rank in only_ours_outcomes(world_size) if rank[name]]
    assert not failures, "\n".join(failures)


def test_the_constructor_has_torchs_arguments_and_defaults():
    theirs = inspect.signature(TorchDDP.__init__).parameters
    mine = inspect.signature(stage6_ddp.DistributedDataParallel.__init__).parameters
    if "forward_sync_buffers" not in theirs:
        pytest.skip(f"torch {torch.__version__} has fewer arguments, and other defaults")
    assert list(mine)[: len(theirs)] == list(theirs)
    assert all(mine[name].default == theirs[name].default for name in theirs)


def test_files_are_in_reading_order_and_short():
    folder = Path(stage6_ddp.__file__).parent
    for file in folder.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 350, file.name
        assert file.stem == "__init__" or f"\n    {file.stem}  " in stage6_ddp.__doc__, (
            f"{file.name} is not in the reading order"
        )


def test_how_many_ranks_have_data_is_read_when_the_current_stream_has_waited():
    """A future of gloo's would wait for the default stream only."""
    work, order = Mock(), []
    work.wait.side_effect = lambda: order.append("stream")
    work.get_future.return_value.wait.side_effect = lambda: (order.append("value"), [torch.tensor([3.0])])[1]
    assert uneven.active_ranks(work) == 3 and order == ["stream", "value"]
