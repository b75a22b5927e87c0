# %% [markdown]
r"""
# 7 · Sharding: nobody keeps everything

Data parallel training multiplies speed, not memory: every rank holds the whole model, all gradients and the whole
optimizer state. If they do not fit into one device, more ranks do not help, unless each rank keeps only a part.

**After this lesson you can**

- count what training a model takes, byte by byte,
- write the three levels of ZeRO, and say what each keeps and sends,
- say when fully sharded training is slower than DDP, and why memory may not fall,
- train with mixed precision, accumulation and clipping in one loop, sharded or not.

*50 minutes, two of them computing; what is optional, at the end, takes 10 more.* Some cells show only three dots. They measure,
check or draw, or they hold what you are asked to write first. Run them like all others; a click on the dots shows the code.
"""

# %% imports
import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ddp_course import Device, DistributedDataParallel, FullyShardedDataParallel, Link
from ddp_course import ShardedOptimizer, allgather, launch, mesh, problems
from ddp_course import reduce_scatter, ring_all_reduce, ring_backend, stage5_bucketed
from ddp_course import stage7_sharded, wire
from ddp_course.lab import claims, on_your_gpus, show, timeline, timing
from ddp_exercises import fill_in, task
from manyranks import presets

K = 4  # how many ranks; 2 works as well

# %% opening-questions
show.questions(7)

# %% [markdown]
r"""
## Count the memory

Training P parameters in float32 with the Adam optimizer takes 4 P bytes for the parameters, 4 P for the gradients and 8 P for
Adam's two running means of each gradient: **16 P** bytes on every rank. A model of 7 billion parameters needs 112 GB, before
a single activation. (ZeRO's paper counts 16 P too, for mixed precision: 2 for a parameter in half precision, 2 for its
gradient, and 12 for the parameter in float32 and its means.)

But not every rank has to hold all of these bytes at every moment.

## Predict
"""

# %% predict
guess = show.predict(
    f"Parameters, gradients and optimizer state are divided over {K} ranks. How much does a rank keep between steps, compared with plain DDP?",
    ["all of it", "half", "a quarter"],
)
guess

# %% [markdown]
r"""
## Build

Each parameter is cut into K chunks, and each rank owns one of them: the chunk whose sum it has after a reduce-scatter
(lesson 04). The optimizer is made from these chunks, so its state is divided too. Two things are sent. Each chunk's
gradients are summed up at its owner, and each owner's new values are gathered by all ranks.
"""


# %% [markdown]
r"""
In **ZeRO-1** each rank updates its own chunk between the reduce-scatter and the allgather. The whole gradients stay in
memory until then. Write this step first (task 7.2 of [exercise 7](../exercises/07_sharding.ipynb)). `weights` and `gradients` are
lists of K chunks, which are views of flat tensors. `update(chunk of weights, chunk of gradients)` makes the step of one chunk, in
place. `reduce_scatter(chunks, group)` and `allgather(chunks, group)` are the two halves of lesson 04's ring: after the first, rank r
has the sum of chunk r+1, and the second sends that chunk to all ranks. The step uses the *mean* of the ranks' gradients, and sends
no more bytes than DDP.
"""


# %% task-7-2
def sharded_step(weights, gradients, update, group=None):
    """Average gradients, update this rank's chunk of the weights, and get the others, in place."""
    raise NotImplementedError("Exercise 7.2: A sharded step")


show.source(task("7.2", sharded_step), click="Write it first, then open: one solution")

# %% [markdown]
r"""
The next two cells hold what follows from this step; open them when you have written it. `Shard` is one parameter: it knows this
rank's chunk, and reduces and gathers as your function does. `Zero1` and `Zero2` train any model with it. **ZeRO-2** reduces each
gradient as soon as backward has it, and drops the chunks that are not its own: before you open the cell, say with which hook.
"""


# %% shard folded=true
class Shard:
    def __init__(self, parameter):
        self.parameter = parameter
        self.whole = parameter.data.view(-1)  # the same memory
        self.chunks = self.whole.tensor_split(dist.get_world_size())
        # Rank r has the sum of chunk r+1.
        self.index = (dist.get_rank() + 1) % dist.get_world_size()
        self.mine = torch.nn.Parameter(self.chunks[self.index])

    def reduce(self):
        chunks = (self.parameter.grad.view(-1) / len(self.chunks)).tensor_split(len(self.chunks))
        reduce_scatter(chunks)
        sum_ = chunks[self.index].clone()
        # Micro-batches add up.
        self.mine.grad = sum_ if self.mine.grad is None else self.mine.grad + sum_
        self.parameter.grad = None

    def gather(self):
        allgather(self.chunks)


# %% zero folded=true
class Zero1:
    def __init__(self, model):
        self.shards = [Shard(parameter) for parameter in model.parameters()]
        self.optimizer = torch.optim.Adam([shard.mine for shard in self.shards])

    def step(self):
        for shard in self.shards:
            if shard.parameter.grad is not None:
                shard.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for shard in self.shards:
            shard.gather()


class Zero2(Zero1):
    def __init__(self, model):
        super().__init__(model)
        for shard in self.shards:
            shard.parameter.register_post_accumulate_grad_hook(lambda _, own=shard: own.reduce())


# %% [markdown]
r"""
**Fully sharded** training (ZeRO-3, FSDP) goes further: between its forward and its backward pass even the parameter is given up.
Hooks gather a layer before it computes, **prefetch** the next layer meanwhile, and free the layer afterwards. Memory is freed by
giving its storage the size 0. Autograd keeps a view of this storage for the backward pass, which is valid again once the layer has
been gathered a second time. A single thread sends all messages in order. An iteration then looks like this:

![Each rank keeps a third of every layer. Before a layer computes, its weights are gathered from all ranks, while the layer before it computes, and freed after use; for the backward pass they are gathered again. Each layer's gradients are summed up at their owners, which update their own third](../docs/figures/iteration_07.svg)

**Possible because** the optimizer's step is elementwise, and a layer's weights are needed only while it computes.

Task 7.5 asks for the three functions that do this: `fetch`, `free` and `finish`. Write them before you open the next cell, which has
them as methods of a `Layer`. The cell after it has the hooks that call them.
"""


