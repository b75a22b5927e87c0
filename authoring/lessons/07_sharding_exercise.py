# %% [markdown]
# # Exercise 7: shard it
#
# Every rank of a DDP keeps the same optimizer state. It need not: each rank can keep the state of a part of the
# parameters, step those, and send the new values to the others (ZeRO stage 1).
#
# Stuck? `hint("7.1")` gives the first of three hints for a task, and
# `hint("7.1", 2)` the next. Reports count them.
# %% imports
import torch
import torch.distributed as dist

from ddp_course.checking import check, hint
from ddp_course.running import wire


# %% [markdown]
# ## 7.1 Who owns what
#
# *5 minutes · easy*
#
# Go through the parameters in order. Each goes to the rank that has the fewest numbers so far, and of ranks with
# equally few to the lowest.
# %% answer-7-1
def assign_owners(sizes, world_size):
    """Return the owning rank of each parameter, for `sizes` in numbers (not bytes)."""
    ### BEGIN SOLUTION
    held, owners = [0] * world_size, []
    for size in sizes:
        owner = held.index(min(held))
        owners.append(owner)
        held[owner] += size
    return owners
    ### END SOLUTION


# %% check-7-1 points=2
check("7.1", assign_owners)


# %% [markdown]
# ## 7.2 A sharded step
#
# *10 minutes · medium*
#
# The gradients are averaged already, by an all-reduce. `optimizer` holds only the parameters that this rank owns. After
# your function all ranks have the new values of all parameters.
#
# This is the simplest way, not the cheapest: the all-reduce sends 2(K-1)/K p, and the owners send (K-1)/K p more, as an
# average over the ranks. The lesson's ZeRO-1 sends 2(K-1)/K p in all: reduce-scatter, step, allgather.
# %% answer-7-2
def sharded_step(parameters, owners, optimizer, group=None):
    """Step this rank's own parameters, and get the others' from their owners, in place."""
    ### BEGIN SOLUTION
    optimizer.step()
    for parameter, owner in zip(parameters, owners):
        if dist.get_rank(group) == owner:
            for peer in wire.others(owner, group):
                wire.send(parameter.detach(), peer, group)
        else:
            wire.recv(parameter.detach(), owner, group)
    ### END SOLUTION


# %% check-7-2 points=3
check("7.2", sharded_step)


# %% [markdown]
# ## 7.3 How many GPUs at least?
#
# *10 minutes · medium*
#
# Mixed precision with Adam, as ZeRO counts it: 2 bytes for a parameter in bfloat16, 2 for its gradient, and 12 of
# optimizer state: the parameter in float32 and its two moments. Level 0 shards nothing, level 1 the optimizer state, level
# 2 the gradients too, level 3 the bfloat16 parameters too. What is sharded is split evenly. On how many ranks does a model
# fit? Guess first: with level 1, is there a number of ranks for every model?
# %% answer-7-3
def fewest_ranks(parameters, memory, level):
    """Return the smallest number of ranks on which each needs at most `memory` bytes; 0 if no number is enough."""
    ### BEGIN SOLUTION
    whole = (16, 4, 2, 0)[level] * parameters
    shared = 16 * parameters - whole
    if whole + shared <= memory:
        return 1
    if whole >= memory:
        return 0
    return -(-shared // (memory - whole))
    ### END SOLUTION


# %% check-7-3 points=2
check("7.3", fewest_ranks)


# %% [markdown]
# ## 7.4 Prefetch with a score to beat
#
# *45 minutes · hard*
#
# A model of equal blocks, three or more of them, fully sharded. Computing goes forward through blocks 0, 1, 2 … and then
# backward through all of them in reverse; it takes 1 tick per block forward, 2 ticks backward. The network does one thing at
# a time, in the order that you give, each as early as it can:
#
# - `("gather", i)` takes 2 ticks. It waits until there is room for the block: no more than `cap_mb` may be taken.
# - `("reduce", i)` averages the gradients of block i, in 2 ticks. It waits for its backward pass.
#
# Room for a block is taken from the beginning of its gather on. A block that you gather twice is freed after its forward
# pass, as in the lesson. A block that you gather once stays until its gradients, which take the same room, are reduced. There
# is always room for two blocks. Give the network its order.
#
# | 6 blocks of 100 MB, 350 MB of room | ticks | |
# |---|---|---|
# | each block gathered just before it computes, and nothing meanwhile | 54 | |
# | forward: the next block meanwhile; backward: each gather after the reduce of the block before | 48 | **beat this** |
# | nobody waits without need, and no block is gathered without need | 33 | nobody can do better |
# %% answer-7-4
def network_order(blocks, block_mb, cap_mb):
    """Return a list of pairs: "gather" or "reduce", and the number of a block."""
    ### BEGIN SOLUTION
    fit = cap_mb // block_mb
    order = [("gather", block) for block in range(blocks)]
    ahead = max(blocks - fit, 0)  # the blocks behind are whole when backward begins, and stay
    for block in reversed(range(blocks)):
        order.append(("reduce", block))
        if ahead:
            ahead -= 1
            order.append(("gather", ahead))
    return order
    ### END SOLUTION


# %% check-7-4 points=4
check("7.4", network_order)
