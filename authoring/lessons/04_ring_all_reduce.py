# %% [markdown]
r"""
# 4 · Ring all-reduce

The server's link was the bottleneck, and all other links were idle most of the time. So we take the server away. We put
the ranks in a circle, and every rank sends to the right and receives from the left, all at the same time. After this
lesson you can average large gradients in a time that hardly depends on the number of ranks.

An operation after which every rank has the sum over all ranks is an **all-reduce**.

**After this lesson you can**

- tell the ring that passes whole gradients around from the one that deserves its name,
- say after each step which rank holds which sum,
- count the bytes, measure the time, and say when the ring is *not* the best choice.

*50 minutes, one of them computing.*
"""

# %% imports
import time

import torch
import torch.distributed as dist

from ddp_course import Link, average_on_server, collectives, every_order, launch
from ddp_course import problems, ring_all_reduce, ring_backend, stage1_single, stage3_paramserver
from ddp_course import stage4_ring, whole_gradient_ring, wire
from ddp_course.lab import claims, compare, on_your_gpus, show, timing
from ddp_exercises import fill_in, task

K = 4  # how many ranks; 2 works as well

# %% opening-questions
show.questions(4)

# %% [markdown]
r"""
![Four ranks on a circle, an arrow from each to the next: four links, all busy at the same time](../docs/figures/ring.svg)

## First try: pass on whole gradients

Each rank keeps a running sum. In each of K-1 rounds it passes on what it received last, and adds what comes in to its sum.
The picture shows which ranks' gradients each rank has added up after the first round. The arrows are the messages of the
next round.

![Four ranks, each with its own gradient and that of its left neighbour added up; arrows to the right are the next messages, and rank 3 sends to rank 0](../docs/figures/ring_whole.svg)
"""

# %% [markdown]
r"""
Write it before you open the next line: a function that takes a tensor and makes it the sum, in place, in a new cell, which the
button + above the lesson makes. `wire.neighbours()` returns this rank, K, and the ranks to the left and to the right;
`wire.exchange(outgoing, right, incoming, left)` sends one tensor while it receives another. A copy, an empty tensor and a loop
of three lines are enough. What must leave in the first round, and what in all others? To try it, put its name in the place of
`ring_all_reduce` in the first cell of the section *Run*.
"""

# %% source-whole
show.source(whole_gradient_ring, click="Write it first, then open: the ring of whole gradients")

# %% [markdown]
r"""
No rank is a bottleneck any more. Each rank sends p bytes K-1 times: $T = (K-1)\,p/b$. This is half of the server's time, but
it still grows with K.

## Second try: chunks

Cut the gradient into K **chunks**. Then all ranks can send at the same time, each a different chunk, and no rank has to send
everything.

1. **Reduce-scatter** takes K-1 steps. In each step a rank passes a chunk on, and the receiver adds its own part. At the end
   each rank holds one chunk that is finished: it is the sum over all ranks. (Many articles write scatter-reduce.)
2. **Allgather** takes K-1 steps. The finished chunks are passed on until every rank has all of them.

## Predict
"""

# %% predict
guess = show.predict(
    "4 ranks, gradients of p bytes, the ring of chunks: how much does each rank send in all?",
    ["0.5 p", "1 p", "1.5 p", "3 p"],
)
guess

# %% [markdown]
r"""
## Step through it

Move the slider. A stripe is one rank's contribution. A chunk with all stripes and a black frame is finished. Watch
which chunk each rank sends (the arrows), and where the finished chunks are after K-1 steps.
"""

# %% stepper
show.widgets.ring_stepper(K)

# %% [markdown]
r"""
This is the moment between the two phases: every rank has finished exactly one chunk. Rank r owns chunk r+1, not chunk r, and
the last rank owns chunk 0. (The arrow that leaves on the right comes in on the left.) Many homemade rings get this index wrong.
"""

# %% half-way
show.sketches.ring_step(K, step=K - 1)

# %% [markdown]
r"""
Now the code, in which `wire.exchange` sends to the right while it receives from the left. Tasks 4.1 to 4.4 of
[exercise 4](../exercises/04_ring_all_reduce.ipynb) ask you to write it, and you learn more if you write it before you look. Here is
the first task. In step 0 of reduce-scatter, rank r sends chunk r to its right neighbour. In every later step it passes on the
chunk that has just come in from the left.
"""

