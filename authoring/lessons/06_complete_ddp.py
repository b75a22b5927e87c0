# %% [markdown]
r"""
# 6 · A complete DDP

Stage 5 assumed that all goes well: every parameter gets a gradient in every step, all ranks have the same amount of
data, nobody accumulates. Real training does none of these favours. Here each assumption is broken, you see what
happens, and then it is mended. `ddp_course.DistributedDataParallel` has the interface of PyTorch's own class, so
everything you learn here holds there too.

**After this lesson you can**

- replace torch's DDP by ours in a training loop and get the same weights,
- read the error about unused parameters, and know what its remedy costs,
- write a training script for torchrun, and find the five usual mistakes in one,
- accumulate gradients without paying for communication each time, send half the bytes, and avoid the usual mistake,
- say what happens to buffers, BatchNorm and ranks that run out of data.

*40 minutes, under a minute of computing.*
"""

# %% imports
import os

from ddp_course import (
    BucketedDDP, DistributedDataParallel, SyncBatchNorm, audit, claims, dist, errors, launch, problems,
    ring_all_reduce, script, show, stage5_bucketed, stage6_ddp, torch, wire,
)  # fmt: skip

K = 4  # how many ranks; 2 works as well

# %% [markdown]
r"""
## The same loop, three classes
"""


# %% same-loop
def train_with(wrap):
    problem = problems.make("synthetic", parameters=3 * 64**2, width=64)
    model = problem.model()
    parallel = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in problem.batches(48, 10, rank=dist.get_rank(), world_size=dist.get_world_size()):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


classes = [BucketedDDP, DistributedDataParallel, torch.nn.parallel.DistributedDataParallel]
stage5, stage6, torchs = [launch(train_with, wrap, world_size=K) for wrap in classes]

# %% check-same
# NBVAL_CHECK_OUTPUT
assert all(torch.equal(stage6[0], other) for other in stage6)
assert max((stage6[0] - torchs[0]).abs().max(), (stage6[0] - stage5[0]).abs().max()) < 1e-5
print("stage 5, stage 6 and torch's DDP train the same weights, equal on all ranks")

# %% what-changed
show.diff(stage5_bucketed.train, stage6_ddp.train)

# %% [markdown]
r"""
The loop is the same. All that is new sits behind `backward()`, one file a feature, in `ddp_course/stage6_ddp/`.

## Predict

A model with two branches uses only one of them in this step. The other branch's parameters get no gradient, so their
bucket never fills.
"""

# %% predict
guess = show.predict(
    "A parameter gets no gradient. What should DDP do in the next step?",
    ["treat it as zero, silently", "hang", "raise an error that names the parameter"],
)
guess


# %% branches
class TwoBranches(torch.nn.Module):
    def __init__(self, both=False):
        super().__init__()
        self.trunk, self.left, self.right = (torch.nn.Linear(16, 16) for _ in range(3))
        self.both = both

    def forward(self, inputs):
        hidden = self.trunk(inputs)
        return self.left(hidden) + (self.right(hidden) if self.both else 0)


def two_steps(**options):
    parallel = DistributedDataParallel(TwoBranches(), **options)
    for _ in range(2):
        parallel(torch.ones(4, 16)).sum().backward()
    return parallel.module.right.weight.grad


# %% broken-unused
try:
    launch(two_steps, world_size=2)
except errors.RankError as error:
    message = error.message
print(message)
guess.reveal("an error", "raise an error that names the parameter")

# %% [markdown]
r"""
The remedy: `find_unused_parameters=True`. After each forward pass DDP walks through the graph from the outputs, and
marks what it does not reach as ready. A bitmap, all-reduced, tells which parameters were used by *no* rank: these
gradients stay untouched.
"""

# %% check-unused
# NBVAL_CHECK_OUTPUT
gradients = launch(two_steps, find_unused_parameters=True, world_size=2)
assert "right.weight" in message and gradients == [None, None]
print("the error names right.weight; with find_unused_parameters it is left alone")

# %% [markdown]
r"""
It is not free, and it does not save traffic either. If the graph never changes, `static_graph=True` searches once only.
Count it, with and without an unused branch: all-reduces of the bitmap, and bytes of gradients, in a step.
"""


