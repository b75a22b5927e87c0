"""Stage 4 equals one device: sums by a ring that sends exactly what the formula says."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from oracles import (
    assert_all_equal_mean,
    assert_all_equal_sum,
    rank_tensor,
    tiny_batches,
    tiny_model,
    trained_alone,
    weights,
)

from ddp_course import launch, stage4_ring, wire

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
SHAPES = [(24, 5), (7,), (3,), (1,), (0,), ()]
RINGS = {"ring": stage4_ring.ring_all_reduce, "whole": stage4_ring.whole_gradient_ring}


def reduced(cases):
    """Run every case on this rank by each ring; return results and traffic, and gloo's."""
    outcomes = []
    for name, shape, dtype in cases:
        ours = rank_tensor(dist.get_rank(), shape, dtype)
        theirs = rank_tensor(dist.get_rank(), shape, dtype)
        with wire.counting() as traffic:
            returned = RINGS[name](ours)
        dist.all_reduce(theirs)
        outcomes.append((ours, theirs, traffic, returned is ours))
    return outcomes


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_rank_gets_the_sum(world_size):
    cases = list(product(RINGS, SHAPES, DTYPES))
    ranks = launch(reduced, cases, world_size=world_size)
    for (name, shape, dtype), *outcomes in zip(cases, *ranks, strict=True):
        assert_all_equal_sum([ours for ours, *_ in outcomes], world_size, shape, dtype)
        assert all(in_place for *_, in_place in outcomes)
        if world_size <= 2:
            assert all(torch.equal(ours, theirs) for ours, theirs, *_ in outcomes)
        if name == "ring":
            assert all(torch.equal(ours, outcomes[0][0]) for ours, *_ in outcomes), (
                "replicas differ in their bits"
            )


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_traffic_is_exactly_the_formula(world_size):
    cases = [(name, (840,), torch.float32) for name in ("ring", "whole")]  # 2, 3 and 8 divide 840
    payload = 840 * 4
    steps = 2 * (world_size - 1)
    for ring, whole in launch(reduced, cases, world_size=world_size):
        traffic = ring[2]
        assert traffic.bytes_sent == traffic.bytes_received == steps * payload // world_size
        assert traffic.messages_sent == traffic.messages_received == steps
        traffic = whole[2]
        assert traffic.bytes_sent == traffic.bytes_received == (world_size - 1) * payload
        assert traffic.messages_sent == world_size - 1


def whole_ring_bits():
    """Sum by both rings values whose sum depends on the order of additions.

    The rings are the ring and the whole-gradient ring.
    """
    results = []
    for ring in RINGS.values():
        tensor = rank_tensor(dist.get_rank(), (1000,)) * 10.0 ** dist.get_rank()
        results.append(ring(tensor).clone())
    return results


def test_only_the_chunked_ring_gives_all_ranks_the_same_bits():
    ranks = launch(whole_ring_bits, world_size=4)
    assert all(torch.equal(chunked, ranks[0][0]) for chunked, _ in ranks)
    assert not all(torch.equal(whole, ranks[0][1]) for _, whole in ranks)


def reduce_scattered():
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    chunks = [rank_tensor(rank, (6,), torch.int64, seed) for seed in range(world_size)]
    stage4_ring.reduce_scatter(chunks)
    return chunks


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_after_reduce_scatter_rank_r_owns_chunk_r_plus_1(world_size):
    for rank, chunks in enumerate(launch(reduce_scattered, world_size=world_size)):
        owned = (rank + 1) % world_size
        expected = sum(rank_tensor(peer, (6,), torch.int64, owned) for peer in range(world_size))
        assert torch.equal(chunks[owned], expected)


def gathered():
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    chunks = [torch.full((2,), -1) for _ in range(world_size)]
    chunks[(rank + 1) % world_size] = torch.full((2,), (rank + 1) % world_size)
    stage4_ring.allgather(chunks)
    return torch.stack(chunks)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_allgather_gives_everyone_every_chunk(world_size):
    for chunks in launch(gathered, world_size=world_size):
        assert chunks.tolist() == [[owner, owner] for owner in range(world_size)]


