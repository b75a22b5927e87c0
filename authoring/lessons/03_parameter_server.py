# %% [markdown]
r"""
# 3 · The parameter server

In this lesson K processes take the place of K threads. They share no lock and no memory, and soon they will share no machine. Each
process has its own copy of the model and its own share of the data. All that is left to do together is to average the gradients, and
the plainest way is to send them all to one rank.

**After this lesson you can**

- use rank, world size and point-to-point messages,
- say why all ranks must start from the same weights, and how,
- share an epoch among ranks without overlap,
- see what becomes of replicas that do not synchronise,
- take an averaging apart into waiting, moving data and computing,
- predict the time of a step with a server, and show that it grows with the number of ranks.

*35 minutes, under a minute of computing.*
"""

# %% imports
import time

import torch
import torch.distributed as dist

from ddp_course import Link, average_on_server, broadcast_parameters, launch, problems
from ddp_course import stage2_dataparallel, stage3_paramserver, wire
from ddp_course.lab import claims, compare, on_your_gpus, show, timing
from ddp_exercises import task

K = 4  # how many ranks; 2 works as well

# %% opening-questions
show.questions(3)

# %% [markdown]
r"""
## Ranks and messages

A **rank** is one process of the job. The ranks have the numbers 0 to K-1, and K is the **world size**. A *point-to-point* message has
one sender and one receiver, and both must take part: a `send` without its `recv` waits for ever. Here each rank sends its number to the
server, which is rank 0.
"""


# %% first-messages
def report():
    rank = dist.get_rank()
    if rank > 0:
        wire.send(torch.tensor([rank]), dst=0)
        return f"rank {rank} sent"
    box = torch.zeros(1, dtype=torch.int64)
    received = []
    for peer in range(1, dist.get_world_size()):
        wire.recv(box, src=peer)
        received.append(box.item())
    return f"rank 0 received {received}"


launch(report, world_size=K)

# %% [markdown]
r"""
`wire.send` and `wire.recv` are `torch.distributed.send` and `recv`, but they also count what passes. Here is the same program in torch's
own words:
"""


# %% torchs-own-words
def report_in_torch():
    rank = dist.get_rank()
    if rank > 0:
        return dist.send(torch.tensor([rank]), dst=0)
    boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(1, dist.get_world_size())]
    for peer, box in enumerate(boxes, 1):
        dist.recv(box, src=peer)
    return [box.item() for box in boxes]


launch(report_in_torch, world_size=K)[0]

# %% [markdown]
r"""
## Start equal

Each rank builds the model itself. With a random start of its own, each would train another model, and averaging
their gradients would make no sense. So before the first step rank 0 sends its weights to all others: a
**broadcast**. We look at one weight of each rank before and after.
"""


# %% broadcast
def one_weight():
    model = problems.make("digits").model(seed=dist.get_rank())
    before = model[0].weight[0, 0, 0, 0].item()
    broadcast_parameters(model)
    after = model[0].weight[0, 0, 0, 0].item()
    return round(before, 4), round(after, 4)


weights = launch(one_weight, world_size=K)
weights

# %% check-broadcast
# NBVAL_CHECK_OUTPUT
before, after = zip(*weights)
assert len(set(before)) == K and set(after) == {before[0]}
print("different before, rank 0's weights everywhere after")

# %% [markdown]
r"""
## Stay equal

What happens if nobody averages? All ranks start with the same weights, and each has its own share of the data. After each step we look
how far the weights have moved apart, which is the largest difference between a weight of rank 0 and the same weight of any other rank.
(With averaging this difference is 0, and its line lies on the axis.)
"""


# %% drift
def distances(average):
    digits = problems.make("digits")
    model = digits.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    largest = []
    for inputs, targets in digits.batches(96, 20, rank=dist.get_rank(), world_size=K):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        if average:
            average_on_server(stage3_paramserver.gradients(model))
        optimizer.step()
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        everyone = [torch.empty_like(weights) for _ in range(K)]
        dist.all_gather(everyone, weights)
        largest.append(max((weights - other).abs().max().item() for other in everyone))
    return largest


