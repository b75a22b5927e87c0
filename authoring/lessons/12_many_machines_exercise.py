# %% [markdown]
# # Exercise 12: many machines
#
# You write an all-reduce in two levels, predict what a cluster that you do not have would take, read
# a log, and explain a figure.
#
# Stuck? `hint("12.1")` gives the first of three hints for a task, and
# `hint("12.1", 2)` the next.
# %% imports
import torch

from ddp_course.stage4_ring import allgather, reduce_scatter, ring_all_reduce
from ddp_exercises import check, hint


# %% [markdown]
# ## 12.1 Two levels
#
# *15 minutes · medium*
#
# There are four ranks on two hosts. `inside` is the group of this rank and its neighbour on the same host; `between` is
# the group of this rank and the one in the same place on the other host. Add up `tensor` (one row) over all four ranks, in
# place, so that only p bytes cross the cable in each direction.
#
# You have `reduce_scatter(chunks, group)`, after which rank r of the *group* holds the sum of chunk r+1 (mod K),
# `allgather(chunks, group)`, which starts from there, and `ring_all_reduce(tensor, group)`.
# %% answer-12-1
def two_levels(tensor, inside, between):
    """Sum `tensor` over all ranks of all hosts, in place.

    A cable may carry 2 (H-1)/H p bytes in each direction.
    """
    ### BEGIN SOLUTION
    world_size = inside.size()
    rank = inside.rank()
    chunks = list(tensor.tensor_split(world_size))
    reduce_scatter(chunks, inside)
    ring_all_reduce(chunks[(rank + 1) % world_size], between)
    allgather(chunks, inside)
    ### END SOLUTION


# %% check-12-1 points=3
check("12.1", two_levels)


# %% [markdown]
# ## 12.2 Predict, measure, explain
#
# *15 minutes · medium*
#
# `measure(ranks, nbytes)` runs a ring all-reduce on 2 to 4 ranks, as many as you have, and returns its seconds. How long
# would `size` ranks take for `nbytes`? And what would the larger part of that time be: `"latency"`, the 2 (K-1) messages
# one after the other, or `"bandwidth"`, the bytes? Measure at most eight times. Nothing else disturbs these measurements.
#
# Write your guess down before you run it: 4 KiB on 256 ranks, latency or bandwidth?
# %% answer-12-2
def foresee(measure, size, nbytes):
    """Return (seconds, "latency" or "bandwidth") of a ring over `size` ranks.

    The measurements are on at most 4 ranks.
    """
    ### BEGIN SOLUTION
    # Each takes two latencies, and a message of its size.
    short = measure(2, 2**10)
    long = measure(2, 2**20)
    seconds_per_byte = (long - short) / (2**20 - 2**10)
    latency = (short - 2**10 * seconds_per_byte) / 2
    latencies = 2 * (size - 1) * latency
    carried = 2 * (size - 1) / size * nbytes * seconds_per_byte
    cause = "latency" if latencies > carried else "bandwidth"
    return latencies + carried, cause
    ### END SOLUTION


# %% check-12-2 points=3
check("12.2", foresee)


# %% [markdown]
# ## 12.3 Two nodes gave me no speed-up: why?
#
# *15 minutes · medium*
#
# Each line of the log is one rank's mean over a minute of training, first on one node, then on two. Times are in seconds
# per step: waiting for samples, computing, and waiting for the other ranks' gradients beyond what backward hides.
#
#     nodes=1 node=0 rank=0 world_size=2 batch_per_rank=32 data=0.0042 compute=0.2010 wait=0.0151
#     nodes=1 node=0 rank=1 world_size=2 batch_per_rank=32 data=0.0042 compute=0.2002 wait=0.0160
#     nodes=2 node=1 rank=2 world_size=4 batch_per_rank=32 data=0.0042 compute=0.2015 wait=0.2391
#     nodes=2 node=0 rank=0 world_size=4 batch_per_rank=32 data=0.0042 compute=0.2008 wait=0.2388
#     nodes=2 node=1 rank=3 world_size=4 batch_per_rank=32 data=0.0042 compute=0.2021 wait=0.2402
#     nodes=2 node=0 rank=1 world_size=4 batch_per_rank=32 data=0.0042 compute=0.2003 wait=0.2397
#
# Each log has one cause:
#
# | | |
# |---|---|
# | `"apart"` | two jobs, each of which thinks that it is alone |
# | `"cable"` | the link between the nodes is too slow for the gradients |
# | `"input"` | samples come too late |
# | `"small batch"` | the batch was kept, so each rank has half the samples but takes nearly as long |
# | `"straggler"` | one rank is slow, and all others wait for it |
#
# This log's cause is the cable. Write what you looked at as a function. Other logs are of smaller and of larger models, whose
# steps take a tenth of these times, or ten times as long.
# %% answer-12-3
def why_no_faster(log):
    """Return the cause, one of the five words, from the lines of a log of one node and of two."""
    ### BEGIN SOLUTION
    nodes = {1: [], 2: []}
    for line in log:
        words = [word.split("=") for word in line.split()]
        values = {key: float(value) for key, value in words}
        nodes[values["nodes"]].append(values)
    alone = nodes[1][0]
    both = nodes[2]

    def typical(name):
        return sorted(values[name] for values in both)[len(both) // 2]

    if both[0]["world_size"] < len(both):
        return "apart"
    if both[0]["batch_per_rank"] < alone["batch_per_rank"]:
        return "small batch"
    if typical("data") > 3 * alone["data"]:
        return "input"
    if max(values["compute"] for values in both) > 1.5 * typical("compute"):
        return "straggler"
    return "cable"
    ### END SOLUTION


# %% check-12-3 points=3
check("12.3", why_no_faster)


# %% [markdown]
# ## 12.4 Explain: four hosts and their cards
#
# *10 minutes · medium*
#
# Look at the last figure of lesson 12: the bus bandwidth over the size of the message, on one host and on four.
# Explain it in two to five sentences of your own, so that somebody who has not read the lesson understands it. Name numbers of the figure.
# Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why four hosts come near the upper line with large messages, and what one flat ring would reach |
# | B | why a message of 1 MiB does not even fill one card |
# | C | why one host alone lies higher, and above the upper line at the end |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-12-4
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "From 1,024 MiB on, four hosts come close to 400 GB/s, because eight rings leave each of them at the same time, "
        "every one by a card of its own; a single ring would end at 50. At 1 MiB they reach 5 GB/s: the bytes are sent "
        "in no time, but the many messages that follow one another pay a latency each. One host is not limited by any "
        "card, as its GPUs talk over NVLink."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-12-4 points=2
check("12.4", explain_figure)
