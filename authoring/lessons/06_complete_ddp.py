# %% [markdown]
r"""
# 6 · A complete DDP

Stage 5 assumed that all goes well: every parameter gets a gradient in every step, all ranks have the same amount of
data, and nobody accumulates gradients. In real training none of this is certain. In this lesson each assumption is broken, you
see what happens, and then it is mended. `ddp_course.DistributedDataParallel` has the interface of PyTorch's own class, so
what you learn here holds for PyTorch too.

**After this lesson you can**

- write the core of DDP in 60 lines: hooks, buckets, unused parameters and `no_sync`, and say what a complete one adds,
- read the error about unused parameters, and know what its remedy costs,
- write a training script for torchrun, and find the six usual mistakes in one,
- accumulate gradients without paying for communication each time, send half the bytes, and avoid the usual mistake,
- say what happens to buffers, BatchNorm and ranks that run out of data.

*60 minutes, one of them computing; the optional part at the end takes 5 more.* Some cells show only three dots. They measure,
check or draw, or they hold what you are asked to write first. Run them like all others; a click on the dots shows the code.
"""

# %% imports
import os
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_course import BucketedDDP, DistributedDataParallel, SyncBatchNorm, launch
from ddp_course import problems, ring_all_reduce, ring_backend, script, stage4_ring
from ddp_course import stage5_bucketed, stage6_ddp, wire
from ddp_course.lab import claims, compare, on_your_gpus, show
from ddp_exercises import fill_in, task
from manyranks import audit
from manyranks.errors import LaunchError, RankError

K = 4  # how many ranks; 2 works as well

# %% opening-questions
show.questions(6)

# %% [markdown]
r"""
## The same loop, three classes

One loop trains the same model in the wrapper of stage 5, in that of stage 6, and in torch's. A later cell compares the weights.
"""


# %% same-loop
def train_with(wrap):
    problem = problems.make("synthetic", parameters=3 * 64**2, width=64)
    model = problem.model()
    parallel = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = problem.batches(48, 10, rank=dist.get_rank(), world_size=dist.get_world_size())
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
    return vector(model.parameters()).detach()


vector = torch.nn.utils.parameters_to_vector  # all numbers of some tensors, one after the other
stage5 = launch(train_with, BucketedDDP, world_size=K, progress=("stage 5", 10))
stage6 = launch(train_with, DistributedDataParallel, world_size=K, progress=("stage 6", 10))
torchs = launch(train_with, TorchDDP, world_size=K, progress=("torch's", 10))

# %% what-changed
show.diff(stage5_bucketed.train, stage6_ddp.train)

# %% [markdown]
r"""
The loop is the same. All that is new is inside the wrapper, in `ddp_course/stage6_ddp/`: one file per feature, and more than
a thousand lines. In the iteration the new boxes stand before backward and after it. (The search for unused parameters, and the
bitmap that says who used which, happen only if you ask for them.)

![Before forward, rank 0's buffers go to all ranks. After forward each rank looks for parameters that were not used. Buckets travel under the backward pass, as in lesson 05. Then the ranks add up a bitmap of who was used, and update. A rank without data joins in with zeros](../docs/figures/iteration_06.svg)

**Possible because** zeros change no sum, and gradients of micro-batches add up before anybody sends them.

What matters most fits into 60 lines, and you can write them yourself, in three steps.

## The core, first step: hooks and buckets

A hook on every parameter says that its gradient is ready. A bucket leaves as soon as all its gradients are there, in the
background. But it never leaves before the bucket in front of it, since all ranks must add up the same buckets. When the last
bucket has left, wait for all of them, and copy the averages back.

Write the class before you open the next cell. `Core(module)` is a `torch.nn.Module`. It keeps the parameters, last first, in
`self.all`, and registers the hook `ready(parameter)`. `forward(inputs)` forgets the last pass, and `finish()` waits.
`dist.all_reduce(flat, async_op=True)` returns at once, with an object that has a method `wait()`. (If you solved task 5.5, you have
written these 24 lines already, with a thread in the place of `async_op`.) The next cell has our class; run it in any case. If you
then put yours into a cell below it, under the same name, the check that follows tries yours, and the next steps build on it.
"""


# %% core folded=true
class Core(torch.nn.Module):
    def __init__(self, module, size=2):  # how many parameters a bucket holds
        super().__init__()
        self.module = module
        self.all = list(module.parameters())[::-1]
        self.buckets = [self.all[i : i + size] for i in range(0, len(self.all), size)]
        for parameter in self.all:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def forward(self, inputs):
        self.there = set()
        self.waiting = list(self.buckets)
        self.sent = []
        return self.module(inputs)

    def ready(self, parameter):
        self.there.add(parameter)
        while self.waiting and self.there.issuperset(self.waiting[0]):
            flat = vector(p.grad for p in self.waiting[0]) / dist.get_world_size()
            self.sent.append((self.waiting.pop(0), flat, dist.all_reduce(flat, async_op=True)))
        if not self.waiting:
            self.finish()

    def finish(self):
        for bucket, flat, work in self.sent:
            work.wait()
            torch.nn.utils.vector_to_parameters(flat, [p.grad for p in bucket])


