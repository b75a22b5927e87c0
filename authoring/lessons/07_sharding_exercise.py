# %% [markdown]
# # Exercise 7: shard it
#
# Every rank of a DDP keeps the same optimizer state. It need not: each rank can keep the state of a part of the
# parameters, step those, and send the new values to the others (ZeRO stage 1). Then go on to training in which a rank
# does not even keep the parameters: you write what FSDP does before a layer computes, after its forward pass, and after
# its backward pass. At the end torch's own FSDP trains over your ring.
#
# Stuck? `hint("7.1")` gives the first of three hints for a task, and
# `hint("7.1", 2)` the next.
# %% imports
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ddp_course import ring_backend
from ddp_course.stage4_ring import allgather, reduce_scatter
from ddp_exercises import check, hint


# %% [markdown]
# ## 7.1 Who owns what
#
# *5 minutes · easy*
#
# Go through the parameters in order. Each goes to the rank that has the fewest numbers so far, and of ranks with
# equally few to the lowest.
# %% answer-7-1
def assign_owners(sizes, world_size):
    """Return the owning rank of each parameter, for `sizes` in numbers (not bytes)."""
    ### BEGIN SOLUTION
    held = [0] * world_size
    owners = []
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
# *10 minutes · medium*
#
# This is ZeRO-1. All weights lie end to end in one flat tensor, all gradients in another, and both are cut into K chunks:
# `weights` and `gradients` are lists of these chunks, views of the flat tensors. A rank keeps optimizer state for one
# chunk only, and `update(chunk of weights, chunk of gradients)` makes the step of that chunk, in place. Afterwards all
# ranks have the new weights. Send no more bytes than DDP does: 2(K-1)/K p per rank.
#
# `reduce_scatter(chunks, group)` and `allgather(chunks, group)` are those of lesson 04: after the first, rank r has the
# sum of chunk r+1; the second sends that chunk to all. The step uses the *mean* of the ranks' gradients.
# %% answer-7-2
def sharded_step(weights, gradients, update, group=None):
    """Average gradients, update this rank's chunk of the weights, and get the others, in place."""
    ### BEGIN SOLUTION
    world_size = dist.get_world_size(group)
    for chunk in gradients:
        chunk /= world_size
    reduce_scatter(gradients, group)
    own = (dist.get_rank(group) + 1) % world_size
    update(weights[own], gradients[own])
    allgather(weights, group)
    ### END SOLUTION


# %% check-7-2 points=3
check("7.2", sharded_step)


