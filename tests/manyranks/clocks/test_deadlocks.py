"""Ten kinds of deadlock: each is named at once, with every rank that waits and its line; so is
who holds all up.
"""

import inspect
import os
import pickle
import queue
import re
import threading
import time
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

from manyranks import Link, launch
from manyranks.clocks import stalls
from manyranks.clocks.clock import Clock
from manyranks.clocks.table import BLOCKED, FREE, Table
from manyranks.errors import Awaited, DeadlockError, LaunchError, LaunchTimeout, RankError, Wait

LARGE = 2**20


def both_receive_first():
    tensor = torch.zeros(4)
    peer = 1 - dist.get_rank()
    dist.recv(tensor, peer)
    dist.send(tensor, peer)


def both_send_large_messages_first():
    tensor = torch.zeros(LARGE)
    peer = 1 - dist.get_rank()
    dist.send(tensor, peer)
    dist.recv(tensor, peer)


def one_has_returned():
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(4), 1)


def all_reduce_against_receive():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(4))
    else:
        dist.recv(torch.zeros(4), 0)


def one_collective_more():
    for _ in range(2 + dist.get_rank()):
        dist.all_reduce(torch.zeros(4))


def the_wrong_peer():
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.zeros(4), 1)
    elif rank == 2:
        dist.recv(torch.zeros(4), 1)


def a_future_that_nobody_sets():
    if dist.get_rank() == 0:
        Future().result()
    else:
        dist.barrier()


def a_lock_that_a_waiter_holds():
    lock = threading.Lock()
    items = queue.Queue()

    def take():
        with lock:
            items.put(None)

    thread = threading.Thread(target=take)
    with lock:
        thread.start()
        items.get()


def a_schedule_that_cannot_run():
    """Play a pipeline of two stages whose first one waits for a gradient before it sends the
    activations.
    """
    activations = torch.zeros(4)
    gradients = torch.zeros(4)
    if dist.get_rank() == 0:
        dist.recv(gradients, 1)
        dist.send(activations, 1)
    else:
        dist.recv(activations, 0)
        dist.send(gradients, 0)


def one_skips_the_barrier():
    if dist.get_rank() != 1:
        dist.barrier()


def unlike_roots():
    dist.broadcast(torch.zeros(4), dist.get_rank())


KINDS = {  # {program: (number of ranks, what its message says)}
    both_receive_first: (2, "rank 0 waits to receive from rank 1 .*rank 1 waits to receive from"),
    both_send_large_messages_first: (2, "rank 0 waits to send to rank 1 .*rank 1 waits to send to"),
    one_has_returned: (2, "rank 0 waits to receive from rank 1 .*rank 1 has returned"),
    all_reduce_against_receive: (
        2,
        "rank 0 waits .*all_reduce.*rank 1 waits to receive from rank 0",
    ),
    one_collective_more: (2, "rank 1 waits .*all_reduce.*rank 0 has returned"),
    the_wrong_peer: (3, "rank 0 waits to send to rank 1 .*rank 2 waits to receive from rank 1"),
    a_future_that_nobody_sets: (2, "rank 0 waits for another thread .*rank 1 waits .*barrier"),
    unlike_roots: (
        2,
        "rank 0 waits .*broadcast from rank 0 .*rank 1 waits .*broadcast from rank 1",
    ),
    a_lock_that_a_waiter_holds: (2, "rank 0 waits for another thread .*rank 1 waits for another"),
    a_schedule_that_cannot_run: (
        2,
        "rank 0 waits to receive from rank 1 .*rank 1 waits to receive",
    ),
    one_skips_the_barrier: (
        3,
        "rank 0 waits .*barrier.*rank 2 waits .*barrier.*rank 1 has returned",
    ),
}


@pytest.mark.parametrize("program", KINDS, ids=lambda program: program.__name__)
def test_a_deadlock_is_named_with_all_ranks_and_lines(program):
    world_size, said = KINDS[program]
    with pytest.raises(DeadlockError) as caught:
        launch(program, world_size=world_size, link=Link("100Mbit"))
    assert re.search(said, caught.value.message), caught.value.message
    waiting = re.findall(r"rank \d+ waits .*? since [\d.]+ s, (.*?)(?:;|$)", caught.value.message)
    assert all(line.startswith("test_deadlocks.py line ") for line in waiting), waiting


