"""torch's own training over a ring of the learner's: right weights, and only the ring's bytes."""

import pytest
import torch
import torch.distributed as dist
from oracles import rank_tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ddp_course import Link, launch, ring_backend, stage4_ring, wire
from manyranks import RankError

STEPS = 3


def own_ring(tensor, group=None):
    """Sum in a ring of steps that cut the tensor themselves, as a learner writes it."""
    chunks = tensor.view(-1).tensor_split(dist.get_world_size(group))
    stage4_ring.reduce_scatter(chunks, group)
    stage4_ring.allgather(chunks, group)


def one_step_short(tensor, group=None):
    """Sum in a ring whose allgather ends before the last chunk has come."""
    rank, size, left, right = wire.neighbours(group)
    chunks = tensor.view(-1).tensor_split(size)
    stage4_ring.reduce_scatter(chunks, group)
    for step in range(size - 2):
        target = chunks[(rank - step) % size]
        wire.exchange(chunks[(rank + 1 - step) % size], right, target, left, group)


def wrong_chunk(tensor, group=None):
    """Sum in a ring that hands out chunk r where chunk r+1 is finished."""
    rank, size, left, right = wire.neighbours(group)
    chunks = tensor.view(-1).tensor_split(size)
    stage4_ring.reduce_scatter(chunks, group)
    for step in range(size - 1):
        target = chunks[(rank - step - 1) % size]
        wire.exchange(chunks[(rank - step) % size], right, target, left, group)


def group_of(ring):
    if ring is None:
        return dist.new_group(backend="gloo")
    ring_backend.register("ring", all_reduce=ring)
    return dist.new_group(backend="ring")


def net(seed):
    """Return a net of 168 parameters, which 2, 3 and 4 ranks cut evenly, in one bucket or many."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 12, bias=False))


def trained(model, wrapped):
    """Return the weights after some steps, and what this rank sent meanwhile."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wire.counting() as traffic:
        for step in range(STEPS):
            optimizer.zero_grad()
            wrapped(rank_tensor(dist.get_rank(), (6, 7), seed=step)).square().mean().backward()
            optimizer.step()
    return traffic


def data_parallel(ring):
    model = net(seed=dist.get_rank())
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=group_of(ring), bucket_cap_mb=0.0005
    )
    traffic = trained(model, wrapped)
    return nn.utils.parameters_to_vector(model.parameters()).detach(), traffic.bytes_sent


def sharded(ring):
    mesh = DeviceMesh.from_group(group_of(ring), "cpu")
    model = net(seed=0)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    traffic = trained(model, model)
    weights = [parameter.full_tensor().detach().view(-1) for parameter in model.parameters()]
    return torch.cat(weights), traffic.bytes_sent


def sizes_of(weights):
    return len(weights) * weights.element_size()


@pytest.mark.parametrize(("world_size", "link"), [(2, None), (3, Link("1Gbit", "10us")), (4, None)])
def test_torchs_ddp_trains_over_the_ring_as_over_gloo(world_size, link):
    ranks = launch(data_parallel, own_ring, world_size=world_size, link=link)
    (expected, nothing), *_ = launch(data_parallel, None, world_size=world_size)
    assert nothing == 0
    for weights, _ in ranks:
        assert torch.equal(weights, ranks[0][0])
        assert (weights - expected).abs().max() <= 1e-6 * expected.abs().max()
    gradients = STEPS * sizes_of(expected)
    sent = sum(sent for _, sent in ranks)
    assert sent == 2 * (world_size - 1) * gradients


def test_a_ring_one_step_short_shows_as_replicas_that_differ():
    ranks = launch(data_parallel, one_step_short, world_size=3)
    assert not all(torch.equal(weights, ranks[0][0]) for weights, _ in ranks)


def test_a_ring_that_hands_out_the_wrong_chunk_shows_as_wrong_weights():
    (weights, _), *_ = launch(data_parallel, wrong_chunk, world_size=3)
    (expected, _), *_ = launch(data_parallel, None, world_size=3)
    assert (weights - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("world_size", "link"), [(2, None), (3, Link("1Gbit", "10us"))])
def test_fully_shard_trains_over_the_rings_two_halves(world_size, link):
    ranks = launch(sharded, own_ring, world_size=world_size, link=link)
    (expected, _), *_ = launch(sharded, None, world_size=world_size)
    for weights, _ in ranks:
        assert (weights - expected).abs().max() <= 1e-6 * expected.abs().max()
    first = 7 * 12 + 12  # The first layer is freed after the forward pass, and gathered again.
    gathered_and_summed = 2 * sizes_of(expected) + 4 * first
    sent = sum(sent for _, sent in ranks)
    assert sent == STEPS * (world_size - 1) * gathered_and_summed


def asked_for_a_maximum():
    group = group_of(own_ring)
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX, group=group)


def test_what_a_ring_of_sums_cannot_do_is_refused():
    with pytest.raises(RankError, match=r"adds up, not"):
        launch(asked_for_a_maximum, world_size=2)


def in_two_groups():
    ring_backend.register("ring", all_reduce=own_ring)
    groups = [dist.new_group([0, 2], backend="ring"), dist.new_group([1, 3], backend="ring")]
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=groups[dist.get_rank() % 2])
    return tensor.item()


def test_groups_of_some_ranks_add_up_among_themselves():
    assert launch(in_two_groups, world_size=4) == [4, 6, 4, 6]
