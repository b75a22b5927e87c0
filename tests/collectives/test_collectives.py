"""Every all-reduce, those of the benchmarks too: right everywhere, with the bytes it promises."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from oracles import ALL_REDUCES, assert_all_equal_sum, rank_tensor

from benchmarks import pipelined_ring
from ddp_course import launch, wire
from ddp_course.collectives import hierarchical_all_reduce

ALGORITHMS = {**ALL_REDUCES, "pipelined ring": pipelined_ring.pipelined_ring_all_reduce}
SHAPES = [(), (1,), (3,), (7, 5), (1000,), (0,)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64]


def all_sums():
    """Sum parameters of all shapes and dtypes by every algorithm.

    The pipelined ring has small segments, hence many.
    """
    pipelined_ring.SEGMENT = 256
    return {
        (name, shape, dtype): algorithm(
            rank_tensor(dist.get_rank(), shape, dtype).requires_grad_(dtype.is_floating_point)
        )
        for name, algorithm in ALGORITHMS.items()
        for shape in SHAPES
        for dtype in DTYPES
    }


@functools.cache
def summed(world_size):
    return launch(all_sums, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_sums(name, world_size):
    for shape in SHAPES:
        for dtype in DTYPES:
            results = [rank[name, shape, dtype] for rank in summed(world_size)]
            assert_all_equal_sum(results, world_size, shape, dtype)
            assert all(torch.equal(result, results[0]) for result in results), (
                "the ranks' bits differ"
            )


ELEMENTS = 960  # Every number of ranks here divides this length.


def hosts_of(size):
    """Sum over hosts of `size` ranks; return the sum, and the bytes that left this rank's host."""
    result = hierarchical_all_reduce(rank_tensor(dist.get_rank(), (101,)), ranks_per_host=size)
    own_host = dist.get_rank() // size
    crossing = []

    def note(event):
        if event.kind == "send" and event.peer // size != own_host:
            crossing.append(event.bytes)

    with wire.observing(note):
        hierarchical_all_reduce(torch.ones(ELEMENTS), ranks_per_host=size)
    return result, sum(crossing)


@pytest.mark.parametrize("world_size, size", [(4, 2), (6, 2), (6, 3), (8, 4), (4, 1), (4, 4)])
def test_hierarchical_crosses_hosts_little(world_size, size):
    ranks = launch(hosts_of, size, world_size=world_size)
    assert_all_equal_sum([result for result, _ in ranks], world_size, (101,), torch.float32)
    hosts = world_size // size
    nbytes = ELEMENTS * 4
    for _, crossed in ranks:
        assert crossed == 2 * (hosts - 1) * nbytes // size // hosts


def test_hierarchical_refuses_hosts_that_do_not_fit():
    def run():
        with pytest.raises(ValueError, match="hosts of 2"):
            hierarchical_all_reduce(torch.ones(3), ranks_per_host=2)

    launch(run, world_size=3)


def traffic(elements=9600):
    found = {}
    for name, algorithm in ALGORITHMS.items():
        with wire.counting() as counted:
            algorithm(torch.ones(elements))
        found[name] = (counted.bytes_sent, counted.messages_sent)
    return found


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_bytes_and_messages(world_size):
    ranks = launch(traffic, world_size=world_size)
    size = 9600 * 4
    rounds = int(math.log2(world_size))
    share = 2 * (world_size - 1) * size // world_size
    for rank, found in enumerate(ranks):
        assert found["halving_doubling"] == (share, 2 * rounds)
        assert found["pipelined ring"] == found["hierarchical"] == (share, 2 * (world_size - 1))
        assert found["tree"][1] <= 2 * rounds, rank
        assert found["tree"][0] == size * found["tree"][1], rank
    assert sum(found["tree"][1] for found in ranks) == 2 * (world_size - 1)


def strided_and_grouped():
    """A tensor with gaps keeps its strides; a subgroup sums over its members only."""
    sums = {}
    pair = dist.new_group([1, 3])
    for name, algorithm in ALGORITHMS.items():
        base = torch.zeros(6, 8)
        columns = base[:, ::2]
        columns.copy_(rank_tensor(dist.get_rank(), (6, 4)))
        assert algorithm(columns) is columns
        assert (base[:, 1::2] == 0).all()
        sums[name] = columns.clone()
        single = torch.ones(10).as_strided([1], [3], 2)
        assert algorithm(single).item() == 4.0
        mine = rank_tensor(dist.get_rank(), (50,))
        sums[name + " pair"] = algorithm(mine, group=pair) if dist.get_rank() in (1, 3) else mine
    return sums


def test_strides_and_groups():
    ranks = launch(strided_and_grouped, world_size=4)
    for name in ALGORITHMS:
        assert_all_equal_sum([rank[name] for rank in ranks], 4, (6, 4), torch.float32)
        expected = rank_tensor(1, (50,)) + rank_tensor(3, (50,))
        for member in (1, 3):
            assert torch.equal(ranks[member][name + " pair"], expected)
        assert torch.equal(ranks[0][name + " pair"], rank_tensor(0, (50,)))
