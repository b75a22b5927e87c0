# %% [markdown]
# # Exercise 5: communicate while you compute
#
# Three parts of a bucketed DDP: which parameters travel together, how to notice that a gradient is ready, and where
# to wait.
# %% imports
import torch

from ddp_course.grading import check


# %% [markdown]
# ## 5.1 Buckets
#
# Backward finishes the last parameters first, so buckets are filled from the last parameter to the first. A bucket
# is closed as soon as it holds `cap_bytes` or more. Parameters of different dtypes never share a bucket. Return the
# buckets in the order in which they were closed, and then those that were never filled.
#
# <details><summary>Hint</summary>
#
# Keep one open bucket a dtype, in a dict. `p.numel() * p.element_size()` is the size of a parameter in bytes.
#
# </details>
# %% answer-5-1
def assign_buckets(parameters, cap_bytes):
    """Return lists of parameters, last parameter first, each list of one dtype and closed on reaching `cap_bytes`."""
    ### BEGIN SOLUTION
    filling, closed = {}, []
    for p in reversed(parameters):
        bucket = filling.setdefault(p.dtype, [])
        bucket.append(p)
        if sum(q.numel() * q.element_size() for q in bucket) >= cap_bytes:
            closed.append(filling.pop(p.dtype))
    return closed + list(filling.values())
    ### END SOLUTION


# %% check-5-1 points=3
check("5.1", assign_buckets)


# %% [markdown]
# ## 5.2 The ready hook
#
# See to it that in every backward pass `ready(parameter)` is called once for each trainable parameter, at the moment
# when its gradient is complete in `parameter.grad`. One layer of the model is used twice, and one is frozen.
#
# <details><summary>Hint</summary>
#
# `Tensor.register_hook` runs *before* the gradient is in `.grad`. There is another one,
# `Tensor.register_post_accumulate_grad_hook`, which hands you the parameter.
#
# </details>
# %% answer-5-2
def tell_when_ready(parameters, ready):
    """Call `ready(parameter)` in each backward pass as soon as the gradient of that parameter is complete."""
    ### BEGIN SOLUTION
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(ready)
    ### END SOLUTION


# %% check-5-2 points=2
check("5.2", tell_when_ready)


# %% [markdown]
# ## 5.3 Waiting in the right place
#
# `flats` are full buckets. `executor` has one thread. `all_reduce(flat)` sums a bucket over all ranks, in place, and
# takes its time. Hand all buckets to the thread in index order, and come back when all of them hold their mean. If
# the communication fails, your function must fail too.
#
# <details><summary>Hint</summary>
#
# `future = executor.submit(function, argument)` returns at once. `future.result()` waits, and raises what the
# function raised. Two loops: one that submits, one that waits.
#
# </details>
# %% answer-5-3
def average_in_background(flats, all_reduce, executor, world_size):
    """Replace each tensor of `flats` by its mean over the ranks, in place, reducing in the executor's thread."""
    ### BEGIN SOLUTION
    futures = []
    for flat in flats:
        flat /= world_size
        futures.append(executor.submit(all_reduce, flat))
    for future in futures:
        future.result()
    ### END SOLUTION


# %% check-5-3 points=3
check("5.3", average_in_background)
