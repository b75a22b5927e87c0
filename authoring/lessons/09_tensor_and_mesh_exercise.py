# %% [markdown]
# # Exercise 9: tensor parallelism and the mesh
#
# Four tasks: how to cut a pair of layers, the two functions around them, a mesh with a fault, and a plan
# for a machine with two kinds of links. The first three need a few lines each; the last is a search with a score.
#
# Stuck? `hint("9.1")` gives the first of three hints for a task, and
# `hint("9.1", 2)` the next.
# %% imports
import torch

from ddp_course.checking import check, hint


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
# ## 9.3 A mesh to mend
#
# *15 minutes · medium*
#
# Somebody trains on a mesh of three axes. Rank numbers count along `tensor` first, then along `pipeline`, then along `data`, so
# that the ranks that share a layer are neighbours, inside a host. Activations are added up over the group "tensor", gradients
# are averaged over the group "data". With `data=2, pipeline=1, tensor=2` there is no error and the loss falls, but not as it
# does on one device; and at the end ranks 0 and 2, which should hold the same slices, have different weights.
#
#     1  def groups(rank, data, pipeline, tensor):
#     2      t = rank % tensor
#     3      p = rank // tensor % pipeline
#     4      d = rank // (tensor * pipeline)
#     5      first_of_row = (d * pipeline + p) * tensor
#     6      return {
#     7          "tensor": [first_of_row + i for i in range(tensor)],
#     8          "pipeline": [(d * pipeline + i) * tensor + t for i in range(pipeline)],
#     9          "data": [(d * pipeline + p) * tensor + i for i in range(data)],
#     10     }
#
# Which line is wrong? Mend it: the ranks of each group in order.
# %% answer-9-3
def the_bug():
    """Return the number of the line that is wrong."""
    ### BEGIN SOLUTION
    return 9
    ### END SOLUTION


def mended_groups(rank, data, pipeline, tensor):
    """Return {"tensor": ranks, "pipeline": ranks, "data": ranks}: those of each axis that `rank` belongs to."""
    ### BEGIN SOLUTION
    t = rank % tensor
    p = rank // tensor % pipeline
    d = rank // (tensor * pipeline)
    return {
        "tensor": [(d * pipeline + p) * tensor + i for i in range(tensor)],
        "pipeline": [(d * pipeline + i) * tensor + t for i in range(pipeline)],
        "data": [(i * pipeline + p) * tensor + t for i in range(data)],
    }
    ### END SOLUTION


# %% check-9-3 points=3
check("9.3", the_bug, mended_groups)


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
# *20 minutes · hard*
#
# With `Enter` and `Leave` every rank of a split layer has the whole activation before and after it, though between split layers,
# in norms and dropout, all of them compute the same. An all-reduce is a reduce-scatter and an allgather; so let the one end a
# split layer, and the other begin the next. In between each rank has its own T-th of the *sequence* only: the bytes are the
# same, the activations take 1/T of the memory.
#
# `allgather(tensor)` returns the ranks' tensors end to end along the first dimension. `reduce_scatter(tensor)` returns this
# rank's T-th, along the first dimension, of the sum over the ranks. Autograd knows neither. Write the two functions:
# `Gather` stands before a column-split layer, `Scatter` after a row-split one. One of the two calls in each pass is enough.
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
