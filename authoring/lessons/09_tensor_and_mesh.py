# %% [markdown]
r"""
# 9 · Tensor parallelism and the mesh

Sharding keeps the model whole while it computes, and a pipeline cuts it between layers. What if a single layer is too large, or its
activations are? Then the layers themselves are split: several ranks work on the same samples, and each has a slice of every matrix. At
the end all ways of splitting are combined on one mesh of ranks.

**After this lesson you can**

- say what the memory of training is made of, activations included, and what makes each part smaller,
- split a pair of linear layers so that one all-reduce per pass is enough,
- lay a mesh of ranks over hosts and explain which way of splitting belongs on which link.

*55 minutes, one of them computing; what is optional takes 15 more.*
"""

# %% imports
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist

from ddp_course import Device, Link, launch, problems, ring_all_reduce, stage4_ring
from ddp_course import stage8_pipeline, stage9_tensor, wire
from ddp_course.lab import claims, on_your_gpus, show, timing
from ddp_exercises import fill_in, task
from manyranks import presets

K = 4  # how many ranks; 2 works as well
cross_entropy = torch.nn.functional.cross_entropy

# %% opening-questions
show.questions(9)

# %% [markdown]
r"""
## What memory is made of

Per parameter, with Adam:

| bytes per parameter | parameters | gradients | optimizer's state | in all |
|---|---|---|---|---|
| float32 | 4 | 4 | 8: two running means | 16 |
| mixed precision, parameters in bfloat16 | 2 | 2 | 12: a float32 copy and two running means | 16 |

Mixed precision does not make this part of the memory smaller. It makes computing faster, and where the parameters are in bfloat16,
half as many bytes travel. (Under autocast, as in lesson 07, as many travel as before.) A second part of the memory grows with the
number of samples: the **activations**, which the forward pass keeps until the backward pass needs them.

## Predict
"""

# %% predict
guess = show.predict(
    "A GPT of 4 layers, width 128, and 16 texts of 64 bytes, float32: what takes the most memory?",
    ["the parameters", "the optimizer's state", "the activations"],
)
guess

# %% [markdown]
r"""
## Run

Autograd tells us which tensors it keeps. We add up their bytes three times: in float32, in bfloat16 by autocast, and with
**activation checkpointing** (Chen et al., 2016). With checkpointing only the inputs of each block are kept, and the backward
pass computes the rest once more, as far as it needs it. (A whole second forward pass would be a third more computing.)
"""


