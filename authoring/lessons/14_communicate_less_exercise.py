# %% [markdown]
# # Exercise 14: communicate less
#
# Send the largest values, meet less often, find what a hook loses, bet on the right way for a link, send eight bits, and explain a
# figure.
#
# Stuck? `hint("14.1")` gives the first of three hints for a task, and
# `hint("14.1", 2)` the next.
# %% imports
import torch

from ddp_exercises import check, hint


# %% [markdown]
# ## 14.1 Send the largest
#
# *10 minutes · medium*
#
# A rank sends only the largest values of its gradient, by magnitude, with their places: `max(1, round(share * n))` of n.
# What is not sent is `left`, and is added to the next gradient before the largest are chosen. Change neither `gradient`
# nor `left`; both have one dimension.
# %% answer-14-1
def compress(gradient, left, share):
    """Return (values, places, left): what to send of gradient + left, where, and what stays."""
    ### BEGIN SOLUTION
    owed = gradient + left
    places = owed.abs().topk(max(1, round(share * len(owed)))).indices
    return owed[places], places, owed.index_fill(0, places, 0.0)
    ### END SOLUTION


# %% check-14-1 points=3
check("14.1", compress)


# %% [markdown]
# ## 14.2 The outer step
#
# *10 minutes · easy*
#
# Each rank started from the `shared` weights and has trained alone; now it has its `own`. In DiLoCo the mean change
# serves as a gradient, and an outer SGD with momentum makes a step with it:
#
# $$g = \text{shared} - \text{mean of own} \qquad v \leftarrow \mu v + g \qquad \text{shared} \leftarrow \text{shared} - \eta v$$
#
# With η = 1 and μ = 0 that is local SGD. `all_reduce(tensor)` sums over the ranks, in place; call it once.
# %% answer-14-2
def outer_step(shared, own, velocity, all_reduce, world_size, rate, momentum):
    """Return (weights, velocity) with which all ranks go on."""
    ### BEGIN SOLUTION
    change = (shared - own) / world_size
    all_reduce(change)
    velocity = momentum * velocity + change
    return shared - rate * velocity, velocity
    ### END SOLUTION


# %% check-14-2 points=2
check("14.2", outer_step)


# %% [markdown]
# ## 14.3 Find the bug: a hook
#
# *10 minutes · medium*
#
# This hook, called in every step for each parameter's gradient, sends a quarter of the values and keeps the rest. It looks
# fine, training runs, and the loss falls, but slowly, and it stays higher than it should. One line is wrong.
# %% faulty-14-3
def faulty_hook(share):  # line 1
    kept = {}  # line 2

    def hook(name, gradient):  # line 3
        owed = gradient + kept.get(name, 0.0)  # line 4
        count = max(1, round(share * owed.numel()))  # line 5
        places = owed.topk(count).indices  # line 6
        sent = torch.zeros_like(owed)  # line 7
        sent[places] = owed[places]  # line 8
        kept[name] = owed - sent  # line 9
        return sent  # line 10

    return hook  # line 11


# %% [markdown]
# Feed it a few steps of a gradient that you know, and look at what it keeps. Then name the line and mend it.
# %% answer-14-3
def the_bug():
    """Return the number of the faulty line."""
    ### BEGIN SOLUTION
    return 6
    ### END SOLUTION


def make_hook(share):
    """Return the mended hook: `hook(name, gradient)` returns what is sent, and keeps the rest."""
    ### BEGIN SOLUTION
    kept = {}

    def hook(name, gradient):
        owed = gradient + kept.get(name, 0.0)
        count = max(1, round(share * owed.numel()))
        places = owed.abs().topk(count).indices
        sent = torch.zeros_like(owed)
        sent[places] = owed[places]
        kept[name] = owed - sent
        return sent

    return hook
    ### END SOLUTION


# %% check-14-3 points=2
check("14.3", the_bug, make_hook)