# %% check-core folded=true
# NBVAL_CHECK_OUTPUT
core = launch(train_with, Core, world_size=K)
assert all(torch.equal(ours[0], other) for ours in (core, stage6) for other in ours)
assert max((torchs[0] - other[0]).abs().max() for other in (core, stage5, stage6)) < 1e-5
print("the core, stages 5 and 6 and torch's DDP train the same weights, equal on all ranks")

# %% [markdown]
r"""
The core trusts that all ranks begin with the same weights. Stage 6 broadcasts rank 0's weights first.

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
        if self.both:
            return self.left(hidden) + self.right(hidden)
        return self.left(hidden)


# %% broken-unused folded=true
def two_steps(wrap, rank_0_uses_both=False, **options):
    torch.manual_seed(0)
    parallel = wrap(TwoBranches(rank_0_uses_both and dist.get_rank() == 0), **options)
    for _ in range(2):
        parallel(torch.ones(4, 16)).sum().backward()
    return [parameter.grad for parameter in parallel.module.parameters()]


try:
    launch(two_steps, DistributedDataParallel, world_size=2)
except RankError as error:
    message = error.message
print(message)
why = {
    "treat it as zero, silently": "A layer that was forgotten in forward would then never train, and nobody would know.",
    "hang": "The ranks would wait for a bucket that never fills, and the log would not say for which.",
}
guess.reveal("an error", "raise an error that names the parameter", why=why)

# %% [markdown]
r"""
Our core says nothing: its first bucket never fills, no other bucket may pass it, and no gradient is averaged. The remedy is
`find_unused_parameters=True`.

## The core, second step: unused parameters

After the forward pass, DDP walks down the graph from the outputs. A parameter that the walk does not reach gets zeros and is
ready at once. But a parameter that was used on *no* rank should stay without a gradient, or momentum and weight decay would move
it. So the ranks also add up a bitmap, which says who has used which parameter. Write this sum first (task 6.2 of
[exercise 6](../exercises/06_complete_ddp.ipynb)): `used` says for each parameter whether this rank used it, as a tensor of bools,
and `all_reduce(tensor)` sums over the ranks, in place. Which parameters were used anywhere?
"""


# %% task-6-2
def used_anywhere(used, all_reduce):
    """Return a new tensor of bools: whether each parameter was used on at least one rank. `used` stays as it is."""
    raise NotImplementedError("Exercise 6.2: Which parameters were used")


show.source(task("6.2", used_anywhere), click="Write it first, then open: one solution")

# %% [markdown]
r"""
The walk needs two things from autograd. A node of the graph has `next_functions`, pairs whose first element is the node below or
None. The nodes at the bottom, which add a gradient up for a parameter, have that parameter as `variable`. Write
`FindsUnused(Core)`, with a `forward` and a `finish` of its own, and then open the next cell.
"""


# %% core-unused folded=true
class FindsUnused(Core):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        nodes = [outputs.grad_fn]
        for node in nodes:  # the list grows while the loop walks down the graph
            nodes += [below for below, _ in node.next_functions if below and below not in nodes]
        reached = {getattr(node, "variable", None) for node in nodes}  # accumulators have one
        self.empty = set()
        for parameter in set(self.all) - reached:
            if parameter.grad is None:
                self.empty.add(parameter)
                parameter.grad = torch.zeros_like(parameter)
            self.ready(parameter)
        return outputs

    def finish(self):
        super().finish()
        users = torch.tensor([parameter not in self.empty for parameter in self.all]).long()
        dist.all_reduce(users)
        for parameter, count in zip(self.all, users, strict=True):
            parameter.grad = parameter.grad if count else None


# %% check-unused folded=true
# NBVAL_CHECK_OUTPUT
search = {"find_unused_parameters": True}
for both in (False, True):
    ours = launch(two_steps, FindsUnused, both, world_size=2)
    theirs = launch(two_steps, TorchDDP, both, **search, world_size=2)
    assert str(ours) == str(theirs) and (ours[0][-1] is not None) == both, (ours, theirs)
print("the same gradients as torch's DDP; that of the right branch is None only if no rank uses it")

# %% [markdown]
r"""
Together with activation checkpointing the search can do harm. With `use_reentrant=True` the walk cannot look into a checkpoint. It
takes the parameters inside for unused, and marks them as ready. When their gradients come after all, they are ready a second time,
and both torch and our class stop: "Expected to mark a variable ready only once". `use_reentrant=False` mends it. (Patient 11 of
the clinic in lesson 11 suffers from this.)