# %% task-4-1
def chunk_to_send(rank, step, world_size):
    """Return the index of the chunk that `rank` sends in `step` (0 to world_size - 2) of reduce-scatter."""
    raise NotImplementedError("Exercise 4.1: Which chunk to send")


show.source(task("4.1", chunk_to_send), click="Write it first, then open: one solution")

# %% [markdown]
r"""
The other side of each message is half written. Put code in the place of the three dots.
"""


# %% faded-chunk-that-comes
def chunk_that_comes(rank, step, world_size):
    """Return the number of the chunk that comes in from the left neighbour in this step of reduce-scatter."""
    left = (rank - 1) % world_size
    return ...


fill_in(chunk_that_comes, {(2, 0, 4): 1, (0, 0, 4): 3, (1, 2, 4): 2})

# %% [markdown]
r"""
<details><summary>The line</summary><code>return (left - step) % world_size</code></details>

The chunk that comes in is the one that the left neighbour sends. Now the whole ring:
"""

# %% source-ring
show.source(ring_all_reduce, stage4_ring.reduce_scatter, stage4_ring.allgather,
            click="Open after tasks 4.1 to 4.4: the ring")

# %% [markdown]
r"""
## Run

Does the ring add up correctly? Every rank brings different numbers, in a tensor whose length K does not divide. The result is
compared with torch's own all-reduce, on every rank. The numbers are integers, so that no rounding can hide a mistake.
"""


# %% correct
def same_as_torch():
    mine = torch.arange(1001.0) * (dist.get_rank() + 1)
    theirs = mine.clone()
    ring_all_reduce(mine)
    dist.all_reduce(theirs)
    return torch.equal(mine, theirs)


agree = launch(same_as_torch, world_size=K)

# %% check-correct
# NBVAL_CHECK_OUTPUT
assert all(agree), agree
print("the ring's sums are torch's sums, on every rank")

# %% [markdown]
r"""
## Right today, and in every order?

Here is a ring whose author was in a hurry: it sends finished chunks around, and no rank waits until its chunks have left. On
your machine this does no harm, because the chunks have left long before the next backward pass writes into the gradient. Would
it do harm on a network that is slow, or busy? One run tells: `every_order` holds all messages back for as long as they may
travel, and looks at every operation that touches their memory meanwhile. (The next cell has the loop of task 4.3 in it, so write
yours first.)
"""


# %% hasty-ring
def hasty_ring(gradient):
    rank, size, left, right = wire.neighbours()
    chunks = gradient.tensor_split(size)
    stage4_ring.reduce_scatter(chunks)
    leaving = []
    for step in range(size - 1):
        leaving.append(wire.isend(chunks[(rank + 1 - step) % size], right))
        wire.recv(chunks[(rank - step) % size], left)
    total = gradient.clone()
    time.sleep(0.05)  # the next forward pass
    gradient.zero_()  # the next backward pass
    return total


def sums(ring):
    return ring(torch.arange(1001.0) * (dist.get_rank() + 1))


hasty = launch(sums, hasty_ring)
print("the same sums here:", all(map(torch.equal, hasty, launch(sums, ring_all_reduce))))
show.verdict(every_order(sums, hasty_ring))
print(every_order(sums, ring_all_reduce))

# %% [markdown]
r"""
The drawing shows three ranks, each with its last six messages. A bar begins when its message begins, and ends where the rank
waits for it; green messages are received, blue ones are sent. A hatched bar is a message for which nobody has waited. The cross is
the moment at which rank 0 touches this message's memory, and both lines of code are printed below. (The other ranks would touch
theirs, too; only the first find is shown. A sleep takes no time in this drawing.) If the ring waits for what is leaving, as
`wire.exchange` does, it is right in every order. The checks of exercise 4 try your ring in the same way.
[EVERY_ORDER.md](../docs/EVERY_ORDER.md) says why one run is enough, and when it is not.

## Count

In each of its 2(K-1) steps a rank sends one chunk of p/K bytes:

$$\text{sent} = 2\,\frac{K-1}{K}\,p \qquad T = 2\,\frac{K-1}{K}\,\frac{p}{b}\;<\;2\,\frac pb$$
"""


# %% count
def server(tensor):
    average_on_server([tensor])


p = 2**20
ways = {"server": server, "whole-gradient ring": whole_gradient_ring, "ring": ring_all_reduce}
colours = dict(zip(ways, [show.STAGE_COLOURS[stage] for stage in ("3", "4w", "4")]))


