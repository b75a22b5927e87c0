"""Programs with one fault each, which `every_order` must find, and right ones beside them."""

import sys
import threading
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist


def neighbours():
    """Return this rank, and its neighbours right and left in the ring of all ranks."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


@contextmanager
def exchange(sent, received):
    """Post a message to the right and a receive from the left; wait for both after the block."""
    _, right, left = neighbours()
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    yield arriving
    arriving.wait()
    leaving.wait()


def started(function, tensor):
    """Return a new thread that calls `function(tensor)`."""
    thread = threading.Thread(target=function, args=(tensor,))
    thread.start()
    return thread


def both_send_first():
    _, right, left = neighbours()
    tensor = torch.ones(4)
    dist.send(tensor, right)
    dist.recv(tensor, left)


def waits_in_an_order_that_needs_buffers():
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    leaving = dist.isend(sent, right)
    leaving.wait()
    dist.irecv(received, left).wait()


def reads_before_the_wait():
    received = torch.zeros(4)
    with exchange(torch.ones(4), received):
        return received.sum()


def reads_a_slice_of_a_view():
    received = torch.zeros(6)
    with exchange(torch.ones(6), received):
        return received.view(2, 3)[1, 1:].clone()


def reads_by_numpy():
    received = torch.zeros(6)
    with exchange(torch.ones(6), received):
        return received.numpy().sum()


def overwrites_what_it_sends():
    sent = torch.ones(4)
    with exchange(sent, torch.zeros(4)):
        sent[1:3] = 7


def overwrites_a_slice_of_a_view_of_what_it_sends():
    sent = torch.ones(6)
    with exchange(sent, torch.zeros(6)):
        sent.view(2, 3)[1, 1:].fill_(7)


def an_optimizer_overwrites_what_is_sent(**kind):
    """Step with a `kind` of SGD: one parameter after the other, all at once, or in one kernel."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **kind)
    model(torch.ones(2, 3)).sum().backward()
    with exchange(model.weight.detach(), torch.zeros(3, 3)):
        optimizer.step()


def another_thread_reads():
    received = torch.zeros(4)
    with exchange(torch.ones(4), received):
        thread = started(add_up, received)
    thread.join()


def another_thread_overwrites():
    sent = torch.ones(4)
    with exchange(sent, torch.zeros(4)):
        thread = started(double, sent)
    thread.join()


def double(tensor):
    tensor.mul_(2)


def another_thread_sleeps_and_reads():
    """Read in a thread that has slept, as a sleep is no wait, however long it is."""
    received = torch.zeros(4)
    with exchange(torch.ones(4), received):
        thread = started(sleep_and_add_up, received)
    thread.join()


def sleep_and_add_up(tensor):
    time.sleep(1)
    return tensor.sum()


def a_barrier_instead_of_a_wait():
    """Read after a barrier to which all have come, while messages may still be on their way."""
    received = torch.zeros(4)
    with exchange(torch.ones(4), received):
        dist.barrier()
        return received.sum()


def add_up(tensor):
    return tensor.sum()


def nobody_waits():
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    dist.isend(sent, right)
    dist.recv(received, left)


def all_reduce_is_read_before_the_wait():
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.mul_(2)
    work.wait()


def reads_the_neighbouring_chunk():
    """Add to the chunk that is just being received, in a step of a ring."""
    rank = dist.get_rank()
    chunks = torch.arange(6.0).tensor_split(dist.get_world_size())
    with exchange(chunks[rank], chunks[rank - 1]):
        chunks[rank - 1].add_(1)


def collectives_in_another_order():
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor)
    else:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)


def two_threads_use_one_group():
    tensors = [
        torch.full((2,), float(dist.get_rank() + 1)),
        torch.full((2,), 10.0 * dist.get_rank()),
    ]
    threads = [threading.Thread(target=dist.all_reduce, args=(tensor,)) for tensor in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tensors


def first_come_first_served():
    """Receive on rank 0 from whoever is first, with a result that depends on it."""
    rank = dist.get_rank()
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        return 0.0
    total = 0.0
    for _ in range(dist.get_world_size() - 1):
        received = torch.zeros(1)
        dist.recv(received)
        total = 10 * total + received.item()
    return total


# The next programs are right.


def sum_of_whoever_comes():
    """Receive on rank 0 from whoever is first, and add up, which does not depend on it."""
    rank = dist.get_rank()
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        return 0.0
    received = [torch.zeros(1) for _ in range(dist.get_world_size() - 1)]
    for tensor in received:
        dist.recv(tensor)
    return sum(tensor.item() for tensor in received)


def asks_until_it_has_arrived():
    sent = torch.ones(4)
    received = torch.zeros(4)
    with exchange(sent, received) as arriving:
        while not arriving.is_completed():
            sent.sum()
    return received


def reads_what_it_sends_and_other_columns():
    """Read what is sent, and rows beside a message, which are not on their way."""
    sent = torch.ones(4)
    rows = torch.zeros(4, 4)
    with exchange(sent, rows[1]):
        return sent.sum() + rows[2:].sum() + rows[0].sum() + torch.zeros_like(rows).sum()


def another_thread_gets_it_after_the_wait():
    received = torch.zeros(4)
    with exchange(torch.ones(4), received) as arriving:
        arriving.wait()
        thread = started(torch.Tensor.sum, received)
    thread.join()


# The last functions say what a launch pays.


def modules_and_hooks():
    """Return the modules of `orders` in this rank, and the names of functions that are hooked."""
    loaded = sorted(name for name in sys.modules if name.startswith("manyranks.orders"))
    functions = [threading.Thread.start, torch.Tensor.numpy, type(dist.group.WORLD).send]
    hooked = [each.__name__ for each in functions if hasattr(each, "__wrapped__")]
    return loaded, hooked


def pays_for_its_hooks():
    loaded, hooked = modules_and_hooks()
    assert "manyranks.orders.in_flight" in loaded
    assert hooked == ["start", "numpy", "send"]