# %% costs
def costs(both, **options):
    parallel = DistributedDataParallel(TwoBranches(both), all_reduce=ring_all_reduce, **options)
    bitmaps, original = [], dist.all_reduce
    dist.all_reduce = lambda *args, **more: bitmaps.append(1) or original(*args, **more)
    for _ in range(3):  # the first step settles the buckets
        bitmaps.clear()
        with wire.counting() as traffic:
            parallel(torch.ones(4, 16)).sum().backward()
    return len(bitmaps), traffic.bytes_sent


search, static = {"find_unused_parameters": True}, {"static_graph": True}
cases = {"all used": (True, {}), "all used, search": (True, search), "all used, static": (True, static),
         "one branch, search": (False, search), "one branch, static": (False, static)}  # fmt: skip
counted = {name: launch(costs, both, world_size=2, **options)[0] for name, (both, options) in cases.items()}
print(*(f"{name}: {bitmaps} bitmaps, {sent} bytes" for name, (bitmaps, sent) in counted.items()), sep="\n")

# %% claims-unused
# NBVAL_CHECK_OUTPUT
bitmaps, sent = ({name: pair[number] for name, pair in counted.items()} for number in (0, 1))
layer = 4 * (16 * 16 + 16)  # bytes that each of two ranks sends for it around a ring
claims.decide(
    6, "DDP makes dynamic graphs slower; static graphs are faster.", "counted",
    {"parameters go unused": bitmaps["one branch, static"] < bitmaps["one branch, search"],
     "all parameters are used": bitmaps["all used, static"] < bitmaps["all used"]},
    "Only the search for unused parameters costs: an all-reduce and a walk through the graph in each step.",
)  # fmt: skip
claims.decide(
    17, "find_unused_parameters=True costs nothing.", "counted",
    {"it is set": bitmaps["all used, search"] == bitmaps["all used"]}, "It costs the search, also where nothing is unused.",
)  # fmt: skip
claims.decide(
    19, "Only the parameters that this forward pass uses are communicated.", "counted",
    {"all parameters are used": sent["all used, search"] <= 3 * layer, "a branch is unused": sent["one branch, search"] <= 2 * layer},
    "Buckets travel whole: a bucket with one used parameter in it is sent entirely, with zeros for the others.",
)  # fmt: skip

# %% [markdown]
r"""
## Accumulation: do not communicate four times

A batch too large for memory is cut into micro-batches, whose gradients add up before one update. Each `backward()`
would average again. Inside `no_sync()` it does not; only the last backward pass communicates. And what it sends can
have half the bytes: with `mixed_precision` weights are cast to **bfloat16** for computing, and the buckets travel in it;
gradients, optimizer and checkpoint stay float32. (torch's name for the option's value has an underscore: it may change.)
"""


# %% accumulate
def bytes_sent(use_no_sync, dtype):
    precision = torch.nn.parallel.distributed._MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    options = {"all_reduce": ring_all_reduce, "mixed_precision": precision}
    parallel = DistributedDataParallel(torch.nn.Linear(256, 256), **options)
    with wire.counting() as traffic:
        for part in range(4):
            quiet = use_no_sync and part < 3
            with parallel.no_sync() if quiet else torch.enable_grad():  # the latter changes nothing
                parallel(torch.ones(8, 256)).sum().backward()
    return traffic.bytes_sent


settings = {"average every time": (False, torch.float32), "no_sync": (True, torch.float32),
            "no_sync, in bfloat16": (True, torch.bfloat16)}  # fmt: skip
sent = {name: launch(bytes_sent, *setting, world_size=K)[0] for name, setting in settings.items()}
often, once, short = sent.values()
show.bars({name: count / 2**20 for name, count in sent.items()}, "sent by a rank (MiB)",
          f"4 micro-batches: no_sync sends {100 * once / often:.0f} % of it, in bfloat16 {100 * short / often:.1f} %",
          kind="counted")  # fmt: skip

# %% check-accumulate
# NBVAL_CHECK_OUTPUT
assert often == 4 * once == 8 * short
print("four micro-batches, a quarter of the bytes; in bfloat16 an eighth")