# %% fully-sharded folded=true
class Layer(Shard):
    thread = None

    def __init__(self, layer):
        super().__init__(layer.weight)
        self.mine = torch.nn.Parameter(self.mine.detach().clone())
        self.memory = self.whole.untyped_storage()
        self.bytes = self.memory.nbytes()
        self.free()

    def free(self):
        self.memory.resize_(0)
        self.coming = None

    def fetch(self):
        if self.coming is None:
            self.memory.resize_(self.bytes)
            self.chunks[self.index].copy_(self.mine.detach())
            self.coming = self.thread.submit(self.gather)
        return self.coming

    def finish(self):
        self.thread.submit(self.reduce).result()
        self.free()


# %% hooks folded=true
class FullySharded:
    def __init__(self, model):
        Layer.thread = ThreadPoolExecutor(1)
        linear = [module for module in model if list(module.parameters())]
        self.shards = [Layer(module) for module in linear]
        for number, (module, shard) in enumerate(zip(linear, self.shards)):
            module.register_forward_pre_hook(lambda *_, n=number: self.compute(n, n + 1))
            module.register_forward_hook(lambda _, __, output, n=number: self.leave(n, output))
            shard.parameter.register_post_accumulate_grad_hook(lambda _, own=shard: own.finish())
        self.optimizer = torch.optim.Adam([shard.mine for shard in self.shards])

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def compute(self, number, following):
        self.shards[number].fetch().result()
        if 0 <= following < len(self.shards):
            self.shards[following].fetch()

    def leave(self, number, output):
        self.shards[number].free()
        output.register_hook(lambda gradient: self.compute(number, number - 1))


# %% [markdown]
r"""
## Is it still the same training?

Adam looks at each element on its own, so it does not matter which rank updates which element. We train the same model in eight
ways: with DDP, with the three classes above, with the course's complete `ShardedOptimizer` and `FullyShardedDataParallel`, and with
torch's own `ZeroRedundancyOptimizer` and `fully_shard`. Each function returns what runs the model and what makes the step. DDP gets
each batch whole. All others get it in two halves, whose gradients must add up.
"""


# %% three-ways folded=true
def ddp(model):
    parallel = stage5_bucketed.BucketedDDP(model, bucket_cap_mb=0.25)
    return parallel, torch.optim.Adam(model.parameters())


def sharded_optimizer(model):
    return model, ShardedOptimizer(model.parameters(), torch.optim.Adam)


def stage7(model):
    parallel = FullyShardedDataParallel(model)
    return parallel, torch.optim.Adam(parallel.parameters())


def torchs_zero1(model):
    zero = import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    return parallel, zero(model.parameters(), torch.optim.Adam)


def torchs_fully(model, backend="gloo"):
    devices = DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")
    for part in [*(module for module in model if list(module.parameters())), model]:
        fully_shard(part, mesh=devices)
    return model, torch.optim.Adam(model.parameters())


others = {"ShardedOptimizer": sharded_optimizer, "stage 7": stage7,
          "torch's ZeRO-1": torchs_zero1, "torch's fully_shard": torchs_fully}
stages = {"ZeRO-1": sharded_optimizer, "fully sharded": stage7}

# %% same-results folded=true
def losses(prepare):
    problem = problems.make("synthetic", parameters=3 * 64**2, width=64, dtype=torch.float64)
    parallel, optimizer = prepare(problem.model())
    seen = []
    for inputs, targets in problem.batches(48, 5, rank=dist.get_rank(), world_size=K):
        parallel.zero_grad()
        parts = 1 if prepare is ddp else 2
        loss = 0.0
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts)):
            part = torch.nn.functional.cross_entropy(parallel(x), y) / parts
            part.backward()
            loss += part.item()
        optimizer.step()
        seen.append(loss)
    return torch.tensor(seen)


ways = {"plain DDP": ddp, "ZeRO-1": lambda model: (model, Zero1(model)),
        "ZeRO-2": lambda model: (model, Zero2(model)),
        "fully sharded": lambda model: (model, FullySharded(model))}
trained = {name: torch.stack(launch(losses, way, world_size=K, progress=(name, 5)))
           for name, way in {**ways, **others}.items()}

# %% check-results folded=true
# NBVAL_CHECK_OUTPUT
plain = trained["plain DDP"]
distance = {name: (seen - plain).abs().max().item() for name, seen in trained.items()}
assert max(distance.values()) < 1e-6 and plain.std(1).min() > 1e-3, distance
print("our three levels, the stage and torch's own have the losses of plain DDP, on every rank and in every step")

# %% [markdown]
r"""
The course's stage 7 adds several things to these 70 lines. Its sums travel while backward goes on, as drawn (`finish` above waits
for each sum). It has blocks of many parameters, shared, frozen and unused parameters, clipping, and checkpoints that fit any number
of ranks, and it refuses in plain words what it cannot do. (Its `enter` and `request` are `compute` and `fetch` above.)

## Run

What will a rank keep between two steps? This count is half written, in float32 with Adam:
"""


# %% faded-bytes-kept
def bytes_kept(parameters, world_size, divided):
    """Return the bytes that a rank keeps; `divided` are the parts that are divided over the ranks."""
    total = 0
    for part, nbytes in (("parameters", 4), ("gradients", 4), ("state", 8)):
        owners = world_size if part in divided else 1
        total += ...
    return total


