# %% [markdown]
# # Exercise 4: build the ring
#
# Small steps to the all-reduce of lesson 4, a choice of ranks, a ring to mend, and your ring under torch. Run the check below each answer as often
# as you like: it starts four ranks, draws new numbers every time, counts what you send, and says what is wrong.
#
# Stuck? `hint("4.1")` gives the first of three hints for a task, and
# `hint("4.1", 2)` the next.
# %% imports
import torch
import torch.distributed as dist

from ddp_course import ring_backend, wire
from ddp_exercises import check, hint


# %% [markdown]
# ## 4.1 Which chunk to send
#
# *5 minutes · easy*
#
# Each rank cuts its gradient into K chunks, numbered from 0. In step 0 of reduce-scatter, rank r sends chunk r to
# its right neighbour. In every later step it sends on the chunk that has just come in from the left.
# %% answer-4-1
def chunk_to_send(rank, step, world_size):
    """Return the index of the chunk that `rank` sends in `step` (0 to world_size - 2) of reduce-scatter."""
    ### BEGIN SOLUTION
    return (rank - step) % world_size
    ### END SOLUTION


# %% check-4-1 points=1
check("4.1", chunk_to_send)


# %% [markdown]
# ## 4.2 Reduce-scatter
#
# *15 minutes · medium*
#
# `chunks` is a list of K tensors, which may differ in length by one. In each of K-1 steps, send one of them to the right
# neighbour. From the left neighbour comes a chunk of another number: add it, in place, to your own chunk of that number.
# What a message is received into is as long as the message. Rank r ends up with the sum of chunk r+1 (modulo K).
# `wire.neighbours(group)` gives you `rank, world_size, left, right`, and
# `wire.exchange(outgoing, right, incoming, left, group)` sends and receives at the same time.
# %% answer-4-2
def reduce_scatter(chunks, group=None):
    """Sum chunk by chunk around the ring, in place: afterwards rank r has the whole sum of chunk r+1."""
    rank, world_size, left, right = wire.neighbours(group)
    ### BEGIN SOLUTION
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        wire.exchange(outgoing, right, incoming, left, group)
        target += incoming
    ### END SOLUTION


# %% check-4-2 points=3
check("4.2", reduce_scatter)


# %% [markdown]
# ## 4.3 Allgather
#
# *10 minutes · medium*
#
# Now rank r has finished chunk r+1. Send finished chunks around, K-1 times, until everyone has all of them.
# %% answer-4-3
def allgather(chunks, group=None):
    """Give every rank all finished chunks, in place; rank r starts with chunk r+1 finished."""
    rank, world_size, left, right = wire.neighbours(group)
    ### BEGIN SOLUTION
    for step in range(world_size - 1):
        outgoing = chunks[(rank + 1 - step) % world_size]
        incoming = chunks[(rank - step) % world_size]
        wire.exchange(outgoing, right, incoming, left, group)
    ### END SOLUTION


# %% check-4-3 points=2
check("4.3", allgather)


# %% [markdown]
# ## 4.4 All-reduce of any shape
#
# *10 minutes · medium*
#
# Put both together for a tensor of any shape: also for a matrix, for a transposed one (which is not contiguous),
# for 23 elements on 4 ranks, and for 2 elements on 4 ranks.
# %% answer-4-4
def ring_all_reduce(tensor, group=None):
    """Sum `tensor` over the ranks of `group`, in place, with 2 (K-1) messages of about 1/K of it."""
    ### BEGIN SOLUTION
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(dist.get_world_size(group))
    reduce_scatter(chunks, group)
    allgather(chunks, group)
    tensor.copy_(flat.view(tensor.shape))
    ### END SOLUTION


# %% check-4-4 points=3
check("4.4", ring_all_reduce)


