# %% [markdown]
# # Exercise 6: everything a real one needs
#
# Four small parts without which a DDP works only in lessons.
# %% imports
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ddp_course.grading import check
from ddp_course.running import wire


# %% [markdown]
# ## 6.1 Accumulate without sending
#
# `parallel` is our DDP. With several micro-batches only the last one needs to synchronise: inside
# `with parallel.no_sync():` nothing is sent, and gradients add up. Make one update for all micro-batches of all
# ranks. All micro-batches have the same size.
#
# <details><summary>Hint</summary>
#
# Whether this backward pass will synchronise is decided in the *forward* pass: it must be inside `no_sync` too.
#
# </details>
# %% answer-6-1
def accumulate(parallel, optimizer, micro_batches):
    """Make one update on a list of (inputs, targets) of equal size, with one synchronisation."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    with parallel.no_sync():
        for inputs, targets in micro_batches[:-1]:
            (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
    inputs, targets = micro_batches[-1]
    (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
    optimizer.step()
    ### END SOLUTION


# %% check-6-1 points=3
check("6.1", accumulate)


# %% [markdown]
# ## 6.2 Which parameters were used
#
# If a parameter was used on no rank, its gradient should stay as it was. `used` says for each parameter whether this
# rank used it (a tensor of bools). `all_reduce(tensor)` sums over the ranks, in place. Which ones were used anywhere?
#
# <details><summary>Hint</summary>
#
# Count the ranks: a tensor of int64 adds up.
#
# </details>
# %% answer-6-2
def used_anywhere(used, all_reduce):
    """Return a new tensor of bools: whether each parameter was used on at least one rank. `used` stays as it is."""
    ### BEGIN SOLUTION
    counts = used.long()
    all_reduce(counts)
    return counts > 0
    ### END SOLUTION


# %% check-6-2 points=2
check("6.2", used_anywhere)


# %% [markdown]
# ## 6.3 Share the buffers
#
# A batch norm keeps running means in buffers, which no gradient keeps equal. Give every rank the buffers of rank
# `src`, whatever their dtype, in place, with `wire.send` and `wire.recv`. `wire.others(src, group)` lists the others.
# %% answer-6-3
def share_buffers(module, src=0, group=None):
    """Give every rank the buffers of rank `src`, in place; parameters stay as they are."""
    ### BEGIN SOLUTION
    for buffer in module.buffers():
        if dist.get_rank(group) == src:
            for peer in wire.others(src, group):
                wire.send(buffer, peer, group)
        else:
            wire.recv(buffer, src, group)
    ### END SOLUTION


# %% check-6-3 points=2
check("6.3", share_buffers)


# %% [markdown]
# ## 6.4 A hook that compresses
#
# Send half the bytes: average a float32 gradient over the ranks, but let it travel in float16. Some gradients are as
# large as 60,000, and float16 ends at 65,504. Return the average in float32.
#
# <details><summary>Hint</summary>
#
# The order matters: what overflows first, a sum of K numbers or a sum of K numbers divided by K?
#
# </details>
# %% answer-6-4
def compressed_average(flat, all_reduce, world_size):
    """Return the mean of `flat` over the ranks in float32; `all_reduce(tensor)` sums a float16 tensor in place."""
    ### BEGIN SOLUTION
    compressed = (flat / world_size).half()
    all_reduce(compressed)
    return compressed.float()
    ### END SOLUTION


# %% check-6-4 points=2
check("6.4", compressed_average)
