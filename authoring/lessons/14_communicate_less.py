# %% [markdown]
r"""
# 14 · Communicate less

Everything so far computed exactly what one device computes. On slow links that has a price: each step waits for all
gradients of all ranks. What if the ranks sent less, or met less often, or did not wait at all? Then they no longer
train exactly as one device does. This lesson measures both sides: how much time is won, and what it costs in accuracy.

**After this lesson you can**

- compress gradients in a hook, and say what error feedback is for,
- train with local SGD and with DiLoCo, and choose how often ranks meet,
- say what a stale gradient is, and when a server that never waits wins,
- compare ways of training by loss against *time*, not against steps.

*40 minutes, under a minute of computing.*
"""

# %% imports
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_course import Device, DistributedDataParallel, Link, communicate_less, launch
from ddp_course import problems, stage1_single, stage4_ring, wire
from ddp_course.lab import claims, show
from ddp_exercises import fill_in, task

K = 4  # how many ranks; 2 works as well

# %% opening-questions
show.questions(14)

# %% [markdown]
r"""
## Three ways out

| | what travels | what is given up |
|---|---|---|
| fewer bytes | numbers of 16 bits (*half precision*); the largest 1 % of a gradient (*top-k*); a matrix as two thin ones (*low rank*, PowerSGD) | gradients are approximate |
| less often | weights, every H steps (*local SGD*, *DiLoCo*) | in between, every rank goes its own way |
| without waiting | each gradient as soon as it is there, to a server | gradients belong to weights of some updates ago: they are *stale* |

Sending the largest 1 % sounds reckless: 99 % of all numbers never arrive. So whatever a rank did not send, it keeps,
and adds to its next gradient. That is **error feedback**: small gradients are sent late instead of never.

## Predict
"""

# %% predict
guess = show.predict(
    "Each rank sends only the largest 1 % of its gradient. How far does training get with and without error feedback?",
    [
        "both as far as with all of it",
        "with feedback nearly as far, without clearly less",
        "neither learns",
    ],
)
guess

# %% [markdown]
r"""
Write the first way yourself (task 14.1 of [exercise 14](../exercises/14_communicate_less.ipynb)). A rank sends only the largest values of
its gradient, by magnitude, with their places: `max(1, round(share * n))` of n. What is not sent is `left`, and is added to the next
gradient before the largest are chosen. Change neither `gradient` nor `left`; both have one dimension.
"""


# %% task-14-1
def compress(gradient, left, share):
    """Return (values, places, left): what to send of gradient + left, where, and what stays."""
    raise NotImplementedError("Exercise 14.1: Send the largest")


show.source(task("14.1", compress), click="Write it first, then open: one solution")

# %% source-topk
show.source(communicate_less.TopK.__call__, click="Open after task 14.1: top-k with error feedback")

# %% [markdown]
r"""
Such a hook takes the place of DDP's average of a bucket (lesson 06). The hooks for low rank and half precision are in the
same file. `gathered` is the ring's allgather: every rank sends on all values and places that it has or receives, except
those that come to it last. How many bytes is that? One line is missing.
"""


# %% faded-sent-by-top-k
def sent_by_top_k(values, share, world_size):
    """Return the bytes that a rank sends for a gradient of so many values; a value and a place have four bytes each."""
    kept = max(1, round(share * values))
    sent = ...
    return sent


fill_in(sent_by_top_k, {(1000, 0.01, 4): 240, (1000, 0.5, 2): 4000, (10, 0.01, 8): 56})

# %% [markdown]
r"""
<details><summary>The line</summary><code>sent = (world_size - 1) * kept * 8</code></details>

These bytes grow with K, while a ring that adds up sends 2(K-1)/K times the gradient, which is hardly more with many ranks than
with few. So top 1 % sends 4 % of the ring's bytes on 4 ranks, and as many bytes as the ring on 100.

The second way is local SGD. One more argument makes it DiLoCo:
"""

