# %% [markdown]
# # Exercise 10: training well
#
# This exercise is about the data, the learning rate, and shards that are not equal.
#
# Stuck? `hint("10.1")` gives the first of three hints for a task, and
# `hint("10.1", 2)` the next.
# %% imports
import math

import torch

from ddp_exercises import check, hint


# %% [markdown]
# ## 10.1 The share of an epoch
#
# *10 minutes · medium*
#
# Each epoch has an order of its own, the same on all ranks: `torch.randperm(dataset_size, generator=…)`, drawn by a generator
# of its own, seeded with `seed + epoch`, so that torch's own generator, which dropout draws from, stays as it is. If K does not divide the samples, the first ones of the order come
# once more at its end. Rank r takes positions r, r+K, r+2K, and so on.
# %% answer-10-1
def epoch_indices(dataset_size, rank, world_size, epoch, seed=0):
    """Return the list of sample indices of `rank` in `epoch`; equally many on all ranks."""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(dataset_size, generator=generator).tolist()
    order += order[: -dataset_size % world_size]
    return order[rank::world_size]
    ### END SOLUTION


# %% check-10-1 points=2
check("10.1", epoch_indices)


# %% [markdown]
# ## 10.2 Warm up, then cool down
#
# *5 minutes · easy*
#
# Large batches want a large learning rate, but not at once. In the first `warmup` steps it rises in equal parts to
# `peak`, which it reaches in step `warmup - 1`. From step `warmup` it falls along half a cosine, from `peak` to 0 in
# step `total`, and stays there. Steps count from 0.
# %% answer-10-2
def learning_rate(step, warmup, total, peak):
    """Return the learning rate of a step."""
    ### BEGIN SOLUTION
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / (total - warmup))
    return peak * (1 + math.cos(math.pi * done)) / 2
    ### END SOLUTION


# %% check-10-2 points=2
check("10.2", learning_rate)


# %% [markdown]
# ## 10.3 The mean over uneven shards
#
# *10 minutes · medium*
#
# Rank r evaluated `count` samples and found the mean loss `mean`, a tensor of one float64. A rank without samples has
# the mean `nan`. What is the mean over all samples of all ranks? `all_reduce(tensor)` sums over the ranks, in place.
# %% answer-10-3
def global_mean(mean, count, all_reduce):
    """Return the mean over all samples of all ranks, the same everywhere; `mean` stays as it is."""
    ### BEGIN SOLUTION
    total = mean.item() * count if count else 0.0
    both = torch.tensor([total, count], dtype=torch.float64)
    all_reduce(both)
    return both[0] / both[1]
    ### END SOLUTION


# %% check-10-3 points=2
check("10.3", global_mean)


# %% [markdown]
# ## 10.4 Find the bug: a sampler that resumes
#
# *10 minutes · medium*
#
# Training stopped in the middle of an epoch, after `done` samples of all ranks together, and goes on, perhaps on another
# number of ranks. The function below gives each rank its part of what is left. With the same number of ranks as before it
# is right. With another one, some samples are seen twice. One line is wrong.
# %% faulty-10-4
def faulty_rest(size, rank, world_size, epoch, seed, done):  # line 1
    generator = torch.Generator().manual_seed(seed + epoch)  # line 2
    order = torch.randperm(size, generator=generator).tolist()  # line 3
    left = order[done - done % world_size :]  # line 4
    left += left[: -len(left) % world_size]  # line 5
    return left[rank::world_size]  # line 6


# %% [markdown]
# Name the line and mend it.
# %% answer-10-4
def the_bug():
    """Return the number of the faulty line."""
    ### BEGIN SOLUTION
    return 4
    ### END SOLUTION


def rest_of_epoch(size, rank, world_size, epoch, seed, done):
    """Return this rank's share of the samples left in an epoch of which `done` have been seen."""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(size, generator=generator).tolist()
    left = order[done:]
    left += left[: -len(left) % world_size]
    return left[rank::world_size]
    ### END SOLUTION


# %% check-10-4 points=2
check("10.4", the_bug, rest_of_epoch)


# %% [markdown]
# ## 10.5 An open measurement
#
# *25 minutes · medium*
#
# With how large a learning rate does a model still learn the digits?
# `stage1_single.train(digits.model(), digits.batches(96, 40), lr=…)` with `digits = problems.make("digits")` trains for 40
# steps and returns their losses. It has learned if the mean of the last ten is below 1; guessing costs 2.3. Guess first, then
# measure as you like, in cells of your own.
#
# Write down the largest rate that you found, and in a sentence what you saw beyond it. There is no formula for this one.
# Your number is tried: with half of it the model must learn, with twice as much it must not. The sentence is for
# your teacher, and for you in a year.
# %% answer-10-5
def largest_rate():
    """Return (the largest learning rate with which it learns, what you saw beyond it).

    What you saw is a sentence of six words or more.
    """
    ### BEGIN SOLUTION
    return 0.3, "From 0.4 on the loss stays near that of guessing, and from 1 on it is sometimes nan."
    ### END SOLUTION


# %% check-10-5 points=2
check("10.5", largest_rate)


# %% [markdown]
# ## 10.6 Three tokens and three hundred
#
# *15 minutes · medium*
#
# A language model's loss is a mean over *tokens*. Here one rank has a short micro-batch of 3 tokens, another one of 300.
# If each rank takes the mean of its own micro-batches and DDP averages the ranks, each of the 3 tokens weighs a hundred times
# as much as each of the 300. Nothing warns: it trains, a little worse. (Several large training libraries did this for years.)
#
# `sums` has, for each of this rank's micro-batches, the *sum* of its tokens' losses, with a graph behind it; `counts` says
# how many tokens each has. You return a list of what `backward()` is called on, a tensor of one number for each micro-batch
# (a count may be 0). The gradients of all of them add up on a rank; then DDP *averages* them over `world_size` ranks. The
# result must be the gradient of the mean over all tokens of all micro-batches of all ranks. `all_reduce(tensor)` sums over
# the ranks, in place; call it once.
# %% answer-10-6
def losses_for_backward(sums, counts, all_reduce, world_size):
    """Return a loss for each micro-batch, so that DDP's average is the gradient of the whole mean.

    The whole mean is the one over all tokens.
    """
    ### BEGIN SOLUTION
    tokens = torch.tensor(float(sum(counts)))
    all_reduce(tokens)
    return [loss * world_size / tokens for loss in sums]
    ### END SOLUTION


# %% check-10-6 points=3
check("10.6", losses_for_backward)


# %% [markdown]
# ## 10.7 Explain: how many devices a training can use
#
# *10 minutes · medium*
#
# Look at the last figure of the section "How long until a loss is reached?" in lesson 10: the time to a loss of 0.9, over the
# number of devices.
# Explain it in two to five sentences of your own, so that somebody who has not read the lesson understands it. Name numbers of the figure.
# Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why two devices need nearly half the time of one, with numbers of the figure or of the table above it |
# | B | why the points leave the line from 4 devices on, and lie level at 8 and 16 |
# | C | why 32 devices gain nothing over 8 (their point lies higher, or is missing), although each computes as many samples in a step |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-10-7
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "With 8 samples in a step the gradient is mostly noise. Two devices average more of it away, need 48 updates "
        "where one needs 96, and are done in 8 s, not 16. Beyond the critical size, some 50 samples, hardly any noise "
        "is left to remove: 8 and 16 devices both need 18 updates. At 32 the linear rule has raised the rate to 0.32, "
        "which is too much for this model: its loss jumps about, and it gets to 0.9 late or not at all."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-10-7 points=2
check("10.7", explain_figure)