def most_sent(way, ranks):
    return max(counts.bytes_sent for counts in timing.count_traffic(way, p, ranks)) / p


sent = {name: most_sent(way, K) for name, way in ways.items()}
expected = {"server": K - 1, "whole-gradient ring": K - 1, "ring": 2 * (K - 1) / K}
show.bars(
    sent,
    "sent by the busiest rank\n(p: one whole gradient)",
    f"On {K} ranks the busiest rank sends {sent['ring']:g} p on the ring, {sent['server']:g} p otherwise",
    colours=colours,
    theory=expected,
    kind="counted",
)

# %% check-bytes
# NBVAL_CHECK_OUTPUT
assert all(abs(sent[name] - expected[name]) < 1e-4 for name in sent), sent  # K may not divide p
print("bytes counted = bytes of the formulas: K-1, K-1 and 2(K-1)/K times p")

# %% reveal
on_four = most_sent(ring_all_reduce, 4)
why = {
    "0.5 p": "A chunk is p/4, and each rank sends 3 of them to add up and 3 to share.",
    "1 p": "A chunk is p/4, and each rank sends 3 of them to add up and 3 to share.",
    "3 p": "That is the ring of whole gradients; a chunk is p/4, and is sent 6 times.",
}
guess.reveal(f"{on_four:g} p", f"{on_four:g} p", "counted", why)

# %% [markdown]
r"""
## Plot

This is the experiment of lesson 03 once more, now with all three ways, on links of 200 Mbit/s. Points are virtual time, lines are
the formulas: 2(K-1), K-1 and 2(K-1)/K times p/b.
"""

# %% predict-times
guess_times = show.predict(
    "On four ranks the busiest rank sends 3 p with the server, and on the ring of whole gradients. How long does the server take?",
    ["half as long as that ring", "as long as that ring", "twice as long as that ring"],
)
guess_times

# %% measure
link = Link("200Mbit")
by_way = {}
for name, way in show.progress(ways.items()):
    by_way[name] = {k: timing.time_collective(way, p, k, link) for k in (2, 3, 4)}
seconds = by_way  # only when all are there: a cell that is interrupted leaves no half of a figure

# %% time-by-ranks folded=true
ks = [2, 3, 4, 5, 6]
unit = 1000 * p / (200e6 / 8)  # milliseconds for p bytes
formulas = {
    "server": [unit * 2 * (k - 1) for k in ks],
    "whole-gradient ring": [unit * (k - 1) for k in ks],
    "ring": [unit * 2 * (k - 1) / k for k in ks],
}
points = {}
for name, times in seconds.items():
    points[name] = (list(times), [1000 * s for s in times.values()], colours[name])
show.curves(
    points,
    "ranks K",
    "time to average 1 MiB (ms)",
    "The ring's time levels off; the others' grow with every rank",
    theory={f"{name}, formula": (ks, formulas[name], colours[name]) for name in formulas},
    kind="virtual time",
)

# %% check-time
# NBVAL_CHECK_OUTPUT
from_2_to_4 = {name: times[4] / times[2] for name, times in seconds.items()}
assert from_2_to_4["ring"] < from_2_to_4["whole-gradient ring"]
assert seconds["ring"][4] < seconds["whole-gradient ring"][4] < seconds["server"][4]
print("on 4 ranks the ring is the fastest, the server the slowest, and the ring's time grows least")

# %% reveal-times
of_server, of_whole = (1000 * seconds[name][4] for name in ("server", "whole-gradient ring"))
why = {
    "half as long as that ring": "It sends as much, and it cannot begin before it has received 3 p.",
    "as long as that ring": "It sends as much, but it cannot begin before it has received 3 p.",
}
took = f"{of_server:.0f} ms with the server, {of_whole:.0f} ms on that ring"
guess_times.reveal(took, "twice as long as that ring", "virtual time", why)

# %% [markdown]
r"""
The server takes twice as long as the whole-gradient ring. It first *receives* 3 p, and only then it sends. On the ring each
rank sends and receives at the same time.

## The other half of the truth: latency

Each message also has a fixed cost, the **latency** α: the time before its first byte arrives. The ring sends
2(K-1) messages one after another, so

$$T = 2(K-1)\,\alpha + 2\,\frac{K-1}{K}\,\frac pb$$

For a long message most of the time is the second term. For a short message it is the first term, which grows with K. Write the
formula as code:
"""