# %% source-local
show.source(
    communicate_less.train_local,
    communicate_less.take_mean_change,
    click="Write task 14.2 first, then open: local SGD and DiLoCo",
)

# %% [markdown]
r"""
The third way is a server that never waits. It has a thread for each worker, which takes the worker's gradient, updates the
weights at once, and answers with the newest ones. While a worker computes, gradients of others update the weights too. How
many updates lie between is the **staleness** of its gradient.
"""

# %% source-server
show.source(communicate_less.serve)

# %% [markdown]
r"""
How stale do gradients become? Here is the server's bookkeeping without threads and weights, again with a line missing.
"""


# %% faded-staleness-of
def staleness_of(workers):
    """Return the staleness of each gradient; `workers` says from whom they come, in the order in which they arrive."""
    known = {}  # the updates in the weights that a worker has; none are in those at the start
    found = []
    for updates, worker in enumerate(workers):
        stale = ...
        found.append(stale)
        known[worker] = updates + 1
    return found


fill_in(staleness_of, {("abcabc",): [0, 1, 2, 2, 2, 2], ("aaab",): [0, 0, 0, 3]})

# %% [markdown]
r"""
<details><summary>The line</summary><code>stale = updates - known.get(worker, 0)</code></details>

## Run

Eight ways train the small byte model, each from three seeds, on equally many samples. The asynchronous server has only
K-1 workers, so each of its workers processes K/(K-1) times as many batches. The server updates after every batch of one
worker instead of after K of them; to compensate, the learning rate is divided by K. Every rank counts what it sends.
"""


