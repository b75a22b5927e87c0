# %% [markdown]
r"""
# 7 · Sharding: nobody keeps everything

Data parallel training multiplies speed, not memory: every rank holds the whole model, all gradients and the whole
optimizer state. If that does not fit, more ranks do not help. Unless each keeps only a part.

**After this lesson you can**

- count what training a model takes, byte by byte,
- say what the three levels of ZeRO keep and send, and how FSDP hides it (prefetch),
- train with mixed precision, accumulation and clipping in one loop, sharded or not,
- predict the memory of a rank and the traffic of a step, and check both.

*35 minutes, under a minute of computing.*
"""

# %% imports
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

from ddp_course import (
    BucketedDDP, Device, DistributedDataParallel, FullyShardedDataParallel, Link, ShardedOptimizer, claims, dist, launch,
    problems, show, stage5_bucketed, stage7_sharded, timeline, timing, torch, wire,
)  # fmt: skip

K = 4  # how many ranks; 2 works as well

# %% [markdown]
r"""
## Count the memory

Training P parameters in float32 with the Adam optimizer takes, on every rank:

| | bytes |
|---|---|
| parameters | 4 P |
| gradients | 4 P |
| Adam's two running means of each gradient | 8 P |
| **in all** | **16 P** |

A model of 7 billion parameters needs 112 GB, before a single activation. There is no need for every rank to hold
all of it at every moment:

The three levels of ZeRO (Rajbhandari et al., 2020) divide one row more each:

| level | each rank keeps its 1/K of | bytes | sends in a step |
|---|---|---|---|
| DDP | nothing: all of everything | 16 P | 2(K-1)/K p |
| 1, `ShardedOptimizer` | the optimizer's state | 8 P + 8 P/K | 2(K-1)/K p |
| 2 | and of the gradients | 4 P + 12 P/K | 2(K-1)/K p |
| 3, fully sharded, FSDP | and of the parameters | 16 P/K, plus the blocks in use | 3(K-1)/K p |

Levels 1 and 2 send no more than DDP: its all-reduce *is* a reduce-scatter and an allgather, and the update fits between the
two. In level 1 a rank keeps whole gradients until the step is over, in level 2 it drops what is not its own as soon as
that is reduced (exercise 7.3 builds it). Level 3 gathers each block of layers just before it computes, and drops it after.

## Predict
"""

# %% predict
guess = show.predict(
    f"Fully sharded over {K} ranks: how much memory does a rank keep between steps, compared with plain DDP?",
    ["all of it", "half", "a quarter"],
)
guess

# %% [markdown]
r"""
## Run

We train a step with each, and then add up the bytes of all tensors that stay: parameters, gradients, Adam's state.
"""


# %% three-ways
def ddp(model):
    return BucketedDDP(model, bucket_cap_mb=0.25), torch.optim.Adam(model.parameters())


def zero1(model):
    return model, ShardedOptimizer(model.parameters(), torch.optim.Adam)  # averages the gradients itself


def fully(model):
    parallel = FullyShardedDataParallel(model)
    return parallel, torch.optim.Adam(parallel.parameters())


# %% memory
def kept(prepare):
    problem = problems.make("synthetic", parameters=8 * 128**2, width=128)
    parallel, optimizer = prepare(problem.model())
    inputs, targets = next(problem.batches(16, 1, rank=dist.get_rank(), world_size=dist.get_world_size()))
    torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    optimizer.step()
    owner = getattr(optimizer, "local", optimizer)  # ZeRO-1 works on shards, with an optimizer of its own
    state = [value for entry in owner.state.values() for value in entry.values()]
    tensors = parameters + gradients + state
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


P, ways = 8 * 128**2, {"plain DDP": ddp, "ZeRO-1": zero1, "fully sharded": fully}
measured = {name: max(launch(kept, way, world_size=K)) / P for name, way in ways.items()}

