# %% [markdown]
# # Exercise 9: tensor parallelism and the mesh
#
# You cut a pair of layers, write the two functions around them and the mesh, plan a machine with two kinds of links,
# split the sequence between layers, write a loss whose logits no rank ever has all of, and explain a figure.
#
# Stuck? `hint("9.1")` gives the first of three hints for a task, and
# `hint("9.1", 2)` the next.
# %% imports
import torch

from ddp_exercises import check, hint


# %% [markdown]
# ## 9.1 A gated MLP
#
# *10 minutes · medium*
#
# Many language models have an MLP with a gate. Two matrices are fused into one, `gate_and_up`, of shape (2H, W): its first H
# rows make the gate, the other H rows what passes through it. Then comes `down`, of shape (W, H):
#
#     gate, up = (x @ gate_and_up.T).chunk(2, dim=-1)
#     y = (silu(gate) * up) @ down.T
#
# Each of `ranks` ranks runs these same two lines with slices of both matrices. The sum of their y must be the y of the whole,
# with no other message in between. H may not be a multiple of `ranks`: no rank gets more than one unit more than another.
# %% answer-9-1
def my_slices(gate_and_up, down, rank, ranks):
    """Return this rank's slices of both matrices; together the ranks have each element once."""
    ### BEGIN SOLUTION
    gate, up = gate_and_up.chunk(2)
    mine = torch.arange(len(gate)).tensor_split(ranks)[rank]
    return torch.cat([gate[mine], up[mine]]), down[:, mine]
    ### END SOLUTION


# %% check-9-1 points=3
check("9.1", my_slices)


# %% [markdown]
# ## 9.2 Into and out of the split layers
#
# *15 minutes · medium*
#
# `all_reduce(tensor)` adds a tensor up over the ranks, in place, and returns it. Autograd does not see it: it knows nothing of
# other ranks. Write the two autograd functions that make a split pair of layers right in both passes. Both are called as
# `Enter.apply(x, all_reduce)`. `Enter` stands before the column-split layer, `Leave` after the row-split one. One
# all-reduce in each pass is enough. The tensor that comes in must not change: somebody else may use it too.
# %% answer-9-2
class Enter(torch.autograd.Function):
    """Before a column-split layer."""

    @staticmethod
    def forward(ctx, x, all_reduce):
        ### BEGIN SOLUTION
        ctx.all_reduce = all_reduce
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return ctx.all_reduce(gradient.clone()), None
        ### END SOLUTION


class Leave(torch.autograd.Function):
    """After a row-split layer."""

    @staticmethod
    def forward(ctx, term, all_reduce):
        ### BEGIN SOLUTION
        return all_reduce(term.clone())
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return gradient, None
        ### END SOLUTION


# %% check-9-2 points=4
check("9.2", Enter, Leave)


# %% [markdown]
# ## 9.3 The mesh
#
# *20 minutes · medium*
#
# `sizes` says how large a mesh is along each axis, such as `{"data": 2, "pipeline": 2, "tensor": 4}`. Another mesh may
# have fewer axes, or others. Ranks are numbered along the last axis first, then along the axis before it, and so on: so the ranks of a
# line along the last axis are neighbours, inside a host.
# Two ranks are in one group along an axis if they differ in their place on this axis alone: on the mesh above rank 5 belongs to 4, 5, 6, 7
# along `tensor`, to 1, 5 along `pipeline` and to 5, 13 along `data`. Each rank calls your function with its own number.
#
# `new_group(ranks)` makes a group of these ranks and returns it, as `dist.new_group` does. Its rules are those of torch: *every*
# rank calls it for *every* group, also for those that it is not in, and all ranks in the same order. If they do not, they wait for
# ever, or hold groups of which the other members know nothing. Give it the ranks in order. An axis of size 1 has groups, too.
# %% answer-9-3
def make_mesh(rank, sizes, new_group):
    """Return {axis: the group along it that `rank` belongs to}."""
    ### BEGIN SOLUTION
    grid = torch.arange(torch.Size(sizes.values()).numel()).view(*sizes.values())
    groups = {}
    for position, (axis, size) in enumerate(sizes.items()):
        for line in grid.movedim(position, -1).reshape(-1, size).tolist():
            group = new_group(line)
            if rank in line:
                groups[axis] = group
    return groups
    ### END SOLUTION