# %% faded-ring-seconds
def ring_seconds(nbytes, world_size, bytes_per_s, latency):
    """Return how long the ring takes for a tensor of `nbytes`, in seconds."""
    messages = 2 * (world_size - 1)  # one after the other
    return ...


fill_in(ring_seconds, {(4000, 4, 1000, 0): 6.0, (4000, 4, 1000, 2): 18.0, (4000, 1, 1000, 2): 0.0})

# %% [markdown]
r"""
<details><summary>The line</summary><code>return messages * (latency + nbytes / world_size / bytes_per_s)</code></details>

On a DGX
A100, one ring of NCCL needed 10, 17 and 34 µs on 2, 4 and 8 GPUs for messages of at most 128 *bytes*. They are so small that only
the 2, 6 and 14 latencies count: about 2 µs for each, and 6 µs once (measured by a user,
[NVIDIA/nccl-tests, issue 123](https://github.com/NVIDIA/nccl-tests/issues/123)). Choose a link and a number of ranks, and see which
algorithm is the fastest for which size. Compare 8 ranks with 6 and 12: one of the algorithms needs a power of two.
"""

# %% explorer
show.widgets.alpha_beta_explorer()

# %% four-and-eight
sizes = {"the message is large": 4 * 2**20, "the message is small": 2**10}
link = Link("100Mbit", "1ms")
growth = {}
for name, size in sizes.items():
    four = timing.time_collective(ring_all_reduce, size, 4, link, repeats=1)
    eight = timing.time_collective(ring_all_reduce, size, 8, link, repeats=1)
    growth[name] = eight / four
    print(f"{name}: {1000 * four:.0f} ms on 4 ranks, {1000 * eight:.0f} ms on 8")

# %% claim-6
# NBVAL_CHECK_OUTPUT
claims.decide(
    6, "The time of ring all-reduce is independent of the number of devices.", "virtual time",
    {name: ratio < 1.25 for name, ratio in growth.items()},
    "The bandwidth term stays below 2 p/b, but 2(K-1) latencies grow with K, and a small message is all latency.",
)

# %% [markdown]
r"""
With twice as many ranks the large message takes less than a fifth longer: the factor 2(K-1)/K grows from 1.5 to 1.75, and never
reaches 2. The claim counts that as independent. The small message takes more than twice as long, since there are 14 latencies
in the place of 6.

The other algorithms in the explorer are in `ddp_course/collectives/`. All have the ring's signature and give the
same sums. A **tree** adds up in log₂ K rounds and sends the result back down. It needs few messages, but each of them has all
p bytes. **Halving and doubling** exchanges smaller and smaller halves with partners farther and farther away. It needs few
messages *and* few bytes, and is at its best when K is a power of two. In Goyal et al. (2017) it was 3 times as fast as the ring
on 32 servers.

Then why is the ring used everywhere? The explorer leaves things out. A ring fits any number of ranks and can follow
the wiring. Halving and doubling needs a power of two of ranks, and of ranks per host too: then its largest halves stay
inside the host, and only small ones leave it. Otherwise the ranks of a host send large halves over the one cable that they
share, and wait for each other. Here both algorithms run, with a cable for each rank, and with hosts whose ranks share one. Each
pair of bars is one case:
"""

# %% contended
rivals = {"ring": ring_all_reduce, "halving-\ndoubling": collectives.halving_doubling_all_reduce}
cases = {
    "8 ranks": (8, None),
    "8 ranks,\n2 hosts": (8, 2),
    "8 ranks,\n3 hosts": (8, 3),
    "6 ranks": (6, None),
}
taken = {name: {} for name in rivals}
for name, way in rivals.items():
    for case, (ranks, hosts) in cases.items():
        link = Link("100Mbit", hosts=hosts)
        seconds_once = timing.time_collective(way, 4 * 2**20, ranks, link, repeats=1)
        taken[name][f"{name}\n{case}"] = 1000 * seconds_once
ring, other = taken.values()

# %% contended-figure folded=true
pairs = {}
for (ring_label, ring_ms), (other_label, other_ms) in zip(ring.items(), other.items()):
    pairs[ring_label] = ring_ms
    pairs[other_label] = other_ms
