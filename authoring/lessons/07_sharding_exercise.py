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

from ddp_course.grading import check, hint
from ddp_course.running import wire


# %% [markdown]
# ## 7.1 Who owns what
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
# The gradients are averaged already. `optimizer` holds only the parameters that this rank owns. After your function
# all ranks have the new values of all parameters.
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
# ## 7.3 What it saves
#
# Training with Adam in float32: 4 bytes for a parameter, 4 for its gradient, 8 for the two moments. Level 0 shards
# nothing, level 1 the moments, level 2 the gradients too, level 3 the parameters too. Everything that is sharded is
# split evenly over the ranks.
# %% answer-7-3
def bytes_per_rank(parameters, world_size, level):
    """Return the bytes that each rank holds for a model of `parameters` numbers."""
    ### BEGIN SOLUTION
    weights, gradients, state = 4 * parameters, 4 * parameters, 8 * parameters
    if level >= 1:
        state /= world_size
    if level >= 2:
        gradients /= world_size
    if level >= 3:
        weights /= world_size
    return weights + gradients + state
    ### END SOLUTION


# %% check-7-3 points=2
check("7.3", bytes_per_rank)