The search is not free, and it does not save traffic either. If the graph never changes, `static_graph=True` searches only once.
The next cell counts the all-reduces of the bitmap and the bytes of gradients in a step, with and without an unused branch.
"""


# %% costs folded=true
def costs(both, **options):
    parallel = DistributedDataParallel(TwoBranches(both), all_reduce=ring_all_reduce, **options)
    bitmaps = []
    original = dist.all_reduce

    def counting(*args, **more):
        bitmaps.append(1)
        return original(*args, **more)

    dist.all_reduce = counting
    for _ in range(3):  # the first step settles the buckets
        bitmaps.clear()
        with wire.counting() as traffic:
            parallel(torch.ones(4, 16)).sum().backward()
    return len(bitmaps), traffic.bytes_sent


static = {"static_graph": True}
cases = {
    "all used": (True, {}), "all used, search": (True, search), "all used, static": (True, static),
    "one branch, search": (False, search), "one branch, static": (False, static),
}
bitmaps = {}
volume = {}
for name, (both, options) in cases.items():
    bitmaps[name], volume[name] = launch(costs, both, world_size=2, **options)[0]
    print(f"{name}: bitmaps: {bitmaps[name]}, {volume[name]} bytes")

# %% claims-unused folded=true
# NBVAL_CHECK_OUTPUT
layer = 4 * (16 * 16 + 16)  # bytes that each of two ranks sends for it around a ring
claims.decide(
    10, "DDP makes dynamic graphs slower; static graphs are faster.", "counted",
    {"parameters go unused": bitmaps["one branch, static"] < bitmaps["one branch, search"],
     "all parameters are used": bitmaps["all used, static"] < bitmaps["all used"]},
    "Only the search for unused parameters costs: an all-reduce and a walk through the graph in each step.",
)
claims.decide(
    11, "find_unused_parameters=True costs nothing.", "counted",
    {"it is set": bitmaps["all used, search"] == bitmaps["all used"]},
    "It costs the search, also where nothing is unused.",
)
claims.decide(
    12, "Only the parameters that this forward pass uses are communicated.", "counted",
    {"all parameters are used": volume["all used, search"] <= 3 * layer,
     "a branch is unused": volume["one branch, search"] <= 2 * layer},
    "Buckets travel whole: a bucket with one used parameter in it is sent entirely, with zeros for the others.",
)

# %% [markdown]
r"""
## Accumulation: do not communicate four times

A batch that is too large for memory is cut into micro-batches, whose gradients add up before one update. Each `backward()`
would average again. Inside `no_sync()` it does not, and only the last backward pass communicates.

This pass can also send half the bytes. With `mixed_precision` the weights are cast to **bfloat16** for computing, and the buckets
travel in bfloat16 too, while gradients, optimizer and checkpoint stay float32. In torch this option is private. Most people use
`torch.autocast` instead: it computes in bfloat16 but keeps gradients, and therefore buckets, in float32. A hook can
compress the buckets (lesson 14).

Write the accumulation first (task 6.1): one update for all micro-batches of all ranks, with one synchronisation. All micro-batches
have the same size, memory has room for the activations of one of them, and the loss is the cross entropy.
"""


# %% task-6-1
def accumulate(parallel, optimizer, micro_batches):
    """Make one update on a list of (inputs, targets) of equal size, with one synchronisation."""
    raise NotImplementedError("Exercise 6.1: Accumulate without sending")


show.source(task("6.1", accumulate), click="Write it first, then open: one solution")

# %% [markdown]
r"""
How many bytes does it save? This function is half written:
"""


# %% faded-bytes-of-an-update
def bytes_of_an_update(parameters, micro_batches, world_size, quiet):
    """Return the bytes of float32 gradients that a rank sends around the ring for one update; `quiet` says whether it uses `no_sync`."""
    synchronisations = 1 if quiet else micro_batches
    return ...


fill_in(bytes_of_an_update, {(1000, 4, 4, True): 6000.0, (1000, 3, 2, False): 12000.0})

# %% [markdown]
r"""
<details><summary>The line</summary><code>return synchronisations * 2 * (world_size - 1) / world_size * 4 * parameters</code></details>

