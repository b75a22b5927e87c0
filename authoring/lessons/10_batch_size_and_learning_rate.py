# %% [markdown]
r"""
# 10 · Batch size and learning rate

With K devices you can do two different things. You can cut the same batch into K shares, and then nothing changes but the
speed. Or you can make the batch K times as large. Then an epoch has K times fewer updates, and you must decide what to do
with the learning rate. Much of what is written about learning rates mixes the two up. This lesson takes them apart by
experiment.

**After this lesson you can**

- say when the learning rate must *not* be changed,
- scale it with the batch, linearly or by the square root, with warm-up, and see where each breaks,
- measure the critical batch size, and say what it bounds,
- avoid quiet mistakes in the sampler, in the loss and in gradient clipping.

*40 minutes, under a minute of computing.*
"""

# %% imports
import time

import torch
import torch.distributed as dist

from ddp_course import Device, Link, launch, problems, stage1_single, stage5_bucketed
from ddp_course import stage6_ddp
from ddp_course.lab import claims, facts, show
from ddp_exercises import fill_in, task

K = 4  # how many ranks; 2 works as well

# %% opening-questions
show.questions(10)

# %% [markdown]
r"""
## Predict: the same batch on more devices

We train the same model twice, at the same learning rate: on one device with a batch of 48, and on K ranks with 48/K
samples each. Do the loss curves differ?
"""

# %% predict
guess = show.predict(
    "Same global batch on K ranks: by what must the learning rate be multiplied?",
    ["1/K", "1", "√K", "K"],
)
guess


# %% same-batch
def losses(world_size=1, rank=0):
    text = problems.make("bytes", parameters=20_000, context=32, dtype=torch.float64)
    train = stage1_single.train if world_size == 1 else stage6_ddp.train
    return train(text.model(), text.batches(48, 25, rank=rank, world_size=world_size), lr=0.5)


many = launch(lambda: losses(dist.get_world_size(), dist.get_rank()), world_size=K, progress=25)
single = losses()
mean = [sum(step) / K for step in zip(*many)]

# %% same-batch-figure folded=true
show.curves(
    {
        "one device": (range(25), single, show.STAGE_COLOURS["1"]),
        f"{K} ranks": (range(25), mean, show.STAGE_COLOURS["6"]),
    },
    "step",
    "loss (nats)",
    "Same batch, same rate: the curves are one",
    points=False,
    nested=True,
)

# %% check-same-batch
# NBVAL_CHECK_OUTPUT
assert max(abs(a - b) for a, b in zip(single, mean)) < 1e-12
print("K ranks with B/K samples each learn exactly what one device learns with B, at the same rate")
guess.reveal("1: the mean of the ranks' means is the mean of the batch", "1")

# %% [markdown]
r"""
## A batch k times as large

Now each device keeps its batch, so the global batch becomes k times as large. The same number of samples then makes k times
fewer steps. To get as far, each step should be longer. Two rules for this are in use:

- **linear**: multiply the rate by k. If the gradient hardly changes over k small steps, one step of k times the length
  leads to the same place.
- **square root**: multiply by √k, because the noise of the gradient falls by √k (lesson 01).

Write the second rule in the place of the three dots:
"""


# %% faded-scaled-rate
def scaled_rate(rate, batch, larger_batch, rule):
    """Return the learning rate for the larger batch, by the rule "linear" or "square root"."""
    k = larger_batch / batch
    if rule == "linear":
        return rate * k
    return ...


fill_in(scaled_rate, {(0.01, 8, 128, "linear"): 0.16, (0.01, 8, 128, "square root"): 0.04})

# %% [markdown]
r"""
<details><summary>The line</summary><code>return rate * k**0.5</code></details>

Large rates are dangerous at the beginning, when the loss is steep. With **warm-up** the rate starts small
and grows over the first steps, here over the first tenth of them. Since K ranks with B/K samples do exactly the step of one device
with B, all of this can be studied on one device. We use four ranks only to make many such runs at the same time, for four rules with
three seeds each.
"""