# %% check-9-3 points=4
check("9.3", make_mesh)


# %% [markdown]
# ## 9.4 Plan a machine
#
# *20 minutes · medium*
#
# `job` is a dict that describes a machine and a model. Find D, T and P, with D · T · P = `gpus`, whose step takes the fewest
# seconds of all that fit: tensor parallelism between hosts is allowed, but slow.
#
# | | |
# |---|---|
# | memory of a GPU | 16 `parameters` / (T P) + `activations` / (D T), at most `memory` bytes |
# | computing | `compute` / (D T P), and the bubble: (1 + (P-1)/`microbatches`) times as long |
# | all-reduces of activations | 2(T-1)/T · `summed` / (D P) bytes, over links of `fast` bytes per second if T ≤ `per_host`, else `slow` |
# | all-reduce of gradients | 2(D-1)/D · 4 `parameters` / (T P) bytes, over `slow` links unless all GPUs are in one host |
#
# `activations` are bytes that a step keeps and `summed` bytes that it adds up, of the whole batch and the whole model. The
# pipeline's own messages are small enough to be left out. The score is the step's time: the shortest that fits gets all points.
# %% answer-9-4
def plan(job):
    """Return (D, T, P), the sizes of the axes data, tensor and pipeline."""
    ### BEGIN SOLUTION
    fitting = []
    for tensor in range(1, job["gpus"] + 1):
        for pipeline in range(1, job["gpus"] + 1):
            data, rest = divmod(job["gpus"], tensor * pipeline)
            if rest or not data:
                continue
            share = job["parameters"] / (tensor * pipeline)
            if 16 * share + job["activations"] / (data * tensor) > job["memory"]:
                continue
            seconds = job["compute"] / job["gpus"] * (1 + (pipeline - 1) / job["microbatches"])
            link = job["fast"] if tensor <= job["per_host"] else job["slow"]
            seconds += 2 * (tensor - 1) / tensor * job["summed"] / (data * pipeline) / link
            link = job["fast"] if job["gpus"] <= job["per_host"] else job["slow"]
            seconds += 2 * (data - 1) / data * 4 * share / link
            fitting.append((seconds, (data, tensor, pipeline)))
    return min(fitting)[1]
    ### END SOLUTION


# %% check-9-4 points=4
check("9.4", plan)