The next cell counts the bytes for four micro-batches.
"""


# %% accumulate folded=true
def bytes_sent(use_no_sync, dtype):
    precision = torch.nn.parallel.distributed._MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    options = {"all_reduce": ring_all_reduce, "mixed_precision": precision}
    parallel = DistributedDataParallel(torch.nn.Linear(256, 256), **options)
    with wire.counting() as traffic:
        for part in range(4):
            around = parallel.no_sync() if use_no_sync and part < 3 else nullcontext()
            with around:
                parallel(torch.ones(8, 256)).sum().backward()
    return traffic.bytes_sent


settings = {"average every time": (False, torch.float32), "no_sync": (True, torch.float32),
            "no_sync, in bfloat16": (True, torch.bfloat16)}
sent = {name: launch(bytes_sent, *setting, world_size=K)[0] for name, setting in settings.items()}
often, once, short = sent.values()
show.bars(
    {name: count / 2**20 for name, count in sent.items()},
    "sent by a rank (MiB)",
    f"4 micro-batches: no_sync sends {100 * once / often:.0f} % of the bytes, in bfloat16 {100 * short / often:.1f} %",
    kind="counted",
)

# %% check-accumulate folded=true
# NBVAL_CHECK_OUTPUT
assert often == 4 * once == 8 * short
print("four micro-batches, a quarter of the bytes; in bfloat16 an eighth")

# %% [markdown]
r"""
## The core, third step: `no_sync`

The hooks fire in every backward pass. Inside `no_sync` they must do nothing. What counts is where the *forward* pass runs, since it
prepares the synchronisation of its backward pass. The usual mistake is to put only `backward()` inside.

Write `CanBeQuiet(FindsUnused)` before you open the next cell: a context manager `no_sync`, and a `forward` and a `ready` that know
whether they are inside.
"""


# %% core-quiet folded=true
class CanBeQuiet(FindsUnused):
    quiet = expecting = False

    @contextmanager
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    def forward(self, inputs):
        self.expecting = not self.quiet
        return super().forward(inputs) if self.expecting else self.module(inputs)

    def ready(self, parameter):
        if self.expecting:
            super().ready(parameter)


# %% claim-13 folded=true
# NBVAL_CHECK_OUTPUT
def gradient(wrap, forward_inside):
    parallel = wrap(torch.nn.Linear(4, 4))
    inputs = torch.full((8, 4), 1.0 + dist.get_rank())
    around = parallel.no_sync() if forward_inside else nullcontext()
    with around:
        loss = parallel(inputs).sum()
    with parallel.no_sync():
        loss.backward()
    return parallel.module.weight.grad


equal = {True: [], False: []}
for inside, of_wrappers in equal.items():
    for wrap in (CanBeQuiet, DistributedDataParallel, TorchDDP):
        of_wrappers.append(torch.equal(*launch(gradient, wrap, inside, world_size=2)))
claims.decide(
    13, "no_sync around the backward pass is enough.", "measured",
    {"the forward pass is inside too": not any(equal[True]),
     "only the backward pass is inside": not all(equal[False])},
    "The forward pass decides whether the next backward pass synchronises: it gets the buckets ready.",
)

# %% [markdown]
r"""
The core, our complete class and torch's do the same. This is how the complete class takes the three steps.
"""

# %% what-ours-adds
reducer = stage6_ddp.reducer.Reducer
graphs = stage6_ddp.graphs.FindUnused
show.source(
    reducer.gradient_ready,
    reducer.mark_ready,
    reducer.send_off,
    reducer.finish,
    graphs.expect,
    graphs.all_sent,
)

# %% [markdown]
r"""
The complete class does more than the cells above. It names the parameters that a pass has missed or used twice. It lays the
buckets out anew, in the order in which gradients became ready. It waits for the buckets at the very end of backward, when
everything else is done. It also handles outputs in lists and dicts, sparse gradients, gradients that stay in the buckets, other
ways to reduce than `dist.all_reduce`, ranks without data, and models whose graph never changes.

## Buffers and BatchNorm

A **buffer** is state without a gradient, such as BatchNorm's running mean. Averaging gradients does not touch buffers,
so the ranks' buffers would drift apart. DDP copies rank 0's buffers to all ranks before each forward pass. It does *not* compute
BatchNorm's mean over all ranks. `SyncBatchNorm` does, both ours and torch's, with one more collective per layer and pass;
`SyncBatchNorm.convert_sync_batchnorm(model)` replaces every BatchNorm of a model by one. Rank 0 has the samples 0 and 1, rank 1 has
10 and 11. What comes out?
"""


# %% claim-14 folded=true
# NBVAL_CHECK_OUTPUT
def normalise(convert):
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    norm = SyncBatchNorm.convert_sync_batchnorm(norm) if convert else norm
    return norm(torch.arange(2.0).reshape(2, 1) + 10 * dist.get_rank()).detach()


plain = torch.cat(launch(normalise, False, world_size=2))
synced = torch.cat(launch(normalise, True, world_size=2))
whole = torch.nn.BatchNorm1d(1)(torch.tensor([[0.0], [1.0], [10.0], [11.0]])).detach()
for outputs in (plain, synced, whole):
    print([f"{number:.2f}" for number in outputs.flatten()])
alike = {"it is the ordinary BatchNorm": plain, "it is SyncBatchNorm": synced}
claims.decide(
    14, "BatchNorm sees the global batch.", "measured",
    {name: torch.allclose(outputs, whole, atol=1e-5) for name, outputs in alike.items()},
    "Every rank normalises with the mean and variance of its own share; SyncBatchNorm exchanges them.",
)

# %% [markdown]
r"""
With plain BatchNorm (first line) both ranks get the same numbers: the difference between their samples is lost. SyncBatchNorm
(second line) gives what one device gives for all four samples (third line).

