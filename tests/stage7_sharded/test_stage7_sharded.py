"""Stage 7 trains what one device trains, to the bit, with the bytes and memory of the theory."""

import ctypes
import gc
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model, trained_alone, weights
from torch.nn.functional import cross_entropy

from ddp_course import launch, problems, stage5_bucketed, stage7_sharded, wire
from ddp_course.base.torch_private import as_plain_tensors
from ddp_course.stage4_ring import average_on_ring
from ddp_course.stage5_bucketed import assign_buckets
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer
from ddp_course.stage7_sharded.flat import Flat

PARAMETERS = sum(parameter.numel() for parameter in tiny_model().parameters())
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
}


def same(one, other):
    """Return whether two nested structures of tensors and plain data are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def groups(model):
    """Return two groups with settings of their own, as people do for weights and biases."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2]}]


def train_averaged(model, optimizer, batches, scheduler=None):
    """Train as stage 1 does if the optimizer averages, and otherwise with rings as in stage 5.

    These add in the same order.
    """
    parameters = [
        parameter for members in optimizer.param_groups for parameter in members["params"]
    ]
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        if not isinstance(optimizer, ShardedOptimizer):
            for bucket in assign_buckets(parameters):
                average_on_ring([parameter.grad for parameter in bucket])
        optimizer.step()
        if scheduler:
            scheduler.step()
    return weights(model)


def laid_out_alike(optimizer):
    """Lay an optimizer's parameters end to end in memory, and return it.

    Where a matrix begins decides how BLAS multiplies it.
    """
    for bucket in assign_buckets(
        [parameter for members in optimizer.param_groups for parameter in members["params"]]
    ):
        Flat(bucket)
    return optimizer


def sharded_beside_unsharded(dtypes=(torch.float32, torch.float64)):
    """Return, for each optimizer, weights and state dict, sharded and not, and bytes of state.

    The bytes are those that this rank holds.
    """
    place = (dist.get_rank(), dist.get_world_size())
    results = {}
    for (name, (kind, options)), dtype in product(OPTIMIZERS.items(), dtypes):
        ours = tiny_model(dtype=dtype)
        theirs = tiny_model(dtype=dtype)
        sharded = ShardedOptimizer(groups(ours), kind, **options)
        whole = laid_out_alike(kind(groups(theirs), **options))
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (sharded, whole)]
        one = train_averaged(ours, sharded, tiny_batches(*place, dtype=dtype), schedules[0])
        other = train_averaged(theirs, whole, tiny_batches(*place, dtype=dtype), schedules[1])
        results[name, dtype] = (
            one,
            other,
            sharded.state_dict(),
            whole.state_dict(),
            state_bytes(sharded.local),
        )
    return results


def state_bytes(optimizer):
    entries = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in entries if isinstance(value, torch.Tensor) and value.dim())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_sharded_optimizer_gives_the_bits_of_the_unsharded_one(world_size):
    ranks = launch(sharded_beside_unsharded, world_size=world_size)
    for case in ranks[0]:
        for ours, theirs, our_state, their_state, _ in (rank[case] for rank in ranks):
            assert torch.equal(ours, theirs), case
            assert torch.equal(ours, ranks[0][case][0]), "replicas differ"
            assert same(our_state["state"], their_state["state"]), case
            pairs = zip(our_state["param_groups"], their_state["param_groups"], strict=True)
            for our_group, their_group in pairs:
                assert our_group["lr"] == their_group["lr"]
                assert our_group["params"] == their_group["params"]
    for name, moments in [("Adam", 2), ("momentum", 1), ("AdamW", 3), ("SGD", 0)]:
        held = [rank[name, torch.float32][4] for rank in ranks]
        assert_state_is_sharded(held, PARAMETERS, world_size, moments=moments)


