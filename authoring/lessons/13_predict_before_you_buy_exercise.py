# %% [markdown]
# # Exercise 13: predict before you buy
#
# You judge a table, read a benchmark, rule out plans, estimate an honest error, predict a layer under FSDP, find how far
# each way reaches, and explain a figure. Nothing here runs against a clock; paper and a few lines are enough.
#
# Stuck? `hint("13.1")` gives the first of three hints for a task, and
# `hint("13.1", 2)` the next.
# %% imports
from ddp_exercises import check, hint


# %% [markdown]
# ## 13.1 Judge a table
#
# *10 minutes · medium*
#
# A table has the speeds of pipelines. Each row is (stages P, micro-batches M, times): `times` as fast as the *first* row,
# whose own `times` is 1. A pipeline of P equal stages is at most P M/(M + P - 1) times as fast as one device. Numbers are
# rounded, and machines are not all alike, so a tenth above the formula may pass. Which rows are too good to be true?
#
# The first rows of GPipe's table are `(2, 1, 1.0), (4, 1, 1.07), (8, 1, 1.3)`. Is one of them?
# %% answer-13-1
def too_good(rows):
    """Return the (stages, micro-batches) of all rows that are more than a tenth faster than the
    formula allows.
    """

    ### BEGIN SOLUTION
    def formula(stages, micro_batches):
        return stages * micro_batches / (micro_batches + stages - 1)

    first = formula(*rows[0][:2])
    return [(p, m) for p, m, times in rows if times > 1.1 * formula(p, m) / first]
    ### END SOLUTION


# %% check-13-1 points=2
check("13.1", too_good)


# %% [markdown]
# ## 13.2 Read a benchmark
#
# *15 minutes · medium*
#
# NCCL's tests print a *bus bandwidth*: on a ring, what each link carries, 2(K-1)/K p over the time. How many seconds did the
# all-reduce take?
#
# A protocol is a pair (seconds of latency, bytes per second of the message); NCCL uses the fastest one for each message.
# From how many bytes on is `second`, slower to start and faster to carry, the faster one? And which protocols are ever used?
# Three lines cross: guess first whether the middle one always has its turn.
# %% answer-13-2
def seconds(bus_gb_per_s, nbytes, ranks):
    """Return the seconds of an all-reduce of `nbytes` whose bus bandwidth is so many 10^9 bytes per
    second.
    """
    ### BEGIN SOLUTION
    return 2 * (ranks - 1) / ranks * nbytes / (1e9 * bus_gb_per_s)
    ### END SOLUTION


def crossover(first, second):
    """Return the bytes for which both protocols take the same time."""
    ### BEGIN SOLUTION
    return (second[0] - first[0]) / (1 / first[1] - 1 / second[1])
    ### END SOLUTION


def used(protocols):
    """Return the names of those protocols, of {name: (latency, rate)}, that are the fastest for
    some message.
    """
    ### BEGIN SOLUTION
    names = sorted(protocols, key=protocols.get)
    fastest = [names[0]]
    while later := [name for name in names if protocols[name][1] > protocols[fastest[-1]][1]]:
        last = protocols[fastest[-1]]
        fastest.append(min(later, key=lambda name: crossover(last, protocols[name])))
    return fastest
    ### END SOLUTION


# %% check-13-2 points=3
check("13.2", seconds, crossover, used)


# %% [markdown]
# ## 13.3 1,536 A100s
#
# *10 minutes · easy*
#
# A plan is (tensor, pipeline, data, sharded). The first three say into how many parts each way divides the GPUs. The last
# one says whether the copies share the state among them (ZeRO-3) or each keeps all of its part. Weights and gradients are in
# bfloat16, Adam's state and a copy of the weights in float32, which makes 16 bytes per parameter. A job is a dict:
# `parameters`, `layers`, `batch` (sequences of a step), `gpus`, `per_host`, `memory_gb`. A tenth of the memory is needed for
# activations. Which of these is the first thing that is wrong with a plan?
#
# | | |
# |---|---|
# | `"GPUs"` | the ways do not make as many GPUs as there are |
# | `"host"` | the GPUs of a layer are on two hosts |
# | `"layers"` | the stages do not have equally many layers |
# | `"batch"` | the copies do not have equally many sequences |
# | `"memory"` | 16 bytes per parameter need more than nine tenths of the memory |
# | `"nothing"` | it can be done |
# %% answer-13-3
def kept_gb(plan, job):
    """Return the 10^9 bytes that each GPU keeps of weights, gradients and Adam's state."""
    ### BEGIN SOLUTION
    tensor, pipeline, data, sharded = plan
    sharing = data if sharded else 1
    return 16 * job["parameters"] / 1e9 / (tensor * pipeline * sharing)
    ### END SOLUTION