# %% drift-figure folded=true
ways = {"never averaged": False, "averaged in each step": True}
apart = {}
for name, average in show.progress(ways.items()):
    apart[name] = launch(distances, average, world_size=K)[0]
show.curves(
    {name: (range(1, 21), largest) for name, largest in apart.items()},
    "step",
    "largest difference of a weight between ranks",
    "Without averaging K ranks train K models",
    points=False,
)

# %% check-drift
# NBVAL_CHECK_OUTPUT
assert apart["never averaged"][-1] > 0.01 and max(apart["averaged in each step"]) == 0
print("without averaging the replicas drift apart; with it they are equal to the last bit")

# %% [markdown]
r"""
Some texts say that all ranks must start "with the same random seed". Here ranks draw their weights with a seed of
their own or with the same one, and then rank 0 broadcasts or does not. Every rank also draws a dropout mask.
"""


# %% seeds
def weights_and_mask(same_seed, broadcast):
    torch.manual_seed(0 if same_seed else dist.get_rank())
    model = torch.nn.Linear(8, 8)
    if broadcast:
        broadcast_parameters(model)
    return model.weight.detach(), torch.nn.functional.dropout(torch.ones(64))


def equal(same_seed, broadcast):
    first, second = launch(weights_and_mask, same_seed, broadcast, world_size=2)
    return tuple(map(torch.equal, first, second))


equality = {(seed, way): equal(seed, way) for seed in (False, True) for way in (False, True)}
for (same_seed, broadcast), (same_weights, masks) in equality.items():
    print(f"same seed: {same_seed!s:5}  broadcast: {broadcast!s:5}", end="  ")
    print(f"equal weights: {same_weights!s:5}  equal masks: {masks}")

# %% claim-4
# NBVAL_CHECK_OUTPUT
claims.decide(
    4, "All ranks must start with the same random seed.", "measured",
    {
        "rank 0 broadcasts": not equality[False, True][0],
        "nobody broadcasts": not equality[False, False][0],
    },
    "The broadcast makes the weights equal. The same seed everywhere gives all ranks the same dropout mask, which is worse.",
)

# %% [markdown]
r"""

## Share the data

A **sampler** decides which rank sees which sample. Ours, like torch's `DistributedSampler`, shuffles the epoch in
the same way on all ranks and then deals it out like cards: rank r takes positions r, r+K, r+2K, …
In a script of your own it goes into the loader:
`DataLoader(data, batch_size=96 // K, sampler=DistributedSampler(data))`. Lesson 04 trains with these two.
"""

# %% shard
for rank in range(K):
    shares = [problems.shard(12, rank, K, epoch).tolist() for epoch in (0, 1)]
    print(f"rank {rank}: epoch 0 {shares[0]}   epoch 1 {shares[1]}")

# %% check-shard
# NBVAL_CHECK_OUTPUT
dealt = torch.cat([problems.shard(12, rank, K) for rank in range(K)])
assert sorted(dealt.tolist()) == list(range(12))
print("every sample once, no overlap")

# %% [markdown]
r"""
Some texts say that each device gets "a different randomly generated batch". A rank could indeed draw its share at random, without
asking the others. Every sample is then as likely as any other, so the average is still a fair estimate of the gradient. But
what does an epoch see? Of 1,200 samples each of K ranks draws a K-th for itself:
"""

