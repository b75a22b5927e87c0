# %% [markdown]
# # Exercise 8: pipelines
#
# The model is split into stages, the batch into micro-batches. A schedule says what each stage does, step by step:
# `("F", 2)` is the forward pass of micro-batch 2, `("B", 2)` its backward pass. Stages and micro-batches count from 0.
#
# Stuck? `hint("8.1")` gives the first of three hints for a task, and
# `hint("8.1", 2)` the next.
# %% imports
import torch

from ddp_course import wire
from ddp_exercises import check, hint


# %% [markdown]
# ## 8.1 GPipe
#
# *5 minutes · easy*
#
# GPipe makes all forward passes, then all backward passes, each in the order of the micro-batches.
# %% answer-8-1
def gpipe(stage, stages, micro_batches):
    """Return the list of steps of one stage: pairs of "F" or "B" and a micro-batch's number."""
    ### BEGIN SOLUTION
    return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]
    ### END SOLUTION


# %% check-8-1 points=2
check("8.1", gpipe)


# %% [markdown]
# ## 8.2 One forward, one backward
#
# *10 minutes · medium*
#
# A stage need not wait for all forward passes. The last stage goes backward right after its first forward pass, the
# one before it after its second, and so on. From then on forward and backward take turns, and at the end come the
# backward passes that are left. Mind pipelines with fewer micro-batches than stages.
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
# ## 8.3 A slow stage
#
# *10 minutes · medium*
#
# The lesson's bubble is that of equal stages. Here stage s takes `times[s]` for a micro-batch, and they only go forward,
# as in a model that answers questions. From the first moment to the last, what share of the time is a stage idle, on
# average over the stages? Guess first: do more micro-batches make it as small as you like?
# %% answer-8-3
def bubble(times, micro_batches):
    """Return the share of the time, from 0 to 1, in which a stage is idle, on average.

    The average is over all stages.
    """
    ### BEGIN SOLUTION
    total = sum(times) + (micro_batches - 1) * max(times)
    return 1 - micro_batches * sum(times) / (len(times) * total)
    ### END SOLUTION


# %% check-8-3 points=2
check("8.3", bubble)


# %% [markdown]
# ## 8.4 What it must remember
#
# *5 minutes · easy*
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


# %% check-8-4 points=2
check("8.4", most_held)


# %% [markdown]
# ## 8.5 Zero bubble: a schedule with a score to beat
#
# *45 minutes · hard*
#
# A backward pass does two things: it computes the gradient of its input, for which the stage before is waiting (`"B"`), and
# the gradients of its weights, for which nobody is waiting (`"W"`). Let `"F"`, `"B"` and `"W"` take one tick each. A stage
# does one thing at a time, in your order, each as early as it can:
#
# - `("F", m)` needs `("F", m)` of the stage before,
# - `("B", m)` needs its own `("F", m)` and `("B", m)` of the stage after,
# - `("W", m)` needs its own `("B", m)`; only then are the activations of m released.
#
# No stage may hold more than `stages` micro-batches, from their F to their W. There are at least as many micro-batches as
# stages. Draw the orders of all stages.
#
# | 4 stages, 8 micro-batches | ticks | |
# |---|---|---|
# | GPipe, each W right after its B | 30 | holds 8 |
# | 1F1B, each W right after its B | 30 | **beat this** |
# | the first stage is idle only while it waits for the first B | 27 | nobody can do better |
#
# Schedules of this kind are called **zero bubble** (Qi et al., ICLR 2024); yours is the paper's ZB-H1 if it reaches 27.
# %% answer-8-5
def schedule(stages, micro_batches):
    """Return a list of steps for each stage: pairs of "F", "B" or "W" and a micro-batch."""
    ### BEGIN SOLUTION
    orders = []
    for stage in range(stages):
        warm_up = stages - 1 - stage
        done = 0
        steps = [("F", m) for m in range(warm_up)]
        for m in range(micro_batches):
            if warm_up + m < micro_batches:
                steps.append(("F", warm_up + m))
            steps.append(("B", m))
            if m >= stage:  # the later the stage, the longer its W can wait
                steps.append(("W", done))
                done += 1
        orders.append(steps + [("W", m) for m in range(done, micro_batches)])
    return orders
    ### END SOLUTION