ratios = [other_ms / ring_ms for ring_ms, other_ms in zip(ring.values(), other.values())]
show.bars(
    pairs,
    "time for 4 MiB (ms)",
    f"Halving-doubling takes {min(ratios):.1f} to {max(ratios):.1f} times the ring's time",
    colours=dict.fromkeys(other, "#CC79A7"),
    form="{:.0f}",
    kind="virtual time",
    width=9.4,
)

# %% check-contended
# NBVAL_CHECK_OUTPUT
eight, on_two, on_three, six = ratios
assert 0.95 < eight < 1.05 and on_two < 0.6 and on_three > 1.5 and six > 1.5, ratios
print("8 ranks: halving-doubling is as fast as the ring, and faster on 2 hosts of 4; slower on 3 hosts, and with 6 ranks")

# %% [markdown]
r"""
The formula leaves out a second thing. A ring can work in segments and add one up while the next arrives (*pipelining*). Halving
and doubling has to finish each exchange before the next one begins.

## Claims: what others call a ring, and whose replicas stay equal

One blog post ("Distributed Training in Pytorch (DDP): Part 1") describes ring all-reduce like this: "In the second round,
each GPU will send gradients that it received from the previous GPU to the next GPU and so on." How many bytes would that be?
"""

# %% claim-7
# NBVAL_CHECK_OUTPUT
alike = {}
for ranks in (2, 4):
    whole = most_sent(whole_gradient_ring, ranks)
    chunked = most_sent(ring_all_reduce, ranks)
    print(f"K = {ranks}: {whole:g} p if gradients are passed on,", end=" ")
    print(f"{chunked:g} p on the ring of chunks (counted)")
    alike[f"K = {ranks}"] = whole == chunked
claims.decide(
    7,
    "In ring all-reduce every device passes on the gradients that it received until all have all.",
    "counted",
    alike,
    "That is the whole-gradient ring, (K-1) p bytes; ring all-reduce passes chunks and sums, 2(K-1)/K p.",
)

# %% [markdown]
r"""
The two rings differ in one more way. Floating-point sums depend on the order of their terms. In the whole-gradient ring
each rank adds in an order of its own. In the chunked ring each chunk is finished on *one* rank and copied from that rank to all
others.
"""


# %% bits
# NBVAL_CHECK_OUTPUT
def bits(all_reduce):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    return all_reduce(values)


whole = launch(bits, whole_gradient_ring, world_size=4)
chunked = launch(bits, ring_all_reduce, world_size=4)
different = sum((whole[0] != other).any().item() for other in whole[1:])
largest = max((whole[0] - other).abs().max() for other in whole)
print(f"whole gradients: {different} of 3 ranks differ from rank 0;", end=" ")
print(f"largest difference {largest:.0g}")
assert different > 0 and all(torch.equal(chunked[0], other) for other in chunked)
print("chunked ring: the same bits on all ranks; whole-gradient ring: not")

# %% [markdown]
r"""
Replicas that differ in the last bit drift apart over thousands of steps. With the chunked ring they stay equal.

The post that made the ring known in deep learning describes the one with chunks: Andrew Gibiansky, ["Bringing HPC
Techniques to Deep Learning"](https://andrew.gibiansky.com/blog/machine-learning/baidu-allreduce/), Baidu Research, 2017.
The algorithm is by Patarasuk and Yuan (2009); Horovod (Sergeev and Del Balso, 2018) brought it to many frameworks.

## What changed

In the training loop, only the sum that it calls has changed. In the iteration, only the box between backward and update is new.

![As with the server, but the gradients are averaged on a ring: each of three ranks sends chunks to its right neighbour, all at the same time, after the backward pass](../docs/figures/iteration_04.svg)

**Possible because** a sum can be taken in any order, and piece by piece.
"""

# %% diff
show.diff(stage3_paramserver.train, stage4_ring.train)

# %% [markdown]
r"""
`batches` is anything that yields pairs. People's scripts have a `DataLoader`, and a `DistributedSampler` that deals the samples out
and must be told the epoch. With these two the ring trains as follows:
"""


