"""The wire moves tensors between neighbours, and counts and reports what it moves."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from oracles import rank_tensor

from ddp_course import launch, wire


def shift(numel):
    """Pass a rank-distinct tensor once around: everybody sends right and receives from the left."""
    rank, _, left, right = wire.neighbours()
    incoming = torch.empty(numel)
    with wire.counting() as traffic:
        wire.exchange(rank_tensor(rank, (numel,)), right, incoming, left)
    return incoming, traffic


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("numel", [0, 1, 100_000])
def test_exchange_moves_the_tensor_and_counts_it(world_size, numel):
    for rank, (incoming, traffic) in enumerate(launch(shift, numel, world_size=world_size)):
        assert torch.equal(incoming, rank_tensor((rank - 1) % world_size, (numel,)))
        assert traffic.bytes_sent == traffic.bytes_received == 4 * numel
        assert traffic.messages_sent == traffic.messages_received == (numel > 0)


def count_in_threads():
    tensor = torch.zeros(10, dtype=torch.float64)
    work = [lambda: wire.send(tensor, 1), lambda: wire.recv(tensor, 0)][dist.get_rank()]
    with wire.counting() as traffic, ThreadPoolExecutor() as pool:
        pool.submit(work).result()
    work()  # This message is not counted: it comes after the block.
    return traffic


def test_all_threads_are_counted_and_only_inside_the_block():
    sender, receiver = launch(count_in_threads, world_size=2)
    assert (sender.bytes_sent, sender.bytes_received, sender.messages_sent) == (80, 0, 1)
    assert (receiver.bytes_sent, receiver.bytes_received, receiver.messages_received) == (0, 80, 1)


def observed():
    events = []
    tensor = torch.zeros(25)
    with wire.observing(events.append), wire.span("outer"):
        if dist.get_rank() == 0:
            wire.send(tensor, 1)
        else:
            wire.recv(tensor, 0)
    return events


def test_events_tell_who_what_and_when():
    for rank, (message, outer) in enumerate(launch(observed, world_size=2)):
        assert (message.kind, message.peer, message.bytes) == (
            ("send", "recv")[rank],
            1 - rank,
            100,
        )
        assert (outer.kind, outer.name, outer.bytes) == ("span", "outer", 0)
        assert outer.start <= message.start <= message.end <= outer.end


def in_a_group():
    group = dist.new_group([3, 0, 2])
    if dist.get_rank() == 1:
        return None
    return wire.neighbours(group), wire.others(0, group), wire.global_rank(1, group)


def test_neighbours_in_a_group_are_global_ranks():
    first, outside, second, third = launch(in_a_group, world_size=4)
    assert outside is None
    assert first == ((0, 3, 3, 2), [2, 3], 2)
    assert second[0] == (1, 3, 0, 3)
    assert third[0] == (2, 3, 2, 0)