def test_a_rank_that_was_told_of_the_deadlock_before_is_named_by_those_told_later():
    table = Table([0, 1])
    late = Clock(table, table.own_threads()[0], 0)
    table.places[late.slot].state = BLOCKED
    table.places[table.threads_per_rank].state = FREE  # Rank 1 has raised the error, and ended.
    earlier = Wait(1, Awaited("thread"), 0.5, "cell", 3, "lock.acquire()")
    table.waits[1] = pickle.dumps(earlier)
    error = stalls.deadlock(late, Awaited("thread"))
    assert "rank 0 waits for another thread" in str(error)
    assert str(error).endswith(
        "; rank 1 waits for another thread since 0.500000 s, cell line 3: lock.acquire()"
    )
    assert error.waits[1] == earlier


def one_raises_and_the_other_waits():
    if dist.get_rank() == 1:
        raise KeyError("mine")
    dist.recv(torch.zeros(4), 1)


def test_a_rank_that_raised_is_the_culprit_and_not_those_that_wait_for_it():
    with pytest.raises(RankError) as caught:
        launch(one_raises_and_the_other_waits, world_size=2, link=Link("100Mbit"))
    assert (caught.value.rank, caught.value.type_name) == (1, "KeyError")


def a_child_fails_first():
    child = os.fork()
    if child == 0:
        raise KeyError("of a child")
    os.waitpid(child, 0)
    both_receive_first()


def test_a_child_that_failed_hides_no_deadlock():
    with pytest.raises(DeadlockError, match="rank 0 waits to receive from rank 1"):
        launch(a_child_fails_first, world_size=2, link=Link("100Mbit"))


def a_ring_with_a_gap():
    """Wait on rank 0 for rank 1, which waits for all in a sum; rank 2 has nothing to do."""
    if dist.get_rank() == 0:
        time.sleep(2)
        dist.recv(torch.zeros(4), 1)
    elif dist.get_rank() == 1:
        dist.all_reduce(torch.zeros(4))


def test_a_deadlock_of_a_launch_has_its_waits_as_data():
    with pytest.raises(DeadlockError) as caught:
        launch(a_ring_with_a_gap, world_size=3, link=Link("100Mbit"))
    error = pickle.loads(pickle.dumps(caught.value))
    _, first = inspect.getsourcelines(a_ring_with_a_gap)
    here = "test_deadlocks.py"
    receive = Awaited("receive", (1,))
    total = Awaited("collective", (0, 1, 2), "all_reduce")
    assert error.waits == [
        Wait(0, receive, 2.0, here, first + 4, "dist.recv(torch.zeros(4), 1)"),
        Wait(1, total, 0.0, here, first + 6, "dist.all_reduce(torch.zeros(4))"),
    ]
    assert error.returned == [2]
    assert error.message.startswith(
        "deadlock: rank 0 waits to receive from rank 1 since 2.000000 s"
    )
    assert str(error).startswith(error.message)
    assert str(error).count(error.message) == 1, "what a deadlock is was said twice"
    # The traceback of the rank that failed first leads to its line.
    lines = ["dist.recv(torch.zeros(4), 1)\n", "dist.all_reduce(torch.zeros(4))\n"]
    assert lines[error.failures[0].rank] in str(error)


def sleeps_for_ever():
    threading.Event().wait()


@pytest.mark.parametrize(
    "program, settings, kind",
    [
        (one_raises_and_the_other_waits, {"link": Link("100Mbit")}, RankError),
        (both_receive_first, {"link": Link("100Mbit")}, DeadlockError),
        (sleeps_for_ever, {"timeout": 1}, LaunchTimeout),
    ],
)
def test_every_launch_that_failed_is_a_launch_error(program, settings, kind):
    with pytest.raises(LaunchError) as caught:
        launch(program, world_size=2, **settings)
    assert type(caught.value) is kind


def one_spins():
    """Spin on rank 0 until it was told."""
    if dist.get_rank() == 0:
        told = []
        report = stalls.report
        stalls.report = lambda *what: told.append(report(*what))
        while not told:
            pass
    dist.barrier()


def test_a_spinner_is_named_with_its_line(capfd):
    launch(one_spins, world_size=2, link=Link("100Mbit"))
    printed = "".join(capfd.readouterr())
    assert re.search("rank 0 holds up all others, test_deadlocks.py line", printed), printed


def slow_without_a_deadlock():
    """Use messages that take long, timers and late posts, which are no deadlock."""
    rank = dist.get_rank()
    time.sleep(100 * (rank + 1))
    items = queue.Queue()
    with pytest.raises(queue.Empty):
        items.get(timeout=50)
    tensor = torch.full((LARGE,), float(rank))
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return tensor[0].item()


def test_what_only_takes_long_is_no_deadlock():
    assert launch(slow_without_a_deadlock, world_size=2, link=Link("1Mbit")) == [0.0, 0.0]
