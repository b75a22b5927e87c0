# %% [markdown]
r"""
# 7 · Sharding: nobody keeps everything

Data parallel training multiplies speed, not memory: every rank holds the whole model, all gradients and the whole
optimizer state. If that does not fit, more ranks do not help. Unless each keeps only a part.

**After this lesson you can**

- count what training a model takes, byte by byte,
- say what ZeRO-1 and fully sharded training (FSDP, ZeRO-3) keep, and what they send,
- predict the memory of a rank and the traffic of a step, and check both.

*35 minutes, under a minute of computing.*
"""

# %% imports
from ddp_course import (
    BucketedDDP, FullyShardedDataParallel, ShardedOptimizer, claims, dist, launch, problems, show,
    stage5_bucketed, stage7_sharded, timeline, torch, wire,
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

- **ZeRO-1**: each rank keeps the optimizer state of 1/K of the parameters, updates these, and the ranks exchange the
  results: 8 P + 8 P/K.
- **Fully sharded**: parameters and gradients are split too. A block of layers is put together just before it
  computes, and dropped after: 16 P/K, plus the blocks in use.

## Predict
"""

# %% predict
guess = show.predict(
    "Fully sharded over 4 ranks: how much memory does a rank keep between steps, compared with plain DDP?",
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
    return BucketedDDP(model), torch.optim.Adam(model.parameters())


def zero1(model):
    return BucketedDDP(model), ShardedOptimizer(model.parameters(), torch.optim.Adam)


def fully(model):
    parallel = FullyShardedDataParallel(model)
    return parallel, torch.optim.Adam(parallel.parameters())


# %% memory
def kept(prepare):
    problem = problems.make("synthetic", parameters=8 * 128**2, width=128)
    parallel, optimizer = prepare(problem.model())
    inputs, targets = next(problem.batches(16, 1, rank=dist.get_rank(), world_size=dist.get_world_size()))
    torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
    optimizer.step()
    owner = getattr(optimizer, "local", optimizer)  # ZeRO-1 works on shards, with an optimizer of its own
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for entry in owner.state.values() for value in entry.values()]
    tensors = parameters + [p.grad for p in parameters if p.grad is not None] + state
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


P, ways = 8 * 128**2, {"plain DDP": ddp, "ZeRO-1": zero1, "fully sharded": fully}
measured = {name: max(launch(kept, way, world_size=K)) / P for name, way in ways.items()}

# %% memory-figure
formula = {"plain DDP": 16, "ZeRO-1": 8 + 8 / K, "fully sharded": 16 / K}
show.bars(measured, "kept on a rank (bytes a parameter)", f"On {K} ranks: from 16 bytes a parameter to {16 / K:g}",
          theory=formula, colours={"fully sharded": show.STAGE_COLOURS["7"]})  # fmt: skip

# %% reveal
share = measured["fully sharded"] / measured["plain DDP"]
guess.reveal(f"{share:.2f} of it on {K} ranks", "a quarter")

# %% check-memory
# NBVAL_CHECK_OUTPUT
assert all(abs(measured[name] / formula[name] - 1) < 0.1 for name in ways), measured
print("measured within 10 % of 16 P, 8 P + 8 P/K and 16 P/K")

# %% claim-8
# NBVAL_CHECK_OUTPUT
finding = claims.test(8)
print(finding.line)

# %% claim-8-numbers
finding

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

DDP's ring sends $2\frac{K-1}{K}p$: scatter-reduce, then allgather, of gradients. ZeRO-1 adds an allgather of the
updated parameters. Fully sharded training gathers the parameters twice, for forward and for backward, and only
scatters the gradients: each way $3\frac{K-1}{K}p$. Half as much again, for memory divided by K.
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
formula = {"plain DDP": 2 * (K - 1) / K, "ZeRO-1": 3 * (K - 1) / K, "fully sharded": 3 * (K - 1) / K}
show.bars(traffic, "sent by a rank in a step (in units of p)", "Sharding sends at most half as much again",
          theory=formula, colours={"fully sharded": show.STAGE_COLOURS["7"]})  # fmt: skip

# %% check-traffic
# NBVAL_CHECK_OUTPUT
assert traffic == formula
print("2(K-1)/K p for DDP, 3(K-1)/K p for ZeRO-1 and for fully sharded, to the byte")

# %% [markdown]
r"""
## When does the gathering happen?

Each block is gathered before it computes, once on the way forward and once on the way back; the next one is already
fetched meanwhile (**prefetch**). The lower half of each row is the communication thread. On one machine with a small
model waiting wins; with more computing per byte it disappears under the blue.
"""


# %% timeline
def one_step():
    problem = problems.make("synthetic", parameters=6 * 256**2)
    parallel, optimizer = fully(problem.model())
    with timeline.recording() as spans:
        for inputs, targets in problem.batches(512, 2, rank=dist.get_rank(), world_size=dist.get_world_size()):
            torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
    start = [span for span in spans if span.name == "forward"][-1].start
    return [span for span in spans if span.start >= start]


show.timeline_figure(
    launch(one_step, world_size=K), title="Fully sharded: a gather before every block, forward and backward"
)

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

## Exercise

`exercises/07_sharding.ipynb`
"""
