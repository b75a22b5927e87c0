# %% [markdown]
r"""
# 2 · Data parallel

The oldest way to use several devices: keep one process, cut every batch into shards, and let each device work on
one of them. Is the result still the same? And what does it cost?

**After this lesson you can**

- prove, and check on a real model, that averaged gradients of shards are the gradient of the batch,
- say when this is *not* true,
- draw what DataParallel does with a batch, and name the device that is overloaded,
- say what Python's global lock does and does not prevent.

*35 minutes, under a minute of computing.*
"""

# %% imports
from ddp_course import (
    DataParallel, claims, launch, problems, show, stage1_single, stage2_dataparallel, timing, torch,
)  # fmt: skip

K = 4  # how many devices; 2 works as well

# %% [markdown]
r"""
## Why averaging is right

The loss of a batch is the mean of its samples' losses. Cut B samples into K shards of B/K. Then

$$\underbrace{\frac1B \sum_{i=1}^{B} \nabla\ell_i}_{\text{the batch}}
= \frac1K \sum_{k=1}^{K} \underbrace{\frac{1}{B/K} \sum_{i \in \text{shard } k} \nabla\ell_i}_{\text{gradient of shard } k}$$

The gradient of the batch *is* the mean of the shards' gradients. Not an approximation. Two things are needed: the
loss is a mean, and the shards are equally large.

## Predict

Now with shards of 1, 7 and 16 samples.
"""

# %% predict
guess = show.predict(
    "Unequal shards: does the plain mean of their gradients still equal the batch's gradient?", ["yes", "no"]
)
guess

# %% [markdown]
r"""
## Run

We compute in float64, where rounding errors are of the size $10^{-16}$, so that nothing hides behind them.
"""


# %% shards-against-batch
digits = problems.make("digits", dtype=torch.float64)
model = digits.model()
inputs, targets = next(digits.batches(global_batch=24, steps=1))


def gradient(inputs, targets):
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(model.parameters()))])


def error(sizes, weights):
    parts = [gradient(*pair) for pair in zip(inputs.split(sizes), targets.split(sizes))]
    return float((sum(w * part for w, part in zip(weights, parts)) - gradient(inputs, targets)).abs().max())