## Uneven inputs

Rank 0 has three batches, the others have two. In the third step rank 0 waits for partners that have left. The
launcher ends such a wait after `timeout` seconds, and says who is missing where. (The whole message goes on with the line at which
each rank was.)
"""


# %% uneven
def uneven(join):
    parallel = DistributedDataParallel(torch.nn.Linear(8, 8))
    steps = 0
    with parallel.join(enable=join):
        for _ in range(3 if dist.get_rank() == 0 else 2):
            parallel(torch.ones(4, 8)).sum().backward()
            steps += 1
    dist.barrier()
    return steps


try:
    launch(uneven, False, world_size=2, timeout=4)
except LaunchError as error:
    cause, _, where = str(error).partition(" All ranks were ended. ")
    print(f"{type(error).__name__}: {cause}")

# %% check-uneven folded=true
# NBVAL_CHECK_OUTPUT
assert launch(uneven, True, world_size=2) == [3, 2]
print("with join(), rank 0 finishes its third step, and rank 1 shadows it with zeros")

# %% [markdown]
r"""
## The real script

In a notebook `launch` starts the ranks. Everywhere else **torchrun** does. It starts one process per device, each process runs the
same script, and environment variables tell each process its rank. Here is a whole script of this kind. Find in it the
process group, this rank's device, the sampler that shares the data and is told the epoch, the wrapper, and the one rank
that writes the checkpoint. [Your script in five changes](../docs/CONVERT.md) leads from a script for one device to a script like
this one.
"""

# %% script
show.source(script)

# %% [markdown]
r"""
The sampler is the part that people leave out most often. Here is half of what it does, without its shuffling. Each rank must get
equally many samples, or one of them would wait for the others, so the first samples are dealt once more.
"""


# %% faded-samples-of
def samples_of(rank, world_size, count):
    """Return the numbers of the samples that a rank gets: every `world_size`-th one."""
    numbers = list(range(count))
    numbers += numbers[: -count % world_size]  # the first ones once more, to fill up
    return ...


fill_in(samples_of, {(0, 2, 4): [0, 2], (1, 2, 4): [1, 3], (1, 3, 7): [1, 4, 0]})

# %% [markdown]
r"""
<details><summary>The line</summary><code>return numbers[rank::world_size]</code></details>

Now let torchrun start the script, once with torch's class and once with ours:
"""

# %% run-script folded=true
codes = show.command(
    "torchrun --standalone --nproc-per-node=2 -m ddp_course.script FOLDER",
    "torchrun --standalone --nproc-per-node=2 -m ddp_course.script FOLDER ours",
)
assert codes == [0, 0], "the script trains with torch's DDP and with ours"

# %% [markdown]
r"""
Copy the script into a cell that begins with `%%writefile train.py`; then
`!torchrun --standalone --nproc-per-node=2 train.py runs/first` runs it here. When people put their own model and data in,
they often make one of six mistakes. None of them raises an error. In the next cells each mistake is made on purpose, by replacing
a few words of the script. `audit` runs the result on two ranks and watches which samples they see, what they save, and whether
their weights stay equal. Guess the symptom of each mistake first. In a terminal, `ddp-course audit train.py FOLDER` does the same
with your own script.

