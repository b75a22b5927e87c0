# %% [markdown]
r"""
# 8 · Pipelines: split the model

So far every rank ran all layers on a part of the data. Now the other way round: each rank runs a part of the layers,
on all of the data. Only activations travel, from one rank to the next. The question is how to keep the ranks busy.

**After this lesson you can**

- cut a model into stages and a batch into micro-batches,
- draw two schedules, GPipe and 1F1B, and predict how long the ranks idle,
- combine pipelines with data parallel training.

*35 minutes, under a minute of computing.*
"""

# %% imports
import itertools

from ddp_course import (
    Device,
    dist,
    launch,
    problems,
    show,
    stage1_single,
    stage5_bucketed,
    stage8_pipeline,
    timing,
    torch,
    wire,
)

K = 4  # how many ranks; 2 works as well

# %% [markdown]
r"""
## Cut the model

`split` cuts a list of layers into stages with about equally many parameters.
"""

# %% split
text = problems.make("bytes", parameters=100_000)
parts = stage8_pipeline.split(stage8_pipeline.layers_of(text.model()), K)
sizes = {f"rank {rank}": sum(p.numel() for p in part.parameters()) / 1000 for rank, part in enumerate(parts)}
show.bars(sizes, "thousand parameters", "Each rank holds some of the layers", form="{:.0f}", kind="counted",
          colours=dict.fromkeys(sizes, show.STAGE_COLOURS["8"]))  # fmt: skip

# %% [markdown]
r"""
## One batch at a time: everyone waits

With a single batch, rank 1 waits for rank 0's activations, rank 2 for rank 1's, and on the way back the same. In the
picture, F is a forward, B a backward pass; white is idle.
"""


# %% naive
def drawn(schedule, microbatches, title):
    rows = stage8_pipeline.timetable(schedule(K, microbatches))
    return show.sketches.schedule(rows, title)


drawn(stage8_pipeline.gpipe, 1, "One batch: one rank works, the others wait")

# %% [markdown]
r"""
## Micro-batches

Cut the batch into M **micro-batches**, and let them follow one another. At the beginning and at the end there is still
idle time, the **bubble**: a share of

$$\frac{K-1}{M+K-1}$$

## Predict
"""

# %% predict
guess = show.predict(
    "4 ranks, 12 micro-batches: for what share of the time does a rank idle?", ["3 %", "20 %", "33 %", "75 %"]
)
guess

# %% gpipe
drawn(stage8_pipeline.gpipe, 8, "GPipe: all forward passes, then all backward passes")

# %% one-forward-one-backward
drawn(stage8_pipeline.one_forward_one_backward, 8, "1F1B: backward as early as possible; the bubble is as large")

# %% [markdown]
r"""
What is 1F1B for, if the bubble is the same? Activations must be kept from a micro-batch's forward to its backward
pass. GPipe keeps those of all M, 1F1B of at most K. Move the sliders: which makes the bubble small, more ranks or more
micro-batches?
"""

# %% explorer
show.widgets.pipeline_explorer(K, 8)

# %% [markdown]
r"""
More micro-batches fill it, more ranks open it again.

## Run

The gradients of all micro-batches add up to the batch's gradient. So a pipeline trains exactly like one device:
"""


# %% same-training
def pipeline_losses(schedule=stage8_pipeline.one_forward_one_backward):
    text = problems.make("bytes", parameters=100_000, dtype=torch.float64)
    return stage8_pipeline.train(text.model(), text.batches(16, 3), lr=0.3, schedule=schedule)


text = problems.make("bytes", parameters=100_000, dtype=torch.float64)
single = stage1_single.train(text.model(), text.batches(16, 3), lr=0.3)
piped = launch(pipeline_losses, world_size=K)[0]

# %% check-same
# NBVAL_CHECK_OUTPUT
assert max(abs(a - b) for a, b in zip(single, piped)) < 1e-12, (single, piped)
print("the pipeline's losses are those of one device")

# %% [markdown]
r"""
## Measure the bubble

Each rank gets an emulated device and the same work: a stack of layers, 48 samples. We measure the time of a batch with
GPipe's schedule for different numbers of micro-batches, 12 among them, and see how much of it a rank worked.
"""


