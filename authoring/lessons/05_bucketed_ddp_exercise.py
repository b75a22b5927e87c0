# %% [markdown]
# # Exercise 5: communicate while you compute
#
# The parts of a bucketed DDP: which parameters travel together, how to notice that a gradient is ready, where to wait, in
# which order to send. Then all of it at work, and timelines to read.
#
# Stuck? `hint("5.1")` gives the first of three hints for a task, and
# `hint("5.1", 2)` the next.
# %% imports
import math

import torch

from ddp_exercises import check, hint


# %% [markdown]
# ## 5.1 Buckets
#
# *15 minutes · medium*
#
# Backward finishes the last parameters first, so buckets are filled from the last parameter to the first. A bucket
# is closed as soon as it holds `cap_bytes` or more. Parameters of different dtypes never share a bucket. Return the
# buckets in the order in which they were closed, and then those that were never filled.
# %% answer-5-1
def assign_buckets(parameters, cap_bytes):
    """Return lists of parameters, last parameter first, each list of one dtype and closed on reaching `cap_bytes`."""
    ### BEGIN SOLUTION
    filling = {}
    closed = []
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
# *5 minutes · easy*
#
# See to it that in every backward pass `ready(parameter)` is called once for each trainable parameter, at the moment
# when its gradient is complete in `parameter.grad`. One layer of the model is used twice, and one is frozen.
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
# *10 minutes · medium*
#
# `flats` are full buckets. `executor` has one thread. `all_reduce(flat)` sums a bucket over all ranks, in place, and
# takes its time. Hand all buckets to the thread in index order, and come back when all of them hold their mean. If
# the communication fails, your function must fail too.
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


# %% [markdown]
# ## 5.4 Find the bug: the order of buckets
#
# *15 minutes · medium*
#
# Gradients become ready one after the other. Which bucket may leave, and when? This function says it for one rank, and on one
# rank it looks fine. In training, if the model has an `if`, ranks finish their gradients in different orders. Then sums are
# wrong, or the ranks wait for ever. One line is wrong.
# %% faulty-5-4
def faulty_departures(buckets, ready):  # line 1
    missing = [set(bucket) for bucket in buckets]  # line 2
    left = []  # line 3
    for count, parameter in enumerate(ready, 1):  # line 4
        for number, waiting in enumerate(missing):  # line 5
            waiting.discard(parameter)  # line 6
            if not waiting and number not in [gone for _, gone in left]:  # line 7
                left.append((count, number))  # line 8
    return left  # line 9


# %% [markdown]
# `buckets` are lists of parameters' numbers, `ready` is the order in which this rank's gradients become ready. Returned are
# pairs: after how many ready gradients, which bucket. Each bucket leaves as early as it can without mixing up the order.
# %% answer-5-4
def the_bug():
    """Return the number of the faulty line."""
    ### BEGIN SOLUTION
    return 7
    ### END SOLUTION


def departures(buckets, ready):
    """Return [(number of gradients that are ready, bucket that leaves then)], in the order of leaving."""
    ### BEGIN SOLUTION
    missing = [set(bucket) for bucket in buckets]
    left = []
    for count, parameter in enumerate(ready, 1):
        for number, waiting in enumerate(missing):
            waiting.discard(parameter)
            if not waiting and number == len(left):
                left.append((count, number))
    return left
    ### END SOLUTION


# %% check-5-4 points=2
check("5.4", the_bug, departures)


# %% [markdown]
# ## 5.5 Assemble a bucketed DDP
#
# *30 minutes · hard*
#
# Now put it together. `buckets` are lists of parameters in the order in which backward finishes them. `all_reduce(flat)`
# sums a tensor in one row over all ranks, in place, and takes its time; `executor` has one thread for it. After
# `backward(loss)` every `parameter.grad` holds the mean over the ranks, in that pass and in all that follow. `self.buckets`
# and whatever else you need is yours to make.
#
# The model runs on an emulated device, so that backward takes time, and your **timeline** is looked at: the ring of a
# bucket must run while backward still computes the next one.
# %% answer-5-5
class Bucketed:
    """Averages gradients by buckets, while backward runs."""

    def __init__(self, buckets, all_reduce, executor, world_size):
        """Get ready to notice each gradient; `buckets` are lists of parameters, first to finish first."""
        ### BEGIN SOLUTION
        self.buckets = buckets
        self.all_reduce = all_reduce
        self.executor = executor
        self.world_size = world_size
        self.start_over()
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.ready)
        ### END SOLUTION

    def backward(self, loss):
        """Run the backward pass of `loss`; when it returns, each gradient is the mean over all ranks."""
        ### BEGIN SOLUTION
        loss.backward()
        for bucket, flat, future in self.leaving:
            future.result()
            pieces = flat.split([parameter.numel() for parameter in bucket])
            for parameter, piece in zip(bucket, pieces):
                parameter.grad = piece.view_as(parameter)
        self.start_over()

    def start_over(self):
        self.missing = [set(bucket) for bucket in self.buckets]
        self.leaving = []

    def ready(self, parameter):
        for waiting in self.missing:
            waiting.discard(parameter)
        while len(self.leaving) < len(self.buckets) and not self.missing[len(self.leaving)]:
            bucket = self.buckets[len(self.leaving)]
            flat = torch.cat([p.grad.reshape(-1) for p in bucket]) / self.world_size
            self.leaving.append((bucket, flat, self.executor.submit(self.all_reduce, flat)))
        ### END SOLUTION