def assert_state_is_sharded(held, parameters, world_size, itemsize=4, moments=2):
    """Assert that every rank holds its chunk's share of the optimizer state, no more.

    All shares together are the whole.
    """
    assert max(held) <= moments * itemsize * -(-parameters // world_size)
    assert sum(held) == moments * itemsize * parameters


def torchs_zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = tiny_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    theirs = train_averaged(model, optimizer, tiny_batches(dist.get_rank(), dist.get_world_size()))
    model = tiny_model()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with wire.counting() as traffic:
        ours = train_averaged(
            model, optimizer, tiny_batches(dist.get_rank(), dist.get_world_size(), steps=4)
        )
    return ours, theirs, traffic.bytes_sent


def test_it_agrees_with_torchs_zero_redundancy_optimizer_and_sends_what_the_formula_says():
    warnings.simplefilter("ignore")
    ranks = launch(torchs_zero, world_size=3)
    for ours, theirs, _ in ranks:
        assert torch.equal(ours, theirs)
    # Each of 4 steps sends 2 (K-1) p bytes.
    assert sum(sent for *_, sent in ranks) == 4 * 2 * 2 * PARAMETERS * 8


# ---- fully sharded


def fully(model, **options):
    return FullyShardedDataParallel(model, **options)


def steps_of(parallel, batches, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(parallel.parameters(), lr=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()


def fully_sharded_training():
    """Return the weights after training in several ways that must all agree.

    How far stage 5 is from them is returned, too.
    """
    place = (dist.get_rank(), dist.get_world_size())
    results = {}
    for name, options in {
        "default": {},
        "one by one": {"prefetch": False},
        "one block": {"blocks": []},
    }.items():
        model = tiny_model(seed=dist.get_rank())
        parallel = fully(model, **options)
        steps_of(parallel, tiny_batches(*place))
        results[name] = weights(parallel.restore())
    model = tiny_model(seed=dist.get_rank())
    losses = stage7_sharded.train(model, tiny_batches(*place), 0.1)
    results["train"] = weights(model)
    bucketed = tiny_model()
    results["stage 5"] = (
        stage5_bucketed.train(bucketed, tiny_batches(*place), 0.1) == losses,
        weights(bucketed),
    )
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_fully_sharded_training_equals_one_device(world_size):
    ranks = launch(fully_sharded_training, world_size=world_size)
    for rank in ranks:
        same_losses, bucketed = rank.pop("stage 5")
        for way, result in rank.items():
            assert torch.equal(result, ranks[0][way]), "replicas differ"
            assert (result - trained_alone()).abs().max() < 1e-14
        if world_size <= 2:
            assert same_losses
            assert all(torch.equal(result, bucketed) for result in rank.values())


def traffic_of_a_step():
    model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(4)))
    parallel = fully(model)
    with wire.counting() as traffic:
        parallel(torch.randn(2, 24)).sum().backward()
    return traffic.bytes_sent, traffic.bytes_received, traffic.messages_sent


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_moves_three_times_the_parameters(world_size):
    payload = 4 * (24 * 24 + 24) * 4
    expected = 3 * (world_size - 1) * payload // world_size
    for sent, received, messages in launch(traffic_of_a_step, world_size=world_size):
        assert sent == received == expected
        assert messages == 3 * 4 * (world_size - 1)


def peak_of_a_step(layers):
    """Return the bytes that a step with Adam takes at its peak.

    They are above those of a process that has done all this before.
    """
    # M_MMAP_THRESHOLD: memory that is freed goes back at once.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)

    problem = problems.make("synthetic", width=512)  # The data count before and after.

    def make_training(count):
        problem.layers = count
        model = fully(problem.model())
        return model, torch.optim.Adam(model.parameters())

    def step(model, optimizer):
        world_size = dist.get_world_size()
        steps_of(model, problem.batches(world_size, 1, 0, dist.get_rank(), world_size), optimizer)
        optimizer.zero_grad()

    small = make_training(3)
    step(*small)
    step(*small)
    del small
    gc.collect()
    before = memory("VmRSS")
    big = make_training(layers)
    step(*big)
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
    step(*big)
    return memory("VmHWM") - before


def memory(key):
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def allowed(layers, world_size):
    """Return 16 P/K bytes and a tenth, and two blocks.

    They are the one that computes and the one that is fetched ahead.
    """
    return 1.1 * 16 * layers * 512**2 / world_size + 2 * 4 * 512**2


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
@pytest.mark.parametrize("world_size, layers", [(2, 64), (4, 128)])
def test_memory_falls_as_theory_says(world_size, layers):
    peaks = launch(peak_of_a_step, layers, world_size=world_size)
    assert max(peaks) <= allowed(layers, world_size)
    assert min(peaks) >= 0.9 * 16 * layers * 512**2 / world_size, (
        "less than the state itself: not measured"
    )


def everything_is_freed():
    parallel = fully(tiny_model())
    steps_of(parallel, tiny_batches(dist.get_rank(), dist.get_world_size(), steps=2))
    left = [sum(block.full.untyped_storage().nbytes() for block in parallel.blocks)]
    with torch.no_grad():
        parallel(torch.ones(1, 13, dtype=torch.float64))
    left.append(sum(block.full.untyped_storage().nbytes() for block in parallel.blocks))
    with as_plain_tensors():
        gradients_left = [
            parameter.grad for block in parallel.blocks for parameter in block.parameters
        ]
    return left, gradients_left, sum(shard.numel() for shard in parallel.parameters())


def test_whole_parameters_are_gone_after_a_step():
    ranks = launch(everything_is_freed, world_size=4)
    assert all(left == [0, 0] and set(grads) == {None} for left, grads, _ in ranks)
    assert sum(count for *_, count in ranks) == PARAMETERS
    assert max(count for *_, count in ranks) <= PARAMETERS / 4 + 3


def on_bytes():
    problem = problems.make("bytes", parameters=60_000, context=16, dtype=torch.float64)
    whole = problem.model()
    sharded = problem.model()
    place = dist.get_rank(), dist.get_world_size()
    stage5_bucketed.train(whole, problem.batches(8, 2, 0, *place), 0.1)
    stage7_sharded.train(sharded, problem.batches(8, 2, 0, *place), 0.1)
    names = [
        type(block.module).__name__ for block in FullyShardedDataParallel(problem.model()).blocks
    ]
    return weights(whole), weights(sharded), names


def test_a_transformer_is_sharded_block_by_block():
    for whole, sharded, names in launch(on_bytes, world_size=2):
        assert torch.equal(whole, sharded)
        assert names == ["ByteGPT"] + ["TransformerBlock"] * (len(names) - 1)
        assert len(names) > 1


def on_cuda():
    from ddp_course import rank_device

    place = (dist.get_rank(), dist.get_world_size())
    results = []
    batches = [(x.to(rank_device()), y.to(rank_device())) for x, y in tiny_batches(*place)]
    model = tiny_model(seed=dist.get_rank()).to(rank_device())
    stage7_sharded.train(model, batches, 0.1)
    results.append(weights(model).cpu())
    model = tiny_model().to(rank_device())
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    results.append(train_averaged(model, optimizer, batches).cpu())
    return results


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    for rank in launch(on_cuda, world_size=2, device="cuda"):
        for result in rank:
            assert (result - trained_alone()).abs().max() < 1e-12