# %% bubble
def idle(microbatches, schedule=stage8_pipeline.gpipe, width=256, layers=4):
    stack = [torch.nn.Linear(width, width) for _ in range(layers)]
    pipeline = stage8_pipeline.Pipeline(torch.nn.Sequential(*stack), microbatches, schedule)
    inputs = torch.randn(48, width, requires_grad=True)  # else rank 0 would have less to do than the others
    seconds = []
    for _ in range(3):  # the first step also opens connections; the fastest was disturbed least
        with timing.stopwatch() as watch:
            pipeline.step(inputs, torch.zeros(48, dtype=torch.int64))
        seconds.append(watch.seconds)
    return min(seconds)


device = Device("150MFLOP/s")
counts = [1, 2, 4, 8, 12, 16]
work_s = 6 * 4 * 256**2 * 48 / device.rate  # of each rank: two flops a weight and sample forward, four backward
measured = {m: 1 - work_s / max(launch(idle, m, world_size=K, device=device)) for m in show.progress(counts)}

# %% bubble-figure
theory = [stage8_pipeline.bubble(K, m) for m in counts]
show.curves(
    {"measured": (counts, [100 * measured[m] for m in counts], show.STAGE_COLOURS["8"])},
    "micro-batches M", "idle (%)", "More micro-batches, a smaller bubble",
    theory={"(K-1)/(M+K-1)": (counts, [100 * share for share in theory], show.STAGE_COLOURS["8"])}, log="x", ticks=counts,
)  # fmt: skip

# %% reveal
guess.reveal(
    f"{100 * measured[12]:.0f} % on {K} ranks; (4-1)/(12+4-1) = {100 * stage8_pipeline.bubble(4, 12):.0f} % derived for 4",
    "20 %",
)

# %% check-bubble
# NBVAL_CHECK_OUTPUT
assert all(measured[m] > stage8_pipeline.bubble(K, m) - 0.05 for m in counts), measured
assert measured[16] < 0.7 * measured[1]
print("no rank idles less than (K-1)/(M+K-1), and more micro-batches shrink the bubble")

# %% [markdown]
r"""
The points lie a little above the line, the more so the more micro-batches there are. Why? A guess: each micro-batch has a
fixed cost, its messages and its small operations, which the formula leaves out. If so, a device twice as fast loses as
many milliseconds a micro-batch, out of half as many. So once more with M = 16, on both devices and with both schedules:
"""


# %% gap
def lost_ms(schedule, rate):
    work = work_s * device.rate / rate
    seconds = max(launch(idle, 16, schedule, world_size=K, device=Device(f"{rate}FLOP/s")))
    return 1000 * (seconds - work * (16 + K - 1) / 16) / 16, 1 - work / seconds


schedules = {"GPipe": stage8_pipeline.gpipe, "1F1B": stage8_pipeline.one_forward_one_backward}
for name, rate in itertools.product(schedules, (300e6, 150e6)):
    lost, share = lost_ms(schedules[name], rate)
    print(f"{name}, {rate / 1e6:.0f} MFLOP/s: idle {share:.1%}, formula {stage8_pipeline.bubble(K, 16):.1%}; "
          f"beyond the formula {lost:.1f} ms a micro-batch (measured)")  # fmt: skip

# %% [markdown]
r"""
Read it so: about as many milliseconds on both devices mean a fixed cost of each micro-batch. 1F1B pays more of it: it turns
from its left neighbour to its right one and back with every micro-batch, and whoever is late by a moment holds up both,
where GPipe waits in one direction at a time. Either way it speaks against ever more micro-batches: each must be large
enough for its computing to be long beside its cost.

## Measure what is kept

How many micro-batches' activations does each rank hold at once, at most? Twelve micro-batches, both schedules.
"""


# %% kept
def kept(schedule):
    pipeline = stage8_pipeline.Pipeline(torch.nn.Linear(8, 8), 12, schedule)
    pipeline.step(torch.randn(48, 8), torch.zeros(48, dtype=torch.int64))
    return pipeline.most_kept


gpipe = launch(kept, stage8_pipeline.gpipe, world_size=K)
alternating = launch(kept, stage8_pipeline.one_forward_one_backward, world_size=K)
print("GPipe:", gpipe, "  1F1B:", alternating)

# %% check-kept
# NBVAL_CHECK_OUTPUT
assert gpipe == [12] * K and alternating == list(range(K, 0, -1))
print("GPipe keeps all 12 micro-batches, 1F1B at most K, and fewer on each later rank")

