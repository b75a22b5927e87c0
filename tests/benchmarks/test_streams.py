"""Plain streams between neighbours: in order, closed after errors."""

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracles import assert_all_equal_sum, rank_tensor

from benchmarks import streams
from benchmarks.pipelined_ring import pipelined_ring_all_reduce
from ddp_course import launch
from manyranks.errors import RankError

NBYTES = 400
SIZES = (5, 0, 300_000)


class Outcome(NamedTuple):
    """What a rank saw: the kind of its error and the error's words, and the sum that came later."""

    kind: str
    words: str
    sum_later: torch.Tensor


def passed_on():
    """Send three tensors to the right, of different sizes; return those that came."""
    sent = [rank_tensor(dist.get_rank(), (size,)) for size in SIZES]
    coming = [torch.empty_like(tensor) for tensor in sent]
    received = []
    with streams.to_neighbours(None, NBYTES) as links:
        for tensor in sent:
            links.send(tensor)
        for tensor in links.received(coming):
            received.append(tensor.clone())
    return received


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_arrive_in_order(world_size):
    for rank, received in enumerate(launch(passed_on, world_size=world_size)):
        for tensor, size in zip(received, SIZES, strict=True):
            assert torch.equal(tensor, rank_tensor((rank - 1) % world_size, (size,)))


def one_fails():
    """Fail on rank 1 in the middle of a ring, and go on afterwards; return the Outcome."""
    tensor = rank_tensor(dist.get_rank(), (1000,))
    pipelined_ring_all_reduce(tensor)
    error = None
    try:
        with streams.to_neighbours(None, NBYTES) as links:
            if dist.get_rank() == 1:
                raise ZeroDivisionError
            for _ in links.received([tensor]):
                pass
    except (ZeroDivisionError, ConnectionError) as raised:
        error = raised
    sum_later = pipelined_ring_all_reduce(rank_tensor(dist.get_rank(), (1000,)))
    return Outcome(type(error).__name__, str(error), sum_later)


def test_a_failure_reaches_the_neighbours_and_leaves_nothing_behind():
    ranks = launch(one_fails, world_size=3)
    left, failed, right = ranks
    assert left.kind == "ConnectionError"
    assert "rank 2" in left.words
    assert failed.kind == "ZeroDivisionError"
    assert right.kind == "ConnectionError"
    assert "rank 1" in right.words
    assert_all_equal_sum([rank.sum_later for rank in ranks], 3, (1000,), torch.float32)


def one_is_silent():
    """Send nothing on rank 1 until rank 0 has lost patience; return rank 0's error in words."""
    group = impatient_group()
    with streams.to_neighbours(group, NBYTES) as links:
        said = ""
        if dist.get_rank() == 0:
            with pytest.raises(TimeoutError) as raised:
                list(links.received([torch.empty(1)]))
            said = str(raised.value)
        dist.barrier()
    return said


def impatient_group():
    """Return a group of both ranks whose calls may take two seconds."""
    dist.barrier()  # The group waits for no rank that still imports.
    return dist.new_group([0, 1], timeout=timedelta(seconds=2))


def test_patience_ends_with_the_timeout_of_the_group():
    said, _ = launch(one_is_silent, world_size=2)
    assert "rank 1 has sent nothing for 2 s" in said


def one_does_not_connect():
    """Never connect from rank 1 to rank 0; return the name of rank 0's error."""
    group = impatient_group()
    if dist.get_rank() == 1:
        streams.socket.create_connection = wait_for_the_other
        with suppress(Exception), streams.to_neighbours(group, NBYTES):
            pass
        return ""
    with pytest.raises(TimeoutError) as raised, streams.to_neighbours(group, NBYTES):
        pass
    dist.barrier()
    return type(raised.value).__name__


def wait_for_the_other(*arguments, **named):
    dist.barrier()


def test_nobody_waits_longer_for_a_connection_than_the_group():
    assert launch(one_does_not_connect, world_size=2) == ["TimeoutError", ""]


def unequal(size_of_rank_1, conjugated):
    """Return what a ring without the flight recorder makes of these tensors.

    They have two sizes unless rank 1 has 8 numbers, too.
    """
    size = size_of_rank_1 if dist.get_rank() == 1 else 8
    tensor = torch.ones(size, dtype=torch.complex64) * 1j
    if conjugated:
        tensor = tensor.conj()
    ring = pipelined_ring_all_reduce.__wrapped__
    return ring(tensor).tolist()


def test_tensors_of_two_sizes_are_refused_and_conjugated_ones_summed():
    with pytest.raises(
        RankError, match=r"ValueError: rank [01] sums a tensor of (64|32) bytes, this rank one of"
    ):
        launch(unequal, 4, False, world_size=2)
    assert launch(unequal, 8, True, world_size=2) == [[-2j] * 8] * 2


def test_a_stranger_is_not_let_in():
    """Whoever finds the door open must know what only the neighbour was told."""
    password = bytes(range(streams.PASSWORD_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as door:
        stranger = socket.create_connection(door.getsockname())
        neighbour = socket.create_connection(door.getsockname())
        stranger.sendall(password[::-1])
        neighbour.sendall(password)
        with streams.let_in(door, password, time.monotonic() + 30) as stream:
            assert stream.getpeername() == neighbour.getsockname()
        assert stranger.recv(1) == b"", "its connection is closed"
        stranger.close()
        neighbour.close()