# %% [markdown]
r"""
The usual mistake: only `backward()` inside `no_sync()`, and the forward pass before it. It is the *forward* pass that
prepares the synchronisation.
"""


# %% where-no-sync-begins
def gradient(wrap, forward_inside):
    parallel, inputs = wrap(torch.nn.Linear(4, 4)), torch.full((8, 4), 1.0 + dist.get_rank())
    if forward_inside:
        with parallel.no_sync():
            parallel(inputs).sum().backward()
    else:
        loss = parallel(inputs).sum()
        with parallel.no_sync():
            loss.backward()
    return parallel.module.weight.grad


# %% claim-12
# NBVAL_CHECK_OUTPUT
wrappers = (DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)
claims.decide(
    12, "no_sync around the backward pass is enough.", "measured",
    {name: not any(torch.equal(*launch(gradient, wrap, inside, world_size=2)) for wrap in wrappers)
     for name, inside in {"the forward pass is inside too": True, "only the backward pass is inside": False}.items()},
    "The forward pass decides whether the next backward pass synchronises: it gets the buckets ready.",
)  # fmt: skip

# %% [markdown]
r"""
## Buffers and BatchNorm

A **buffer** is state without a gradient, such as BatchNorm's running mean. Averaging gradients does not touch it,
so it would drift apart; DDP copies rank 0's to all before each forward pass. What it does *not* do is to compute the
mean over all ranks. Ours and torch's `SyncBatchNorm` do, with one more collective a layer in
each pass.
"""


# %% batchnorm
def normalise(convert):
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    if convert:
        norm = SyncBatchNorm.convert_sync_batchnorm(norm)
    return norm(torch.arange(2.0).reshape(2, 1) + 10 * dist.get_rank()).flatten().tolist()


for convert in (False, True):
    print(
        "SyncBatchNorm" if convert else "BatchNorm    ",
        [[round(x, 2) for x in row] for row in launch(normalise, convert, world_size=2)],
    )

# %% claim-15
# NBVAL_CHECK_OUTPUT
whole = torch.nn.BatchNorm1d(1)(torch.tensor([[0.0], [1.0], [10.0], [11.0]])).detach().flatten()
claims.decide(
    15, "BatchNorm sees the global batch.", "measured",
    {f"it is {name}": torch.allclose(torch.tensor(launch(normalise, convert, world_size=2)).flatten(), whole, atol=1e-5)
     for name, convert in {"the ordinary BatchNorm": False, "SyncBatchNorm": True}.items()},
    "Every rank normalises with the mean and variance of its own share; SyncBatchNorm exchanges them.",
)  # fmt: skip

# %% [markdown]
r"""
Rank 0 has the samples 0 and 1, rank 1 has 10 and 11. With plain BatchNorm both see the same: the difference between
the ranks is lost.

## Uneven inputs

Rank 0 has three batches, the others have two. In the third step rank 0 waits for partners that have gone. The
launcher ends such a wait after `timeout` seconds and says where everyone was.
"""


# %% broken-uneven
def uneven(join):
    parallel, steps = DistributedDataParallel(torch.nn.Linear(8, 8)), 0
    with parallel.join(enable=join):
        for _ in range(3 if dist.get_rank() == 0 else 2):
            parallel(torch.ones(4, 8)).sum().backward()
            steps += 1
    dist.barrier()
    return steps


try:
    launch(uneven, False, world_size=2, timeout=4)
except errors.CourseError as error:
    print(type(error).__name__, str(error).splitlines()[0])

# %% check-uneven
# NBVAL_CHECK_OUTPUT
assert launch(uneven, True, world_size=2) == [3, 2]
print("with join(), rank 0 finishes its third step, and rank 1 shadows it with zeros")

# %% [markdown]
r"""
## The real script

In a notebook `launch` starts the ranks. Everywhere else **torchrun** does: it starts one process a device, each running
the same script, and tells each by environment variables who it is. This is all that such a script needs. Find in it:
the process group, this rank's device, the sampler that shares the data and is told the epoch, the wrapper, and the one
rank that writes the checkpoint.
"""

# %% script
show.source(script.main)

# %% run-script
codes = show.command(
    "torchrun --standalone --nproc-per-node=2 -m ddp_course.script FOLDER",
    "torchrun --standalone --nproc-per-node=2 -m ddp_course.script FOLDER ours",
)