# %% [markdown]
r"""
## What travels

Data parallel training sends gradients: as many bytes as there are parameters, whatever the batch. A pipeline sends
activations: as many as there are samples, times the *width* of the model, but not times its depth. Here is what the
busiest rank sends in a step of our byte model, beside the ring's share of its gradients. (From three ranks on, those in the
middle are the busiest: they send activations forward and gradients of activations back.)
"""


# %% traffic
def sent():
    text = problems.make("bytes", parameters=100_000)
    model = text.model()
    part = stage8_pipeline.split(stage8_pipeline.layers_of(model), dist.get_world_size())[dist.get_rank()]
    pipeline = stage8_pipeline.Pipeline(part)
    with wire.counting() as traffic:
        pipeline.step(*next(text.batches(16, 1)))
    return traffic.bytes_sent / 1e6, sum(p.numel() for p in model.parameters()) * 4 / 1e6


activations, gradients = map(max, zip(*launch(sent, world_size=K)))
ring = 2 * (K - 1) / K * gradients
show.bars({"pipeline: activations": activations, "ring: gradients": ring}, "sent by the busiest rank (MB)",
          f"Here the pipeline's busiest rank sends {activations / ring:.0%} of what the ring sends", kind="counted; ring derived",
          colours={"pipeline: activations": show.STAGE_COLOURS["8"], "ring: gradients": show.STAGE_COLOURS["4"]})  # fmt: skip

# %% [markdown]
r"""
## Both at once

Pipelines can stand side by side, each on its share of the data. Ranks that hold the same stage average their
gradients with the ring of lesson 04. With 4 ranks: 2 pipelines of 2 ranks.
"""


# %% grid
def on_a_grid():
    text = problems.make("bytes", parameters=100_000, dtype=torch.float64)
    replica, replicas = dist.get_rank() // 2, dist.get_world_size() // 2
    share = text.batches(16, 3, rank=replica, world_size=replicas)
    model = text.model()
    stage8_pipeline.train(model, share, lr=0.3, stages=2)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


text = problems.make("bytes", parameters=100_000, dtype=torch.float64)
model = text.model()
stage1_single.train(model, text.batches(16, 3), lr=0.3)
alone = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

# %% check-grid
# NBVAL_CHECK_OUTPUT
assert all((weights - alone).abs().max() < 1e-10 for weights in launch(on_a_grid, world_size=K))
print("pipelines side by side train the same weights as one device")

# %% [markdown]
r"""
## What changed

Compared with stage 5's loop, forward, loss and backward have become one `pipeline.step`, because they alternate.
"""

# %% diff
show.diff(stage5_bucketed.train, stage8_pipeline.train)

# %% [markdown]
r"""
## What torch does

`torch.distributed.pipelining` has the same schedules, and *interleaved* ones, in which each rank holds several thin
stages, so that the bubble shrinks further. The largest models use three splits at once: **tensor parallel** (each
matrix cut into pieces) inside a machine, pipelines between machines, data parallel around it all.

## Check yourself

**1.** Why not use very many micro-batches, and forget about the bubble?
<details><summary>Answer</summary>
Each must be large enough to keep the device busy, each message pays its latency, and the batch has an end: M cannot
be more than its samples.
</details>

**2.** One stage takes twice as long as the others. What is the speed of the pipeline?
<details><summary>Answer</summary>
That of the slowest stage; all others idle half of the time. That is why the model is cut evenly.
</details>

**3.** Which needs the faster links: data parallel or pipeline?
<details><summary>Answer</summary>
Usually data parallel: gradients of all parameters in every step. Pipelines send one activation tensor a micro-batch,
to one neighbour. So pipelines are what one uses between machines.
</details>

## In three lines

1. A pipeline splits layers over ranks; micro-batches keep them busy but for a bubble of (K-1)/(M+K-1).
2. GPipe keeps M micro-batches' activations, 1F1B at most K: counted, with the same bubble.
3. What travels grows with samples and width, not with depth: pipelines suit slow links between hosts.

**Exercise:** [8](../exercises/08_pipeline.ipynb), `exercises/08_pipeline.ipynb`. **Next:**
[9, tensor parallelism and the mesh](09_tensor_and_mesh.ipynb).
"""