def wrong_with(plan, job):
    """Return the first thing that is wrong with a plan, one of the six words."""
    ### BEGIN SOLUTION
    tensor, pipeline, data, _ = plan
    if tensor * pipeline * data != job["gpus"]:
        return "GPUs"
    if job["per_host"] % tensor:
        return "host"
    if job["layers"] % pipeline:
        return "layers"
    if job["batch"] % data:
        return "batch"
    return "memory" if kept_gb(plan, job) > 0.9 * job["memory_gb"] else "nothing"
    ### END SOLUTION


# %% check-13-3 points=3
check("13.3", kept_gb, wrong_with)


# %% [markdown]
# ## 13.4 An honest error
#
# *15 minutes · medium*
#
# If the batch stays the same and the GPUs double, what each GPU computes halves, and what ZeRO-3 sends stays. So t(K) =
# c/K + s, with two unknowns. From two rows (GPUs, seconds), what will K GPUs take?
#
# Then say how good that is. Of three rows hold out each in turn, fit to the other two, and compare: predicted over measured,
# minus 1. Write down first: on which row do you expect the largest error?
# %% answer-13-4
def predicted(two_rows, gpus):
    """Return the seconds of a step on `gpus` GPUs, from two rows (GPUs, seconds)."""
    ### BEGIN SOLUTION
    (few, slow), (many, fast) = two_rows
    computing = (slow - fast) / (1 / few - 1 / many)
    return computing / gpus + slow - computing / few
    ### END SOLUTION


def held_out(rows):
    """Return {GPUs: error} for each of three rows (GPUs, seconds), held out and predicted from the
    other two.
    """
    ### BEGIN SOLUTION
    errors = {}
    for gpus, measured in rows:
        others = [row for row in rows if row[0] != gpus]
        errors[gpus] = predicted(others, gpus) / measured - 1
    return errors
    ### END SOLUTION


# %% check-13-4 points=3
check("13.4", predicted, held_out)


# %% [markdown]
# ## 13.5 A layer under FSDP
#
# *15 minutes · medium*
#
# A layer has `weights` weights and a `width`; a micro-batch has so many `tokens`, in sequences of `context`. On an A100 products with
# weights run at 0.75 of 312 Tflop/s, attention at 0.32 of 312. A product is 2 flops per weight and token; attention is 2 flops per token of the
# context, unit of width and token (half of all scores is masked, which this counts already). The backward pass has twice the products and 2.5 times the attention.
# Return the seconds of both passes.
#
# FSDP gathers the weights, 2 bytes each, before each pass, and scatters the gradients, 2 bytes each, in the second: one
# gather is the sending of the forward pass, a gather and a scatter that of the backward pass. A gather or
# scatter sends (K-1)/K of these bytes at `rate` bytes per second. In each pass the longer of computing and sending counts, and 0.15 of the
# shorter. How many seconds does the layer take?
# %% answer-13-5
def passes(weights, width, tokens, context):
    """Return the seconds of the forward and of the backward pass."""
    ### BEGIN SOLUTION
    products = 2 * weights * tokens / (0.75 * 312e12)
    attention = 2 * context * width * tokens / (0.32 * 312e12)
    return products + attention, 2 * products + 2.5 * attention
    ### END SOLUTION


def fsdp_layer(forward, backward, weights, gpus, rate):
    """Return the seconds of both passes of a layer with all that is sent."""
    ### BEGIN SOLUTION
    ring = (gpus - 1) / gpus * 2 * weights / rate

    def longer(computing, sending):
        return max(computing, sending) + 0.15 * min(computing, sending)

    return longer(forward, ring) + longer(backward, 2 * ring)
    ### END SOLUTION


# %% check-13-5 points=3
check("13.5", passes, fsdp_layer)


