# %% [markdown]
# # Exercise 8: pipelines
#
# The model is split into stages, the batch into micro-batches. A schedule says what each stage does, step by step:
# `("F", 2)` is the forward pass of micro-batch 2, `("B", 2)` its backward pass. Stages and micro-batches count from 0.
# %% imports
from ddp_course.grading import check


# %% [markdown]
# ## 8.1 GPipe
#
# All forward passes, then all backward passes, each in the order of the micro-batches.
# %% answer-8-1
def gpipe(stage, stages, micro_batches):
    """Return the list of steps of one stage: pairs of "F" or "B" and the number of the micro-batch."""
    ### BEGIN SOLUTION
    return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]
    ### END SOLUTION


# %% check-8-1 points=1
check("8.1", gpipe)


# %% [markdown]
# ## 8.2 One forward, one backward
#
# A stage need not wait for all forward passes. The last stage goes backward right after its first forward pass, the
# one before it after its second, and so on. From then on forward and backward take turns, and at the end come the
# backward passes that are left. Mind pipelines with fewer micro-batches than stages.
#
# <details><summary>Hint</summary>
#
# Warm-up: `min(stages - 1 - stage, micro_batches)` forward passes. Then pairs: one forward, one backward.
#
# </details>
# %% answer-8-2
def one_forward_one_backward(stage, stages, micro_batches):
    """Return the list of steps of one stage in the 1F1B schedule."""
    ### BEGIN SOLUTION
    warm_up = min(stages - 1 - stage, micro_batches)
    steps = [("F", m) for m in range(warm_up)]
    for m in range(warm_up, micro_batches):
        steps += [("F", m), ("B", m - warm_up)]
    return steps + [("B", m) for m in range(micro_batches - warm_up, micro_batches)]
    ### END SOLUTION


# %% check-8-2 points=3
check("8.2", one_forward_one_backward)


# %% [markdown]
# ## 8.3 The bubble
#
# Every stage takes the same time for a micro-batch. While the pipeline fills and drains, stages are idle. What share
# of the time in all is that?
# %% answer-8-3
def bubble(stages, micro_batches):
    """Return the share of the time, from 0 to 1, in which a stage is idle."""
    ### BEGIN SOLUTION
    return (stages - 1) / (micro_batches + stages - 1)
    ### END SOLUTION


# %% check-8-3 points=1
check("8.3", bubble)


# %% [markdown]
# ## 8.4 What it must remember
#
# Both schedules have the same bubble. The difference is memory: between its forward and its backward pass, a
# micro-batch's activations are held. How many micro-batches at most, for any schedule?
# %% answer-8-4
def most_held(steps):
    """Return the largest number of micro-batches whose activations are held at the same time."""
    ### BEGIN SOLUTION
    held = most = 0
    for kind, _ in steps:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most
    ### END SOLUTION


# %% check-8-4 points=1
check("8.4", most_held)
