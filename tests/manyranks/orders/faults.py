"""Programs with one fault each, and their right relatives: what `every_order` must find and must
not blame.
"""

import sys
import threading
import time

import torch
import torch.distributed as dist


def neighbours():
    """This rank, and its neighbours in the ring of all ranks."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


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
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    total = received.sum()
    arriving.wait()
    leaving.wait()
    return total


def reads_a_slice_of_a_view():
    _, right, left = neighbours()
    sent = torch.ones(6)
    received = torch.zeros(6)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    total = received.view(2, 3)[1, 1:].clone()
    arriving.wait()
    leaving.wait()
    return total


def reads_by_numpy():
    _, right, left = neighbours()
    sent = torch.ones(6)
    received = torch.zeros(6)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    total = received.numpy().sum()
    arriving.wait()
    leaving.wait()
    return total


def overwrites_what_it_sends():
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    sent[1:3] = 7
    arriving.wait()
    leaving.wait()


def overwrites_a_slice_of_a_view_of_what_it_sends():
    _, right, left = neighbours()
    sent = torch.ones(6)
    received = torch.zeros(6)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    sent.view(2, 3)[1, 1:].fill_(7)
    arriving.wait()
    leaving.wait()


def an_optimizer_overwrites_what_is_sent(**kind):
    """What `kind` of SGD: one parameter after the other, all at once, or all in one kernel."""
    _, right, left = neighbours()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **kind)
    model(torch.ones(2, 3)).sum().backward()
    received = torch.zeros(3, 3)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(model.weight.detach(), right)
    optimizer.step()
    arriving.wait()
    leaving.wait()


def another_thread_reads():
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    thread = threading.Thread(target=add_up, args=(received,))
    thread.start()
    arriving.wait()
    leaving.wait()
    thread.join()


def another_thread_overwrites():
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    thread = threading.Thread(target=double, args=(sent,))
    thread.start()
    arriving.wait()
    leaving.wait()
    thread.join()


def double(tensor):
    tensor.mul_(2)


def another_thread_sleeps_and_reads():
    """A sleep is no wait, however long it is."""
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    thread = threading.Thread(target=sleep_and_add_up, args=(received,))
    thread.start()
    arriving.wait()
    leaving.wait()
    thread.join()


def sleep_and_add_up(tensor):
    time.sleep(1)
    return tensor.sum()


def a_barrier_instead_of_a_wait():
    """All have come to the barrier, but their messages may still be on their way."""
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    dist.barrier()
    total = received.sum()
    arriving.wait()
    leaving.wait()
    return total


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
    """A ring's step that adds to the chunk which is just being received."""
    rank, right, left = neighbours()
    chunks = torch.arange(6.0).tensor_split(dist.get_world_size())
    arriving = dist.irecv(chunks[rank - 1], left)
    leaving = dist.isend(chunks[rank], right)
    chunks[rank - 1].add_(1)
    arriving.wait()
    leaving.wait()


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
    """Rank 0 receives from whoever is first, and the result depends on it."""
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


# What is right.


def sum_of_whoever_comes():
    """Rank 0 receives from whoever is first, and adds up."""
    rank = dist.get_rank()
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
        return 0.0
    received = [torch.zeros(1) for _ in range(dist.get_world_size() - 1)]
    for tensor in received:
        dist.recv(tensor)
    return sum(tensor.item() for tensor in received)


def asks_until_it_has_arrived():
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    while not arriving.is_completed():
        sent.sum()
    arriving.wait()
    leaving.wait()
    return received


def reads_what_it_sends_and_other_columns():
    """What is sent may be read; the columns beside a message are not on their way."""
    _, right, left = neighbours()
    sent = torch.ones(4)
    rows = torch.zeros(4, 4)
    arriving = dist.irecv(rows[1], left)
    leaving = dist.isend(sent, right)
    total = sent.sum() + rows[2:].sum() + rows[0].sum() + torch.zeros_like(rows).sum()
    arriving.wait()
    leaving.wait()
    return total


def another_thread_gets_it_after_the_wait():
    _, right, left = neighbours()
    sent = torch.ones(4)
    received = torch.zeros(4)
    arriving = dist.irecv(received, left)
    leaving = dist.isend(sent, right)
    arriving.wait()
    thread = threading.Thread(target=received.sum)
    thread.start()
    leaving.wait()
    thread.join()


# What a launch pays.


def modules_and_hooks():
    """The modules of `orders` in this rank, and those of their hooks that it would meet."""
    loaded = sorted(name for name in sys.modules if name.startswith("manyranks.orders"))
    functions = [threading.Thread.start, torch.Tensor.numpy, type(dist.group.WORLD).send]
    hooked = [each.__name__ for each in functions if hasattr(each, "__wrapped__")]
    return loaded, hooked


def pays_for_its_hooks():
    loaded, hooked = modules_and_hooks()
    assert "manyranks.orders.in_flight" in loaded
    assert hooked == ["start", "numpy", "send"]