# %% [markdown]
# ## 7.3 How many GPUs at least?
#
# *10 minutes · medium*
#
# Mixed precision with Adam, as ZeRO counts it: 2 bytes for a parameter in bfloat16, 2 for its gradient, and 12 of
# optimizer state: the parameter in float32 and its two moments. Level 0 shards nothing, level 1 the optimizer state, level
# 2 the gradients too, level 3 the bfloat16 parameters too. What is sharded is split evenly. On how many ranks does a model
# fit? Guess first: with level 1, is there a number of ranks for every model?
# %% answer-7-3
def fewest_ranks(parameters, memory, level):
    """Return the fewest ranks of which each needs at most `memory` bytes; 0 if no number does."""
    ### BEGIN SOLUTION
    whole = (16, 4, 2, 0)[level] * parameters
    shared = 16 * parameters - whole
    if whole + shared <= memory:
        return 1
    if whole >= memory:
        return 0
    return -(-shared // (memory - whole))
    ### END SOLUTION


# %% check-7-3 points=2
check("7.3", fewest_ranks)


# %% [markdown]
# ## 7.4 Prefetch with a score to beat
#
# *45 minutes · hard*
#
# A model of equal blocks, three or more of them, fully sharded. Computing goes forward through blocks 0, 1, 2 … and then
# backward through all of them in reverse; it takes 1 tick per block forward, 2 ticks backward. The network does one thing at
# a time, in the order that you give, each as early as it can:
#
# - `("gather", i)` takes 2 ticks. It waits until there is room for the block: no more than `cap_mb` may be taken.
# - `("reduce", i)` averages the gradients of block i, in 2 ticks. It waits for its backward pass.
#
# Room for a block is taken from the beginning of its gather on. A block that you gather twice is freed after its forward
# pass, as in the lesson. A block that you gather once stays until its gradients, which take the same room, are reduced. There
# is always room for two blocks. Give the network its order.
#
# | 6 blocks of 100 MB, 350 MB of room | ticks | |
# |---|---|---|
# | each block gathered just before it computes, and nothing meanwhile | 54 | |
# | forward: the next block meanwhile; backward: each gather after the reduce of the block before | 48 | **beat this** |
# | nobody waits without need, and no block is gathered without need | 33 | nobody can do better |
# %% answer-7-4
def network_order(blocks, block_mb, cap_mb):
    """Return a list of pairs: "gather" or "reduce", and the number of a block."""
    ### BEGIN SOLUTION
    fit = cap_mb // block_mb
    order = [("gather", block) for block in range(blocks)]
    ahead = max(blocks - fit, 0)  # the blocks behind are whole when backward begins, and stay
    for block in reversed(range(blocks)):
        order.append(("reduce", block))
        if ahead:
            ahead -= 1
            order.append(("gather", ahead))
    return order
    ### END SOLUTION


# %% check-7-4 points=4
check("7.4", network_order)


# %% [markdown]
# ## 7.5 Fully sharded: fetch, free, finish
#
# *40 minutes · hard*
#
# A rank keeps a part of each layer only. Hooks call your three functions: `fetch` before a layer computes, forward and
# backward, and one layer ahead, so that its gather runs under this layer's computing; `free` when a layer's forward pass
# is over; `finish` when backward has the gradient of the layer's whole parameter. A `layer` has
#
# | | |
# |---|---|
# | `layer.parameter` | the whole parameter, in bfloat16; it computes, and `parameter.grad` is its gradient |
# | `layer.storage`, `layer.nbytes` | the memory of the whole parameter: `storage.resize_(0)` gives it back, `storage.resize_(nbytes)` takes it again, with anything in it |
# | `layer.chunks` | the whole parameter cut into K chunks, views of that memory |
# | `layer.index` | which of the chunks this rank owns: rank r owns chunk r+1, as after a reduce-scatter |
# | `layer.own` | this rank's chunk in float32, the *master* that the optimizer steps; `own.grad` is its gradient |
# | `layer.coming` | yours: None, or what `fetch` returned |
# | `layer.group` | the ranks |
#
# - `fetch(layer, thread)` returns at once. `thread.submit(function, *arguments)` runs a function on the thread that sends
#   all messages, in order, and returns a future. Called again before `free`, it gathers nothing a second time. Weights
#   travel in bfloat16.
# - `free(layer)` gives the memory back.
# - `finish(layer, thread)` brings the *mean* of the ranks' gradients to `own.grad`, in float32: bfloat16 keeps eight
# significant bits, too few for sums. Gradients of several backward passes add up until the optimizer clears them. The rank
# keeps no more than its chunk: the whole gradient goes, and the layer is freed. `finish` returns when all that is done.
# %% answer-7-5
def fetch(layer, thread):
    """Begin to gather the whole parameter, unless that has begun; return the gather's future."""
    ### BEGIN SOLUTION
    if layer.coming is None:
        layer.storage.resize_(layer.nbytes)
        layer.chunks[layer.index].copy_(layer.own.detach())
        layer.coming = thread.submit(allgather, layer.chunks, layer.group)
    return layer.coming
    ### END SOLUTION


def free(layer):
    """Give the memory of the whole parameter back."""
    ### BEGIN SOLUTION
    layer.storage.resize_(0)
    layer.coming = None
    ### END SOLUTION


def finish(layer, thread):
    """Add the mean of this rank's chunk of the gradient to `own.grad`, and free all the rest."""
    ### BEGIN SOLUTION
    world_size = len(layer.chunks)
    whole = layer.parameter.grad.view(-1).float() / world_size
    gradients = whole.tensor_split(world_size)
    thread.submit(reduce_scatter, gradients, layer.group).result()
    part = gradients[layer.index].clone()
    layer.own.grad = part if layer.own.grad is None else layer.own.grad + part
    layer.parameter.grad = None
    free(layer)
    ### END SOLUTION


# %% check-7-5 points=5
check("7.5", fetch, free, finish)


# %% [markdown]
# ## 7.6 The norm of what no rank has
#
# *10 minutes · medium*
#
# To clip gradients by their norm one needs the norm of *all* of them, and no rank has all. `shards` are this rank's parts
# of the sharded gradients. `replicated` are gradients that every rank has whole, and equal: those of small layers that are
# not sharded. `all_reduce(tensor)` sums over the ranks, in place; once is enough.
# %% answer-7-6
def global_norm(shards, replicated, all_reduce):
    """Return the 2-norm of all gradients together, the same on all ranks; change no gradient."""
    ### BEGIN SOLUTION
    squares = torch.zeros((), dtype=torch.float64)
    for shard in shards:
        squares += shard.square().sum()
    all_reduce(squares)
    for gradient in replicated:
        squares += gradient.square().sum()
    return squares.sqrt()
    ### END SOLUTION


# %% check-7-6 points=2
check("7.6", global_norm)


# %% [markdown]
# ## 7.7 How small may the batch be?
#
# *15 minutes · medium*
#
# A model is trained fully sharded, on as few GPUs as possible. Each parameter takes 16 bytes in all (parameter, gradient and Adam's
# state, as in 7.3), shared out evenly, and a GPU has room for `memory` bytes. A larger batch is more to compute for the same messages.
# With n parameters on K GPUs of `flops_per_s` each,
#
# - a forward pass computes 2 n flops per token, while the weights are gathered,
# - a backward pass computes 4 n flops per token, while the weights are gathered again and the gradients are scattered.
#
# Each gather and each scatter sends (K-1)/K of its n numbers, `weight_bytes` or `gradient_bytes` each, over a link of `bytes_per_s`.
# On the fewest GPUs, how many tokens must the batch have, over all GPUs together, so that *neither* pass waits for the network?
# Return GPUs and tokens, both as an `int`; where nothing is sent, 0 tokens are enough.
# %% answer-7-7
def smallest_batch(parameters, memory, flops_per_s, bytes_per_s, weight_bytes, gradient_bytes):
    """Return the fewest GPUs that keep the model, and the fewest tokens with which none waits."""
    ### BEGIN SOLUTION
    gpus = -(-16 * parameters // memory)
    # forward: 2 n tokens / K / flops_per_s >= (K-1)/K n weight_bytes / bytes_per_s,
    # and backward in the same way
    forward = weight_bytes / 2
    backward = (weight_bytes + gradient_bytes) / 4
    tokens = (gpus - 1) * max(forward, backward) * flops_per_s / bytes_per_s
    return gpus, math.ceil(tokens)
    ### END SOLUTION


# %% check-7-7 points=2
check("7.7", smallest_batch)


# %% [markdown]
# ## 7.8 Your two halves under torch's own sharding
#
# *15 minutes · medium*
#
# torch's `fully_shard` gathers and scatters through a process group, so your two halves of a ring can carry it. Train `model`, an
# `nn.Sequential`, with torch's own `fully_shard`: first each layer that has parameters, then the whole model. Then a rank has only
# one layer whole at a time. `ring_backend.register("halves", reduce_scatter=..., allgather=...)` gives torch a backend of that name,
# `dist.new_group(backend=...)` makes a group of it, `DeviceMesh.from_group(group, "cpu")` makes a mesh of the group, and `fully_shard`
# takes a `mesh`. The loss is the cross entropy, and the optimizer is SGD with the learning rate `lr`.
# %% answer-7-8
def train_sharded(reduce_scatter, allgather, model, batches, lr):
    """Train `model` in place on (inputs, targets), sharded by torch, over these two halves of a ring."""
    ### BEGIN SOLUTION
    ring_backend.register("halves", reduce_scatter=reduce_scatter, allgather=allgather)
    mesh = DeviceMesh.from_group(dist.new_group(backend="halves"), "cpu")
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    ### END SOLUTION


# %% check-7-8 points=2
check("7.8", train_sharded)


# %% [markdown]
# ## 7.9 Explain: memory over a step
#
# *10 minutes · medium*
#
# Look at the figure of curves in the section "Why memory did not fall" of lesson 07: what a rank holds over a whole step, in
# several ways.
# Explain it in two to five sentences of your own, so that somebody who has not read the lesson understands it. Name numbers of the figure.
# Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why the curves peak where forward ends and backward begins |
# | B | why sharding lowers the whole curve, but takes nothing from its bump |
# | C | why the curve with checkpointing peaks several times, each time lower |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-7-9
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "At 1, where forward ends, the activations of all 16 layers exist at the same time, and "
        "backward then frees them one by one. Sharding divides parameters, gradients and state by K, "
        "which lowers the curve everywhere, while every rank still runs the whole model on its "
        "samples and keeps all activations. With checkpointing only the inputs of four parts are "
        "kept, and each part is computed once more in backward, so its activations appear and go "
        "again."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-7-9 points=2
check("7.9", explain_figure)


# %% [markdown]
# ## 7.10 Reading lab: whose memory is this?
#
# *15 minutes · medium*
#
# torch's profiler has recorded how many bytes per parameter a rank holds over one step, in four ways of training. (On a GPU
# `torch.cuda.memory._record_memory_history` records the same.) Moments 0 to 1 are the forward pass, 1 to 2 the backward pass and 2 to 3 the
# update. These are sketches of the four:
#
#     "DDP": everything is on every rank          "ZeRO-1": only the optimizer's state is sharded
#     bytes      /\                               bytes
#          _____/  \____                                 /\  .--
#                                                  _____/  \-
#     "fully sharded"                             "checkpointed": fully sharded, activations computed once more
#     bytes      /\                               bytes
#               /  \                                     |\ |\ |\ |\
#          ____/    \____                          ______| \| \| \| \____
#
# Write the rules by which you tell them apart. `held` is a list of pairs (moment, bytes per parameter), in order of time. Training is in
# float32 with Adam, on `ranks` ranks. Numbers are never exact: they may be 0.3 bytes too large or too small, and a rank that shards
# everything also holds the layer in use, about one byte.
# %% answer-7-10
def way_of(held, ranks):
    """Return "DDP", "ZeRO-1", "fully sharded" or "checkpointed" for a list of (moment, bytes per parameter)."""
    ### BEGIN SOLUTION
    before = held[0][1]
    backward = [count for moment, count in held if 1 <= moment < 2]
    after = [count for moment, count in held if moment >= 2]
    if before > 14:
        return "DDP"
    if after[0] > before + 2:
        return "ZeRO-1"
    rises = 0
    for place in range(1, len(backward)):
        if backward[place] > backward[place - 1] + 1:
            rises += 1
    return "checkpointed" if rises >= 2 else "fully sharded"
    ### END SOLUTION


# %% check-7-10 points=2
check("7.10", way_of)


# %% [markdown]
# ## 7.11 Reading lab: what does a trace of a sharded step say?
#
# *15 minutes · medium*
#
# `torch.profiler` writes what [Perfetto](https://ui.perfetto.dev) draws: a list of events, each a dict. Of a step under `fully_shard` you get
#
#     {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 118.0, "dur": 950.0, "args": {"stream": 20}}
#     {"ph": "X", "cat": "kernel", "name": "sm90_xmma_gemm_bf16", "ts": 402.5, "dur": 310.0, "args": {"stream": 7}}
#     {"ph": "X", "cat": "cpu_op", "name": "c10d::_allgather_base_", "ts": 60.0, "dur": 41.0}
#
# and so on, in any order. `ts` is when an event began and `dur` how long it took, in microseconds. What the GPU computes is on one stream, a
# kernel at a time; NCCL's kernels are on others. The processor's events (`cpu_op`) only queue the kernels. For how long does the GPU send or
# receive while it computes nothing? Say it for the gathers and for the scatters.
# %% answer-7-11
def exposed(events):
    """Return {"AllGather": microseconds, "ReduceScatter": microseconds} in which no kernel computes."""
    ### BEGIN SOLUTION
    kernels = [event for event in events if event["cat"] == "kernel"]
    computing = [event for event in kernels if "nccl" not in event["name"]]
    waited = {"AllGather": 0.0, "ReduceScatter": 0.0}
    for event in kernels:
        begin = event["ts"]
        end = begin + event["dur"]
        for kind in waited:
            if kind in event["name"]:
                waited[kind] += event["dur"]
                for other in computing:
                    together = min(end, other["ts"] + other["dur"]) - max(begin, other["ts"])
                    waited[kind] -= max(0.0, together)
    return waited
    ### END SOLUTION


# %% check-7-11 points=2
check("7.11", exposed)