# %% check-5-5 points=4
check("5.5", Bucketed)


# %% [markdown]
# ## 5.6 Which timeline belongs to which setting?
#
# *10 minutes · medium*
#
# Four people ran the same model. These are the timelines of one step of theirs, in milliseconds:
#
#     "each on its own": a ring for each gradient, after backward
#     backward       ==========================
#     communication                            -- -- -- --
#
#     "one bucket": a cap larger than the model
#     backward       ==========================
#     communication                            --------
#
#     "hidden": buckets, and a link that keeps up with backward
#     backward       ==========================
#     communication         --     --     --   --
#
#     "slow link": buckets, each of which finds the link still busy
#     backward       ==========================
#     communication         ----------------------------
#
# Write the rules by which you tell them apart, from spans in any order; a step's "forward" and "update" are among them.
# Numbers are never exact: what "begins when backward ends" may begin 2 ms before or after.
# %% answer-5-6
def setting_of(timeline):
    """Return "each on its own", "one bucket", "hidden" or "slow link" for spans (name, start_ms, end_ms)."""
    ### BEGIN SOLUTION
    ends = max(end for name, _, end in timeline if name == "backward")
    rings = sorted((start, end) for name, start, end in timeline if name == "communication")
    if len(rings) == 1:
        return "one bucket"
    if rings[0][0] > ends - 5:
        return "each on its own"
    pauses = sum(rings[i][0] - rings[i - 1][1] > 4 for i in range(1, len(rings)))
    return "hidden" if pauses else "slow link"
    ### END SOLUTION


# %% check-5-6 points=2
check("5.6", setting_of)


# %% [markdown]
# ## 5.7 Predict, measure, explain
#
# *15 minutes · medium*
#
# From how many samples on does communication hide behind backward? `measure(samples)` runs a backward pass on an emulated
# device and tells its seconds; `ring` is what the all-reduce takes, however many samples there are.
#
# 1. **Predict** by `measure(64)` and `measure(128)` alone: on the straight line through these two, from which number of
#    samples on, 1 or more, is backward at least as long as the ring?
# 2. **Measure**: which number is it really? `measure` as often as you like, up to 40 times; it never falls. The answer lies between 1 and 1024.
# 3. **Explain**: at the number that you measured, what bounds the device? With half of the samples backward takes (nearly) half the time:
#    `"computing"`. It takes more than three quarters of the time: `"memory"`, since the weights must be read however few samples there are.
#    `"both"` is for what lies between.
# %% answer-5-7
def when_it_hides(measure, ring):
    """Return (predicted samples, measured samples, "computing", "memory" or "both")."""
    ### BEGIN SOLUTION
    with_64 = measure(64)
    with_128 = measure(128)
    slope = (with_128 - with_64) / 64
    predicted = max(1, math.ceil(64 + (ring - with_64) / slope))
    low = 0
    high = 1024
    while high - low > 1:
        middle = (low + high) // 2
        if measure(middle) >= ring:
            high = middle
        else:
            low = middle
    share = measure(max(1, high // 2)) / measure(high)
    bound = "both"
    if share < 0.6:
        bound = "computing"
    elif share > 0.75:
        bound = "memory"
    return predicted, high, bound
    ### END SOLUTION


# %% check-5-7 points=3
check("5.7", when_it_hides)


# %% [markdown]
# ## 5.8 How far does data parallelism reach?
#
# *15 minutes · medium*
#
# The batch of one step is fixed, since a larger one would train differently (lesson 10): `tokens` tokens, shared out evenly over K
# devices. With n parameters, backward takes 4 n flops per token, and a device computes `flops_per_s`. Meanwhile a ring
# all-reduce sends 2(K-1)/K of n gradients of `gradient_bytes` each, over a link of `bytes_per_s`. More devices have less to
# compute, but hardly less to send. Up to which K, a whole number, does the all-reduce still fit under the backward pass? You need
# no n: write both times down, on paper and without the lesson, and see what cancels.
# %% answer-5-8
def most_ranks(tokens, flops_per_s, bytes_per_s, gradient_bytes):
    """Return the largest K at which the all-reduce takes no longer than the backward pass."""
    ### BEGIN SOLUTION
    # 4 n tokens / K / flops_per_s >= 2 (K-1) / K n gradient_bytes / bytes_per_s
    return int(1 + 2 * tokens * bytes_per_s / (gradient_bytes * flops_per_s))
    ### END SOLUTION


# %% check-5-8 points=2
check("5.8", most_ranks)


# %% [markdown]
# ## 5.9 Explain: two links and their caps
#
# *10 minutes · medium*
#
# Look at the last figure of the section "The bucket cap" in lesson 05: the time of a step over the cap, on a link with a
# latency of 1 ms and on one without.
# Explain it in two to five sentences of your own, so that somebody who has not read the lesson understands it. Name numbers of the figure.
# Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why the curve of 1 ms rises towards the smallest caps, with a number of the figure or of the text |
# | B | why both curves rise towards the largest cap |
# | C | why the other curve does not rise on the left, although as many bytes travel |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-5-9
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "At 0.001 MiB there are 31 buckets, and each pays six latencies of 1 ms, 186 ms in all, which "
        "backward cannot hide. With one large bucket nothing leaves before backward ends, so all "
        "communication comes after it, on both links. Without a latency 31 messages cost no more than "
        "one, since the same bytes travel in either case."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-5-9 points=2
check("5.9", explain_figure)