# %% train
def final_loss(problem, samples, batch, lr, warm_up, seed):
    model = problem.model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    steps = samples // batch
    for step, (inputs, targets) in enumerate(problem.batches(batch, steps, seed=seed)):
        ramp = min(1, (step + 1) / max(1, steps // 10)) if warm_up else 1
        optimizer.param_groups[0]["lr"] = lr * ramp
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    loss = problem.loss(model)
    return loss if loss < 6 else 6.0  # NaN is not less than 6 either


# %% rules
rules = {"same rate": lambda k: 1, "square root": lambda k: k**0.5,
         "linear": lambda k: k, "linear, warm-up": lambda k: k}
factors = [1, 2, 4, 8, 16, 32]


def sweep(problem, samples, batch, lr):
    runs = {(name, k, seed): (k * batch, lr * rule(k), "warm" in name, seed)
            for k in factors for name, rule in rules.items() for seed in range(3)}
    different = list(dict.fromkeys(runs.values()))  # for k = 1 three of the rules are the same run

    def every_fourth():
        dist.barrier()  # the only thing that these ranks do together: each trains runs of its own
        return {run: final_loss(problem, samples, *run) for run in different[dist.get_rank() :: 4]}

    steps = sum(samples // run[0] for run in different[::4])
    parts = launch(every_fourth, world_size=4, progress=steps)
    loss_of = {run: loss for part in parts for run, loss in part.items()}
    losses = torch.tensor([loss_of[run] for run in runs.values()], dtype=torch.float64)
    return dict(zip(rules, losses.view(len(factors), len(rules), 3).unbind(1)))


# %% digits
def drawn(losses, batch, title):
    means = {name: (factors, three.mean(1)) for name, three in losses.items()}
    bands = {name: (factors, three.amin(1), three.amax(1)) for name, three in losses.items()}
    x = f"batch, in units of {batch} samples"
    y = "held-out loss (nats)"
    return show.curves(
        means, x, y, title, log="x", points=False, bands=bands, ticks=factors
    )


digits = sweep(problems.make("digits"), samples=2880, batch=8, lr=0.01)
drawn(digits, 8, "digits: with the linear rule, a batch 4 times as large reaches the same loss")

# %% check-digits
# NBVAL_CHECK_OUTPUT
at = {name: three.mean(1).tolist() for name, three in digits.items()}
four = factors.index(4)
assert at["linear"][four] < at["square root"][four] < at["same rate"][four], at
assert at["linear"][four] < 1.5 * at["linear"][0] and at["linear"][-1] > 2 * at["linear"][0], at
print("batch times 4: linear is best and the same rate worst; batch times 32: linear has broken")

# %% [markdown]
r"""
The bands reach from the best to the worst of three seeds. Up to a point, linear scaling gives the small batch's result with
k times fewer steps, and an unchanged rate does not. Beyond that point no rule reaches the small batch's loss: either the
learning rate is too large, or there are too few steps. Warm-up makes no clear difference here, since at 16 times the batch
only 22 steps are left, and a tenth of them is 2. At full size, near the end of this lesson, it pays.

**Where is that point?** Lesson 01 measured how noisy a gradient is. Averaging more samples pays as long as the noise is
larger than the gradient itself. The batch at which both are equally long is the **critical batch size** (McCandlish et al.,
"An Empirical Model of Large-Batch Training", 2018). It is the squared noise of a single sample, divided by the squared
length of the gradient. Take it as an order of magnitude, since nothing breaks at just this size. In a long training it grows,
because the gradient gets smaller. In these few steps it stays within a factor of two.
"""


# %% critical
def critical_batch(model, digits, draws=256):
    parameters = list(model.parameters())

    def gradient(inputs, targets):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, parameters)])

    truth = gradient(digits.inputs, digits.targets)
    noise = 0.0
    for inputs, targets in digits.batches(1, draws):
        noise += float((gradient(inputs, targets) - truth).square().sum())
    return noise / draws / float(truth.square().sum())


problem = problems.make("digits")
model = problem.model()
critical = {}
for before, steps in show.progress([(0, 0), (0, 40), (40, 80), (80, 160)]):
    stage1_single.train(model, problem.batches(8, steps, start=before), 0.01)
    critical[f"after {steps} steps"] = critical_batch(model, problem)
low, *_, high = sorted(critical.values())
title = f"Noise and gradient are equally long at {low:.0f} to {high:.0f} samples"
show.bars(critical, "critical batch size (samples)", title, form="{:.0f}", kind="measured")