The last mistake is the most frequent one where data are streamed. An `IterableDataset` has no sampler, so it must share its
samples out itself, among the ranks *and* among the workers of each rank. This one forgets the workers.
"""

# %% mistakes
text = repr(show.source(script))
stream = """DataLoader(type("Stream", (torch.utils.data.IterableDataset,), {
        "__iter__": lambda self: (data[n] for n in sampler)})(), batch_size=32, num_workers=2)"""
mistakes = {
    "no sampler": ("sampler=sampler)", "shuffle=True)"),
    "the epoch is not told": ("        sampler.set_epoch(epoch)\n", ""),
    "forward past the wrapper": ("cross_entropy(parallel(", "cross_entropy(model("),
    "everybody saves": ("if dist.get_rank() == 0:", "if True:"),
    "the wrapper is saved": ("model.state_dict()", "parallel.state_dict()"),
    "each worker yields all": ("DataLoader(data, batch_size=32, sampler=sampler)", stream),
}
messages_of = {}
for name, change in show.progress(mistakes.items()):
    messages_of[name] = audit(text.replace(*change))
for name, messages in messages_of.items():
    print(f"{name}:\n    {'; '.join(messages)}")

assert audit(text) == []
assert all(len(messages) == 1 for messages in messages_of.values()), messages_of

# %% [markdown]
r"""
DDP has one more option: a **communication hook** takes the place of a bucket's average, and may send fewer bytes (lesson 14).

## Is it free on one device?
"""


# %% claim-15 folded=true
# NBVAL_CHECK_OUTPUT
def operations(wrapped):
    os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler announces itself otherwise
    model = torch.nn.Linear(64, 64)
    model = TorchDDP(model) if wrapped else model
    for _ in range(2):  # the first step of DDP lays the buckets out
        with torch.profiler.profile(acc_events=True) as profile:
            model(torch.ones(8, 64)).sum().backward()
    return sum(event.name.startswith("aten::") for event in profile.events())


bare, wrapped = (launch(operations, wrapped, world_size=1)[0] for wrapped in (False, True))
print(f"operations of a step: {bare} without DDP, {wrapped} with it")
claims.decide(
    15, "DDP on one device is free.", "counted", {"the model is wrapped": wrapped <= bare},
    "Gradients are copied into buckets, scaled and watched by hooks: 1 to 6 % of a ResNet step on a V100 (published: pytorch, benchmarks/distributed/ddp).",
)

# %% [markdown]
r"""
## On your GPUs

The complete wrapper runs beside torch's on the devices of this machine, in real time. Both use the same backend, so on GPUs
their times should be close. Without a GPU the figure shows what one NVIDIA H200 needed, which two ranks shared.
"""

# %% on-your-gpus
yours = on_your_gpus("6,torch")
assert yours.max_abs_diff < 1e-4, "the weights are not one device's"
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

torch does the same in C++, in `torch/csrc/distributed/c10d/reducer.cpp`. Your `ready` is called `autograd_hook` in that file, with
`mark_variable_ready` and `mark_bucket_ready`; `finish` is `finalize_backward`, and the walk is `search_unused_parameters`.
The class around it, with `no_sync` and `join`, is written in Python: `torch/nn/parallel/distributed.py`. The paper is
[Li et al., VLDB 2020](https://arxiv.org/abs/2006.15704).

Two things are worth knowing about its speed. Copying gradients into buckets costs time, unless you ask for
`gradient_as_bucket_view=True`. And torch lays its buckets out anew after the first step, in the order in which gradients really
became ready. `make bench ddp` measures our class against torch's, side by side.

**On a GPU the communication runs on a stream, not in a thread.** A stream is a queue of kernels. The kernels of one stream run one
after the other, and two streams run side by side. Python only puts kernels into a queue, and goes on. NCCL has a stream of its own,
and this is what `ready` does on a GPU:

```python
flat = vector(p.grad for p in bucket) / world_size  # queued behind backward's kernels, not yet computed
work = dist.all_reduce(flat, async_op=True)         # NCCL's stream waits for an *event*, the one after `flat`
...                                                 # Python queues more of backward; nobody has waited yet
work.wait()                                         # the computing stream waits for NCCL's event; Python does not
```

So `work.wait()` returns at once, and what is queued next runs after the sum. With gloo `work.wait()` blocks Python until the sum is
ready. This has three consequences:

- A clock in Python tells when a kernel was queued, not when it ran, so times are taken with events.
- Memory that another stream still uses must not be freed; `tensor.record_stream` prevents it.
- Overlap is not free, since an all-reduce is a kernel too. In the trace at the end of [lesson 5](05_bucketed_ddp.ipynb) an
  all-reduce holds 8 of the GPU's 108 multiprocessors (SMs) while it runs, and its traffic goes through the memory that backward
  also needs.

## Your ring under torch's class

In lesson 04 torch's own class trained over your ring. Now you know what the class does, and can listen to it. The ring below notes
how many numbers torch has it add up, in each sum of a step. The model is the one with two branches, of which a step uses one; each of
its layers has 272 numbers in two parameters. The search for unused parameters is on, and the cap is small. Then two rings take its
place whose authors were off by one: one stops its allgather a step early, the other hands out chunk r where chunk r+1 is finished.
Before you run it: which of the sums will be the bitmap?
"""

