# %% [markdown]
r"""
# 9 · Batch size and learning rate

K devices can mean two things. The same batch, cut into K shares: then nothing changes but the speed. Or a batch K
times as large: then there are K times fewer updates in an epoch, and the question is what to do with the learning
rate. Much of what is written about it mixes the two up. This lesson takes them apart, by experiment.

**After this lesson you can**

- say when the learning rate must *not* be changed,
- scale it with the batch, linearly or by the square root, with warm-up, and see where each breaks,
- avoid four quiet mistakes: in the sampler, the loss, dropout and gradient clipping.

*35 minutes, under a minute of computing.*
"""

# %% imports
from ddp_course import claims, dist, facts, launch, problems, show, stage1_single, stage6_ddp, torch

K = 4  # how many ranks; 2 works as well

# %% [markdown]
r"""
## Predict: the same batch on more devices

First question: one device with a batch of 48, or K ranks with 48/K each, at the same learning rate. Do the loss curves
differ?
"""

# %% predict
guess = show.predict(
    "Same global batch on K ranks: by what must the learning rate be multiplied?", ["1/K", "1", "√K", "K"]
)
guess


# %% same-batch
def losses(world_size=1, rank=0):
    text = problems.make("bytes", parameters=20_000, context=32, dtype=torch.float64)
    train = stage1_single.train if world_size == 1 else stage6_ddp.train
    return train(text.model(), text.batches(48, 25, rank=rank, world_size=world_size), lr=0.5)


one = losses()
many = launch(lambda: losses(dist.get_world_size(), dist.get_rank()), world_size=K)
mean = [sum(step) / K for step in zip(*many)]

# %% same-batch-figure
show.curves(
    {"one device": (range(25), one, show.STAGE_COLOURS["1"]), f"{K} ranks": (range(25), mean, show.STAGE_COLOURS["6"])},
    "step", "loss (nats)", "Same batch, same rate: the curves are one", points=False, nested=True,
)  # fmt: skip

# %% check-same-batch
# NBVAL_CHECK_OUTPUT
assert max(abs(a - b) for a, b in zip(one, mean)) < 1e-12
print("K ranks with B/K samples each learn exactly what one device learns with B, at the same rate")

# %% claim-1
# NBVAL_CHECK_OUTPUT
finding = claims.test(1)
print(finding.line)
guess.reveal("1: the mean of the ranks' means is the mean of the batch", "1")

# %% [markdown]
r"""
## A batch k times as large

Now each device keeps its batch, so the global batch grows. The same number of samples makes k times fewer steps. To
get as far, each step should be longer. Two rules are in use:

- **linear**: multiply the rate by k. If the gradient hardly changes over k small steps, one step of k times the length
  leads to the same place.
- **square root**: multiply by √k, because the noise of the gradient falls by √k (lesson 01).

Large rates are dangerous at the beginning, when the loss is steep. **Warm-up** starts small and grows over the first
steps, here over the first quarter. Because K ranks with B/K samples do exactly the step of one device with B, all of
this can be studied on one device; we use the ranks to try four rules at the same time.
"""


