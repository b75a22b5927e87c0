# %% [markdown]
# # Exercise 3: the server
#
# K ranks, one of which collects, averages and sends back. Each check starts four ranks, and tries your answer with
# 1 to 4 of them, with different servers. All messages go through `wire`, where they are counted.
#
# Stuck? `hint("3.1")` gives the first of three hints for a task, and
# `hint("3.1", 2)` the next.
# %% imports
import torch
import torch.distributed as dist

from ddp_course import wire
from ddp_exercises import check, hint


# %% [markdown]
# ## 3.1 Collect
#
# *10 minutes · medium*
#
# The server's first loop. Everyone else sends its tensor to rank `server`; the server adds what it receives to its
# own. `wire.send(tensor, rank, group)` and `wire.recv(tensor, rank, group)` wait until they are done.
# `wire.others(server, group)` lists all ranks but the server.
# %% answer-3-1
def collect(tensor, server=0, group=None):
    """Add the tensors of all ranks up in the server's `tensor`, in place; the others keep theirs."""
    ### BEGIN SOLUTION
    if dist.get_rank(group) != server:
        wire.send(tensor, server, group)
        return
    incoming = torch.empty_like(tensor)
    for peer in wire.others(server, group):
        wire.recv(incoming, peer, group)
        tensor += incoming
    ### END SOLUTION


# %% check-3-1 points=2
check("3.1", collect)


# %% [markdown]
# ## 3.2 Send back
#
# *5 minutes · easy*
#
# The second loop: the server's tensor replaces everybody's.
# %% answer-3-2
def send_back(tensor, server=0, group=None):
    """Give every rank the server's tensor, in place."""
    ### BEGIN SOLUTION
    if dist.get_rank(group) != server:
        wire.recv(tensor, server, group)
        return
    for peer in wire.others(server, group):
        wire.send(tensor, peer, group)
    ### END SOLUTION


# %% check-3-2 points=2
check("3.2", send_back)


# %% [markdown]
# ## 3.3 Average
#
# *5 minutes · easy*
#
# Both loops, and the division that makes a mean of the sum. K is `dist.get_world_size(group)`.
# %% answer-3-3
def average(tensor, server=0, group=None):
    """Replace `tensor` by its mean over all ranks, in place."""
    ### BEGIN SOLUTION
    tensor /= dist.get_world_size(group)
    collect(tensor, server, group)
    send_back(tensor, server, group)
    ### END SOLUTION


# %% check-3-3 points=2
check("3.3", average)


# %% [markdown]
# ## 3.4 How many ranks pay?
#
# *15 minutes · medium*
#
# One rank needs `computing` seconds for the whole batch. K ranks share that equally, but then they average `parameters`
# float32 numbers through a server: every tensor passes through the server's link, one after the other, in and then out.
# Latency does not count. Guess first: if eight ranks are best on some link, how many are best on one four times as fast?
# %% answer-3-4
def ranks_that_pay(computing, parameters, bits_per_second, most):
    """Return the number of ranks, from 1 to `most`, with which a step takes the fewest seconds."""

    ### BEGIN SOLUTION
    def step(ranks):
        return computing / ranks + 2 * (ranks - 1) * parameters * 4 * 8 / bits_per_second

    return min(range(1, most + 1), key=step)
    ### END SOLUTION


# %% check-3-4 points=2
check("3.4", ranks_that_pay)