# %% [markdown]
# ## 14.4 Bet on a winner
#
# *15 minutes · medium*
#
# Several ways were tried. `ways[name]["losses"]` are the losses after step 1, 2, … and `ways[name]["bytes"]`, one number,
# what the busiest rank sends in a step, on average. A step takes `compute_s` seconds of computing and then the time to send
# on a link of `bits` bits per second. Which way is the first to get down to `target`, in *time*? Some never do. And for two
# ways, on how fast a link do they get there at the same time?
# %% answer-14-4
def winner(ways, target, compute_s, bits):
    """Return the name of the way that reaches a loss of `target` or less first."""

    ### BEGIN SOLUTION
    def seconds(way):
        reached = (step for step, loss in enumerate(way["losses"], 1) if loss <= target)
        steps = next(reached, float("inf"))
        return steps * (compute_s + 8 * way["bytes"] / bits)

    return min(ways, key=lambda name: seconds(ways[name]))
    ### END SOLUTION


def break_even(plain, frugal, target, compute_s):
    """Return the bits per second at which both ways reach `target` at the same time.

    `frugal` needs more steps.
    """

    ### BEGIN SOLUTION
    def steps_of(way):
        return next(step for step, loss in enumerate(way["losses"], 1) if loss <= target)

    n = steps_of(plain)
    m = steps_of(frugal)
    return 8 * (n * plain["bytes"] - m * frugal["bytes"]) / (compute_s * (m - n))
    ### END SOLUTION


# %% check-14-4 points=2
check("14.4", winner, break_even)


# %% [markdown]
# ## 14.5 Eight bits
#
# *20 minutes · medium*
#
# A gradient of float32 travels as whole numbers from -127 to 127, of one byte each, beside one number that says what a 1 is
# worth: the *scale*. As in 14.1, what rounding loses is `left`, and is added to the next gradient: `owed = gradient + left`.
# The scale is such that the largest magnitude of `owed` becomes 127. It may happen that all values are zero.
#
# `gather(tensor)` returns a list with this tensor of every rank, in order. Ranks have scales of their own. Gather
# int8 values and a scale of one number, and nothing else. Change neither `gradient` nor `left`.
# %% answer-14-5
def int8_mean(gradient, left, gather):
    """Return (the mean over ranks of what was sent, what is left on this rank now), in float32."""
    ### BEGIN SOLUTION
    owed = gradient + left
    scale = owed.abs().max() / 127
    values = (owed / scale.clamp(min=1e-30)).round().to(torch.int8)
    all_values = gather(values)
    all_scales = gather(scale.reshape(1))
    total = torch.zeros_like(owed)
    for their_values, their_scale in zip(all_values, all_scales):
        total += their_values * their_scale
    return total / len(all_values), owed - values * scale
    ### END SOLUTION


# %% check-14-5 points=3
check("14.5", int8_mean)


# %% [markdown]
# ## 14.6 Explain: loss against time, on two links
#
# *10 minutes · medium*
#
# Look at the two figures of the section "Loss against time" in lesson 14: seven ways to train, on a slow link and on a fast one.
# Explain them in two to five sentences of your own, so that somebody who has not read the lesson understands them. Name numbers of the
# figures. Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why the ways stand so far apart on the slow link, and in which order |
# | B | why nearly all of them meet on the fast link, and why one does not |
# | C | which differences in loss mean something, and which do not |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-14-6
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "On 5 Mbit/s computing takes 20 ms of a step and its messages nearly 30 times that, so the order is "
        "that of bytes: averaging each step needs 12 s, local SGD with an eighth of them 2.3 s, top 1 % even less. "
        "On 1 Gbit/s messages take hardly any time, hence six curves end between 0.8 and 0.9 s. "
        "Only the server needs 1.2 s, for one rank in four trains nothing. Final losses lie "
        "within 0.3 nats, and bands from three seeds are about as wide and overlap: who learns best "
        "cannot be read from these pictures, who is quickest can."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-14-6 points=2
check("14.6", explain_figure)