# %% train
def final_loss(problem, samples, batch, lr, warm_up):
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    steps = samples // batch
    for step, (inputs, targets) in enumerate(problem.batches(batch, steps)):
        ramp = min(1, (step + 1) / max(1, steps // 4)) if warm_up else 1
        optimizer.param_groups[0]["lr"] = lr * ramp
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    loss = problem.loss(model)
    return loss if loss < 6 else 6.0  # NaN is not less than 6 either


# %% rules
rules = {
    "same rate": lambda k: 1,
    "square root": lambda k: k**0.5,
    "linear": lambda k: k,
    "linear, warm-up": lambda k: k,
}
factors = [1, 2, 4, 8, 16, 32]


def sweep(problem, samples, batch, lr):
    def one_rule():
        name, rule = list(rules.items())[dist.get_rank()]
        return [final_loss(problem, samples, k * batch, lr * rule(k), "warm" in name) for k in factors]

    return dict(zip(rules, launch(one_rule, world_size=len(rules))))


# %% digits
digits = sweep(problems.make("digits"), samples=2874, batch=8, lr=0.05)
show.curves({name: (factors, row) for name, row in digits.items()}, "batch, in units of 8 samples", "held-out loss (nats)",
            "digits: up to 32 samples cost little; beyond, every rule loses", log="x", points=False)  # fmt: skip

# %% check-digits
# NBVAL_CHECK_OUTPUT
at = {name: row[factors.index(4)] for name, row in digits.items()}
assert at["linear"] < at["square root"] < at["same rate"], at
assert digits["linear"][factors.index(32)] > 10 * digits["linear"][0]
print("batch times 4: linear scaling is best, the same rate is worst; batch times 32: linear scaling has broken")

# %% [markdown]
r"""
Two things to see. Up to a point, linear scaling nearly gives the small batch's result in a quarter of the steps. Beyond
it every rule loses: the steps become too few, and the linear rate too long. The same on text; a loss of 6 stands for
"ran away".
"""

# %% bytes
text = sweep(problems.make("bytes", parameters=20_000, context=32), samples=1536, batch=4, lr=0.1)
show.curves({name: (factors, row) for name, row in text.items()}, "batch, in units of 4 samples", "held-out loss (nats)",
            "bytes: the same text in larger batches, and every rule loses", log="x", points=False)  # fmt: skip

# %% check-bytes
# NBVAL_CHECK_OUTPUT
assert all(row[-1] > row[0] + 0.5 for row in text.values()), text
print("32 times the batch, 1/32 of the steps: no rule makes up for it")

# %% [markdown]
r"""
## At full size

Goyal et al. (2017) trained ResNet-50 on ImageNet with linear scaling and warm-up, in the same number of epochs each.
Up to a batch of 8,192 the error stays the same. Beyond, it grows.
"""

# %% imagenet
table = facts.rows("imagenet_large_batch")
batches, errors = [row["global_batch"] for row in table], [row["top1_error_percent"] for row in table]
best = [min(errors)] * len(batches)
show.curves({"linear scaling and warm-up": (batches, errors)}, "global batch", "top-1 error (%)",
            "ImageNet: no loss up to a batch of 8,192 (Goyal et al. 2017)", theory={"best": (batches, best, "#999999")},
            log="x")  # fmt: skip

# %% [markdown]
r"""
At a batch of 8,192 the paper also tried the alternatives. Error with linear scaling and gradual warm-up: 23.74 %;
without warm-up 24.84 %; with a square-root rate 26.22 %; without scaling at all 41.67 %.

## Four quiet mistakes

None of these raises an error. All cost accuracy.
"""

# %% claims
# NBVAL_CHECK_OUTPUT
findings = [claims.test(number) for number in (7, 13, 14, 16)]
for finding in findings:
    print(finding.line)

# %% claims-numbers
print(*findings, sep="\n\n")

# %% [markdown]
r"""
Two more belong here and were tested in lesson 06: `no_sync` around backward only (claim 12), and BatchNorm, which
sees the rank's share only (claim 15). With 8 samples a rank its statistics are noisy, however large the global batch is.

## What torch does

DDP averages, and leaves the learning rate to you. `DistributedSampler` needs `set_epoch` in each epoch. For clipping,
call `clip_grad_norm_` after `backward()`, when gradients are already averaged: all ranks then compute the same norm.
`torch.optim.lr_scheduler` has `LinearLR` for the warm-up.

## Check yourself

**1.** You go from 1 to 8 GPUs and keep the batch *per GPU*. Which rate do you try first?
<details><summary>Answer</summary>
8 times the old one, with warm-up over the first few hundred steps; √8 times if the optimizer is Adam. Then measure.
</details>

**2.** You go from 1 to 8 GPUs and keep the *global* batch. Which rate?
<details><summary>Answer</summary>
The same. It is the same training.
</details>

**3.** Validation accuracy on 8 ranks is 0.02 % off that on one. The model is the same. Why?
<details><summary>Answer</summary>
The sampler pads the last samples so that all ranks get equally many; these count twice. Weight by the real number of
samples, or evaluate without padding.
</details>

## Exercise

`exercises/09_batch_size_and_learning_rate.ipynb`
"""