# %% [markdown]
# ## 9.5 Sequence parallelism
#
# *15 minutes · medium*
#
# With `Enter` and `Leave` every rank has the whole activation before and after a split layer. So between split layers, in
# norms and dropout, all ranks compute the same. An all-reduce is a reduce-scatter and an allgather; so let the one end a
# split layer, and the other begin the next. In between each rank has its own T-th of the *sequence* only: the bytes are the
# same, the activations take 1/T of the memory.
#
# `allgather(tensor)` returns the ranks' tensors end to end along the first dimension. `reduce_scatter(tensor)` returns this
# rank's T-th, along the first dimension, of the sum over the ranks. Autograd knows neither. Write the two functions:
# `Gather` stands before a column-split layer, `Scatter` after a row-split one. Each `forward` and each `backward` needs
# just one of the two calls.
# %% answer-9-5
class Gather(torch.autograd.Function):
    """From this rank's part of the sequence to the whole of it."""

    @staticmethod
    def forward(ctx, x, allgather, reduce_scatter):
        ### BEGIN SOLUTION
        ctx.reduce_scatter = reduce_scatter
        return allgather(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return ctx.reduce_scatter(gradient), None, None
        ### END SOLUTION


class Scatter(torch.autograd.Function):
    """From a term of the sum for the whole sequence to this rank's part of the sum."""

    @staticmethod
    def forward(ctx, term, allgather, reduce_scatter):
        ### BEGIN SOLUTION
        ctx.allgather = allgather
        return reduce_scatter(term)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        return ctx.allgather(gradient), None, None
        ### END SOLUTION


# %% check-9-5 points=3
check("9.5", Gather, Scatter)


# %% [markdown]
# ## 9.6 A loss without the logits
#
# *30 minutes · hard*
#
# A language model's last layer has an output for each word of the vocabulary, 128,000 or more. Split by columns, each rank has the
# logits of some words, and gathering them would send, and keep, the largest activation of the model. The cross entropy needs less: of a
# token with logits z and target y it is
#
#     log(sum over j of exp(z_j - m)) + m - z_y
#
# with any m; if m is the largest logit, no exponential overflows. The gradient of z_j is exp(z_j - m) / sum, and 1 less for j = y.
#
# `logits`, of shape (tokens, columns), are those of this rank's words: column 0 is of word `first`, column 1 of the next one. `targets`,
# equal on all ranks, are words of the whole vocabulary, or -100 for a token that does not count: no loss, no gradient, not a part of the
# mean. At least one token counts.
# `all_max(tensor)` and `all_sum(tensor)` return the largest and the sum of the ranks' tensors, element by element, so these have the
# same shape on all ranks; autograd sees neither.
# The result is torch's `cross_entropy` of the whole logits, on every rank, and the gradient of this rank's columns. Three numbers per token
# have to travel, however large the vocabulary is.
# %% answer-9-6
class SplitLoss(torch.autograd.Function):
    """The mean cross entropy, from logits of which each rank has some columns."""

    @staticmethod
    def forward(ctx, logits, targets, first, all_max, all_sum):
        ### BEGIN SOLUTION
        highest = all_max(logits.amax(1))
        weights = (logits - highest[:, None]).exp()
        total = all_sum(weights.sum(1))
        columns = targets - first
        # These targets are among its columns.
        rows = ((columns >= 0) & (columns < logits.shape[1])).nonzero().flatten()
        at_target = torch.zeros_like(highest)
        at_target[rows] = logits[rows, columns[rows]]
        losses = total.log() + highest - all_sum(at_target)
        gradient = weights / total[:, None]
        gradient[rows, columns[rows]] -= 1
        counts = targets != -100
        gradient[~counts] = 0
        ctx.save_for_backward(gradient / counts.sum())
        return losses[counts].mean()
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        ### BEGIN SOLUTION
        (of_logits,) = ctx.saved_tensors
        return gradient * of_logits, None, None, None, None
        ### END SOLUTION


# %% check-9-6 points=5
check("9.6", SplitLoss)


# %% [markdown]
# ## 9.7 Explain: four meshes on two hosts
#
# *10 minutes · medium*
#
# Look at the figure of the section "What travels, and on which link" in lesson 09: the time of a step on four meshes, with what
# crosses between the hosts.
# Explain it in two to five sentences of your own, so that somebody who has not read the lesson understands it. Name numbers of the figure.
# Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why tensor parallelism between hosts is the slowest |
# | B | what the dash means, and why a bar ends at it or above it |
# | C | why the pipeline sends least, and what it pays for that |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-9-7
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "Between hosts every block waits four times for a sum of activations on the cable of 15 "
        "Mbit/s, and nothing hides it, so this bar is the longest. The dash is the time that the "
        "cable alone needs for the bytes of both ranks of a host, and a bar above it also computes or "
        "waits. A pipeline sends one activation forward and one gradient back per micro-batch, but "
        "its ranks idle in the bubble."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-9-7 points=2
check("9.7", explain_figure)