# %% [markdown]
# ## 13.6 Limits
#
# *20 minutes · medium*
#
# The batch is fixed, since a larger one would train differently (lesson 10). So more GPUs have less to compute each, and at some number
# one waits for the network. Where? No run is needed for that: write down both times of each pass, and see what cancels. `job` is a dict:
#
# | | |
# |---|---|
# | `tokens` | tokens in the batch of a step, shared out evenly |
# | `rate` | flops per second of a GPU |
# | `between`, `inside` | bytes per second that a GPU sends to another host, and within its own |
# | `per_host` | GPUs of a host |
# | `weight_bytes`, `gradient_bytes` | bytes of a weight and of a gradient on the way; an activation has two |
# | `inner` | inner width of a pair of layers, from some width to `inner` and back (the dict has no width) |
#
# **Fully sharded**, all GPUs: a forward pass computes 2 flops per weight and token, while the weights are gathered; a backward pass computes
# 4, while the weights are gathered again and the gradients are scattered. Each of the three sends (K-1)/K of its bytes. Up to which K does
# *neither* pass wait? (For any K, whether it fills whole hosts or not, all bytes are sent at `between`.)
#
# **Tensor parallel**: T ranks of a host share each pair of layers, and sum up its outputs (that width per token) by a ring all-reduce, under
# which nothing can be computed. Up to which T does it take no longer than the computing of the pair's forward pass? T must divide `per_host`.
#
# **Both**: T ranks of a host, the largest T of above, are one replica, and the replicas are fully sharded over hosts. Up to
# how many GPUs does neither pass wait for the sharding's messages? (The time of the all-reduces does not count.)
# %% answer-13-6
def most_sharded(job):
    """Return the largest number of GPUs at which neither pass of fully sharded training waits for
    the network.
    """
    ### BEGIN SOLUTION
    # forward: 2 n tokens / K / rate >= (K-1)/K n weight_bytes / between,
    # and backward in the same way
    forward = 2 / job["weight_bytes"]
    backward = 4 / (job["weight_bytes"] + job["gradient_bytes"])
    return int(1 + min(forward, backward) * job["tokens"] * job["between"] / job["rate"])
    ### END SOLUTION


def most_tensor(job):
    """Return the largest T that divides a host and whose all-reduce takes no longer than the pair's
    computing.
    """
    ### BEGIN SOLUTION
    # 4 b width inner / T / rate >= 2 (T-1)/T 2 b width / inside
    limit = 1 + job["inner"] * job["inside"] / job["rate"]
    return max(t for t in range(1, job["per_host"] + 1) if t <= limit and job["per_host"] % t == 0)
    ### END SOLUTION


def most_together(job):
    """Return the largest number of GPUs if T ranks of a host share each layer and the replicas are
    fully sharded.
    """
    ### BEGIN SOLUTION
    # A rank has a T-th of the weights to send and a T-th of its replica's flops to compute:
    # T cancels.
    return most_tensor(job) * most_sharded(job)
    ### END SOLUTION


# %% check-13-6 points=3
check("13.6", most_sharded, most_tensor, most_together)


# %% [markdown]
# ## 13.7 Explain: two ways on 1,536 GPUs
#
# *10 minutes · medium*
#
# Look at the figure of the section "1,536 GPUs" in lesson 13: flops per second and GPU, over the number of GPUs.
# Explain it in two to five sentences of your own, so that somebody who has not read the lesson understands it. Name numbers of the figure.
# Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why ZeRO-3 becomes so much slower per GPU with four times the GPUs |
# | B | why three ways at once lose so little, and to what they lose it |
# | C | which points test the lines and which do not, and how well the lines pass |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-13-7
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "From 384 to 1,536 GPUs ZeRO-3 falls from 144 to 44 Tflop/s per GPU: the batch is fixed, so a GPU "
        "has a quarter of the work, yet gathers as many weights in each pass. Three ways at once "
        "keep 141 of 153, because their busiest messages stay in one host; what is lost is mostly a "
        "pipeline with fewer micro-batches, whose stages idle longer. Two points of ZeRO-3 were "
        "used for the fit and prove nothing. The third tests it, and 48 were predicted; the other line "
        "was fitted to none of its points and lies within 2 %."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-13-7 points=2
check("13.7", explain_figure)