# %% [markdown]
r"""
Well below the critical size, doubling the batch nearly halves the number of steps. Well above it, a larger batch saves hardly
any steps, and samples are wasted. Between the two, one case passes slowly into the other. The paper's theory puts this into a
formula: a batch of B needs $1 + B_{\text{critical}}/B$ times the steps of the largest batch. Write it as code:
"""


# %% faded-steps-and-samples
def steps_and_samples(fewest_steps, batch, critical):
    """Return the steps and the samples that a batch needs; the largest batch needs `fewest_steps`."""
    steps = ...
    return steps, steps * batch


fill_in(steps_and_samples, {(100, 50, 50): (200.0, 10_000.0), (100, 5, 50): (1100.0, 5500.0),
                            (100, 500, 50): (110.0, 55_000.0)})

# %% [markdown]
r"""
<details><summary>The line</summary><code>steps = fewest_steps * (1 + critical / batch)</code></details>

From a batch of 5 to one of 50 the steps fall from 1,100 to 200, for less than twice the samples. From 50 to 500 they fall to
110, for 5.5 times the samples. Here are runs with the linear rule, drawn twice. Against **updates** the largest batch looks
best. Against **samples**, which the devices have to compute, it does not: a batch below the critical size ends as low as a
small one, and a batch above it is behind.
"""