# %% ways
def hooked(hook):
    def way(model, batches, lr):
        parallel = DistributedDataParallel(model)
        losses = []
        parallel.register_comm_hook(None, hook())
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(parallel(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return way


def local(every, outer=None):
    def way(model, batches, lr):
        return communicate_less.train_local(model, batches, lr, every, outer)

    return way


# %% all-ways
def nesterov(parameters):
    # The paper's momentum of 0.9 wants more than five meetings.
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.6, nesterov=True)


def asynchronous(model, batches, lr):
    losses, _ = communicate_less.train_asynchronously(model, batches, lr / K)
    return losses


ways = {
    "every step": stage4_ring.train,
    "half precision": hooked(lambda: communicate_less.fp16_hook),
    "top 1 %": hooked(lambda: communicate_less.TopK(0.01)),
    "top 1 %, no feedback": hooked(lambda: communicate_less.TopK(0.01, feedback=False)),
    "low rank": hooked(lambda: communicate_less.LowRank(2)),
    "local SGD": local(every=8),
    "DiLoCo": local(every=8, outer=nesterov),
    "asynchronous": asynchronous,
}


# %% outcome
class Outcome(NamedTuple):
    losses: list
    bytes_per_step: float
    held_out_loss: float


# %% run
text = problems.make("bytes", parameters=20_000, context=32)


def trained(seed, steps=40):
    outcomes = {}
    for name, way in ways.items():
        model = text.model(seed)
        shares = steps * K // (K - 1) if name == "asynchronous" else steps
        share = text.batches(32, shares, seed=seed, rank=dist.get_rank(), world_size=K)
        with wire.counting() as before:
            way(text.model(), [], 0.15)  # no steps: the broadcast at the start, and no more
        with wire.counting() as traffic:
            losses = way(model, share, 0.15)
        bytes_per_step = (traffic.bytes_sent - before.bytes_sent) / steps
        outcomes[name] = Outcome(losses, bytes_per_step, text.loss(model))
        dist.barrier()
    return outcomes


# Rank 0 takes these: two of seven ways also meet five times, and the server takes none.
steps = 7 * 40 + 2 * 5
runs = [launch(trained, seed, world_size=K, progress=(f"seed {seed}", steps)) for seed in range(3)]

# %% final-loss folded=true
final = {}
for name in ways:
    final[name] = [ranks[0][name].held_out_loss for ranks in runs]
mean = {name.replace(", ", ",\n"): sum(three) / 3 for name, three in final.items()}
spread = max(max(three) - min(three) for three in final.values())
show.bars(
    mean,
    "held-out loss (nats)",
    f"Seeds differ by up to {spread:.2f} nats: smaller differences between ways mean nothing",
    width=9.4,
    kind="measured",
)

# %% reveal
gap = {}
for name in ("top 1 %", "top 1 %, no feedback"):
    gap[name] = sum(final[name]) / 3 - sum(final["every step"]) / 3
guess.reveal("with feedback {:+.2f} nats, without {:+.2f}".format(*gap.values()), guess.answers[1])

# %% check-feedback
# NBVAL_CHECK_OUTPUT
assert gap["top 1 %"] < 0.5 * gap["top 1 %, no feedback"], gap
assert all(mean < 4 for mean in final["local SGD"])
print("error feedback wins back most of what the largest 1 % alone would lose")

# %% bytes folded=true
sent = {}
for name in ways:
    sent[name] = max(rank[name].bytes_per_step for rank in runs[0])
first = sent["every step"]
percent = {name: 100 * count / first for name, count in sent.items()}
title = (
    f"Top 1 % sends {percent['top 1 %']:.0f} % of the ring's bytes;"
    f" an asynchronous server sends {percent['asynchronous']:.0f} %"
)
show.bars(
    {name.replace(", ", ",\n"): number for name, number in percent.items()},
    "sent by the busiest rank (% of the ring)",
    title,
    kind="counted",
    width=9.4,
)

# %% check-bytes folded=true
# NBVAL_CHECK_OUTPUT
assert 0.45 < sent["half precision"] / first < 0.55 and sent["local SGD"] < 0.2 * first
assert sent["top 1 %"] < 0.1 * first
print("half precision sends half; local SGD an eighth; the largest 1 % with their places a few hundredths")

# %% [markdown]
r"""
The asynchronous server answers every share with p bytes, as in lesson 03. For the 32 samples of a step that makes K p bytes,
while a rank of the ring sends 2(K-1)/K p. The server saves waiting, not bytes.

## Loss against time

Steps are not what we pay for. Let a device compute its share of 32 samples in 20 ms and let the link carry b bytes per
second. Then n steps are over after n times (20 ms + bytes sent / b); the server's K-1 workers make K/(K-1) times as many
steps for as many samples. The losses are measured, the bytes counted, the time derived from them. (These are losses on
the text that is trained on. The held-out text is easier, so its losses above are lower.) Nothing is hidden under
backward here: with the overlap of lesson 05 a step that averages gradients would be up to 13 ms shorter. Seven of
the eight ways are drawn: all but top 1 % without feedback. First a slow link of 5 Mbit/s, as between two homes; then a fast one of 1 Gbit/s.
"""


# %% clock folded=true
def against_time(bits_per_second, compute_s=0.02, window=8):
    series = {}
    bands = {}
    for name in ways:
        if name == "top 1 %, no feedback":
            continue
        outcomes = [rank[name] for ranks in runs for rank in ranks]
        # The server trains nothing, so it has no losses.
        losses = [outcome.losses for outcome in outcomes if outcome.losses]
        mean_losses = torch.tensor(losses).unflatten(0, (len(runs), -1)).mean(1)
        smooth = mean_losses.unfold(1, window, 1).mean(-1)
        shares = K / (K - 1) if name == "asynchronous" else 1  # One of K ranks only serves.
        step_s = compute_s + sent[name] / shares * 8 / bits_per_second
        seconds = [step_s * (step + window) for step in range(smooth.shape[1])]
        series[name] = seconds, smooth.mean(0).tolist()
        bands[name] = seconds, smooth.amin(0).tolist(), smooth.amax(0).tolist()
    return series, bands


# %% drawn folded=true
def drawn(bits_per_second, title):
    series, bands = against_time(bits_per_second)
    axis = "training loss (nats, mean of 8 steps)"
    kind = "loss measured, time derived"
    return show.curves(
        series, "time (s)", axis, title, bands=bands, log="x", points=False, height=4.6, kind=kind
    )


# %% slow-link
drawn(5e6, "On 5 Mbit/s, the fewer bytes a way sends, the sooner it is done")

# %% fast-link
drawn(1e9, "On 1 Gbit/s sending less gains little, and a server costs one worker")

# %% check-time folded=true
# NBVAL_CHECK_OUTPUT
def last_second(name, bits_per_second):
    series, _ = against_time(bits_per_second)
    seconds, _ = series[name]
    return seconds[-1]


assert last_second("every step", 5e6) > 3 * last_second("local SGD", 5e6)
assert last_second("every step", 1e9) < 1.2 * last_second("local SGD", 1e9)
print("slow link: local SGD takes less than a third of the time; fast link: it gains less than a fifth")
faster = {}
for link, speed in (("5 Mbit/s", 5e6), ("1 Gbit/s", 1e9)):
    shorter = last_second("every step", speed) / last_second("local SGD", speed)
    faster[f"the link has {link}"] = shorter > 1.2
claims.decide(
    26, "Whoever sends fewer bytes trains faster.", "derived", faster,
    "Bytes cost time only while the device waits for them; what is left out of a gradient costs accuracy on any link.",
)

# %% [markdown]
r"""
The bands show the best and the worst of three seeds: a difference smaller than a band says nothing. On the fast link only the
server takes longer for as many samples than averaging in every step: it has one worker less, and sends the most bytes.

## Is the clock right?

The times were derived from bytes. Now the programs themselves run on emulated devices and links, in virtual time. Three of the ways
make two steps that are not timed, and then eight that are; local SGD meets once in these. A device takes 60 ms per step. The dashes
are the derived times.
"""


# %% measured folded=true
def step_seconds(name, ranks):
    begun = []

    def watched():
        for batch in text.batches(8 * ranks, 11, rank=dist.get_rank(), world_size=ranks):
            begun.append(time.perf_counter())
            yield batch

    ways[name](text.model(), watched(), 0.15)
    return (begun[10] - begun[2]) / 8 if begun else 0.0  # the server takes no batches


with Device("1GFLOP/s").emulate(record=True, sleep=False) as counted:
    stage1_single.train(text.model(), text.batches(8, 1), 0.15)
device = Device(f"{counted.busy_s / 0.06}GFLOP/s")  # on which a step takes 60 ms
wall = {
    name: 1000 * max(launch(step_seconds, name, K, world_size=K, link=Link("5Mbit"), device=device))
    for name in show.progress(("every step", "half precision", "local SGD"))
}
derived = {name: 60 + 1000 * sent[name] * 8 / 5e6 for name in wall}
furthest = max(abs(wall[name] / derived[name] - 1) for name in wall)
title = f"The programs take the derived times, to within {100 * furthest:.1f} %"
show.bars(wall, "time per step (ms)", title, theory=derived,
          form="{:.0f}", kind="virtual time", dash="derived")

# %% check-clock folded=true
# NBVAL_CHECK_OUTPUT
assert all(wall[name] > 0.9 * derived[name] for name in wall), (wall, derived)
print("no step is shorter than derived: device and link take their time")

# %% [markdown]
r"""
## Who waits for the slow one?

On fast links sending less gains little. But now let one of four devices have half of the rate. If all ranks meet in every
step, every step takes as long as on that device. The asynchronous server's other workers go on at their own pace. It has one
worker less, and still more samples get through. The price is staleness. Whether the loss falls faster too is another question.
(Above, with all devices alike, equally many samples gave the same loss.)
"""


# %% slow-rank folded=true
def staleness():
    share = text.batches(32, 8, rank=dist.get_rank(), world_size=4)
    _, updates_late = communicate_less.train_asynchronously(text.model(), share, 0.15)
    return sorted(updates_late)


slow = Device(f"{device.rate / 2}FLOP/s")
mixed = [device, device, device, slow]
both = ("every step", "asynchronous")
seconds = {name: launch(step_seconds, name, 4, world_size=4, device=mixed) for name in both}
updates = launch(staleness, world_size=4, device=mixed)[0]
median = updates[len(updates) // 2]
print(f"staleness of a gradient, in updates: median {median}, at most {updates[-1]} (counted)")
together = {}
for name, ranks in seconds.items():
    paces = [1000 * step for step in ranks if step]  # the server takes no batches
    together[name] = 1000 * sum(8 / ms for ms in paces)
gain = together["asynchronous"] / together["every step"]
title = f"With one slow rank, asynchronous training gets through {gain:.2f} times as many samples"
show.bars(together, "samples per second, all workers", title, form="{:.0f}", kind="virtual time")

# %% [markdown]
r"""
## On a larger model

DiLoCo's authors have published the same comparison on a larger model (Douillard et al., arXiv 2311.08105, Table 2). A
language model goes on from step 24,000 for N steps, alone or with eight times the computing. Communication is 8 N where
eight devices meet in every step.

| way | perplexity | communication | time | computing |
|---|---|---|---|---|
| alone | 16.23 | 0 | 1 | 1 |
| batch 8 times as large, 8 devices | 15.30 | 8 N | 1 | 8 |
| batch 8 times as large, one device | 15.30 | 0 | 8 | 8 |
| 8 times as many steps, one device | 14.72 | 0 | 8 | 8 |
| DiLoCo, 8 devices, H = 500 | 15.02 | 8 N / 500 | 1 | 8 |

DiLoCo sends a 500th of what data parallelism sends, and ends lower: in the same time, eight devices that train apart make
eight times as many (small) steps as eight devices that share each step. Eight times as many steps in a row on one device end
lowest, and take eight times as long.

## What changed

Stage 4's loop averages gradients in every step. Local SGD does not; instead, ranks meet after some of the steps.
"""

# %% diff
show.diff(stage4_ring.train, communicate_less.train_local)

# %% [markdown]
r"""
## What torch does

`torch.distributed.algorithms.ddp_comm_hooks` has half precision, PowerSGD and others; they run unchanged on our DDP, as ours
would on torch's. `torch.distributed.algorithms.model_averaging` has local SGD. DiLoCo and its successors train models over
the internet, with hundreds of steps between two meetings; `torchft` has an implementation. Asynchronous servers are rare
today: stale gradients make results depend on who was fast, and no run can be repeated. These ways come from Vogels et al.,
*PowerSGD* (2019); Karimireddy et al., error feedback (2019); Stich, local SGD (2019); Douillard et al., *DiLoCo* (2023).

## Check yourself

**1.** Your links are so fast that communication hides behind backward. Should you compress?
<details><summary>Answer</summary>
No. There is no time to win, and compression costs computing and accuracy.
</details>

**2.** Local SGD with H = 1 is the same as what?
<details><summary>Answer</summary>
With plain SGD it is the same as averaging gradients: the mean of (w - lr g) is w minus lr times the mean of g. With momentum
or Adam it is not, since each rank then has its own state.
</details>

**3.** Eight workers push to an asynchronous server at the same pace. How stale is a gradient, typically?
<details><summary>Answer</summary>
Seven updates: while one worker computes, each of the others delivers once. A slow worker's gradients are staler still.
</details>

## In three lines

1. Fewer bytes (half precision, top-k, low rank) or fewer meetings (local SGD, DiLoCo) win time exactly where links are slow.
2. What is not sent must be kept: error feedback turns "never" into "later".
3. None of it is the training of one device any more: compare by loss against time, over several seeds.

**Exercise:** [14](../exercises/14_communicate_less.ipynb), `exercises/14_communicate_less.ipynb`. **Next:**
[15, capstone](15_capstone.ipynb): your own model and data.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