# %% activations
def stored_mb(forward):
    stored = {}

    def keep(tensor):
        memory = tensor.untyped_storage()
        stored[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(nbytes for place, nbytes in stored.items() if place not in own) / 1e6, loss


# %% forward
def forward(recompute):
    x = model.bytes(tokens[:, :-1]) + model.positions.weight
    for block in model.blocks:
        if recompute:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        else:
            x = block(x)
    return cross_entropy(model.head(model.norm(x)).transpose(1, 2), tokens[:, 1:])


def stored(recompute=False, dtype=torch.float32):
    with torch.utils.flop_counter.FlopCounterMode(display=False) as flops:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            megabytes, loss = stored_mb(partial(forward, recompute))
        loss.backward()
    return megabytes, flops.get_total_flops()


model = problems.ByteGPT(4, 128, 64)
tokens = torch.randint(256, (16, 65))
p = 4e-6 * sum(parameter.numel() for parameter in model.parameters())
hows = ({}, {"recompute": True}, {"dtype": torch.bfloat16})
(plain, flops), (few, more), (half, _) = [stored(**how) for how in show.progress(hows)]

# %% memory-figure folded=true
parts = {"parameters": p, "gradients": p, "Adam's state": 2 * p, "activations": plain,
         "activations,\nbfloat16": half, "activations,\ncheckpointed": few}
truth = f"activations {plain:.0f} MB, everything else {4 * p:.0f} MB"
guess.reveal(truth, "the activations", kind="counted")
show.bars(parts, "memory (MB)", f"Activations: {plain / (4 * p):.1f} times all the rest; "
          f"checkpointing leaves {100 * few / plain:.0f} % of them", kind="counted",
          colours=dict.fromkeys([*parts][3:], show.STAGE_COLOURS["9"]))

# %% check-memory folded=true
# NBVAL_CHECK_OUTPUT
assert plain > 4 * p and half < 0.75 * plain and few < 0.25 * plain, parts
assert 1.15 < more / flops < 1.34, more / flops
print("counted: checkpointing keeps less than a quarter of the activations, for a fifth more flops")

# %% claim-24
# NBVAL_CHECK_OUTPUT
claims.decide(
    24, "Mixed precision halves the memory of training.", "counted",
    {"activations are all that counts": half < 0.6 * plain,
     "parameters, gradients and optimizer state count": 2 + 2 + 12 < 0.6 * (4 + 4 + 8)},
    "Per parameter both take 16 bytes: the optimizer needs a float32 copy. Only activations, and what travels, become smaller.",
)

# %% [markdown]
r"""
## Two ways to split a linear layer

A linear layer computes $y = x W^T$. If W is **column-split**, it is cut by its outputs: every rank needs all of x, and computes
some of y. If W is **row-split**, it is cut by its inputs: every rank needs some of x, and computes one of T terms of y, which an
all-reduce adds up. (PyTorch stores W as (outputs, inputs), and "column" and "row" refer to its transpose.) The two fit together, one
after the other: the first leaves y split in just the way in which the second needs its x. Between them there is an activation, such
as ReLU, which works on each element alone.

**Possible because** a matrix product splits by columns and by rows.

The backward pass is the mirror image. Each term gets the same gradient, which is that of y, and the gradient of x is the sum of the
gradients that all ranks compute for it. So each pass needs one all-reduce: the forward pass needs it behind the second layer, and the
backward pass before the first. Two autograd functions do this, `Enter` and `Leave` (*f* and *g* in Megatron-LM):
"""


# %% enter-and-leave
show.source(
    stage9_tensor.Enter,
    stage9_tensor.Leave,
    click="Write task 9.2 first, then open: Enter and Leave",
)

# %% [markdown]
r"""
Which slices does a rank take? Try it on a harder MLP (task 9.1 of [exercise 9](../exercises/09_tensor_and_mesh.ipynb)). Many
language models have one with a gate: two matrices are fused into one, `gate_and_up`, of shape (2H, W), whose first H rows make the
gate; `down` has shape (W, H).

    gate, up = (x @ gate_and_up.T).chunk(2, dim=-1)
    y = (silu(gate) * up) @ down.T

Each of `ranks` ranks runs these two lines with slices of both matrices, and the sum of their y must be the y of the whole. No
rank gets more than one unit more than another.
"""


# %% task-9-1
def my_slices(gate_and_up, down, rank, ranks):
    """Return this rank's slices of both matrices; together the ranks have each element once."""
    raise NotImplementedError("Exercise 9.1: A gated MLP")


show.source(task("9.1", my_slices), click="Write it first, then open: one solution")

# %% [markdown]
r"""
An MLP of two layers, without a gate, takes two lines on T ranks, `hidden` and `ours`. Each rank takes its slices of the same
weights; the result and the gradient of x are compared with those of the whole MLP.
"""


# %% split-mlp
def split_mlp(enter, leave):
    torch.manual_seed(0)
    x = torch.randn(8, 16, dtype=torch.float64)
    up = torch.randn(64, 16, dtype=torch.float64)
    down = torch.randn(16, 64, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    split = x.clone().requires_grad_()
    y = torch.relu(whole @ up.T) @ down.T
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    # Column-split: a rank computes some of the outputs.
    hidden = torch.relu(enter(split, ring_all_reduce) @ up.chunk(ranks)[rank].T)
    # Row-split: it computes one of the terms of all outputs.
    ours = leave(hidden @ down.chunk(ranks, dim=1)[rank].T, ring_all_reduce)
    for output in (y, ours):
        output.square().sum().backward()
    outputs_apart = (y - ours).abs().max()
    gradients_apart = (whole.grad - split.grad).abs().max() / whole.grad.abs().max()
    return max(outputs_apart.item(), gradients_apart.item())


# %% check-mlp
# NBVAL_CHECK_OUTPUT
enter = stage9_tensor.Enter.apply
leave = stage9_tensor.Leave.apply
assert max(launch(split_mlp, enter, leave, world_size=K)) < 1e-12
assert min(launch(split_mlp, lambda x, _: x, leave, world_size=K)) > 0.1
print("split over all ranks, outputs and gradients are those of the whole; without the backward sum they are not")

# %% [markdown]
r"""
Attention splits the same way. Its unit is the *head*: a rank has the queries, keys and values of some heads
(column-split), and the matrix after them is row-split. So a transformer block has two such pairs, and **four all-reduces per
step**: two forward, two backward. Here is an iteration with one block:

![All ranks work on the whole batch, each with a third of the attention heads and of the MLP's units. In the forward pass their outputs are added up after the attention and after the MLP; in the backward pass the gradients of the inputs, before each of them. Each rank updates its own slices; no gradient of a weight is sent](../docs/figures/iteration_09.svg)

`stage9_tensor` finds the pairs in a model and puts its slices in their places. It also handles biases, numbers of heads that T does
not divide, dropout (equal on all ranks of a layer) and clipping, and it can put the whole model together again. Its row-split layer, for example:
"""

# %% source
show.source(stage9_tensor.RowLinear)

# %% [markdown]
r"""
## A mesh

Usually T is small, and there are more ranks. They form a **mesh** of D × T: ranks of a row share the layers and work on the
same samples, ranks of a column hold the same slices and average their gradients, with the ring of lesson 04.

![Four ranks in two rows, hosts as boxes: the two ranks of a host add up activations; ranks with the same slice, one below the other, average gradients](../docs/figures/mesh_2x2.svg)

How does a rank find its neighbours? It lays all ranks out as a grid, row by row, and makes a group of each line along each axis. The
first half of this is where a rank stands:
"""


# %% faded-place-in-grid
def place_in_grid(rank, rows, columns):
    """Return the row and the column of a rank; ranks fill one row after the other."""
    row = ...
    return row, rank % columns


fill_in(place_in_grid, {(0, 2, 4): (0, 0), (5, 2, 4): (1, 1), (3, 4, 1): (3, 0)})

# %% [markdown]
r"""
<details><summary>The line</summary><code>row = rank // columns</code></details>

Task 9.3 asks for the groups.
"""

# %% mesh-source
show.source(stage9_tensor.mesh, click="Write task 9.3 first, then open: the mesh")

# %% [markdown]
r"""
The loop is that of the ring but for the mesh: the average goes over one axis of it, the split over the other.
"""

# %% diff
show.diff(stage4_ring.train, stage9_tensor.train)


# %% same-training
def weights(tensor):
    problem = problems.make("synthetic", parameters=4 * 64**2, width=64, dtype=torch.float64)
    model = problem.model()
    row = dist.get_rank() // tensor
    rows = dist.get_world_size() // tensor
    share = problem.batches(48, 5, rank=row, world_size=rows)
    stage9_tensor.train(model, share, lr=0.1, tensor=tensor)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# %% check-same
# NBVAL_CHECK_OUTPUT
alone = launch(weights, 1, world_size=1)[0]
for tensor in (K, K // 2, 1):
    trained = launch(weights, tensor, world_size=K)
    assert all((ours - alone).abs().max() < 1e-12 for ours in trained), tensor
print("every mesh trains the same weights as one device")

# %% [markdown]
r"""
## What travels, and on which link

DDP sends gradients: 2(K-1)/K p per step, whatever the batch. Tensor parallelism sends activations. None of what it sends can hide,
since the next layer waits for the sum. If the activations between two layers have a bytes, how many does a rank send for a block, in
both passes?
"""


# %% faded-sent-by-a-block
def sent_by_a_block(activation_bytes, ranks):
    """Return the bytes that each of the ranks sends for a block: two all-reduces forward, two backward."""
    all_reduces = 4
    return ...


fill_in(sent_by_a_block, {(1000, 4): 6000.0, (1000, 2): 4000.0, (1000, 1): 0.0})

# %% [markdown]
r"""
<details><summary>The line</summary><code>return all_reduces * 2 * (ranks - 1) / ranks * activation_bytes</code></details>

For a batch of 1,024 bytes of text in a GPT of width 64, a is 262 kB.

Which axis of the mesh belongs inside a host? We take two hosts with two ranks each. Links inside a host are fast, and the link
between the hosts carries 15 Mbit/s. The last axis of a mesh joins neighbouring ranks, which are on one host, so whoever swaps the axes
swaps the links. We try both, and then the same with a pipeline of two ranks in the place of tensor parallelism. Devices are emulated,
and the bytes between hosts are counted.
"""


# %% timed-steps
def training(axes, gpt):
    groups = stage9_tensor.mesh(**axes)
    if "tensor" in axes:
        stage9_tensor.parallelize(gpt, groups["tensor"])
        return gpt, groups, lambda x, y: cross_entropy(gpt(x), y).backward()
    part = stage8_pipeline.split(gpt.layers(), axes["pipeline"])[dist.get_rank(groups["pipeline"])]
    return part, groups, stage8_pipeline.Pipeline(part, group=groups["pipeline"]).step


def steps(axes):
    model, groups, step = training(axes, problems.ByteGPT(2, 64, 64))
    seconds = []
    with wire.observing(lambda event: crossing.append(event)):
        for _ in range(2):  # the first also opens connections
            crossing = []
            with timing.stopwatch() as watch:
                step(tokens[:, :-1], tokens[:, 1:])
                stage4_ring.average_on_ring(stage4_ring.gradients(model), group=groups["data"])
            seconds.append(watch.seconds)
    host = dist.get_rank() * 2 // K
    elsewhere = [e.bytes for e in crossing if e.kind == "send" and e.peer * 2 // K != host]
    return 1000 * min(seconds), sum(elsewhere) / 1e6


# %% timed-figure folded=true
meshes = {"tensor inside,\ndata between": dict(data=K // 2, tensor=2),
          "data inside,\ntensor between": dict(tensor=2, data=K // 2),
          "pipeline inside,\ndata between": dict(data=K // 2, pipeline=2),
          "data inside,\npipeline between": dict(pipeline=2, data=K // 2)}
setting = {"world_size": K, "device": Device("4GFLOP/s"), "link": Link("15Mbit", hosts=2)}
ranks = {name: launch(steps, axes, **setting) for name, axes in show.progress(meshes.items())}
step_ms = {}
cable_ms = {}
colours = {}
for name, found in ranks.items():
    crossed_mb = max(mb for _, mb in found)
    label = f"{name}\n{crossed_mb:.2f} MB on the cable"
    step_ms[label] = max(ms for ms, _ in found)
    cable_ms[label] = 1000 * K / 2 * crossed_mb / 1.875  # 15 Mbit/s are 1.875 MB/s
    stage = "9" if "tensor" in name else "8"
    colours[label] = show.STAGE_COLOURS[stage]
good, bad, *_ = step_ms.values()
title = f"Tensor parallelism between hosts takes {bad / good:.1f} times as long as inside"
show.bars(step_ms, "a step (ms)", title, form="{:.0f}", theory=cable_ms, colours=colours,
          dash="the cable alone", kind="virtual time; MB counted; dashes derived")

# %% check-timed folded=true
# NBVAL_CHECK_OUTPUT
assert K == 2 or bad > 1.2 * good, step_ms
print("the sums of activations belong inside a host")

# %% [markdown]
r"""
Under each bar you read what a rank sends to the other host in a step. The dash is the time that the cable needs for it, for
all ranks of a host. Tensor parallelism between the hosts waits for the cable in every block, twice per pass. (Its bar ends at
the dash all the same: while one pair of ranks computes, the other pair has the cable.) Gradients cross once per step, and
only those of this rank's slices and of the layers that are not split. A pipeline sends least, so it wins on a cable as slow
as this one, and pays with the bubble. That is why the largest models combine all three: **tensor parallelism** inside a host,
pipelines between hosts, and data parallelism around it all. This is how 8 ranks look:

![Eight ranks on four hosts in two rows: the two ranks of a host add up activations; a host passes activations on to the next one of its row; ranks one below the other average gradients](../docs/figures/mesh_2x2x2.svg)

## How far does it reach?

A split pair of layers on b tokens, of width h and inner width 4h, computes 16 b h² flops forward, so T ranks of R flop/s take
16 b h² / (T R) seconds. Its all-reduce sums b h numbers of two bytes over links of W bytes/s:
$2\,\frac{T-1}{T}\cdot 2\,b\,h / W$ seconds. Nothing can hide it, since the next layer needs the sum. It takes less than the
computing while

$$T \le 1 + \frac{4\,h\,W}{R}$$

The batch is not in this formula: a larger batch does not help, but a wider model does. Between hosts with R/W = 8,000 flops
per byte, and for h = 8,192, this T is 5, and then a rank waits for half of its time. Inside a host of H100s, with NVLink, W
is nine times as large. This is why tensor parallelism stays inside a host. Data parallelism, which needs R/W tokens per
replica (lessons 05 and 07), goes across. Together they reach further. The T ranks of a replica compute T times as fast, and
each of them sends only its T-th of the gradients. So a replica of T ranks needs no more tokens than a single device did, and
a batch feeds T times as many devices. Task 13.6 asks for both limits. The next cell assumes that a GPU reaches 0.4 of the
speed that datasheets promise. Before you run it: does a faster GPU allow more ranks to share a layer, or fewer?
"""

# %% reach folded=true
widths = [1024, 2048, 4096, 8192, 16384]
reach = {}
for gpu, colour in {"V100": "#0072B2", "A100": "#009E73", "H100": "#D55E00"}.items():
    sheet = presets.ACCELERATORS[gpu]
    links = {
        "inside": presets.LINKS[sheet.link].bandwidth / 8,
        "between hosts": sheet.network / 8 / 8,  # 8 GPUs share the cards
    }
    for where, bandwidth in links.items():
        largest = [1 + 4 * width * bandwidth / (0.4 * sheet.rate) for width in widths]
        reach[f"{gpu}s {where}"] = widths, largest, colour
inside, between = (reach[f"H100s {where}"][1][3] for where in links)
reach["GPUs of a host"] = widths, [8] * 5, "#767676"
title = f"Width 8,192: T may be {inside:.0f} inside a host of H100s, {between:.0f} between hosts"
picture = show.curves(reach, "width of the model", "most ranks that may share a layer (T)", title,
                      log="xy", points=False, ticks=widths, kind="derived", height=4.4)
for line, look in zip(picture.axes[0].lines[1:6:2], ("--", ":", ":")):
    line.set_linestyle(look)  # V100s are dashed, since the dots of the H100s lie on theirs
picture.axes[0].legend(fontsize=8)
picture

# %% [markdown]
r"""
It allows fewer, because the speed of GPUs has grown more than that of the links inside their hosts. All eight GPUs of a host
may still share a layer, except in narrow models. Between hosts 5 to 7 may, at a width of 8,192. (Between hosts the lines of
V100s and H100s lie on one another, because the network of a host has grown as much as the speed of its GPUs.)

What divides memory, and by how much? Parameters, gradients and state are divided by T and by the number of pipeline stages, and also
by D if they are sharded. Activations are divided by D, since each row has a part of the samples, and inside a pair of layers also by T.
The inputs of the blocks are still whole on every rank. *Sequence parallelism* (Korthikanti et al., 2022; task 9.5) splits them too. One
activation is larger than all others: the **logits**, 128,000 or more for each token. They are never gathered. If the last layer is
split by columns, the loss needs only three numbers of each token from all ranks (task 9.6).

## A sequence on all ranks: ring attention (optional)

One text of a million tokens is a batch of one. There are no samples to share out, and the activations of this one text are too large
for a device. So the *sequence* is cut, and each rank has the tokens of one stretch. All layers but one work on each token by itself.
**Attention** is the exception: each query needs the keys and values of all tokens before it. These go around the ring of lesson 04, a
stretch at a time, while the queries stay (Liu et al., *Ring Attention*, 2023).

A softmax needs the sum over all keys, and no rank ever has them all. But a sum can be corrected. Each rank keeps the highest score so
far. When a higher one comes, it shrinks what it has summed up by the ratio of the two. This is the **online softmax**, on which
FlashAttention is built, too. What goes to the right in the forward pass has a gradient that comes back to the left:
"""


# %% pass-on
class PassOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, blocks):
        _, _, left, right = wire.neighbours()
        received = torch.empty_like(blocks)
        wire.exchange(blocks, right, received, left)
        return received

    @staticmethod
    def backward(ctx, gradient):
        _, _, left, right = wire.neighbours()
        received = torch.empty_like(gradient)
        wire.exchange(gradient.contiguous(), left, received, right)
        return received


# %% ring-attention
# Each is (tokens, width), and belongs to this rank's tokens.
def ring_attention(queries, keys, values):
    rank, size, _, _ = wire.neighbours()
    places = torch.arange(len(queries))
    blocks = torch.stack([keys, values])
    highest = torch.full((len(queries), 1), -torch.inf)
    total = output = 0.0
    for turn in range(size):
        ahead = (rank - turn) % size - rank  # these keys are of the rank so many further on
        scores = queries @ blocks[0].T / queries.shape[1] ** 0.5
        scores = scores.masked_fill(places + ahead * len(places) > places[:, None], -torch.inf)
        top = torch.maximum(highest, scores.amax(1, keepdim=True)).detach()
        weights = (scores - top).exp()
        shrink = (highest - top).exp()
        total = total * shrink + weights.sum(1, keepdim=True)
        output = output * shrink + weights @ blocks[1]
        highest = top
        if turn < size - 1:
            blocks = PassOn.apply(blocks)
    return output / total


# %% [markdown]
r"""
Its first turn is with its own keys, so that each query has a finite score from the beginning. Before you run it: how many bytes
does a rank send in both passes, if the keys and values of the whole sequence are k bytes?
"""


# %% attend folded=true
def attend(size):
    torch.manual_seed(0)
    whole = torch.randn(3, 64, 16, dtype=torch.float64)
    rank = dist.get_rank()
    own = whole.chunk(size, 1)[rank].clone().requires_grad_()
    with wire.counting() as traffic:
        result = ring_attention(*own)
        result.square().sum().backward()
    whole.requires_grad_()
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    pairs = (result, expected.chunk(size)[rank]), (own.grad, whole.grad.chunk(size, 1)[rank])
    return max((a - b).abs().max().item() for a, b in pairs), traffic.bytes_sent / whole[1:].nbytes


# %% check-ring-attention
# NBVAL_CHECK_OUTPUT
apart, shares = zip(*launch(attend, K, world_size=K))
assert max(apart) < 1e-13, apart
assert set(shares) == {2 * (K - 1) / K}, shares
print("ring attention has torch's outputs and gradients; each rank sends 2 (K-1)/K of the keys and values in both passes")

# %% [markdown]
r"""
The scores of all tokens with all others are never in one place: a rank has a K-th of a K-th of them at a time. What a rank sends grows
with the tokens of a stretch, and what it computes grows with their square. So in long sequences the messages hide behind the products.
Two things are missing for real use. Our autograd keeps every stretch that came by, while real programs let it come by once more in the
backward pass. And with this mask rank 0 has work in one turn only, and the last rank has work in all turns. Real programs therefore give
each rank one stretch from the front and one from the back.

## Experts and the all-to-all (optional)

A **mixture of experts** makes a layer larger without more computing. There are many MLPs, the *experts*, and a small *router* sends each
token to one of them (Shazeer et al., 2017; Fedus et al., *Switch Transformers*, 2021). If each rank has one expert, tokens must travel to
the rank of their expert, and the results must come back. Each rank has something else for each other rank, which is the **all-to-all**
of lesson 04's table. The gradient of a token that has travelled travels back, by the same exchange the other way round:
"""


# %% all-to-all
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, leaving, coming):  # how many go to, and come from, each rank
        ctx.way_back = coming, leaving
        rank, size, _, _ = wire.neighbours()
        outgoing = tokens.split(leaving)
        incoming = tokens.new_empty(sum(coming), tokens.shape[1]).split(coming)
        incoming[rank].copy_(outgoing[rank])
        for turn in range(1, size):
            to = (rank + turn) % size
            source = (rank - turn) % size
            wire.exchange(outgoing[to], to, incoming[source], source)
        return torch.cat(incoming)

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient.contiguous(), *ctx.way_back), None, None


# %% experts
def through_experts(tokens, router, expert):
    weight, choice = (tokens @ router).softmax(1).max(1)
    order = choice.argsort(stable=True)
    of_ranks = [None] * K
    dist.all_gather_object(of_ranks, choice.bincount(minlength=K).tolist())
    leaving = of_ranks[dist.get_rank()]
    coming = [counts[dist.get_rank()] for counts in of_ranks]
    arrived = AllToAll.apply(tokens[order], leaving, coming)
    returned = AllToAll.apply(expert(arrived), coming, leaving)
    in_place = torch.zeros_like(tokens).index_copy(0, order, returned)
    return weight[:, None] * in_place, leaving


# %% [markdown]
r"""
Before you run it: how often does a token cross a cable in a step, if its expert is on another rank?
"""


# %% with-experts folded=true
def with_experts(size):
    torch.manual_seed(0)
    router = torch.randn(16, size, dtype=torch.float64)
    experts = torch.randn(size, 16, 16, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(size, 64, 16, dtype=torch.float64, requires_grad=True)
    rank = dist.get_rank()
    mine = experts[rank].detach().requires_grad_()
    own = tokens[rank].detach().requires_grad_()
    with wire.counting() as traffic:
        output, leaving = through_experts(own, router, lambda x: torch.relu(x @ mine))
        output.square().sum().backward()
    weight, choice = (tokens @ router).softmax(2).max(2)
    hidden = torch.relu((tokens[..., None, :] @ experts[choice]).squeeze(2))
    expected = weight[..., None] * hidden
    expected.square().sum().backward()
    pairs = (output, expected[rank]), (own.grad, tokens.grad[rank]), (mine.grad, experts.grad[rank])
    apart = max((a - b).abs().max().item() for a, b in pairs)
    return apart, traffic.bytes_sent, 64 - leaving[rank]


# %% check-experts folded=true
# NBVAL_CHECK_OUTPUT
apart, sent, travelled = zip(*launch(with_experts, K, world_size=K))
assert max(apart) < 1e-10, apart
assert sum(sent) == 4 * sum(travelled) * 16 * 8, (sent, travelled)
print("each token that has its expert elsewhere crosses four times: the bytes counted")

# %% [markdown]
r"""
Outputs and gradients are those of one device with all experts. A token crosses four times: it goes there and back, and so
does its gradient. If the router spreads b tokens of width h evenly, each rank sends $4\,\frac{K-1}{K}\,b\,h$ numbers in a
step, however many parameters the experts have. Three things are different from all earlier lessons. The ranks' shares depend
on the data, so a rank whose expert is popular keeps all others waiting; real routers are trained to spread tokens, or drop
some. The router's gradients are averaged over all ranks, but an expert's are not: it has seen its tokens from all ranks
already, and DDP must leave it out. And K more ranks can hold K more experts, which is why the largest models of today are
mixtures.

## A loss over everybody's samples (optional)

A contrastive loss compares each sample with all others of the batch (CLIP: Radford et al., 2021). So under data parallel
training the ranks gather each other's features. `dist.all_gather` knows nothing of autograd, and people put each rank's own
features, which have a graph, back in their place. It trains, and the loss is that of one device. Before you run it: is the
gradient that of one device, too, on two ranks?
"""


# %% contrastive
# NBVAL_CHECK_OUTPUT
def gathered(features):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.detach())
    parts[dist.get_rank()] = features  # these have a graph
    return torch.cat(parts)


def share_of_gradient(size):
    torch.manual_seed(0)
    views = torch.randn(2, 16, 8, dtype=torch.float64)
    weight = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    gradients = []
    for gather, pair in (torch.clone, views), (gathered, views.chunk(size, 1)[dist.get_rank()]):
        left, right = (gather(torch.nn.functional.normalize(view @ weight, dim=1)) for view in pair)
        loss = cross_entropy(left @ right.T / 0.1, torch.arange(16))
        gradients += torch.autograd.grad(loss, weight)
    whole, mine = gradients
    ring_all_reduce(mine)
    return (mine / size / whole).mean().item()  # as DDP averages


for size in (2, 4):
    print(f"{size} ranks: {launch(share_of_gradient, size, world_size=size)[0]:.3f} of the gradient")

# %% [markdown]
r"""
Each rank's gradient goes through its own features only. Their *sum* is the gradient of the whole batch, and DDP takes the
mean. Nothing warns: SGD trains at a K-th of its learning rate. Adam divides by the size of the gradients and hardly notices;
only its `weight_decay`, which is added to the gradient, is K times too strong (AdamW's is not). Multiply the loss by K, or
gather with a collective that has a backward pass, as `PassOn` and `AllToAll` above have.

## On your GPUs

Split layers run on the devices of this machine, in real time. Every block waits for four all-reduces, which nothing hides, so
what they cost depends on what joins the GPUs. Without a GPU the figure shows what one NVIDIA H200 needed, which two ranks
shared. With a GPU the figure has each rank's timeline, too: *compute* is all time but the waiting for others. It includes
Python's time between two operations, which the lanes leave white. (The last thin *communication* is the average over all
ranks with the same slices. Here only one rank has them, so nothing is sent.)
"""

# %% on-your-gpus
yours = on_your_gpus("9")
assert yours.max_abs_diff < 1e-4, "the weights are not one device's"
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

`torch.distributed.tensor.parallel.parallelize_module` takes a plan, which says what layer is split in which way, over one axis of a
`DeviceMesh`. Here it splits the MLP of a block, beside our class, with the same weights and the same inputs:
"""


# %% torchs-own folded=true
def torchs_own():
    parallel = import_module("torch.distributed.tensor.parallel")
    shape = (dist.get_world_size() // 2, 2)
    names = ("data", "tensor")
    devices = torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    ours, theirs = (problems.TransformerBlock(64, 2, 0.0).mlp.double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(theirs, devices["tensor"], plan)
    stage9_tensor.parallelize(ours, devices.get_group("tensor"))
    x = torch.randn(8, 64, dtype=torch.float64)
    for mlp in (ours, theirs):
        mlp(x).square().sum().backward()
    furthest = 0.0
    for our, their in zip(ours.parameters(), theirs.parameters()):
        apart = our.grad.as_subclass(torch.Tensor) - their.grad.to_local()
        furthest = max(furthest, apart.abs().max().item())
    return furthest


# %% check-torch
# NBVAL_CHECK_OUTPUT
assert max(launch(torchs_own, world_size=K)) < 1e-9
print("parallelize_module on a DeviceMesh makes the same gradients, slice by slice")

# %% [markdown]
r"""
In PyTorch's source `torch/distributed/tensor/parallel/style.py` has `ColwiseParallel` and `RowwiseParallel`. Their tensors are
*DTensors*, which know their placement on the mesh (`Shard(0)`, `Shard(1)`, `Replicate()`, `Partial()`) and insert the collectives
themselves. `torch/distributed/device_mesh.py` makes the groups. The idea comes from Megatron-LM (Shoeybi et al., 2019). The mesh of three
axes comes from Narayanan et al. (2021), where T is at most the number of GPUs in a host.

## Check yourself

**1.** Why is the first layer of an MLP split by columns and the second by rows, and not the other way round?
<details><summary>Answer</summary>
A row-split first layer would have to add up its terms before the activation, since ReLU of a sum is not the sum of
ReLUs. Then a column-split second layer leaves y in pieces, which have to be gathered. Two collectives per pass instead of one.
</details>

**2.** You double the batch. What happens to the traffic of data parallel training, and of tensor parallelism?
<details><summary>Answer</summary>
Gradients are as many bytes as before. Activations are twice as many, and so are the bytes of tensor parallelism.
</details>

**3.** LayerNorms are whole on every rank of a row. Why do their gradients need no sum over the row?
<details><summary>Answer</summary>
All ranks of the row compute them from the same numbers: the activations after <code>Leave</code> are equal, and the
gradients before <code>Enter</code> are summed up already. Averaging over the wrong axis is the classic mistake here.
</details>

## In three lines

1. Beside 16 bytes per parameter there are activations. Checkpointing trades most of them for a fifth more flops (counted).
2. A column-split layer and then a row-split one need one all-reduce per pass, and give the numbers of one device.
3. Sums of activations belong on the fastest links, while gradients may cross slow ones. This orders the mesh.

**Exercise:** [9](../exercises/09_tensor_and_mesh.ipynb), `exercises/09_tensor_and_mesh.ipynb`. **Next:**
[10, batch size and learning rate](10_batch_size_and_learning_rate.ipynb).

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