# %% two-axes
def curve(k, samples=5760, every=640):
    problem = problems.make("digits")
    model = problem.model()
    batch = 8 * k
    losses = []
    for epoch in show.progress(range(samples // every), f"batch {batch}"):
        steps = every // batch
        share = problem.batches(batch, steps * (epoch + 1), start=steps * epoch)
        stage1_single.train(model, share, 0.01 * k)
        losses.append(problem.loss(model))
    return losses


lines = {k: curve(k) for k in (1, 4, 16)}
samples = 640 * torch.arange(1, 10)
against_updates = {f"batch {8 * k}": (samples // (8 * k), row) for k, row in lines.items()}
title = "Counted in updates, the largest batch is the first to reach a low loss"
show.curves(against_updates, "updates", "held-out loss (nats)", title, log="x", points=False)

# %% against-samples folded=true
against_samples = {f"batch {8 * k}": (samples, row) for k, row in lines.items()}
title = "Counted in samples, a batch beyond the critical size falls behind"
show.curves(against_samples, "samples", "held-out loss (nats)", title, points=False)

# %% [markdown]
r"""
## How long until a loss is reached?

So do more devices pay? Let each device compute 8 samples per step, and let the rate grow with the number of devices. First we
count, on one device and for three seeds, how many updates it takes until the held-out loss is below 0.9.
"""


# %% updates
def updates(devices, seed, goal=0.9, samples=8192):
    problem = problems.make("digits")
    batch = 8 * devices
    model = problem.model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * devices)
    batches = problem.batches(batch, samples // batch, seed=seed)
    for number, (inputs, targets) in enumerate(batches, 1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if number % max(1, 16 // devices) == 0 and problem.loss(model) < goal:
            return number
    return float("inf")  # not within 8,192 samples


# %% updates-needed
runs = show.progress([(devices, seed) for devices in factors for seed in range(3)])
counts = {run: updates(*run) for run in runs}
needed = {}
for devices in factors:
    needed[devices] = [counts[devices, seed] for seed in range(3)]
needed

# %% [markdown]
r"""
Then we measure, in virtual time, how long a step takes on 1 to 8 emulated devices, which are joined by emulated links and use the
buckets of lesson 05. For 16 and 32 devices we take the time on 8, since a ring's time hardly grows (lesson 04). The number of updates times
the time of a step is the time to the loss. We evaluate after every 128 samples (on 32 devices after each update, 256), so the counts are rounded up to that. `inf` means that a run
did not get there within 8,192 samples, and where two of three seeds did not, the figure has no point. (At 32 devices the rate is so large
that the last digits of a sum decide, so this row may differ from one machine to another.)
"""


# %% step-times folded=true
def seconds_of_steps():
    problem = problems.make("digits")
    ranks = dist.get_world_size()
    begun = []

    def watched():
        for batch in problem.batches(8 * ranks, 5, rank=dist.get_rank(), world_size=ranks):
            begun.append(time.perf_counter())
            yield batch

    stage5_bucketed.train(problem.model(), watched(), 0.01, bucket_cap_mb=0.1)
    return (begun[-1] - begun[0]) / (len(begun) - 1)


# %% step-times-measured
device = Device("200MFLOP/s")
link = Link("100Mbit")
step_s = {}
for k in show.progress([1, 2, 4, 8]):
    step_s[k] = max(launch(seconds_of_steps, world_size=k, device=device, link=link))
step_s |= dict.fromkeys((16, 32), step_s[8])

# %% time-to-loss
reached = {}
for k, three in needed.items():
    reached[k] = sorted(count * step_s[k] for count in three)
shown = [k for k in factors if reached[k][1] < float("inf")]
best = min(shown, key=lambda k: reached[k][1])

# %% time-to-loss-figure folded=true
medians = [reached[k][1] for k in shown]
ideal = [reached[1][1] / k for k in shown]
show.curves(
    {"median of three seeds": (shown, medians)},
    "devices",
    "time to a loss of 0.9 (s)",
    f"More than {best} devices gain nothing",
    theory={"K times as fast": (shown, ideal)},
    log="xy",
    ticks=factors,
    kind="updates counted; virtual time; line derived",
)

# %% check-time-to-loss
# NBVAL_CHECK_OUTPUT
assert reached[4][1] < 0.7 * reached[1][1] and best < 32, reached
print("4 devices reach the loss sooner than one, and 32 are not the fastest")

# %% [markdown]
r"""
Twice the devices halve the number of updates only below the critical batch size. Beyond it a step takes as long as before, and
as many steps are needed, so the additional devices gain nothing.

## On text

Does the same hold for text? We repeat the sweep with the byte model. A loss of 6 stands for a run whose loss ran away.
"""

# %% bytes
text = sweep(problems.make("bytes", parameters=20_000, context=32), samples=1536, batch=4, lr=0.05)
drawn(text, 4, "bytes: the linear rule holds longest, and then its loss runs away")

# %% check-bytes
# NBVAL_CHECK_OUTPUT
at = {name: three.mean(1).tolist() for name, three in text.items()}
assert (
    at["linear"][factors.index(4)] < at["same rate"][factors.index(4)]
    and min(row[-1] for row in at.values()) > at["linear"][0]
)
print("4 times the batch: linear beats the same rate; 32 times: no rule makes up for 1/32 of the steps")

# %% [markdown]
r"""
At 16 times the batch, runs with warm-up even end higher, although it changes only the first of their 24 steps. That a single step
matters at all shows how large the rate is.

So the advice "scale the learning rate linearly" is right *below the critical batch size*. The base rate must also be small enough
to be multiplied, and the run must be so long that its first steps do not decide.

## At full size

Goyal et al. (2017) trained ResNet-50 on ImageNet with linear scaling and warm-up, for the same number of epochs at
each batch size. Up to a batch of 8,192 the error stays the same, and beyond that it grows.
"""

# %% imagenet folded=true
table = facts.rows("imagenet_large_batch")
batches = [row["global_batch"] for row in table]
errors = [row["top1_error_percent"] for row in table]
lowest = [min(errors)] * len(batches)
show.curves(
    {"linear scaling and warm-up": (batches, errors)},
    "global batch",
    "top-1 error (%)",
    "ImageNet: the same error up to a batch of 8,192 (Goyal et al. 2017)",
    theory={"lowest of all": (batches, lowest, "#808080")},
    log="x",
    kind="published; line derived",
)

# %% [markdown]
r"""
At a batch of 8,192 the paper also tried the alternatives:

| learning rate | error |
|---|---|
| linear scaling and gradual warm-up | 23.74 % |
| linear scaling without warm-up | 24.84 % |
| square root | 26.22 % |
| not scaled at all | 41.67 % |

## Two quiet mistakes

Two mistakes raise no error and cost accuracy. One is made with `DistributedSampler`, which should shuffle anew in each epoch. The
other is made with gradients: they should be clipped by the norm of their average, and not one by one in a hook before they are
averaged.

Write the sampler first (task 10.1 of [exercise 10](../exercises/10_batch_size_and_learning_rate.ipynb)). Each epoch has an order of
its own, the same on all ranks: `torch.randperm(dataset_size, generator=…)`, drawn by a generator of its own, seeded with
`seed + epoch`, so that torch's own generator, which dropout draws from, stays as it is. If K does not divide the samples, the first ones of the order come once more at its end. Rank r takes positions r, r+K, r+2K, …
"""


# %% task-10-1
def epoch_indices(dataset_size, rank, world_size, epoch, seed=0):
    """Return the list of sample indices of `rank` in `epoch`; equally many on all ranks."""
    raise NotImplementedError("Exercise 10.1: The share of an epoch")


show.source(task("10.1", epoch_indices), click="Write it first, then open: one solution")

# %% [markdown]
r"""
Does torch's sampler do this by itself?
"""


# %% claim-17
# NBVAL_CHECK_OUTPUT
def repeats(set_epoch):
    sampler = torch.utils.data.DistributedSampler(range(100), num_replicas=2, rank=0)
    first = list(sampler)
    if set_epoch:
        sampler.set_epoch(1)
    return list(sampler) == first


claims.decide(
    17, "DistributedSampler shuffles anew in each epoch by itself.", "counted",
    {"set_epoch is called": not repeats(True), "set_epoch is forgotten": not repeats(False)},
    "The order is drawn from seed + epoch, and the sampler cannot know the epoch. It pads with duplicates besides.",
)


# %% clipping folded=true
def difference(limit):
    problem = problems.make("synthetic", parameters=3 * 64**2, width=64, dtype=torch.float64)
    share = problem.batches(24, 1, rank=dist.get_rank(), world_size=dist.get_world_size())
    inputs, targets = next(share)
    early = problem.model()
    late = problem.model()
    for model in (early, late):
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        for parameter in model.parameters():
            if model is early:  # as a hook would, which sees one gradient of one rank
                torch.nn.utils.clip_grad_norm_([parameter], limit)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    torch.nn.utils.clip_grad_norm_(late.parameters(), limit)
    furthest = 0.0
    for mine, other in zip(early.parameters(), late.parameters()):
        apart = (mine.grad - other.grad).abs().max() / other.grad.abs().max()
        furthest = max(furthest, float(apart))
    return furthest


# %% claim-18
# NBVAL_CHECK_OUTPUT
limits = {"gradients are clipped": 0.05, "nothing is large enough to be clipped": 1e6}
claims.decide(
    18, "Clipping gradients in a hook equals clipping them after backward.", "measured",
    {name: launch(difference, limit, world_size=2)[0] < 1e-12 for name, limit in limits.items()},
    "A hook sees one parameter's gradient of one rank; the norm that counts is that of all parameters, averaged.",
)

# %% [markdown]
r"""
Three more mistakes were tested in other lessons: a plain mean over uneven shards (claim 1, lesson 02), `no_sync` around
backward only (claim 13, lesson 06), and BatchNorm, which sees only its rank's share (claim 14, lesson 06). With 8 samples per
rank BatchNorm's statistics are noisy, however large the global batch is.

## What torch does

DDP averages, and leaves the learning rate to you. `DistributedSampler` needs `set_epoch` in each epoch. For clipping,
call `clip_grad_norm_` after `backward()`, when gradients are already averaged: all ranks then compute the same norm.
`torch.optim.lr_scheduler` has `LinearLR` for the warm-up.

## Check yourself

**1.** You go from 1 to 8 GPUs and keep the batch *per GPU*. Which rate do you try first?
<details><summary>Answer</summary>
Try 8 times the old one, with warm-up over the first few hundred steps, or √8 times if the optimizer is Adam. Then measure.
</details>

**2.** You go from 1 to 8 GPUs and keep the *global* batch. Which rate?
<details><summary>Answer</summary>
You need the same rate, since it is the same training.
</details>

**3.** Validation accuracy on 8 ranks is 0.02 % off that on one. The model is the same. Why?
<details><summary>Answer</summary>
The sampler pads the last samples so that all ranks get equally many; these count twice. Weight by the real number of
samples, or evaluate without padding.
</details>

## In three lines

1. The same global batch on more devices needs the same rate and gives the same curve, to the last digits.
2. With a larger batch, the linear rule works below the critical batch size and breaks beyond it.
3. Samplers, means of losses and clipping each invite a mistake that raises no error.

**Exercise:** [10](../exercises/10_batch_size_and_learning_rate.ipynb), `exercises/10_batch_size_and_learning_rate.ipynb`.
**Next:** [11, when things fail](11_when_things_fail.ipynb).

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