# %% memory-figure
formula = {"plain DDP": 16, "ZeRO-1": 8 + 8 / K, "fully sharded": 16 / K}
show.bars(measured, "kept on a rank (bytes a parameter)", f"On {K} ranks: from 16 bytes a parameter to {16 / K:g}",
          kind="counted", theory=formula, colours={"fully sharded": show.STAGE_COLOURS["7"]})  # fmt: skip

# %% reveal
share = measured["fully sharded"] / measured["plain DDP"]
guess.reveal(f"{share:.2f} of it on {K} ranks", guess.answers[K // 2], kind="counted")

# %% check-memory
# NBVAL_CHECK_OUTPUT
assert all(abs(measured[name] / formula[name] - 1) < 0.1 for name in ways), measured
print("counted: within 10 % of the derived 16 P, 8 P + 8 P/K and 16 P/K")

# %% claim-8
# NBVAL_CHECK_OUTPUT
alone = 16  # bytes per parameter on one device: parameter, gradient and Adam's two moments
claims.decide(
    8, "DDP helps when the model is too big for one device.", "counted",
    {"every rank keeps everything": measured["plain DDP"] < 0.9 * alone,
     "parameters and state are sharded": measured["fully sharded"] < 0.9 * alone},
    "DDP copies parameters, gradients and optimizer state to every rank; sharding divides them.",
)  # fmt: skip

# %% [markdown]
r"""
## Is it still the same training?

Adam looks at each element on its own, so it does not matter which rank updates which element. All three ways give the
same parameters.
"""


# %% same-results
def train(prepare):
    problem = problems.make("synthetic", parameters=3 * 64**2, width=64)
    model = problem.model()
    parallel, optimizer = prepare(model)
    for inputs, targets in problem.batches(48, 5, rank=dist.get_rank(), world_size=dist.get_world_size()):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
    state = parallel.state_dict()
    return torch.cat([state[name].reshape(-1) for name in sorted(state)])


results = {name: launch(train, way, world_size=K)[0] for name, way in ways.items()}

# %% check-results
# NBVAL_CHECK_OUTPUT
reference = results["plain DDP"]
assert torch.equal(results["ZeRO-1"], reference) and (results["fully sharded"] - reference).abs().max() < 1e-4
print("ZeRO-1: the same bits as unsharded; fully sharded: the same but for rounding")

# %% [markdown]
r"""
## What it costs: traffic

DDP's ring sends $2\frac{K-1}{K}p$: reduce-scatter, then allgather, of gradients. ZeRO-1 puts the update between the
two: reduce-scatter of gradients, then allgather of updated parameters, as many bytes. Fully sharded training gathers
the parameters twice, for forward and for backward, and only scatters the gradients: $3\frac{K-1}{K}p$. Half as much
again, for memory divided by K.

To clip gradients by their norm, call `clip_grad_norm_` of the wrapper or of the sharded optimizer: the norm is that of
all shards together. `torch.nn.utils.clip_grad_norm_` would scale each shard by a norm of its own, so it is refused.
"""


# %% traffic
def sent(prepare):
    problem = problems.make("synthetic", parameters=8 * 128**2, width=128)
    parallel, optimizer = prepare(problem.model())
    for inputs, targets in problem.batches(16, 2, rank=dist.get_rank(), world_size=dist.get_world_size()):
        with wire.counting() as traffic:
            torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
    return traffic.bytes_sent


p = 4 * P
traffic = {name: max(launch(sent, way, world_size=K)) / p for name, way in ways.items()}
formula = {"plain DDP": 2 * (K - 1) / K, "ZeRO-1": 2 * (K - 1) / K, "fully sharded": 3 * (K - 1) / K}
show.bars(traffic, "sent by a rank in a step (in units of p)", "Sharding sends at most half as much again",
          kind="counted", theory=formula, colours={"fully sharded": show.STAGE_COLOURS["7"]})  # fmt: skip

# %% check-traffic
# NBVAL_CHECK_OUTPUT
assert traffic == formula
print("2(K-1)/K p for DDP and for ZeRO-1, 3(K-1)/K p for fully sharded, to the byte")

# %% [markdown]
r"""
## When does the gathering happen?

Each block is gathered before it computes, once on the way forward and once on the way back; the next one is already
fetched meanwhile (**prefetch**). On emulated devices and links it can be seen what that hides: rank 0's step without and
with prefetch, the calmest of three. The lower half of each row is the communication thread.
"""


# %% prefetch
def steps(prefetch):
    problem = problems.make("synthetic", parameters=size)
    parallel = FullyShardedDataParallel(problem.model(), prefetch=prefetch)
    optimizer = torch.optim.Adam(parallel.parameters())
    with timeline.recording() as spans:
        for inputs, targets in problem.batches(128 * K, 4, rank=dist.get_rank(), world_size=K):
            torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
    ends = [span.end for span in spans if span.name == "update"]
    return [[span for span in spans if start <= span.start < end] for start, end in pairwise(ends)]


def step_s(ranks):
    return max(lane[-1].end for lane in ranks) - min(lane[0].start for lane in ranks)


def on_devices(fn, *arguments):
    return launch(fn, *arguments, world_size=K, device=Device("800MFLOP/s"), link=Link("150Mbit"))


size = 6 * 256**2  # six layers
lanes = {prefetch: min(zip(*on_devices(steps, prefetch)), key=step_s) for prefetch in (False, True)}
step_ms = {prefetch: 1000 * step_s(ranks) for prefetch, ranks in lanes.items()}
show.timeline_figure([lanes[False][0], lanes[True][0]], labels=["waits", "prefetches"], align=True,
                     title=f"A step without prefetch: {step_ms[False]:.0f} ms; with it: {step_ms[True]:.0f} ms")  # fmt: skip

# %% check-prefetch
# NBVAL_CHECK_OUTPUT
hidden = [sum(map(timeline.hidden_share, lanes[prefetch])) / K for prefetch in (False, True)]
assert step_ms[True] < step_ms[False] and hidden[True] > hidden[False] + 0.2, (step_ms, hidden)
print("prefetch hides gathers behind computing, and the step is shorter")

# %% [markdown]
r"""
Has memory a price in time, then? The step time of all three, beside what they keep. The dashes are derived: computing,
and the communication that nothing is left to hide behind. That is one layer's all-reduce for DDP, with a bucket a layer;
everything for ZeRO-1; and for fully sharded training the first gather of each pass and the last layer's gradients.
"""


# %% step-times
def seconds_of(name):
    problem, seconds = problems.make("synthetic", parameters=size), []
    parallel, optimizer = ways[name](problem.model())
    for inputs, targets in problem.batches(128 * K, 4, rank=dist.get_rank(), world_size=K):
        with timing.stopwatch() as watch:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
        seconds.append(watch.seconds)
    return min(seconds)


times = {name: 1000 * max(on_devices(seconds_of, name)) for name in show.progress(ways)}
computing = 1000 * (6 - 2 / 6) * size * 128 / 800e6  # nobody needs the gradient of the first layer's inputs
gather = 1000 * (K - 1) / K * 4 * size / (150e6 / 8)  # of all layers; to scatter takes as long
exposed = {"plain DDP": 2 / 6, "ZeRO-1": 2, "fully sharded": 3 / 6}  # of six layers
ideal = {name: computing + share * gather for name, share in exposed.items()}
kept_on = {name: f"{name}\n{measured[name]:.0f} bytes a parameter" for name in ways}
ratio = times["fully sharded"] / times["plain DDP"]
show.bars({kept_on[name]: ms for name, ms in times.items()}, "a step (ms)", form="{:.0f}",
          title=f"{16 / K:g} instead of 16 bytes a parameter, in {ratio:.2f} times DDP's time",
          theory={kept_on[name]: ms for name, ms in ideal.items()})  # fmt: skip

# %% [markdown]
r"""
DDP hides its all-reduce under backward, fully sharded training its gathers under both passes. Our ZeRO-1 sends no more than
DDP, but it does so after backward, where nothing is left to hide it behind.

## Mixed precision, accumulation and clipping, in one loop

What real training adds to the loop of lesson 06 works the same under DDP and under sharding. **Autocast** computes forward
and backward in bfloat16, half the bytes, while parameters and updates stay float32. Two micro-batches **accumulate**, the
first one without communication. Gradients are **clipped** by the norm of *all* of them: sharded, that takes the wrapper's
own `clip_grad_norm_`, since each rank has only a part.
"""


# %% mixed-precision
def mixed(sharded, dtype):
    text = problems.make("bytes", parameters=20_000, context=32)
    parallel = (FullyShardedDataParallel if sharded else DistributedDataParallel)(text.model())
    optimizer, losses = torch.optim.SGD(parallel.parameters(), lr=0.3), []
    for inputs, targets in text.batches(32, 20, rank=dist.get_rank(), world_size=K):
        optimizer.zero_grad()
        for part, (x, y) in enumerate(zip(inputs.chunk(2), targets.chunk(2))):
            quiet = part == 0 and not sharded
            with parallel.no_sync() if quiet else nullcontext():
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    loss = torch.nn.functional.cross_entropy(parallel(x), y) / 2
                loss.backward()
        clip = parallel.clip_grad_norm_ if sharded else partial(torch.nn.utils.clip_grad_norm_, parallel.parameters())
        clip(1.0)
        optimizer.step()
        losses.append(2 * loss.item())
    return losses


# %% check-mixed-precision
# NBVAL_CHECK_OUTPUT
settings = [(sharded, dtype) for sharded in (False, True) for dtype in (torch.float32, torch.bfloat16)]
exact, rounded, sharded, both = (launch(mixed, *setting, world_size=K)[0] for setting in settings)
assert max(abs(a - b) for a, b in zip(exact, sharded)) < 1e-3, (exact, sharded)
assert 0 < max(abs(a - b) for a, b in zip(exact, rounded)) < 0.3 and abs(rounded[-1] - both[-1]) < 0.1, (rounded, both)
print("sharded as DDP; bfloat16 within a few tenths of a nat of float32, under both")

# %% [markdown]
r"""
## What changed

The loop of stage 5, with another wrapper. The optimizer is made from the wrapper's parameters: this rank's shards.
"""

# %% diff
show.diff(stage5_bucketed.train, stage7_sharded.train)

# %% [markdown]
r"""
## What torch does

`torch.distributed.optim.ZeroRedundancyOptimizer` is ZeRO-1, `torch.distributed.fsdp.fully_shard` the rest. Real
ones also keep parameters in bfloat16 while they compute, shard over the GPUs of one machine only, or move the
optimizer state to the CPU.

## Check yourself

**1.** 7 billion parameters, Adam, float32, 64 GPUs. What does each keep, fully sharded?
<details><summary>Answer</summary>
112 GB / 64 = 1.75 GB, plus the blocks in use and the activations.
</details>

**2.** Why not always shard everything?
<details><summary>Answer</summary>
Half as much traffic again, and it sits in the forward pass too, where there is less to hide it behind. If the model
fits, DDP is simpler and faster.
</details>

**3.** Does sharding shrink the activations?
<details><summary>Answer</summary>
No. Each rank still runs the whole model on its samples. Smaller batches, activation checkpointing, or splitting the
model itself (lesson 08) do.
</details>

## In three lines

1. Of 16 bytes a parameter (counted), level 1 divides 8 by K, level 2 another 4, level 3 all.
2. Levels 1 and 2 send what DDP sends; level 3 half as much again, which prefetch hides behind computing.
3. Autocast, accumulation and clipping go into the same loop; only clipping must know that gradients are sharded.

**Exercise:** [7](../exercises/07_sharding.ipynb), `exercises/07_sharding.ipynb`. **Next:**
[8, pipelines](08_pipeline.ipynb): split the model itself.
"""