# %% own-loader
def train_epochs(epochs):
    digits = problems.make("digits")
    data = torch.utils.data.TensorDataset(digits.inputs, digits.targets)
    sampler = torch.utils.data.DistributedSampler(data, drop_last=True)
    loader = torch.utils.data.DataLoader(data, batch_size=96 // K, sampler=sampler, drop_last=True)
    model = digits.model()
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        losses.append(sum(stage4_ring.train(model, loader, lr=digits.learning_rate)) / len(loader))
    return losses, digits.evaluate(model)["accuracy"]


of_ranks = launch(train_epochs, 8, world_size=K)
losses, accuracy = of_ranks[0]
print("mean loss of each epoch on rank 0:", ", ".join(f"{loss:.2f}" for loss in losses))

# %% check-own-loader
# NBVAL_CHECK_OUTPUT
assert losses[-1] < losses[0] / 2 and accuracy > 0.85, of_ranks
assert len({accuracy for _, accuracy in of_ranks}) == 1, of_ranks
print("the loss has more than halved, and all ranks have one model that is right for more than 85 % of new digits")

# %% [markdown]
r"""
## On your GPUs

Server and ring run on the devices of this machine, in real time. Beside them runs the all-reduce of the backend, on as many
bytes: NCCL on GPUs, gloo on the processor. The backend is written in C++ and needs no Python between two messages. With two ranks
server and ring send the same bytes. If the ring wins, it wins because it sends while it receives. Without a GPU the figure
shows what one NVIDIA H200 needed, which two ranks shared; the two times above it are this machine's.
"""

# %% on-your-gpus
yours = on_your_gpus("3,4")
assert yours.max_abs_diff < 1e-4, "the ring's weights are not one device's"
both = {"our ring": ring_all_reduce, "the backend's all-reduce": dist.all_reduce}
for name, all_reduce in both.items():
    seconds_here = timing.time_collective(
        all_reduce, yours.gradient_bytes, yours.world_size, device="auto"
    )
    print(f"{name}: {1000 * seconds_here:.1f} ms (measured)")
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

`torch.distributed.all_reduce` leaves the choice to the backend. gloo uses a ring, cut into segments. NCCL chooses
among ring, tree and others by message size and topology. On one machine with NVLink its rings run over all links
at once. Where this is in PyTorch: `torch/csrc/distributed/c10d/ProcessGroupGloo.cpp` and `ProcessGroupNCCL.cpp`, which hand
the call on to these libraries.

The all-reduce is one of eight *collectives*, and the later lessons use the others. Mind one difference: torch's
`reduce_scatter`, as drawn here, leaves chunk r on rank r, while our ring leaves chunk r+1 there.

![Broadcast, scatter, gather, allgather, reduce, reduce-scatter, all-reduce and all-to-all on four ranks: which chunks each rank has before and after](../docs/figures/collectives.svg)

| `torch.distributed` | a rank sends, on a ring if not said otherwise (p = all chunks of a tensor) | used for |
|---|---|---|
| `broadcast` | p; the last rank on the way sends nothing | equal weights at the start (lesson 03), buffers (06) |
| `scatter` | rank 0 alone, straight to each: (K-1)/K p | handing out |
| `gather` | each rank but rank 0, straight to it: p/K | collecting |
| `all_gather` | (K-1)/K p | weights of a sharded layer (07), activations (09) |
| `reduce` | p; the rank that gets the sum sends nothing | a loss to print |
| `reduce_scatter` | (K-1)/K p | gradients of a sharded layer (07) |
| `all_reduce` | 2(K-1)/K p | gradients (04 to 06), activations (09) |
| `all_to_all` | (K-1)/K p, straight to each | tokens that go to the rank of their expert (09) |
"""

# %% [markdown]
r"""
## Your ring under torch's own training

torch's classes for training ask a *process group* for their sums, and do not look at who adds up. So you can hand them your own
ring: `ring_backend.register("ring", all_reduce=my_ring)` gives torch a new backend, and `dist.new_group(backend="ring")` makes a
group of it. Here torch's own `DistributedDataParallel` trains over the ring of this lesson, over gloo, and over a ring whose
author stopped one step too early: its allgather has K-2 steps. The first cell, behind the three dots, has that ring and the training.
"""


# %% own-backend folded=true
def one_step_short(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    chunks = tensor.tensor_split(size)
    stage4_ring.reduce_scatter(chunks, group)
    for step in range(size - 2):  # it should be size - 1
        target = chunks[(rank - step) % size]
        wire.exchange(chunks[(rank + 1 - step) % size], right, target, left, group)


def train_torchs_ddp(backend, all_reduce):
    ring_backend.register("ring", all_reduce=all_reduce)
    digits = problems.make("digits")
    model = digits.model()
    group = dist.new_group(backend=backend)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    batches = digits.batches(96, 5, rank=dist.get_rank(), world_size=K)
    with wire.counting() as traffic:
        stage1_single.train(wrapped, batches, digits.learning_rate)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return weights, traffic.bytes_sent / (5 * weights.nbytes)


# %% check-own-backend
# NBVAL_CHECK_OUTPUT
mine = launch(train_torchs_ddp, "ring", ring_all_reduce, world_size=K)
theirs = launch(train_torchs_ddp, "gloo", ring_all_reduce, world_size=K)
short = launch(train_torchs_ddp, "ring", one_step_short, world_size=K)
print("over my ring a rank sends 2 (K-1)/K p a step through its code:", all(sent == 2 * (K - 1) / K for _, sent in mine))
print("over gloo it sends nothing through it:", all(sent == 0 for _, sent in theirs))
print("my ring = gloo:", all(torch.allclose(w, theirs[0][0], atol=1e-6) for w, _ in mine))
print("one step short, replicas are equal:", all(torch.equal(w, short[0][0]) for w, _ in short))

# %% [markdown]
r"""
Over the ring every rank sent 2(K-1)/K times its gradients in each step through the ring's own code, so torch's training ran on
your sums alone. Over gloo not one byte went through that code. With the shorter ring no error is raised, and each rank trains a model of its own. (In such a group
each sum is finished before torch goes on, so nothing overlaps with the backward pass. How torch does better is lesson 05.)

## Check yourself

**1.** 1 GB of gradients, links of 10 Gbit/s. How long on 4 ranks, how long on 400?
<details><summary>Answer</summary>
On 4 ranks it takes 2 · 3/4 · 1 GB / (1.25 GB/s) = 1.2 s and 6 latencies. On 400 ranks it takes 2 · 399/400 · 0.8 s = 1.6 s
and 798 latencies.
</details>

**2.** Why is a ring of K = 2 no better than passing whole gradients?
<details><summary>Answer</summary>
2(K-1)/K = K-1 = 1 for K = 2. Both send p bytes.
</details>

**3.** One of eight links is half as fast as the others. What does it do to the ring?
<details><summary>Answer</summary>
Everything passes through every link, so the ring runs at the slowest link's speed: half.
</details>
"""

# %% [markdown]
r"""
## Yours in the comparison

The ring of lesson 00 stands here beside the chunked ring and PyTorch's own. It sends whole gradients, (K-1) p, so its steps take
longer. Cut the gradient into chunks yourself, as exercise 4 does in small steps, and it comes down to the others. If a line goes
wrong, the row says by how much the weights differ from one device's, and from which step on. From step 1 on the average itself is
wrong: perhaps nobody divides, or a part of the sum is missing. From a later step on, something is left over from the step
before. The timeline draws all that your row does between backward and update as communication.
"""


# %% my-average
def my_average(gradient):
    """Replace a gradient by its mean over the ranks, in place."""
    _, world_size, left, right = wire.neighbours()
    outgoing = gradient.clone()
    for _ in range(world_size - 1):
        incoming = torch.empty_like(gradient)
        wire.exchange(outgoing, right, incoming, left)
        gradient += incoming
        outgoing = incoming
    gradient /= world_size


# %% my-train
def my_train(model, batches, lr):
    """Train on this rank's share of each batch; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        for parameter in model.parameters():
            my_average(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% compare-yours
results = compare.run(
    "digits", world_size=K, stages="1,4,torch", device="cpu", progress=True,
    yours={"my ring": my_train}
)
compare.table(results)

# %% yours-in-the-comparison
show.compare_figure(results)

# %% [markdown]
r"""
## In three lines

1. Every rank of the chunked ring sends 2(K-1)/K p: 1.5 p on 4 ranks (counted), and less than 2 p for any K (derived).
2. Its 2(K-1) latencies do grow with K. For small messages other algorithms win, if each rank has a cable of its own.
3. Each chunk is finished on one rank and copied from that rank, so replicas stay equal to the last bit.

**Exercise:** [4](../exercises/04_ring_all_reduce.ipynb), `exercises/04_ring_all_reduce.ipynb`. **Next:**
[5, bucketed DDP](05_bucketed_ddp.ipynb): communicate while you compute.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