# %% check-8-5 points=4
check("8.5", schedule)


# %% [markdown]
# ## 8.6 Which timeline belongs to which schedule?
#
# *10 minutes · medium*
#
# `timeline` is a list of `(stage, "F" or "B", micro_batch, start, end)`, in any order, of a pipeline of three or more stages
# with at least as many micro-batches. One of its stages is slower than the others. Which schedule is it, and which stage?
# %% answer-8-6
def read(timeline):
    """Return ("GPipe", "1F1B" or "one at a time", the slow stage's number)."""
    ### BEGIN SOLUTION
    took = {}
    for stage, _, _, start, end in timeline:
        took[stage] = took.get(stage, 0.0) + end - start
    slow = max(took, key=took.get)
    ordered = sorted(timeline, key=lambda span: span[3])
    first = [(kind, m) for stage, kind, m, _, _ in ordered if stage == 0]
    last = [(kind, m) for stage, kind, m, _, _ in ordered if stage == max(took)]
    if first[1][0] == "B":
        return "one at a time", slow
    name = "1F1B" if last[1][0] == "B" else "GPipe"
    return name, slow
    ### END SOLUTION


# %% check-8-6 points=2
check("8.6", read)


# %% [markdown]
# ## 8.7 A stage, with its messages
#
# *25 minutes · medium*
#
# Now a stage of a real pipeline, on ranks. Somebody else walks through GPipe's schedule and calls your two functions with the
# number of a micro-batch. A `stage` has `module`, its part of the model; `before` and `after`, the neighbours' ranks, None at the ends;
# `shape`, the shape of what comes from the stage before (all is float32); and an empty dict `kept` for what you want to keep. The first stage has
# `inputs`, a list with a tensor for each micro-batch. The last one has `targets` and `loss(output, target)`, and the loss of the batch is
# the *mean* over its micro-batches, of which there are `stage.microbatches`.
#
# `wire.send(tensor, rank)` and `wire.recv(tensor, rank)` are those of lesson 03. Parameters' gradients add up in `.grad` as
# always. After its backward pass nothing of a micro-batch is kept.
# %% answer-8-7
def forward(stage, number):
    """Take micro-batch `number` from the stage before, run the module, and hand its output on."""
    ### BEGIN SOLUTION
    if stage.before is None:
        x = stage.inputs[number]
    else:
        x = torch.empty(stage.shape)
        wire.recv(x, stage.before)
        x.requires_grad_()
    y = stage.module(x)
    if stage.after is None:
        y = stage.loss(y, stage.targets[number]) / stage.microbatches
    else:
        wire.send(y.detach(), stage.after)
    stage.kept[number] = x, y
    ### END SOLUTION


def backward(stage, number):
    """Take the output's gradient from the stage after, go backward, and hand the input's back."""
    ### BEGIN SOLUTION
    x, y = stage.kept.pop(number)
    if stage.after is None:
        y.backward()
    else:
        gradient = torch.empty_like(y)
        wire.recv(gradient, stage.after)
        y.backward(gradient)
    if stage.before is not None:
        wire.send(x.grad, stage.before)
    ### END SOLUTION


# %% check-8-7 points=4
check("8.7", forward, backward)


# %% [markdown]
# ## 8.8 Explain: idle ranks and micro-batches
#
# *10 minutes · medium*
#
# Look at the figure of the section "The bubble on real messages" in lesson 08: for what share of the time a rank idles, over
# the number of micro-batches.
# Explain it in two to five sentences of your own, so that somebody who has not read the lesson understands it. Name numbers of the figure.
# Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why one micro-batch leaves ranks idle for three quarters of the time |
# | B | why more micro-batches help, and by which formula |
# | C | why the curve never reaches zero, or what real devices add to it |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-8-8
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "With one micro-batch on 4 ranks, one rank works and three wait, so 75 % of the time is idle. "
        "With M micro-batches the ranks fill and empty the pipeline once, which takes K-1 of M+K-1 "
        "slots, so at 12 only 20 % is left. The pipeline must always fill and empty, M ends at the "
        "number of samples, and on real devices each small micro-batch has a fixed cost of its own."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-8-8 points=2
check("8.8", explain_figure)