# %% random-batches folded=true
# NBVAL_CHECK_OUTPUT
generator = torch.Generator().manual_seed(0)
drawn = [torch.randperm(1200, generator=generator)[: 1200 // K] for rank in range(K)]
missed = 1 - len(torch.cat(drawn).unique()) / 1200
assert abs(missed - (1 - 1 / K) ** K) < 0.03, missed
print("drawn by each rank for itself, (1 - 1/K) to the power of K of all samples are seen by nobody (counted)")

# %% [markdown]
r"""
With four ranks this is nearly a third of the data in each epoch, and other samples count twice or more. A sampler that deals out
shows every sample exactly once. The shares are different, but nothing generates them: they are parts of one shuffled epoch.
"""

# %% [markdown]
r"""
## The server

All gradients go to rank 0, and the average comes back. All arrows of the picture pass through the one link of the server. (Our server
only averages, and every rank updates its own copy of the weights. A real parameter server *holds* the weights: gradients come in, the
server updates, and weights go out. The number of bytes is the same.)

![A star: rank 0, the server, in the middle; from each other rank one arrow with a gradient leads to it and one with the average leads back, all through the server's one link](../docs/figures/star.svg)

## Predict
"""

# %% predict
guess = show.predict("The time at 4 ranks is how many times the time at 2 ranks?", [1, 2, 3, 4])
guess

# %% [markdown]
r"""
Tasks 3.1 to 3.3 of [exercise 3](../exercises/03_parameter_server.ipynb) ask you to write the code, and you learn more if you write it
before you look. The first of them is the server's first loop. All other ranks send their tensor to rank `server`, and the server adds
what it receives to its own tensor. `wire.send(tensor, rank, group)` and `wire.recv(tensor, rank, group)` wait until they are done, and
`wire.others(server, group)` lists all ranks but the server.
"""

# %% task-3-1
def collect(tensor, server=0, group=None):
    """Add the tensors of all ranks up in the server's `tensor`, in place; the others keep theirs."""
    raise NotImplementedError("Exercise 3.1: Collect")


show.source(task("3.1", collect), click="Write it first, then open: one solution")

# %% source
show.source(average_on_server, stage3_paramserver.collect_and_return,
            click="Open after tasks 3.1 to 3.3: the server")

# %% [markdown]
r"""
Let p be the bytes of all gradients, and b the bytes per second that a link carries. The server receives K-1
gradients, one after another, and then sends K-1 averages:

$$T = 2\,(K-1)\,\frac{p}{b}$$

## Run

Inside one machine messages travel at the speed of memory, and the difference would be too small to see. So we **emulate
links** of 200 Mbit/s: each rank gets its own network cable with a speed limit, at the sending and at the receiving end.
Then a gradient of 1 MiB is averaged on 2, 3 and 4 ranks, in virtual time. The slowest rank's time counts, because everyone
waits for it. Work out the three times from the formula before you run the cells.
"""

# %% measure
link = Link("200Mbit")
p = 2**20


def server(tensor):
    average_on_server([tensor])


seconds = {}
for ranks in show.progress((2, 3, 4)):
    seconds[ranks] = timing.time_collective(server, p, ranks, link)

# %% plot
colour = show.STAGE_COLOURS["3"]
ranks = [1, 2, 3, 4, 5]
formula = [1000 * 2 * (number - 1) * p / (200e6 / 8) for number in ranks]
show.curves(
    {"virtual time": (list(seconds), [1000 * s for s in seconds.values()], colour)},
    "ranks K",
    "time to average 1 MiB (ms)",
    "With a server the time grows with the number of ranks",
    theory={"2(K-1) p/b": (ranks, formula, colour)},
    kind="virtual time",
)

# %% reveal
ratio = seconds[4] / seconds[2]
why = {
    1: "All gradients pass the server's one link, one after the other.",
    2: "The server's own gradient does not travel: of 4 ranks 3 send, of 2 ranks 1 does.",
    4: "The server's own gradient does not travel: of 4 ranks 3 send, of 2 ranks 1 does.",
}
nearest = show.widgets.nearest(ratio, guess.answers)
guess.reveal(f"{ratio:.1f} times", nearest, "virtual time", why)

# %% check-time
# NBVAL_CHECK_OUTPUT
assert 2 < ratio < 6
print("twice the ranks, about three times the wait")

# %% [markdown]
r"""
## Count

How many bytes is that? The wire counts what each rank sends and receives in one call.
"""

# %% count
traffic = timing.count_traffic(server, p, K)
show.bars(
    {f"rank {rank}": counts.bytes_sent / p for rank, counts in enumerate(traffic)},
    "bytes sent (p: one whole gradient)",
    "The server sends K-1 times as much as anyone else",
    colours={"rank 0": colour},
    theory={"rank 0": K - 1},
    kind="counted",
)

# %% check-bytes
# NBVAL_CHECK_OUTPUT
assert [counts.bytes_sent for counts in traffic] == [(K - 1) * p] + [p] * (K - 1)
assert traffic[0].bytes_received == (K - 1) * p
print("server: (K-1) p in and (K-1) p out; everyone else: p out and p in")

# %% [markdown]
r"""
## Three things in one

"Averaging gradients" consists of three things: **waiting** until all ranks are there (synchronisation), **moving data** through the
links, and **adding up** (collective computation). The next cell takes the same call apart. One rank computes for 20 ms more than the
others, and a barrier before the call tells how long they wait for it. Waiting and moving are in virtual time. The additions alone are
repeated here, and their real time is measured.
"""


# %% apart
def taken_apart():
    server(torch.ones(p // 4))  # opens the connections
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.02)
    with timing.stopwatch() as waiting:
        dist.barrier()
    with timing.stopwatch() as whole:
        server(torch.ones(p // 4))
    return waiting.seconds, whole.seconds


waiting, moving = zip(*launch(taken_apart, world_size=K, link=link, device="cpu"))

# %% apart-figure folded=true
total, incoming = torch.ones(2, p // 4)
tries = []
for _ in range(9):  # The first addition also wakes torch's threads.
    with timing.stopwatch() as adding:
        total += incoming
    tries.append(adding.seconds)
show.bars(
    {
        "waiting for the slowest": 1000 * max(waiting),
        "moving data": 1000 * max(moving),
        "adding up": 1000 * (K - 1) * min(tries),
    },
    "longest on any rank (ms)",
    "Moving data takes nearly all of the time; the waiting is what we put in",
    form="{:.1f}",
    kind="virtual time; adding measured",
)

# %% [markdown]
r"""
Faster links (NVLink inside a machine, InfiniBand between machines) make only the middle bar shorter. Lesson 11 deals with the first
bar. The third bar is the only one that was really measured. It shows the shortest of nine tries, because a single try may take a hundred
times as long if other programs hold the processor at that moment.

## What changed

Compared with stage 2's loop, the wrapper is gone. There is a broadcast at the start, and one more line before the update. `batches` now
yields only this rank's share. In the iteration no master hands out shards and weights any more, and every rank makes the update.

![Each of three ranks takes a third of the batch and goes forward and backward with equal weights. Then ranks 1 and 2 send their gradients to rank 0, which sends the average back. Every rank makes the same update, so the weights stay equal](../docs/figures/iteration_03.svg)

**Possible because** an update depends on weights and gradients alone: ranks that agree on both stay equal.
"""

# %% diff
show.diff(stage2_dataparallel.train, stage3_paramserver.train)

# %% [markdown]
r"""
## Claim: "a parameter server takes 2(K-1) p/b"

*This* server does take so long. But a cable has two directions, so the first rank's average could be on its way back while the last
rank's gradient still comes in. The next cell has a server that cuts the gradient into pieces and does both at once. Both servers collect
and send 1 MiB in virtual time, on links of 100 Mbit/s.
"""


# %% both-ways
def both_ways(gradient, pieces=16):
    parts = gradient.tensor_split(pieces)
    for n in range(pieces + 1):
        # Piece n goes to the server while the sum of the piece before it comes back.
        going = parts[n : n + 1]
        coming = parts[max(n - 1, 0) : n]
        if dist.get_rank() != 0:
            wire.exchange_all([(part, 0) for part in going], [(part, 0) for part in coming])
            continue
        arriving = [(torch.empty_like(part), peer) for part in going for peer in wire.others(0)]
        wire.exchange_all([(part, peer) for part in coming for peer in wire.others(0)], arriving)
        for part, _ in arriving:
            going[0].add_(part)
    return gradient


assert [rank.tolist() for rank in launch(both_ways, torch.ones(5), world_size=3)] == [[3.0] * 5] * 3


# %% two-servers folded=true
def one_way(gradient):
    average_on_server([gradient])


size = 2**20
cable = Link("100Mbit")
servers = {
    "it collects everything before it sends": one_way,
    "it sends while it still collects": both_ways,
}
by_formula = 2 * (3 - 1) * size / (100e6 / 8)
ratios = {}
for name, way in servers.items():
    ratios[name] = timing.time_collective(way, size, 3, cable, repeats=1) / by_formula
    print(f"{name}: {ratios[name]:.2f} of the formula")

# %% claim-5
# NBVAL_CHECK_OUTPUT
claims.decide(
    5, "A parameter server takes 2(K-1) p/b.", "virtual time",
    {name: 0.95 < ratio < 1.05 for name, ratio in ratios.items()},
    "A cable carries both directions at once: a server that works in pieces needs little more than (K-1) p/b.",
)

# %% [markdown]
r"""
Even this server's time grows with K. Lesson 04 gets rid of the growth.

## On your GPUs

Here the server averages on the devices of this machine, in real time. With GPUs the gradients travel by NCCL, one rank's after the
other's, while all other GPUs wait. Without a GPU the figure shows what one NVIDIA H200 needed, which two ranks shared.
"""

# %% on-your-gpus
yours = on_your_gpus("3")
assert yours.max_abs_diff < 1e-4, "the server's weights are not one device's"
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

`dist.reduce` to one rank and `dist.broadcast` back would do the same job. They are cheaper than our two loops, because inside they are
not stars: gloo's reduce is a ring, and its broadcast is a tree. DDP uses the broadcast once, when the wrapper is made. Servers are still in
use where ranks should *not* wait for each other (asynchronous training), and where huge embedding tables are stored of which each rank
needs only a few rows.

## Check yourself

**1.** 8 ranks, 100 MB of gradients, links of 10 Gbit/s. How long does each step wait for the server?
<details><summary>Answer</summary>
2 · 7 · 100 MB / (1.25 GB/s) = 1.12 s. A GPU would have computed the step in a fraction of that.
</details>

**2.** Would two servers, each for half of the gradient, be faster?
<details><summary>Answer</summary>
Yes, twice: each link carries half. And K servers, each for 1/K of the gradient? That is no star any more. It is
very close to what lesson 04 does.
</details>

**3.** Nobody broadcasts, but all ranks build the model from the same seed. Does it work?
<details><summary>Answer</summary>
Yes, if no rank draws other random numbers before it builds the model, and all load the same checkpoint. The broadcast
makes it certain instead of likely.
</details>
"""

# %% [markdown]
r"""
## Yours in the comparison

What you write can stand beside the course's stages and PyTorch's own, in the table and in the figure, in virtual time. Here is a
training function as you would write it, which averages one gradient at a time. Run it, and then change it: let the server keep its sum to
itself, average in the first step alone, or leave out the broadcast. The row then says by how much the weights differ from one device's,
and from which step on. (A broadcast that is left out changes nothing as long as all ranks build the same model.) Two
servers, each for every other gradient, would be right and faster, as question 2 says: rank 1 can be the second. Your messages are ten
times as many as stage 3's, which packs the ten gradients of the model into one tensor; here that costs nothing, because these links have
no latency. In the timeline all the time between your backward pass and your update is drawn as communication.
"""


# %% my-average
def my_average(gradient):
    """Replace a gradient by its mean over the ranks, in place."""
    if dist.get_rank() != 0:
        wire.send(gradient, 0)
        wire.recv(gradient, 0)
        return
    others = range(1, dist.get_world_size())
    for other in others:
        incoming = torch.empty_like(gradient)
        wire.recv(incoming, other)
        gradient += incoming
    gradient /= dist.get_world_size()
    for other in others:
        wire.send(gradient, other)


# %% my-train
def my_train(model, batches, lr):
    """Train on this rank's share of each batch; return the losses."""
    broadcast_parameters(model)
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
    "digits", world_size=K, stages="1,3,torch", device="cpu", progress=True,
    yours={"my server": my_train}
)
compare.table(results)

# %% yours-in-the-comparison
show.compare_figure(results)

# %% [markdown]
r"""
## In three lines

1. Equal weights at the start (by a broadcast) and equal gradients in every step keep K replicas one model.
2. The one link of a server carries 2(K-1) p, so its time grows with the number of ranks, as derived.
3. Averaging consists of waiting, moving and adding up. Without a slow rank, moving takes nearly all of the time.

**Exercise:** [3](../exercises/03_parameter_server.ipynb), `exercises/03_parameter_server.ipynb`. **Next:**
[4, ring all-reduce](04_ring_all_reduce.ipynb): no server.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