# %% check-script
# NBVAL_CHECK_OUTPUT
assert codes == [0, 0]
print("the script trains with torch's DDP and with ours")

# %% [markdown]
r"""
Copy it, and put your own model and data in. Then you will make one of five mistakes, as everybody does. None of them
raises an error. Each is planted here by replacing a few words of the script; `audit` runs the result on two ranks and
watches which samples they see, what they save, and whether their weights stay equal. Guess the symptom of each first.
"""

# %% mistakes
text = repr(show.source(script))
mistakes = {
    "no sampler": ("sampler=sampler)", "shuffle=True)"),
    "the epoch is not told": ("        sampler.set_epoch(epoch)\n", ""),
    "forward past the wrapper": ("cross_entropy(parallel(", "cross_entropy(model("),
    "everybody saves": ("if dist.get_rank() == 0:", "if True:"),
    "the wrapper is saved": ("model.state_dict()", "parallel.state_dict()"),
}
found = {name: audit.audit(text.replace(right, wrong)) for name, (right, wrong) in mistakes.items()}
for name, messages in found.items():
    print(f"{name}:\n    {'; '.join(messages)}")

# %% check-mistakes
# NBVAL_CHECK_OUTPUT
assert audit.audit(text) == [] and all(len(messages) == 1 for messages in found.values()), found
print("five mistakes planted, five found; the script itself has none")

# %% [markdown]
r"""
Fewer bytes by a **communication hook**, which replaces the average of a bucket, are the subject of lesson 14.

## Is it free on one device?
"""


# %% operations
def operations(wrapped):
    os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler announces itself otherwise
    model = torch.nn.Linear(64, 64)
    model = torch.nn.parallel.DistributedDataParallel(model) if wrapped else model
    for _ in range(2):  # the first step of DDP lays the buckets out
        with torch.profiler.profile() as profile:
            model(torch.ones(8, 64)).sum().backward()
    return sum(event.name.startswith("aten::") for event in profile.events())


plain, wrapped = (launch(operations, wrapped, world_size=1)[0] for wrapped in (False, True))
print(f"operations of a step: {plain} without DDP, {wrapped} with it")

# %% claim-18
# NBVAL_CHECK_OUTPUT
claims.decide(
    18, "DDP on one device is free.", "counted", {"the model is wrapped": wrapped <= plain},
    "Gradients are copied into buckets, scaled and watched by hooks: 1 to 6 % of a step of ResNets on a V100 (published).",
)  # fmt: skip

# %% [markdown]
r"""
## What torch does

The same, in C++. Two things are worth knowing about its speed: copying gradients into buckets costs time, unless
`gradient_as_bucket_view=True`; and buckets are laid out anew after the first step, in the order in which gradients
really became ready. `make bench ddp` measures ours against it, side by side.

## Check yourself

**1.** Your loss uses only one of two heads, chosen at random on each rank. Which option do you need?
<details><summary>Answer</summary>
<code>find_unused_parameters=True</code>. A head that only some ranks used gets the average over all ranks, with zeros
from those that did not use it. <code>static_graph</code> would be wrong, since the graph changes.
</details>

**2.** Why does DDP copy rank 0's buffers instead of averaging them?
<details><summary>Answer</summary>
It cannot know what they mean: a counter or an index must not be averaged. Copying keeps the replicas equal, which is
all that it promises.
</details>

**3.** With <code>no_sync</code> over 4 micro-batches, by what do you divide the loss?
<details><summary>Answer</summary>
By 4. Gradients of micro-batches add up; DDP divides by the number of ranks only.
</details>

## In three lines

1. Same loop, same weights as torch's DDP; all that real training needs happens behind `backward()`.
2. Unused parameters, uneven data and accumulation each need a word from you: an option, `join`, `no_sync`.
3. A script for torchrun is 30 lines; its five usual mistakes raise no error, so check samples, weights and files.

**Exercise:** [6](../exercises/06_complete_ddp.ipynb), `exercises/06_complete_ddp.ipynb`. **Next:**
[7, sharding](07_sharding.ipynb): when the model does not fit.
"""