# %% compare-gradients
equal = error([24 // K] * K, [1 / K] * K)
unequal = error([1, 7, 16], [1 / 3, 1 / 3, 1 / 3])
weighted = error([1, 7, 16], [1 / 24, 7 / 24, 16 / 24])
print(f"equal shards, plain mean:     {equal:.0e}")
print(f"unequal shards, plain mean:   {unequal:.0e}")
print(f"unequal shards, weighted:     {weighted:.0e}")
guess.reveal(f"off by {unequal:.0e}", "no")

# %% check-averaging
# NBVAL_CHECK_OUTPUT
assert equal < 1e-12 and weighted < 1e-12 and unequal > 1e-6
print("equal shards: the mean is exact; unequal shards: weight each by its number of samples")

# %% [markdown]
r"""
So K devices with B/K samples each do *the same step* as one device with B samples, at the same learning rate. You
will read that the rate has to be multiplied by K "because the gradient is divided by K". Here is the experiment:
train four ranks and one device, and compare the weights at the end. The experiment is done twice: with the mean of
the losses, which is what everyone uses, and with their sum, for which the sentence is right.
"""

# %% claim-1
# NBVAL_CHECK_OUTPUT
finding = claims.test(1)
print(finding.line)

# %% claim-1-numbers
finding

# %% [markdown]
r"""
## One step, drawn

`DataParallel` does this with every batch. Follow the arrows from left to right.
"""

# %% sketch
show.sketches.scatter_gather(K)

# %% [markdown]
r"""
And in code. Each arrow is a function:
"""

# %% source
show.source(
    stage2_dataparallel.scatter, stage2_dataparallel.replicate, stage2_dataparallel.gather, stage2_dataparallel.reduce
)

# %% [markdown]
r"""
## What changed

From stage 1 to stage 2, in the loop itself: two lines. The model is wrapped, and after `loss.backward()`, which
ends at the gathered outputs, the wrapper carries on through the replicas.
"""

# %% diff
show.diff(stage1_single.train, stage2_dataparallel.train)

# %% same-training
digits = problems.make("digits")
one, many = digits.model(), digits.model()
stage1_single.train(one, digits.batches(48, 30), lr=0.05)
stage2_dataparallel.train(many, digits.batches(48, 30), lr=0.05, devices=["cpu"] * K)
pairs = zip(one.parameters(), many.parameters())
difference = max(float((a - b).detach().abs().max()) for a, b in pairs)

# %% check-same-training
# NBVAL_CHECK_OUTPUT
assert difference < 1e-4, difference
print("one device and DataParallel: the same weights after 30 steps")

# %% [markdown]
r"""
## The master's load

Who holds what? Halfway through a step, after forward, we count the bytes of the tensors on each device. The input
of the whole batch and all outputs lie on the master. After backward the master also receives K-1 gradients and
adds them up, one after another.
"""


# %% count-memory
def nbytes(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


text = problems.make("bytes", parameters=100_000)
inputs, targets = next(text.batches(global_batch=24, steps=1))
parallel = DataParallel(text.model(), ["cpu"] * K)
outputs = parallel(inputs)
held = [nbytes(*replica.parameters(), out) for replica, out in zip(parallel.replicas, parallel.outputs)]
held[0] += nbytes(inputs, targets, outputs)

# %% memory-figure
labels = ["master"] + [f"device {k}" for k in range(1, K)]
times = held[0] / held[-1]
show.bars(
    dict(zip(labels, [count / 2**20 for count in held])), "weights, inputs and outputs (MiB)",
    f"The master holds {times:.1f} times what the others hold", colours={"master": show.STAGE_COLOURS["2"]},
)  # fmt: skip

# %% check-master
# NBVAL_CHECK_OUTPUT
assert held[0] > 1.3 * max(held[1:])
print("the master holds more than any other device")

# %% [markdown]
r"""
And with every step all weights are copied from the master to all others again: (K-1) p bytes out, and (K-1) p
bytes of gradients back, for p bytes of weights, through the master's link.

## Claim: "a single process can use only one core"

This is said to be why DataParallel is slow: Python's *global interpreter lock* (GIL) lets only one thread run Python
code at a time. But most of a training step is not Python code. The experiment lets one thread work and counts how
often another one gets a turn meanwhile.
"""

# %% claim-5
# NBVAL_CHECK_OUTPUT
finding = claims.test(5)
print(finding.line)

# %% claim-5-numbers
finding

# %% [markdown]
r"""
So threads are not useless. How good are they? Two shards of text, each with its own copy of the model: one after the
other, in two threads, and in two processes.
"""


# %% threads-and-processes
def seconds(map_shards, count):
    torch.set_num_threads(1)
    models, best = [text.model() for _ in range(count)], [9.0, 9.0]
    batches = [next(text.batches(16, 1, seed=shard)) for shard in range(count)]
    for _ in range(6):
        with timing.stopwatch() as forward:
            losses = map_shards(loss_of, models, batches)
        with timing.stopwatch() as backward:
            map_shards(torch.Tensor.backward, losses)
        best = [min(best[0], forward.seconds), min(best[1], backward.seconds)]
    return best


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def in_turn(function, *arguments):
    return list(map(function, *arguments))


# %% threads-figure
rows = {"in turn": launch(seconds, in_turn, 2, world_size=1)[0]}
rows["threads"] = launch(seconds, stage2_dataparallel.in_threads, 2, world_size=1)[0]
rows["processes"] = [max(both) for both in zip(*launch(seconds, in_turn, 1, world_size=2))]
parts = {f"{part}\n{way}": 1000 * row[i] for i, part in enumerate(["forward", "backward"]) for way, row in rows.items()}
gain = {way: sum(rows["in turn"]) / sum(row) for way, row in rows.items()}
show.bars(parts, "time for two shards (ms)", form="{:.1f}",
          title=f"Two threads are {gain['threads']:.1f} times as fast as one, two processes {gain['processes']:.1f} times")  # fmt: skip

# %% [markdown]
r"""
With two free cores, both take little more than half the time of one after the other. Processes stay that good when more
of the work is Python; threads do not. And in `DataParallel` the replicas are made anew in every step, and the master does
everything else alone.

## What torch does

`torch.nn.DataParallel` is this algorithm, on GPUs. Its documentation recommends `DistributedDataParallel` instead,
even on a single machine. It does not average: its loss is that of the gathered outputs, so the *sum* of the
replicas' gradients is right, as it is in ours.

## Check yourself

**1.** Why does `reduce` add, when we have just proved that averages are right?
<details><summary>Answer</summary>
The loss was taken over the whole batch, on the master, so each sample's part was already divided by B. Averages
are right when every shard takes the mean over its own B/K samples.
</details>

**2.** Your last batch has 10 samples, and K = 4. What does the mean of the ranks' means do wrong?
<details><summary>Answer</summary>
The shards have 3, 3, 2 and 2 samples. A sample in a small shard counts for 1/8, in a large one for 1/12. Weight
by the number of samples, or drop the odd ones.
</details>

**3.** Does DataParallel help if the model does not fit into the memory of one device?
<details><summary>Answer</summary>
No. Every device holds a whole copy, and the master holds even more. Lessons 07 and 08 help.
</details>

## Exercise

`exercises/02_data_parallel.ipynb`
"""