# %% predict-faults
guess_faults = show.predict(
    "Which of the two faulty rings does a comparison of the replicas find?",
    ["both", "the one that stops early", "the one that hands out another chunk", "neither"],
)
guess_faults


# %% own-backend
def gradients_over(backend, first=1, missing=0):
    def my_ring(tensor, group=None):
        heard.append(tensor.numel())
        rank, size, left, right = wire.neighbours(group)
        chunks = tensor.tensor_split(size)
        stage4_ring.reduce_scatter(chunks, group)
        for step in range(size - 1 - missing):
            target = chunks[(rank + first - 1 - step) % size]
            wire.exchange(chunks[(rank + first - step) % size], right, target, left, group)

    torch.manual_seed(0)
    ring_backend.register("mine", all_reduce=my_ring)
    group = dist.new_group(backend=backend)
    parallel = TorchDDP(TwoBranches(), process_group=group, bucket_cap_mb=0.001, **search)
    for _ in range(3):  # the first steps settle the buckets
        heard = []
        parallel.zero_grad()
        parallel(torch.ones(4, 16) + dist.get_rank()).square().sum().backward()
    return heard, vector(p.grad for p in parallel.parameters() if p.grad is not None)


# %% check-own-backend folded=true
# NBVAL_CHECK_OUTPUT
(_, theirs), *_ = launch(gradients_over, "gloo", world_size=K)
faults = {"my ring": (1, 0), "a step short": (1, 1), "another chunk": (0, 0)}
found = {}
for name, fault in faults.items():
    of_ranks = launch(gradients_over, "mine", *fault, world_size=K)
    heard, mine = of_ranks[0]
    equal = all(torch.equal(mine, other) for _, other in of_ranks)
    found[name] = equal, torch.allclose(mine, theirs)
    print(f"{name}: sums of {heard}; replicas equal: {equal}; as with gloo: {found[name][1]}")
assert list(found.values()) == [(True, True), (False, False), (True, False)] or K == 2, found

# %% reveal-faults
every_chunk = "The wrong chunks reach all ranks alike, so the replicas stay equal, and all are wrong."
why = {
    "both": every_chunk,
    "the one that hands out another chunk": every_chunk,
    "neither": "A chunk that does not arrive leaves on that rank what was there, and the replicas differ.",
}
guess_faults.reveal("the one that stops early", "the one that stops early", "measured", why)

# %% [markdown]
r"""
Three buckets of 272 numbers, one for each layer, also for the branch that nobody used, and then six numbers: the bitmap, one for each
parameter. Every one of these sums was made by your code. The ring that stops early leaves the replicas different, and whoever compares
them finds it. The ring that hands out the wrong chunk leaves equal replicas that are all wrong: only a comparison with one device, or
with another backend, finds that one. Task 6.9 asks you to write the comparison of the replicas.

## Check yourself

**1.** Your loss uses only one of two heads, chosen at random on each rank. Which option do you need?
<details><summary>Answer</summary>
<code>find_unused_parameters=True</code>. A head that only some ranks used gets the average over all ranks, with zeros
from those that did not use it. <code>static_graph</code> would be wrong, since the graph changes.
</details>

**2.** Why does DDP copy rank 0's buffers instead of averaging them?
<details><summary>Answer</summary>
It cannot know what they mean: a counter or an index must not be averaged. Copying keeps the replicas equal, and DDP
promises no more than that.
</details>

**3.** With <code>no_sync</code> over 4 micro-batches, by what do you divide the loss?
<details><summary>Answer</summary>
By 4. Gradients of micro-batches add up; DDP divides by the number of ranks only.
</details>
"""

# %% [markdown]
r"""
## Optional: under `torch.compile`

The compiler makes one graph of a model, or a few. A hook fires only when the backward pass of a whole graph is done. With one graph
no bucket could leave before the end, and no communication would be hidden. So torch cuts the graph where a bucket ends. Here are
six blocks of 1 MiB on two ranks, wrapped in seven ways. `note` takes the compiler's place: it notes how many blocks are in each
graph that it gets, and compiles nothing. (The two classes have a `forward` of their own, because torch does not compile its own
layers and a bare `torch.nn.Sequential`.)
"""

# %% predict-graphs
guess_graphs = show.predict("How many graphs does the compiler make of six blocks with buckets of 2 MiB?", [1, 3, 4, 6])
guess_graphs


# %% blocks
class Block(torch.nn.Linear):
    def forward(self, inputs):
        return torch.relu(super().forward(inputs))


class Blocks(torch.nn.Sequential):
    def forward(self, inputs):
        for block in self:
            inputs = block(inputs)
        return inputs