def strided():
    rank = dist.get_rank()
    transposed = rank_tensor(rank, (6, 4)).t()
    columns = rank_tensor(rank, (6, 4))[:, ::2]
    stage4_ring.ring_all_reduce(transposed)
    stage4_ring.whole_gradient_ring(columns)
    return transposed, columns


def test_tensors_need_not_be_contiguous():
    expected = sum(rank_tensor(rank, (6, 4)) for rank in range(3))
    for transposed, columns in launch(strided, world_size=3):
        assert torch.allclose(transposed, expected.t())
        assert torch.allclose(columns, expected[:, ::2])


def in_subgroups():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = groups[rank % 2]
    return RINGS["ring"](rank_tensor(rank, (5,)), group=mine), RINGS["whole"](
        rank_tensor(rank, (5,)), mine
    )


def test_sub_groups_reduce_among_themselves():
    ranks = launch(in_subgroups, world_size=4)
    for rank, results in enumerate(ranks):
        expected = rank_tensor(rank, (5,)) + rank_tensor((rank + 2) % 4, (5,))
        assert all(torch.equal(result, expected) for result in results)


def off_by_one_chunk(chunks, group=None):
    rank, world_size, left, right = wire.neighbours(group)
    for step in range(world_size - 1):
        outgoing = chunks[(rank + 1 - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        wire.exchange(outgoing, right, incoming, left, group)
        target += incoming


def broken_ring(fault):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    tensor = rank_tensor(rank, (24,))
    chunks = list(tensor.tensor_split(world_size))
    if fault == "off-by-one chunk":
        off_by_one_chunk(chunks)
        stage4_ring.allgather(chunks)
    elif fault == "reversed chunks":
        stage4_ring.reduce_scatter(chunks)
        stage4_ring.allgather(chunks)
        tensor.copy_(torch.cat(chunks[::-1]))
    elif fault == "no allgather":
        stage4_ring.reduce_scatter(chunks)
    return tensor


@pytest.mark.parametrize(
    "fault", ["off-by-one chunk", "reversed chunks", "no allgather", "no sync"]
)
@pytest.mark.parametrize("world_size", [3, 4])
def test_the_oracle_rejects(fault, world_size):
    results = launch(broken_ring, fault, world_size=world_size)
    with pytest.raises(AssertionError, match="is off by"):
        assert_all_equal_sum(results, world_size, (24,), torch.float32)


def averaged():
    tensors = [
        rank_tensor(dist.get_rank(), shape, torch.float32, seed)
        for seed, shape in enumerate([(5, 3), (7,)])
    ]
    stage4_ring.average_on_ring(tensors)
    return tensors


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_average_on_ring_is_the_mean(world_size):
    ranks = launch(averaged, world_size=world_size)
    for seed, shape in enumerate([(5, 3), (7,)]):
        assert_all_equal_mean(
            [tensors[seed] for tensors in ranks], world_size, shape, torch.float32, seed
        )


def train_stage():
    model = tiny_model(seed=dist.get_rank())
    stage4_ring.train(model, tiny_batches(dist.get_rank(), dist.get_world_size()), 0.1)
    return weights(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_one_device_and_all_replicas_are_equal(world_size):
    ranks = launch(train_stage, world_size=world_size)
    assert all(torch.equal(result, ranks[0]) for result in ranks)
    assert (ranks[0] - trained_alone()).abs().max() < 1e-14


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    from ddp_course import rank_device

    def on_device():
        return stage4_ring.ring_all_reduce(
            rank_tensor(dist.get_rank(), (1001,)).to(rank_device())
        ).cpu()

    assert_all_equal_sum(launch(on_device, world_size=2, device="cuda"), 2, (1001,), torch.float32)