# %% [markdown]
# ## 4.5 Who joins the ring?
#
# *15 minutes · medium*
#
# The ranks' cables differ: `cables[r]` is what rank r can send, in bits per second. One rank needs `computing` seconds for
# the whole batch; those who join share that equally, and then average `parameters` float32 numbers on a ring, in which
# every message waits `latency` seconds before its first bit arrives. If K ranks join, a chunk is exactly a K-th of the
# parameters. Guess first: nine ranks have fast cables, the tenth has one of half the speed. Does it join?
# %% answer-4-5
def step_seconds(cables, parameters, latency, computing):
    """Return the seconds of the shortest step that some or all of the ranks can make together."""
    ### BEGIN SOLUTION
    fastest = sorted(cables, reverse=True)
    times = []
    for ranks in range(1, len(cables) + 1):
        message = latency + 4 * parameters / ranks * 8 / fastest[ranks - 1]
        times.append(computing / ranks + 2 * (ranks - 1) * message)
    return min(times)
    ### END SOLUTION


# %% check-4-5 points=2
check("4.5", step_seconds)


# %% [markdown]
# ## 4.6 Find the bug: a ring
#
# *10 minutes · medium*
#
# Its author has tested this ring on 2, 3 and 4 ranks with 12 and 24 numbers, different on every rank, and all sums were right.
# In training the replicas drift apart. One line is wrong.
# %% faulty-4-6
def faulty_ring(tensor, group=None):  # line 1
    rank, size, left, right = wire.neighbours(group)  # line 2
    chunks = [  # line 3
        tensor[i * (len(tensor) // size) : (i + 1) * (len(tensor) // size)] for i in range(size)
    ]
    incoming = torch.empty_like(max(chunks, key=len))  # line 4
    for step in range(size - 1):  # line 5
        own = chunks[(rank - step - 1) % size]  # line 6
        wire.exchange(chunks[(rank - step) % size], right, incoming[: len(own)], left, group)  # line 7
        own += incoming[: len(own)]  # line 8
    for step in range(size - 1):  # line 9
        own = chunks[(rank - step) % size]  # line 10
        wire.exchange(chunks[(rank + 1 - step) % size], right, own, left, group)  # line 11


# %% [markdown]
# Which test would have found it? Name the line and mend it. `tensor` is in one row.
# %% answer-4-6
def the_bug():
    """Return the number of the faulty line."""
    ### BEGIN SOLUTION
    return 3
    ### END SOLUTION


def mended_ring(tensor, group=None):
    """Sum `tensor` over the ranks of `group` in place, as the ring above should."""
    ### BEGIN SOLUTION
    rank, size, left, right = wire.neighbours(group)
    chunks = list(tensor.tensor_split(size))
    incoming = torch.empty_like(max(chunks, key=len))
    for step in range(size - 1):
        own = chunks[(rank - step - 1) % size]
        wire.exchange(chunks[(rank - step) % size], right, incoming[: len(own)], left, group)
        own += incoming[: len(own)]
    for step in range(size - 1):
        own = chunks[(rank - step) % size]
        wire.exchange(chunks[(rank + 1 - step) % size], right, own, left, group)
    ### END SOLUTION


# %% check-4-6 points=2
check("4.6", the_bug, mended_ring)


# %% [markdown]
# ## 4.7 Your ring under torch's own training
#
# *10 minutes · medium*
#
# Train `model` with torch's own `torch.nn.parallel.DistributedDataParallel`, and let `all_reduce` carry every gradient; your ring
# of 4.4 is such a function. `ring_backend.register("mine", all_reduce=all_reduce)` gives torch a backend of that name,
# `dist.new_group(backend=...)` makes a group of it, and torch's class takes a `process_group`. The loss is the cross entropy, and the
# optimizer is SGD with the learning rate `lr`.
# %% answer-4-7
def train_over(all_reduce, model, batches, lr):
    """Train `model` in place on (inputs, targets), with torch's own class and the sums of `all_reduce`."""
    ### BEGIN SOLUTION
    ring_backend.register("mine", all_reduce=all_reduce)
    group = dist.new_group(backend="mine")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
    ### END SOLUTION


# %% check-4-7 points=2
check("4.7", train_over)