def under_ddp(cap, cut=True, wrapper=TorchDDP):
    def wrap(model, note):
        # Named in a text: a function that names this module cannot be sent to the ranks.
        vars(torch._dynamo)["config"].optimize_ddp = cut
        return wrapper(torch.compile(model, backend=note), bucket_cap_mb=cap)

    return wrap


def fully_sharded(model, note):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        block.compile(backend=note)
        torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh)


# %% graphs folded=true
def graphs_and_loss(wrap):
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks_in = []

    def note(graph, inputs):
        blocks_in.append(sum(node.name.startswith("linear") for node in graph.graph.nodes))
        return graph.forward

    model = wrap(Blocks(*[Block(512, 512) for _ in range(6)]), note)
    loss = model(torch.ones(4, 512)).square().mean()
    loss.backward()
    return blocks_in, loss.item()


# %% compiled folded=true
# NBVAL_CHECK_OUTPUT
wrapped_in = {
    "nothing": lambda model, note: torch.compile(model, backend=note),
    "DDP, buckets of 1 MiB": under_ddp(1),
    "DDP, buckets of 2 MiB": under_ddp(2),
    "DDP, buckets of 25 MiB": under_ddp(25),
    "DDP, optimize_ddp = False": under_ddp(2, cut=False),
    "stage 6, buckets of 2 MiB": under_ddp(2, wrapper=DistributedDataParallel),
    "fully_shard, each block compiled": fully_sharded,
}


def of_all_wrappers():
    return [graphs_and_loss(wrap) for wrap in wrapped_in.values()]


counted_graphs = launch(of_all_wrappers, world_size=2)[0]
print("how many blocks are in each graph (counted)")
for name, (blocks_in, _) in zip(wrapped_in, counted_graphs):
    print(f"{name + ':':34}{blocks_in}")
assert [len(blocks_in) for blocks_in, _ in counted_graphs[:6]] == [1, 6, 4, 2, 1, 1], counted_graphs
assert len({loss for _, loss in counted_graphs}) == 1, counted_graphs
print("the loss is the same everywhere")

# %% reveal-graphs
blocks_in, _ = counted_graphs[2]
why = {
    1: "So it is without DDP, or under a wrapper that the compiler does not know.",
    3: "Six blocks of 1 MiB would fill three buckets of 2 MiB, but the first bucket is closed at 1 MiB.",
    6: "So it is with buckets of 1 MiB; two blocks share a bucket of 2 MiB.",
}
guess_graphs.reveal(f"{len(blocks_in)} graphs", len(blocks_in), "counted", why)

# %% [markdown]
r"""
The first bucket is closed at 1 MiB, which one block reaches, so buckets of 2 MiB make four graphs, not three. Under `fully_shard`
each block is compiled by itself, and gather and free run between the graphs. Six blocks that are alike share two graphs, because
the first block's input needs no gradient. With DDP, mind three things:

- Caps below 1 MiB end in an `AssertionError` about the first bucket.
- Write `DistributedDataParallel(torch.compile(model))`. The other way round, the compiler stumbles over DDP's own `forward`.
- The compiler knows only torch's class. Under ours a model stays one graph, so what the compiler gains is lost with the overlap.
"""

# %% [markdown]
r"""
## Yours in the comparison

The core that you read or wrote above, `CanBeQuiet`, trains here beside the complete wrapper and PyTorch's own. Change a line of its
cell, run it and the comparison again, and the row says by how much the weights differ from one device's, and from which step on. Nobody counts bytes here, since all
three use torch's own all-reduce. Your core's row shows no sending and no waiting, because the core notes neither: it waits inside its
backward pass, whose bar is longer by as much. Its step is a little shorter than the others', since its buckets have two parameters each,
and less is left to send when backward ends.
"""


# %% my-train
def my_train(model, batches, lr):
    """Train on this rank's share of each batch; return the losses."""
    parallel = CanBeQuiet(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% compare-yours
results = compare.run(
    "digits", world_size=K, stages="1,6,torch", device="cpu", progress=True,
    yours={"my core": my_train}
)
compare.table(results)

# %% yours-in-the-comparison
show.compare_figure(results)

# %% [markdown]
r"""
## In three lines

1. The core of DDP is hooks, buckets, a bitmap of used parameters and a flag: 60 lines, which train the same weights as torch's.
2. Unused parameters, uneven data and accumulation each need a word from you: an option, `join`, `no_sync`.
3. A script for torchrun has under 70 lines. Its six usual mistakes raise no error, so check samples, weights and files.

**Exercise:** [6](../exercises/06_complete_ddp.ipynb), `exercises/06_complete_ddp.ipynb`. **Next:**
[7, sharding](07_sharding.ipynb): when the model does not fit.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