two = ("state", "gradients")
fill_in(bytes_kept, {(1000, 4, ()): 16000.0, (1000, 4, two[:1]): 10000.0, (1000, 2, two): 10000.0})

# %% [markdown]
r"""
<details><summary>The line</summary><code>total += parameters * nbytes / owners</code></details>

We train a step with DDP and with each of our three classes, and count the bytes that it sends. Then we add up the bytes of all
tensors that stay: parameters, gradients, and Adam's state.
"""


# %% memory folded=true
def kept_and_sent(prepare):
    problem = problems.make("synthetic", parameters=8 * 128**2, width=128)
    model = problem.model()
    parallel, optimizer = prepare(model)
    inputs, targets = next(problem.batches(16, 1, rank=dist.get_rank(), world_size=K))
    with wire.counting() as traffic:
        torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
        inner = getattr(optimizer, "optimizer", optimizer)  # ours are made from shards
        parameters = list(model.parameters())
        parameters += [p for group in inner.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        optimizer.step()
    state = [value for entry in inner.state.values() for value in entry.values()]
    memories = [tensor.untyped_storage() for tensor in parameters + gradients + state]
    sizes = {memory.data_ptr(): memory.nbytes() for memory in memories}
    return sum(sizes.values()), traffic.bytes_sent


P = 8 * 128**2
counted = {name: launch(kept_and_sent, ways[name], world_size=K) for name in show.progress(ways)}
measured = {name: max(ranks)[0] / P for name, ranks in counted.items()}

# %% memory-figure folded=true
formula = {"plain DDP": 16, "ZeRO-1": 8 + 8 / K, "ZeRO-2": 4 + 12 / K, "fully sharded": 16 / K}
assert all(abs(measured[name] / formula[name] - 1) < 0.1 for name in ways), measured
share = measured["fully sharded"] / measured["plain DDP"]
guess.reveal(f"{share:.2f} of it on {K} ranks", guess.answers[K // 2], kind="counted")
title = f"On {K} ranks: from 16 bytes per parameter to {16 / K:g}"
show.bars(measured, "kept on a rank (bytes per parameter)", title, kind="counted",
          theory=formula, colours={"fully sharded": show.STAGE_COLOURS["7"]})

# %% [markdown]
r"""
Two sentences that are often written can be put on trial here: that DDP helps when a model is too big, and that in data
parallel training each GPU processes only its own chunk of the parameters. For the second one, a hook notes, right before each
layer computes, how many bytes of its weights are in memory.
"""


# %% claims-kept folded=true
# NBVAL_CHECK_OUTPUT
def computed_with(prepare):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
    parallel, _ = prepare(model)
    there = []
    for layer in model:
        memory = layer.weight.untyped_storage()
        layer.register_forward_pre_hook(lambda *_, memory=memory: there.append(memory.nbytes()))
    parallel(torch.ones(2, 64))
    return sum(there) / (4 * 4 * 64**2)


claims.decide(
    16, "DDP helps when the model is too big for one device.", "counted",
    {"every rank keeps everything": measured["plain DDP"] < 0.9 * 16,
     "parameters and state are sharded": measured["fully sharded"] < 0.9 * 16},
    "DDP copies parameters, gradients and optimizer state to every rank; sharding divides them.",
)
claims.decide(
    22, "In data parallel training each GPU processes only its own chunk of the parameters.", "counted",
    {name: max(launch(computed_with, ways[name], world_size=K)) < 0.9 for name in measured},
    "Each rank computes with all parameters, on its own share of the data; sharding divides only what it keeps between uses.",
)

# %% [markdown]
r"""
Each level divides one thing more. The table has the formulas behind the dashes, and what each level sends (p = 4 P bytes of
gradients):

| level | divided by K | bytes kept | sent in a step |
|---|---|---|---|
| DDP | nothing | 16 P | 2(K-1)/K p |
| ZeRO-1 | the optimizer's state | 8 P + 8 P/K | 2(K-1)/K p |
| ZeRO-2 | state and gradients | 4 P + 12 P/K | 2(K-1)/K p |
| ZeRO-3, fully sharded, FSDP | state, gradients and parameters | 16 P/K, plus the layers in use | 3(K-1)/K p |

## What it costs: traffic

DDP's ring is a reduce-scatter and an allgather of gradients. ZeRO-1 and ZeRO-2 put the update between the two: they reduce-scatter
the gradients, and then allgather the updated parameters, which are as many bytes. Fully sharded training gathers the parameters
twice, for forward and for backward, and only scatters the gradients. It sends 1.5 times the bytes, for memory divided by K. With
several micro-batches the difference grows: DDP still averages once for an update (`no_sync`), but a sharded rank has no room for whole
weights or gradients between two micro-batches. How often does each use half of a ring?
"""


# %% faded-bytes-sent
def bytes_sent(nbytes, world_size, is_sharded, micro_batches):
    """Return what a rank sends for one update, in bytes; the gradients have `nbytes`."""
    halves = ...
    return halves * (world_size - 1) / world_size * nbytes


fill_in(bytes_sent, {(1000, 4, False, 8): 1500.0, (1000, 4, True, 8): 18000.0})

# %% [markdown]
r"""
<details><summary>The line</summary><code>halves = 3 * micro_batches if is_sharded else 2</code></details>

These are the bytes that the step above, of one micro-batch, has counted:
"""

# %% traffic-figure folded=true
traffic = {}
formula = {}
for name, ranks in counted.items():
    traffic[name] = max(sent for _, sent in ranks) / (4 * P)
    times_sent = 3 if name == "fully sharded" else 2
    formula[name] = times_sent * (K - 1) / K
assert traffic == formula, traffic
show.bars(traffic, "sent by a rank in a step\n(p: all gradients)",
          "Fully sharded training sends 1.5 times what DDP sends; the others send the same", kind="counted",
          theory=formula, colours={"fully sharded": show.STAGE_COLOURS["7"]})

# %% [markdown]
r"""
## When does the gathering happen?

Each block is gathered before it computes, once on the way forward and once on the way back. With **prefetch** the next block is
fetched while this one computes. How much communication does prefetch hide? Here is rank 0's step on emulated devices and links,
without and with prefetch, in virtual time. The lower half of each row is the communication thread.
"""


# %% prefetch folded=true
def last_step(prefetch):
    problem = problems.make("synthetic", parameters=size)
    parallel = FullyShardedDataParallel(problem.model(), prefetch=prefetch)
    optimizer = torch.optim.Adam(parallel.parameters())
    with timeline.recording() as spans:
        for inputs, targets in problem.batches(128 * K, 4, rank=dist.get_rank(), world_size=K):
            torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
    return timeline.by_step(spans)[-1]


def step_s(ranks):
    return max(lane[-1].end for lane in ranks) - min(lane[0].start for lane in ranks)


def on_devices(fn, *arguments, link="150Mbit"):
    return launch(fn, *arguments, world_size=K, device=Device("800MFLOP/s"), link=Link(link))


size = 6 * 256**2  # six layers
lanes = {prefetch: on_devices(last_step, prefetch) for prefetch in show.progress((False, True))}
step_ms = {prefetch: 1000 * step_s(ranks) for prefetch, ranks in lanes.items()}
title = f"A step without prefetch: {step_ms[False]:.0f} ms; with it: {step_ms[True]:.0f} ms"
show.timeline_figure([lanes[False][0], lanes[True][0]], labels=["waits", "prefetches"], align=True,
                     title=title)

# %% [markdown]
r"""
Prefetch hides gathers behind computing, and the step is shorter.

Does saving memory cost time? Here are the step times, with the memory under each bar. A dash marks computing time plus
the communication that these programs cannot hide. For DDP, with a bucket per layer, this is one layer's all-reduce. For ZeRO-1
and ZeRO-2 it is all communication. For fully sharded training it is the first gather of each pass, and the reduction of the
gradients that come last. (ZeRO-1 and fully sharded are stage 7's here.)
"""


# %% step-times folded=true
def seconds_of(name, batch=128):
    problem = problems.make("synthetic", parameters=size)
    seconds = []
    parallel, optimizer = {**ways, **stages}[name](problem.model())
    for inputs, targets in problem.batches(batch * K, 4, rank=dist.get_rank(), world_size=K):
        with timing.stopwatch() as watch:
            parallel.zero_grad()
            torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
        seconds.append(watch.seconds)
    return min(seconds)


times = {name: 1000 * max(on_devices(seconds_of, name)) for name in show.progress(ways)}
computing = 1000 * (6 - 2 / 6) * size * 128 / 800e6  # nobody needs the first inputs' gradient
gather = 1000 * (K - 1) / K * 4 * size / (150e6 / 8)  # of all layers; scattering takes as long
exposed = {"plain DDP": 2 / 6, "ZeRO-1": 2, "ZeRO-2": 2, "fully sharded": 3 / 6}  # of six layers
overlap = {"ZeRO-1": ",\nno overlap", "ZeRO-2": ",\nno overlap"}
labels = {n: f"{n}{overlap.get(n, '')}\n{measured[n]:.0f} bytes\nper parameter" for n in ways}
ratio = times["fully sharded"] / times["plain DDP"]
show.bars({labels[n]: ms for n, ms in times.items()}, "a step (ms)", kind="virtual time",
          title=f"Fully sharded: 1/{K} of the memory, in {ratio:.2f} times DDP's time", form="{:.0f}",
          theory={labels[n]: computing + share * gather for n, share in exposed.items()})

# %% [markdown]
r"""
DDP hides its all-reduce under backward, and fully sharded training hides its gathers under both passes. *Our* ZeRO-1 and
ZeRO-2 hide nothing, which is why they take longest here: ZeRO-1 sends after backward, and ZeRO-2 waits in each hook. This is
no property of the levels. Libraries reduce-scatter buckets under backward and gather under the next forward pass. Both levels then
take DDP's time, since they send as much, and all four ways are close: for 8 billion parameters on 64 H100s (where DDP
would not fit) the model of lesson 13 predicts 2.2 to 2.3 s per step for each of them.

## When FSDP loses

Communication hides behind computing, if there is enough computing. On a link of about a quarter of the speed the network is the
slower part, and FSDP sends 3(K-1)/K p where DDP sends 2(K-1)/K p. (Its step is not 1.5 times as long, because in
the forward pass FSDP already sends, while DDP has nothing to send yet.) The remedy is more computing per byte: a larger batch per
rank. Each dash is the larger of two lower bounds. One is the computing plus what cannot be hidden. The other is all the sending plus
whatever must be computed before sending can begin. DDP can send after forward and one layer's backward; FSDP waits only for the
last layer's forward.
"""

# %% when-fsdp-loses folded=true
sends = {"plain DDP": 2, "fully sharded": 3}  # how often the bytes of all layers travel
before = {"plain DDP": 16 / 34, "fully sharded": 2 / 34}  # the share of computing before it
slow = gather * 150 / 40
slow_ms = {}
bounds = {}
for samples, name in show.progress([(samples, name) for samples in (128, 512) for name in sends]):
    ms = computing * samples / 128
    label = f"{name}\n{samples} samples"
    slow_ms[label] = 1000 * max(on_devices(seconds_of, name, samples, link="40Mbit"))
    bounds[label] = max(ms + exposed[name] * slow, before[name] * ms + sends[name] * slow)
ddp_few, sharded_few, ddp_many, sharded_many = slow_ms.values()
few = sharded_few / ddp_few
many = sharded_many / ddp_many
title = f"On a slow link FSDP takes {few:.2f} times DDP's time; with a large batch, {many:.2f} times"
show.bars(slow_ms, "a step (ms)", title, form="{:.0f}", theory=bounds,
          kind="virtual time", dash="lower bound")

# %% [markdown]
r"""
## Why memory did not fall

"I sharded over all my GPUs, and it still does not fit." Two things are not sharded: the **activations**, which grow
with the batch, and the layers in use (with prefetch, two at a time). So we look at a whole step, and not only at the moment between
two steps. torch's profiler notes each piece of memory that a rank allocates or gives back, whoever asks for it, so it can compare
our ways with torch's own. Before you look: at which moment of a step does a rank hold the most?

(The profiler watches one thread only. `AtOnce` in the next cell therefore takes the place of the sending thread: it sends at once,
and has a thread's two methods.)
"""


# %% over-a-step folded=true
class AtOnce:
    def submit(self, send):
        send()
        return self

    def result(self):
        return None


def held_over_a_step(name, shapes, batch=1000, recompute=False):
    os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler announces itself otherwise
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        linear = [torch.nn.Linear(*shape, bias=False) for shape in shapes]
        parts = [part for layer in linear for part in (layer, torch.nn.ReLU())]
        model = torch.nn.Sequential(*parts)
        parallel, optimizer = {**ways, **others}[name](model)
        Layer.thread = AtOnce()
        for _ in range(2):  # from the second step on there is optimizer state
            three_phases(model, parallel, optimizer, torch.randn(batch, shapes[0][0]), recompute)
    parameters = sum(inputs * outputs for inputs, outputs in shapes)
    return by_phase(profile.profiler.kineto_results.events(), parameters)


# %% phases folded=true
def three_phases(model, parallel, optimizer, x, recompute):
    with torch.profiler.record_function("forward"):
        if recompute:
            y = torch.utils.checkpoint.checkpoint_sequential(model, 4, x, use_reentrant=False)
        else:
            y = parallel(x)
        total = y.sum()
    with torch.profiler.record_function("backward"):
        total.backward()
    with torch.profiler.record_function("update"):
        optimizer.step()
        parallel.zero_grad()


def by_phase(events, parameters):  # what is held in each phase of the last step
    in_order = sorted((event.start_ns(), event.name(), event.nbytes()) for event in events)
    begin = {name: start for start, name, _ in in_order}
    changes = [(start, nbytes) for start, name, nbytes in in_order if name == "[memory]"]
    moments, sizes = torch.tensor(changes).T.contiguous()
    held = sizes.cumsum(0) / parameters
    borders = torch.tensor([begin[phase] for phase in ("forward", "backward", "update")])
    return list(held.tensor_split(torch.searchsorted(moments, borders)))[1:]


# %% memory-over-a-step folded=true
even = [(128, 128)] * 16
settings = {name: (name, even) for name in ("plain DDP", "ZeRO-1", "fully sharded")}
settings["checkpointed too"] = ("fully sharded", even, 1000, True)
beside = {name: (name, even) for name in ("torch's ZeRO-1", "torch's fully_shard")}
beside["torch's, checkpointed too"] = ("torch's fully_shard", even, 1000, True)
colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#D55E00", "#009E73", "#CC79A7")
course = {}
lines = {}
for (name, setting), colour in zip(show.progress({**settings, **beside}.items()), colours):
    phases = launch(held_over_a_step, *setting, world_size=K)[0]
    course[name] = [part.max().item() for phase in phases for part in phase.tensor_split(16)]
    lines[name] = ([n / 16 for n in range(48)], course[name], colour)
title = "Peaks: DDP {:.0f}, ZeRO-1 {:.0f}, fully sharded {:.0f}, checkpointed {:.0f}"
picture = show.curves(lines, "0 to 1: forward, 1 to 2: backward, 2 to 3: update",
                      "held on a rank (bytes per parameter)", points=False, ticks=range(4),
                      title=title.format(*map(max, course.values())), height=4.6, kind="counted")
for line in picture.axes[0].lines[len(settings):]:
    line.set_linestyle("--")  # torch's
picture.axes[0].legend()
picture

# %% held-figure folded=true
cases = {"small batch": (even, 16), "big layers": ([(128, 2048), (2048, 128)], 16),
         "as many weights\nin small layers": (even * 2, 16)}
most = {}
for name, case in show.progress(cases.items()):
    phases = launch(held_over_a_step, "fully sharded", *case, world_size=K)[0]
    most[name] = torch.cat(phases).max().item()
large = {"large batch": max(course["fully sharded"]),
         "large batch,\ncheckpointed": max(course["checkpointed too"])}
held = {"small batch": most.pop("small batch"), **large, **most}
title = f"Activations and big layers are not divided by {K}"
show.bars(held, "most held on a rank (bytes per parameter)", title, kind="counted",
          theory=dict.fromkeys(held, 16 / K), dash=f"16/{K}: parameters, gradients, Adam's state")

# %% check-both-questions folded=true
# NBVAL_CHECK_OUTPUT
hidden = [sum(map(timeline.hidden_share, lanes[prefetch])) / K for prefetch in (False, True)]
assert step_ms[True] < step_ms[False] and hidden[True] > hidden[False] + 0.2, (step_ms, hidden)
print("prefetch hides gathers behind computing, and the step is shorter")
assert K == 2 or (few > 1.1 and many < few - 0.1), (few, many)
few_samples, many_samples, checkpointed, big, small = held.values()
assert many_samples > 2 * few_samples and big > 1.2 * small, held
assert checkpointed < 0.7 * many_samples, held
print("on a slow link FSDP loses, and a larger batch helps; for memory, checkpoint activations and shard in small blocks")

# %% [markdown]
r"""
Without checkpointing every way holds the most where forward ends and backward begins, because all activations exist at that
moment. Sharding lowers the whole curve by what it divides, and no more. (At the peak ZeRO-1 lies 10 bytes lower, not 6: it
has no gradients yet, while DDP's buckets always exist.) **Activation checkpointing** keeps the activations of one quarter of
the model at a time. Its curve peaks again with each quarter that is computed once more.

The dashed lines are torch's own ways. Its `fully_shard` peaks where ours does; checkpointed, it peaks a little higher. Its
ZeRO-1 peaks 4 bytes per parameter above ours: these are DDP's buckets. It frees its gradients only at the end of the update.

In the bars, each remedy stands beside its fault. (The small batch has 16 samples, the large one 1,000.) Checkpointing keeps
only some activations and computes the others again. With smaller blocks, less is whole at any moment.

## Mixed precision, accumulation and clipping, in one loop

Real training adds three things to the loop of lesson 06. They fit DDP and sharding alike, with two differences that the cell shows.

- **Autocast** computes the products of forward and backward in bfloat16, while parameters and updates stay float32. Gradients
  stay float32 too: under autocast DDP's messages still have four bytes per parameter.
- The gradients of two micro-batches **accumulate**. Under DDP the first micro-batch needs no communication. A sharded rank has no
  room for whole gradients, so it reduces the gradients of each micro-batch.
- Gradients are **clipped** by the norm of *all* gradients. In sharded training each rank has only a part of them, so the norm
  takes one sum over the ranks. Our class has a `clip_grad_norm_` for this sum, and refuses torch's. With torch's `fully_shard`
  the gradients are DTensors, and `torch.nn.utils.clip_grad_norm_` takes the sum by itself.
"""


# %% mixed-precision
def mixed(sharded, wrap, dtype):
    text = problems.make("bytes", parameters=20_000, context=32)
    parallel = wrap(text.model())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.3)
    losses = []
    for inputs, targets in text.batches(32, 5, rank=dist.get_rank(), world_size=2):
        optimizer.zero_grad()
        for part, (x, y) in enumerate(zip(inputs.chunk(2), targets.chunk(2))):
            sync = parallel.no_sync() if part == 0 and not sharded else torch.enable_grad()
            with sync:  # enable_grad changes nothing
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    loss = torch.nn.functional.cross_entropy(parallel(x), y) / 2
                loss.backward()
        if sharded:
            parallel.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        losses.append(2 * loss.item())
    return losses


# %% check-mixed-precision folded=true
# NBVAL_CHECK_OUTPUT
kinds = ((False, DistributedDataParallel), (True, FullyShardedDataParallel))
settings = [(*kind, dtype) for kind in kinds for dtype in (torch.float32, torch.bfloat16)]
exact, rounded, sharded, both = (launch(mixed, *setting, world_size=2)[0] for setting in settings)
assert max(abs(a - b) for a, b in zip(exact, sharded)) < 1e-3, (exact, sharded)
assert 0 < max(abs(a - b) for a, b in zip(exact, rounded)) < 0.3, (exact, rounded)
assert abs(rounded[-1] - both[-1]) < 0.1, (rounded, both)
print("sharded losses are DDP's; in bfloat16 both are within a few tenths of a nat of float32")

# %% [markdown]
r"""
## What changed

The loop is stage 5's, with another wrapper. The optimizer is made from the wrapper's parameters, which are this rank's shards.
"""

# %% diff
show.diff(stage5_bucketed.train, stage7_sharded.train)

# %% [markdown]
r"""
## Hybrid sharding in ten lines

Between hosts links are slower than inside a host. **Hybrid sharding** shards only inside a host, and uses plain data
parallelism between hosts. It consists of what you have already, on a mesh of two axes: inside a host, stage 7 with a group of
its own, and between hosts, the ring of lesson 04 over the ranks that hold the *same* shard. The next cell has two hosts with
two ranks each. Before you run it: of 16 bytes per parameter, how many does a rank keep? And how many p cross the cable in
each direction, fully sharded and hybrid?
"""


# %% hybrid
def hybrid(model, hosts=2):
    # Neighbours share a host.
    groups = mesh.mesh(between=hosts, inside=dist.get_world_size() // hosts)
    parallel = FullyShardedDataParallel(model, process_group=groups["inside"])
    optimizer = torch.optim.Adam(parallel.parameters())

    def average_between(*_):  # the ranks inside have averaged theirs in the backward pass
        for shard in parallel.parameters():
            ring_all_reduce(shard.grad, group=groups["between"])
            shard.grad /= hosts

    optimizer.register_step_pre_hook(average_between)
    return parallel, optimizer


# %% hybrid-figure folded=true
ways["hybrid"] = hybrid
two_hosts = {"device": Device("800MFLOP/s"), "link": Link("20Mbit", hosts=2)}
together = torch.stack(launch(losses, hybrid, world_size=K))
assert (together - trained["plain DDP"]).abs().max() < 1e-6
kept, _ = max(launch(kept_and_sent, hybrid, world_size=K))
assert abs(kept / P * (K // 2) / 16 - 1) < 0.1
bytes_of = {"plain DDP": 16, "fully sharded": 16 / K, "hybrid": kept / P}
on_hosts = {}
heights = {}
for name in show.progress(bytes_of):
    on_hosts[name] = 1000 * max(launch(seconds_of, name, world_size=K, **two_hosts))
    heights[f"{name}\n{bytes_of[name]:.0f} bytes\nper parameter"] = on_hosts[name]
share = on_hosts["hybrid"] / on_hosts["fully sharded"]
title = f"On two hosts hybrid sharding takes {share:.2f} times as long as fully sharded training"
show.bars(heights, "a step (ms)", title, form="{:.0f}", kind="virtual time")

# %% [markdown]
r"""
A rank of the hybrid keeps 16/2 = 8 bytes per parameter, since two ranks share them, and it trains what DDP trains. On the cable it
sends what lesson 12 calls "two levels": each of a host's two ranks averages its half of the gradients with its partner, which is p in
each direction. On 4 ranks a flat ring sends 2.25 p over the cable when fully sharded (3(K-1)/K p), and 1.5 p under DDP. (Our
averaging hides behind nothing, so on a cable of five times the speed the hybrid took 1.2 times as long as fully sharded training. We
also do not broadcast between the hosts, because all ranks build the same model here. Libraries do both.) In torch the call is
`fully_shard(block, mesh=init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard")))`.
"""

# %% [markdown]
r"""
## On your GPUs

Sharded training runs on the devices of this machine, in real time, beside the complete wrapper of lesson 06. It sends
3(K-1)/K p, as counted above, where DDP sends 2(K-1)/K p: half as many bytes again, for a K-th of the memory. Without a GPU
the figure shows what one NVIDIA H200 needed, which two ranks shared. Fully sharded training adds far more there than DDP does: each
layer is gathered before its forward pass and again before its backward pass, and each gather has a fixed cost.
"""

# %% on-your-gpus
yours = on_your_gpus("6,7")
assert yours.max_abs_diff < 1e-4, "the weights are not one device's"
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

The cell with the eight ways calls torch's classes. In PyTorch's source, `torch/distributed/optim/zero_redundancy_optimizer.py` is
ZeRO-1, by whole parameters. The other levels are in `torch/distributed/fsdp/_fully_shard`: `_fsdp_param_group.py` has the hooks that
gather, prefetch and reduce, as `FullySharded` above. `fully_shard` can also keep parameters in bfloat16 while they compute
(`MixedPrecisionPolicy`), shard over the GPUs of one machine only (a mesh of two axes), or move the state to the CPU. The levels are
from Rajbhandari et al., *ZeRO* (2020), and their use in torch from Zhao et al., *PyTorch FSDP* (2023).

## Your two halves under torch's own sharding

`fully_shard` asks a process group for two things: to sum and scatter, and to gather. These are the two halves of your ring. So torch's own
sharded training runs over them, as torch's DDP ran over the whole ring in lesson 04. Here it does, once with the two halves, and once with a
reduce-scatter whose author stopped a step early. Before you run it: will the replicas part, as they did under DDP?
"""


# %% own-halves
def a_step_short(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    for step in range(size - 2):  # it should be size - 1
        target = chunks[(rank - step - 1) % size]
        incoming = torch.empty_like(target)
        wire.exchange(chunks[(rank - step) % size], right, incoming, left, group)
        target += incoming


def over_own_halves(scatter):
    def sharded(model):
        ring_backend.register("halves", reduce_scatter=scatter, allgather=allgather)
        return torchs_fully(model, backend="halves")

    with wire.counting() as traffic:
        seen = losses(sharded)
    return seen, traffic.bytes_sent


# %% check-own-halves
# NBVAL_CHECK_OUTPUT
p = 8 * 3 * 64**2  # bytes in float64; the five updates have two micro-batches each
for scatter in (reduce_scatter, a_step_short):
    seen, of_ranks = zip(*launch(over_own_halves, scatter, world_size=K))
    same = torch.allclose(torch.stack(seen), trained["torch's fully_shard"], atol=1e-9)
    missing = 3 * (K - 1) - of_ranks[0] * K / (10 * p)
    print(f"{scatter.__name__}: the losses of torch's own group: {same};", end=" ")
    print(f"missing in a micro-batch: {missing:g} of 3(K-1) messages of p/K")

# %% [markdown]
r"""
Each micro-batch sends 3(K-1)/K p through your code: two gathers and one scatter. The short one skips a step of the scatter in each of
them. Its losses are wrong, and no comparison of replicas would find it. In sharded training each weight has one owner, and all others
get a copy of what the owner has: there is nothing left that could differ. Task 7.8 lets your own halves train torch's model.

## Check yourself

**1.** 7 billion parameters, Adam, float32, 64 GPUs. What does each keep, fully sharded?
<details><summary>Answer</summary>
It keeps 112 GB / 64 = 1.75 GB, plus the blocks in use and the activations.
</details>

**2.** Why not always shard everything?
<details><summary>Answer</summary>
Sharding everything takes 1.5 times the traffic, and some of it is in the forward pass, which is shorter and hides less. If the
model fits, DDP is simpler and often faster.
</details>

**3.** Does sharding shrink the activations?
<details><summary>Answer</summary>
No. Each rank still runs the whole model on its samples. Smaller batches, activation checkpointing, or splitting the
model itself (lesson 08) do.
</details>
"""

# %% [markdown]
r"""
## Optional: how far does it reach?

This continues the optional part of lesson 05. A device has b tokens; the model has n parameters; K devices compute R flop/s each, and
their links carry W bytes/s. Weights and gradients have two bytes each.

| pass | computes, flops per token | sends |
|---|---|---|
| DDP, backward | 4 n | reduce-scatter and allgather of gradients |
| fully sharded, forward | 2 n | allgather of weights |
| fully sharded, backward | 4 n | allgather of weights, reduce-scatter of gradients |

Each of these collectives sends (K-1)/K of n numbers. How many tokens must a device have in each row, so that it does not wait? The
model must also fit: its 16 n bytes, without activations, need 16 n / M GPUs of M bytes each. How large must the batch of all these
GPUs together be? Write it down. This is task 7.7, for weights and gradients of any size. (Task 13.6 asks for the largest K.)

<details><summary>Write it first, then open: how many tokens in each row</summary>

With two bytes each, DDP computes for 4 n b / R seconds and sends for 4 n / W. In fully sharded training, forward computes for
2 n b / R and sends for 2 n / W, and backward computes for 4 n b / R and sends for 4 n / W. (Each sending time must be multiplied by
(K-1)/K.) So b is R / W in all three rows, times (K-1)/K.

</details>

Fully sharded training needs as many tokens per device as DDP does, in both passes, and n does not matter: a larger model does
not hide its messages any better. But a larger model needs more GPUs to fit. The next cell assumes that a GPU reaches 0.4 of
the speed that datasheets promise. Before you run it: how many tokens must a batch have on the fewest H100s that can keep 405
billion parameters?
"""

# %% reach folded=true
millions = [0.1, 0.2, 0.5, 1, 2, 5, 10]  # tokens in a batch
reach = {}
for gpu, colour in {"A100": "#009E73", "H100": "#D55E00"}.items():
    sheet = presets.ACCELERATORS[gpu]
    needed = 0.4 * sheet.rate / (sheet.network / 8 / 8)  # tokens; 8 GPUs share a host's cards
    most_gpus = [1 + 1e6 * tokens / needed for tokens in millions]
    reach[f"below this line no {gpu} waits"] = millions, most_gpus, colour
fewest = {billions: -(-16 * billions // sheet.capacity_gb) for billions in (70, 405)}
floors = {}
for billions, count in fewest.items():
    label = f"{billions} billion parameters: {count:.0f} GPUs of 80 GB"
    floors[label] = (millions, [count] * 7, "#767676")
least = (fewest[405] - 1) * needed / 1e6
show.curves(reach, "tokens in the batch (millions)", "GPUs", theory=floors, log="xy", points=False,
            title=f"The {fewest[405]:.0f} H100s that keep 405 billion parameters need {least:.2f} million tokens",
            ticks=millions, kind="derived")

# %% [markdown]
r"""
Above its dashed line a model fits; below its slanted line no GPU waits. Where the two lines meet is the smallest batch that hides the
sending: 0.63 million tokens for 405 billion parameters on 81 H100s, each of which has 7,800 tokens to compute. More GPUs need a
larger batch, and so does a larger model, since it needs more GPUs. (An A100 computes a third as fast on half of the network, so it
needs 5,000 tokens.) If the batch may not grow, a faster network helps, or hybrid sharding, since W is several times as large inside a
host.
"""

# %% [markdown]
r"""
## Optional: an optimizer that is not elementwise

Sharding was possible because Adam looks at each element on its own. Some newer optimizers do not. **Muon** (Jordan et al., 2024) replaces
the momentum of a weight matrix by the nearest matrix whose rows all have the same length and are orthogonal to each other. Five rounds of
matrix products do this approximately. A rank that has only some rows of the matrix can do the same with these rows, and gets something
else. Before you run it: by how much will the two differ?
"""


# %% muon
def orthogonal(matrix):
    matrix = matrix / matrix.norm()
    for _ in range(5):  # Newton and Schulz's iteration, with Muon's three numbers
        square = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * square + 2.0315 * square @ square) @ matrix
    return matrix


def exchanged(parts):  # rank r gets what each rank has for it
    rank, size, _, _ = wire.neighbours()
    gotten = [torch.empty_like(part) for part in parts]
    gotten[rank].copy_(parts[rank])
    for turn in range(1, size):
        to = (rank + turn) % size
        source = (rank - turn) % size
        wire.exchange(parts[to], to, gotten[source], source)
    return gotten


# %% check-muon
# NBVAL_CHECK_OUTPUT
def updates(size):
    matrices = torch.randn(size, 64, 64, generator=torch.Generator().manual_seed(0))
    rows = [matrix.chunk(size)[dist.get_rank()].clone() for matrix in matrices]
    with wire.counting() as traffic:
        whole = torch.cat(exchanged(rows))  # all rows of one of the matrices
        mine = exchanged(list(orthogonal(whole).chunk(size)))
    wanted = [orthogonal(matrix).chunk(size)[dist.get_rank()] for matrix in matrices]
    alone = [orthogonal(part) for part in rows]
    wanted = torch.cat(wanted)
    apart = [(torch.cat(way) - wanted).norm() / wanted.norm() for way in (alone, mine)]
    return apart, traffic.bytes_sent / matrices.nbytes


(alone, mine), sent = launch(updates, K, world_size=K)[0]
assert alone > 0.3 and mine < 1e-5 and sent == 2 * (K - 1) / K**2, (alone, mine, sent)
print("rows on their own make another update; whole matrices in turn make the same one, for 2(K-1)/K² p more")

# %% [markdown]
r"""
On 4 ranks the update of rows alone is off by 0.6 of its length, and nothing warns. So each matrix must be whole somewhere for
a moment. The cell deals the matrices out: each rank gets all rows of every K-th matrix, makes its update, and sends the rows
back. That is an all-to-all in each direction, of a K-th of the momentum each time, which is little beside the 3(K-1)/K p of a
sharded step. (The first large run with Muon gathered each matrix instead: Liu et al., *Muon is Scalable for LLM
Training*, 2025.) Or an optimizer is sharded by whole parameters, as in task 7.1 and in torch's ZeRO-1. Shampoo and other
methods that look at whole matrices need the same.
"""

# %% [markdown]
r"""
## In three lines

1. Of 16 bytes per parameter (counted), level 1 divides 8 by K, level 2 divides 4 more, and level 3 divides all. Activations stay whole.
2. Levels 1 and 2 send as much as DDP. Level 3 sends 1.5 times as much, and prefetch hides it, unless the link is too slow.
3. Autocast, accumulation and clipping go into the same loop. Accumulation and clipping must know that gradients are sharded.

**Exercise:** [7](../exercises/07_sharding.ipynb), `exercises/07_sharding.ipynb`. **Next:**
[8, pipelines](08_pipeline.ipynb): split the model itself.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
