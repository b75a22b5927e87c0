# %% [markdown]
r"""
# 8 · Pipelines: split the model

So far every rank ran all layers on a part of the data. Now the other way round: each rank runs a part of the layers,
on all of the data. Only activations and their gradients travel, from one rank to the next and back. The question is how to keep the ranks busy.

**After this lesson you can**

- cut a model into stages and a batch into micro-batches,
- write a pipeline's step on plain messages, with any schedule,
- draw four schedules, GPipe, 1F1B, interleaved and zero bubble, and predict how long the ranks idle,
- combine pipelines with data parallel training.

*45 minutes, under a minute of computing.*
"""

# %% imports
from importlib import import_module

import torch
import torch.distributed as dist

from ddp_course import Device, launch, problems, stage1_single, stage5_bucketed
from ddp_course import stage8_pipeline, wire
from ddp_course.lab import on_your_gpus, show, timing
from ddp_exercises import task

K = 4  # how many ranks; 2 works as well
cross_entropy = torch.nn.functional.cross_entropy

# %% [markdown]
r"""
## Cut the model

Each rank gets some consecutive layers, a *stage* of the pipeline. The slowest rank holds up all others, so the cut
should give each the same *computing*. We count the flops of every layer's forward pass, and cut twice: evenly by
parameters, as stage 8's `split` does, and evenly by flops. The first layer of our byte model only looks up rows of a
table: many parameters, no flops.
"""


# %% count-flops folded=true
def flops_of(layers, x):
    counts = []
    # Of attention's kernels torch counts the products of the plain one only.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for layer in layers:
            with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
                x = layer(x)
            counts.append(counter.get_total_flops() / 1e6)
    return counts


text = problems.make("bytes", parameters=100_000)
layers = stage8_pipeline.layers_of(text.model())
flops = flops_of(layers, next(text.batches(16, 1))[0])
# A layer goes to the rank in whose share of all flops its middle lies.
by_flops = [int(K * (sum(flops[:n]) + flops[n] / 2) / sum(flops)) for n in range(len(flops))]

# %% cuts folded=true
by_parameters = [rank for rank, part in enumerate(stage8_pipeline.split(layers, K)) for _ in part]
work = {}
for name, ranks in (("parameters", by_parameters), ("flops", by_flops)):
    for r in range(K):
        work[f"{name},\nrank {r}"] = sum(f for f, rank in zip(flops, ranks) if rank == r)
title = "Cut by parameters, the slowest rank computes {:.0f} Mflop; cut by flops, {:.0f}"
colours = ["#808080"] * K + [show.STAGE_COLOURS["8"]] * K
show.bars(
    work,
    "forward pass (Mflop)",
    title.format(max(work.values()), max([*work.values()][K:])),
    form="{:.0f}",
    width=9,
    kind="counted",
    colours=dict(zip(work, colours)),
)

# %% [markdown]
r"""
Real programs cut by measured times. Below we keep to models whose layers are all alike, and to `split` where they
are not: for the result it makes no difference.

## Build: one step on messages

In the iteration nobody averages gradients any more. What travels are activations, and their gradients back:

![Rank 0 has layer 1, rank 1 layer 2, rank 2 layer 3. The whole batch is cut into three micro-batches. Their activations go down from rank to rank, then the gradients of the activations go up. At the beginning, in the middle and at the end ranks idle. Each rank updates its own layer; no gradient of a weight is sent](../docs/figures/iteration_08.svg)

**Possible because** layers compose: a layer needs nothing but what the layer before it gives.

A rank's part of a step: receive activations from the left, compute, send to the right; and the other way round for
gradients. Each message carries a number, its *tag*, made of micro-batch, sender and receiver, so that a receive gets the
message that it is for. `isend` does not wait until the other side receives. `send` would: if two ranks each send first,
both wait for ever. First the job: a stack of equal layers, and a batch in M parts, the same on all ranks.
"""

# %% job
SAMPLES = 48
M = 8
WIDTH = 32
LAYERS = 16


def stack(stages):
    torch.manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        layers.append(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()))
    size = LAYERS // stages
    return [torch.nn.Sequential(*layers[n * size : (n + 1) * size]).double() for n in range(stages)]


def gradients_of(module):
    return torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()])


torch.manual_seed(1)
samples = torch.randn(SAMPLES, WIDTH, dtype=torch.float64).chunk(M)
targets = torch.randint(WIDTH, (SAMPLES,)).chunk(M)


# %% messages
class Mail:
    # Stage `number` of 0…last; it lives on rank number % K.
    def __init__(self, module, number, last):
        self.module = module
        self.number = number
        self.last = last
        self.kept = {}
        self.leaving = []

    def send(self, tensor, m, to):
        tag = 10_000 * m + 100 * self.number + to
        work = dist.isend(tensor, to % dist.get_world_size(), tag=tag)
        self.leaving.append((work, tensor))  # the tensor must stay until it has left

    def receive(self, m, source):
        tensor = torch.empty(SAMPLES // M, WIDTH, dtype=torch.float64)
        tag = 10_000 * m + 100 * source + self.number
        dist.recv(tensor, source % dist.get_world_size(), tag=tag)
        return tensor


# %% [markdown]
r"""
Now forward and backward. Autograd knows one rank only: its graph starts at the activations that were received, and its
backward pass starts with the gradient that comes from the right. Only the last stage knows the loss. It divides the loss by
M, so that the gradients of M equal micro-batches add up to that of the whole batch.
"""


# %% forward-and-backward
class Stage(Mail):
    def forward(self, m):
        if self.number == 0:
            start = samples[m]
        else:
            start = self.receive(m, self.number - 1).requires_grad_()
        outputs = self.module(start)
        if self.number < self.last:
            self.send(outputs.detach(), m, self.number + 1)
        else:
            outputs = cross_entropy(outputs, targets[m]) / M
        self.kept[m] = start, outputs

    def from_the_right(self, m):
        return None if self.number == self.last else self.receive(m, self.number + 1)

    def backward(self, m):
        start, outputs = self.kept.pop(m)
        outputs.backward(self.from_the_right(m))
        if self.number > 0:
            self.send(start.grad, m, self.number - 1)


# %% [markdown]
r"""
With a single batch, rank 1 waits for rank 0's activations, rank 2 for rank 1's, and on the way back the same. F is a
forward, B a backward pass; white is idle.
"""


# %% naive folded=true
# A rank with two stages has half the layers in each.
def timetable(schedule, microbatches, chunks=1):
    steps = schedule(K, microbatches)
    return stage8_pipeline.timetable(steps, forward=1 / chunks, backward=2 / chunks)


one_batch = timetable(stage8_pipeline.gpipe, 1)
show.sketches.schedules({"One batch: one rank works, the others wait": one_batch})

# %% [markdown]
r"""
So cut the batch into M **micro-batches**, and let them follow one another.

## Predict
"""

# %% predict
guess = show.predict(
    "4 ranks, 12 micro-batches: for what share of the time does a rank idle?",
    ["3 %", "20 %", "33 %", "75 %"],
)
guess

# %% [markdown]
r"""
## Schedules are data

A schedule says who does what, and in which order: one list of instructions per rank, and nothing else. Write the simplest one
first, **GPipe**: all forward passes, then all backward passes, each in the order of the micro-batches (task 8.1 of
[exercise 8](../exercises/08_pipeline.ipynb)).
"""

# %% task-8-1
def gpipe(stage, stages, micro_batches):
    """Return the list of steps of one stage: pairs of "F" or "B" and the number of the
    micro-batch.
    """
    raise NotImplementedError("Exercise 8.1: GPipe")


show.source(task("8.1", gpipe), click="Write it first, then open: one solution")

# %% [markdown]
r"""
Here are GPipe and another schedule as stage 8 has them, for 3 ranks and 4 micro-batches:
"""

# %% as-data
one_forward_one_backward = stage8_pipeline.one_forward_one_backward
for schedule in (stage8_pipeline.gpipe, one_forward_one_backward):
    print(schedule.__name__)
    for rank, row in enumerate(schedule(3, 4)):
        print(f"   rank {rank}: ", " ".join(f"{step.letter}{step.microbatch}" for step in row))

# %% [markdown]
r"""
GPipe does all forward passes first. **1F1B**, one forward, one backward, starts backward as early as possible.
"""

# %% [markdown]
r"""
## A backward pass is two things

The rank to the left waits for the gradient of the *inputs* (B). Nobody waits for the gradients of the *weights* (W):
they are needed at the end of the step. So split the backward pass, and do W when there is nothing else to do. This is
the idea of **zero bubble** schedules.
"""


# %% split-backward
class SplitStage(Stage):
    def input(self, m):
        start, outputs = self.kept[m]
        gradient = self.from_the_right(m)
        if self.number > 0:
            (towards,) = torch.autograd.grad(outputs, start, gradient, retain_graph=True)
            self.send(towards, m, self.number - 1)
        self.kept[m] = outputs, gradient

    def weight(self, m):
        outputs, gradient = self.kept.pop(m)
        torch.autograd.backward(outputs, gradient, inputs=list(self.module.parameters()))


# %% [markdown]
r"""
To run any such list takes a few lines, since a rank that receives waits by itself:
"""


# %% run
def run(schedule):
    rank = dist.get_rank()
    size = dist.get_world_size()
    instructions = schedule(size, M)
    count = 1 + max(step.stage for row in instructions for step in row)
    mine = {}
    for number in range(rank, count, size):
        mine[number] = SplitStage(stack(count)[number], number, count - 1)
    for step in instructions[rank]:
        getattr(mine[step.stage], step.name)(step.microbatch)
    for stage in mine.values():
        for work, _ in stage.leaving:
            work.wait()
    return {number: gradients_of(stage.module) for number, stage in mine.items()}


# %% [markdown]
r"""
**Interleaved** schedules go another way: each rank gets two thinner stages, rank 0 for example stages 0 and K. The
pipeline fills in half the time, and about twice as many messages travel.

## Run

All four lists, on real messages, against the gradients of one device:
"""

# %% check-core folded=true
# NBVAL_CHECK_OUTPUT
schedules = {
    "GPipe": stage8_pipeline.gpipe,
    "1F1B": one_forward_one_backward,
    "interleaved": stage8_pipeline.interleaved,
    "zero bubble": stage8_pipeline.zero_bubble,
}
whole = stack(1)[0]
cross_entropy(whole(torch.cat(samples)), torch.cat(targets)).backward()
for name, schedule in schedules.items():
    ranks = launch(run, schedule, world_size=K)
    stages = {number: gradient for rank in ranks for number, gradient in rank.items()}
    gradient = torch.cat([stages[number] for number in sorted(stages)])
    assert (gradient - gradients_of(whole)).abs().max() < 1e-14, name
    print(f"{name}: stages per rank: {len(stages) // K}; the gradients are those of one device")

# %% [markdown]
r"""
Four schedules, one loop, the same gradients. What differs is the time. A forward pass of a micro-batch takes one unit
on all of a rank's layers, B and W one each, a whole backward pass two:
"""

# %% four folded=true
rows = {}
for name, schedule in schedules.items():
    rows[name] = timetable(schedule, M, chunks=2 if name == "interleaved" else 1)
show.sketches.schedules(rows)

# %% [markdown]
r"""
The white parts in the figure (not the outlined boxes, which are the second stage of an interleaved rank) are the **bubble**: a rank waits while the pipeline fills, turns round and empties. In GPipe
and 1F1B it is a share of

$$\frac{K-1}{M+K-1}$$

With two stages per rank the white parts are half as long, which makes it $\frac{K-1}{2M+K-1}$; in this zero bubble
schedule they are a third as long, $\frac{K-1}{3M+K-1}$. (Then why *zero* bubble? This variant keeps no more micro-batches than
1F1B's first rank. With twice that memory only the white parts around the update are left.) What is 1F1B for, then, if it idles as long as GPipe?
Activations must be kept from a micro-batch's forward to its backward pass: GPipe keeps those of all M, 1F1B those of at
most K. (Interleaving has a price here: with K = 4, by the lists above, rank 0 keeps 11 thin micro-batches, as much as 5.5 whole
ones.) Move the sliders: which makes the bubble small,
more ranks or more micro-batches?
"""

# %% explorer
show.widgets.pipeline_explorer(K, M)

# %% [markdown]
r"""
## The real one

`torch.distributed.pipelining` has the same schedules. Those with several stages per rank are lists there, too: we translate these
into our instructions, and let our own loop run them as well. Before you look: will the interleaved list be the one that we have? And
its zero bubble, which is interleaved, too: two stages per rank, with B and W apart?
"""


# %% with-torch folded=true
def with_torch(name, per_rank):
    pipelining = import_module("torch.distributed.pipelining")
    rank = dist.get_rank()
    size = dist.get_world_size()
    count = per_rank * size
    device = torch.device("cpu")
    modules = {n: stack(count)[n] for n in range(rank, count, size)}
    stages = [pipelining.PipelineStage(module, n, count, device) for n, module in modules.items()]
    mine = stages if per_rank > 1 else stages[0]
    schedule = getattr(pipelining, name)(mine, n_microbatches=M, loss_fn=cross_entropy)
    inputs = [torch.cat(samples)] if rank == 0 else []
    schedule.step(*inputs, target=torch.cat(targets), losses=[])
    gradients = {n: gradients_of(module) for n, module in modules.items()}
    return gradients, [in_our_words(schedule.pipeline_order[each]) for each in range(size)]


def in_our_words(actions):
    return [kinds[each.computation_type.name](each.microbatch_index, each.stage_index)
            for each in actions if each and each.computation_type.name in kinds]


kinds = {"FORWARD": stage8_pipeline.Forward, "FULL_BACKWARD": stage8_pipeline.Backward,
         "BACKWARD_INPUT": stage8_pipeline.BackwardInput,
         "BACKWARD_WEIGHT": stage8_pipeline.BackwardWeight}

# %% check-torchs folded=true
# NBVAL_CHECK_OUTPUT
lists = {}
for own_name, kind, per_rank in (
    ("GPipe", "ScheduleGPipe", 1), ("1F1B", "Schedule1F1B", 1),
    ("interleaved", "ScheduleInterleaved1F1B", 2),
    ("zero bubble", "ScheduleInterleavedZeroBubble", 2),
):
    outcomes = launch(with_torch, kind, per_rank, world_size=K)
    by_loop = {"torch's loop": [gradients for gradients, _ in outcomes]}
    alike = ""
    if per_rank == 2:
        lists[own_name] = outcomes[0][1]
        by_loop["ours"] = launch(run, lambda *_, order=lists[own_name]: order, world_size=K)
        verdict = "is" if lists[own_name] == schedules[own_name](K, M) else "is not"
        alike = f", by a list that {verdict} ours"
    for parts in by_loop.values():
        by_stage = {number: gradient for part in parts for number, gradient in part.items()}
        gradient = torch.cat([by_stage[number] for number in sorted(by_stage)])
        assert (gradient - gradients_of(whole)).abs().max() < 1e-14, own_name
    print(f"{kind}: the gradients of one device by {' and by '.join(by_loop)}{alike}")

# %% torchs-figure folded=true
torchs = {}
for name in ("interleaved", "zero bubble"):
    torchs[f"torch's {name}"] = stage8_pipeline.timetable(lists[name], forward=0.5, backward=1)
ours = {f"our {name}": rows[name] for name in ("interleaved", "zero bubble")}
show.sketches.schedules(ours | torchs)

# %% [markdown]
r"""
torch's interleaved list is ours, instruction by instruction. Its zero bubble joins both ideas: thin stages halve what zero bubble's
white parts take, for about twice as many messages. (If you try `ScheduleZBVZeroBubble` in the cell above, all ranks wait for ever: its stages
lie in a V, so rank r has stages r and 2K-1-r, not r and r+K, and stages in the wrong places wait for messages that nobody sends. Placed
right it runs, and its list runs by our `Pipeline` too.)

## What stage 8 adds

`stage8_pipeline.Pipeline` runs the same lists by the same loop. It adds what our core leaves out: activations of any
shape; receives that are posted ahead; intermediate results that it saves for W, while our core recomputes them; a batch that M
does not divide; and errors in plain words for lists in which ranks would wait for each other in a circle. It trains like one
device:
"""


# %% same-losses folded=true
def pipeline_losses(schedule):
    text = problems.make("bytes", parameters=100_000, dtype=torch.float64)
    return stage8_pipeline.train(text.model(), text.batches(16, 3), lr=0.3, schedule=schedule)


text = problems.make("bytes", parameters=100_000, dtype=torch.float64)
single = stage1_single.train(text.model(), text.batches(16, 3), lr=0.3)
progress = show.progress(schedules.values())
piped = [launch(pipeline_losses, schedule, world_size=K)[0] for schedule in progress]

# %% check-same folded=true
# NBVAL_CHECK_OUTPUT
for losses in piped:
    assert max(abs(a - b) for a, b in zip(single, losses)) < 1e-12, (single, losses)
print("with all four schedules the losses are those of one device")

# %% [markdown]
r"""
## The bubble on real messages

Each rank gets an emulated device and the same work: a stack of layers, 48 samples. We take the virtual time of a batch with
GPipe's schedule for different numbers of micro-batches, 12 among them, and see for what share of it a rank is idle.
"""


# %% bubble folded=true
def seconds_of_a_step(microbatches, schedule=stage8_pipeline.gpipe, chunks=1, width=256, layers=4):
    stages = []
    for _ in range(chunks):
        linear = [torch.nn.Linear(width, width) for _ in range(layers // chunks)]
        stages.append(torch.nn.Sequential(*linear))
    pipeline = stage8_pipeline.Pipeline(stages, microbatches, schedule)
    inputs = torch.randn(48, width, requires_grad=True)  # else rank 0 had less to do than others
    seconds = []
    for _ in range(2):  # the first step also opens connections
        with timing.stopwatch() as watch:
            pipeline.step(inputs, torch.zeros(48, dtype=torch.int64))
        seconds.append(watch.seconds)
    return min(seconds)


def idle(*settings):
    return 1 - work_s / max(launch(seconds_of_a_step, *settings, world_size=K, device=device))


device = Device("150MFLOP/s")
counts = [1, 2, 4, 8, 12]
# Of each rank: two flops per weight and sample forward, four backward.
work_s = 6 * 4 * 256**2 * 48 / device.rate
measured = {m: idle(m) for m in show.progress(counts)}

# %% bubble-figure folded=true
guess.reveal(f"{100 * measured[12]:.0f} % on {K} ranks; (4-1)/(12+4-1) = {100 * stage8_pipeline.bubble(4, 12):.0f} % derived for 4",
             "20 %", kind="virtual time")
points = [100 * measured[m] for m in counts]
line = [100 * stage8_pipeline.bubble(K, m) for m in counts]
show.curves({"virtual time": (counts, points, show.STAGE_COLOURS["8"])},
            "micro-batches M", "idle (%)", "More micro-batches, a smaller bubble",
            theory={"(K-1)/(M+K-1)": (counts, line, show.STAGE_COLOURS["8"])},
            log="x", ticks=counts, kind="virtual time")

# %% check-bubble folded=true
# NBVAL_CHECK_OUTPUT
assert all(measured[m] > stage8_pipeline.bubble(K, m) - 0.05 for m in counts), measured
assert measured[12] < 0.75 * measured[1]
print("no rank idles less than (K-1)/(M+K-1), and more micro-batches shrink the bubble")

# %% [markdown]
r"""
The points lie on the line, since the emulated device has no fixed cost per operation and the links here cost nothing. On real
devices they lie above it, and more so with many micro-batches: each has its messages and its small operations. Before you run
the next cell: all four schedules with M = 8. What will the bars be, by the timetables above?
"""

# %% four-measured folded=true
derived = {name: 100 * show.sketches.idle(table) for name, table in rows.items()}
percent = {"GPipe": 100 * measured[M], "1F1B": 100 * idle(M, one_forward_one_backward),
           "interleaved": 100 * idle(M, stage8_pipeline.interleaved, 2),
           "zero bubble": 100 * idle(M, stage8_pipeline.zero_bubble)}
title = "Ranks idle for as long as the schedule says"
show.bars(percent, "idle (%)", title, form="{:.0f}", theory=derived, kind="virtual time",
          dash="timetable", colours=dict.fromkeys(percent, show.STAGE_COLOURS["8"]))

# %% [markdown]
r"""
On real devices bars stand above the black line by the fixed cost of the micro-batches. Interleaved stages send twice
as many messages, each with half as much computing to hide it. In GPipe a rank waits for one neighbour at a time. In the
other schedules it alternates, so a delay of either neighbour holds it up. So more micro-batches and thinner stages help
up to a point, and a measurement decides where it is.

## Measure what is kept

How many micro-batches' activations does each rank hold at once, at most? Twelve micro-batches.
"""


# %% kept folded=true
def most_kept(schedule):
    pipeline = stage8_pipeline.Pipeline(torch.nn.Linear(8, 8), 12, schedule)
    pipeline.step(torch.randn(48, 8), torch.zeros(48, dtype=torch.int64))
    return pipeline.most_kept


# %% check-kept folded=true
# NBVAL_CHECK_OUTPUT
most = {}
for name in ("GPipe", "1F1B", "zero bubble"):
    most[name] = launch(most_kept, schedules[name], world_size=K)
assert most == {"GPipe": [12] * K, "1F1B": list(range(K, 0, -1)), "zero bubble": [K] * K}, most
print("GPipe keeps all 12 micro-batches; 1F1B at most K, and fewer on each later rank; zero bubble K")

# %% [markdown]
r"""
## What travels

Data parallel training sends gradients: four bytes for each parameter, whatever the batch. A pipeline sends
activations: as many numbers as there are samples (of text: bytes), times the *width* of the model, but not times its
depth. Here is what the
busiest rank sends in a step of our byte model, beside the ring's share of its gradients. (From three ranks on, those in the
middle are the busiest: they send activations forward and gradients of activations back.)
"""


# %% traffic folded=true
def sent():
    text = problems.make("bytes", parameters=100_000)
    model = text.model()
    layers = stage8_pipeline.layers_of(model)
    part = stage8_pipeline.split(layers, dist.get_world_size())[dist.get_rank()]
    pipeline = stage8_pipeline.Pipeline(part)
    with wire.counting() as traffic:
        pipeline.step(*next(text.batches(16, 1)))
    return traffic.bytes_sent / 1e6, sum(p.numel() for p in model.parameters()) * 4 / 1e6


activations, gradients = map(max, zip(*launch(sent, world_size=K)))
ring = 2 * (K - 1) / K * gradients
heights = {"pipeline: activations": activations, "ring: gradients": ring}
colours = dict(zip(heights, (show.STAGE_COLOURS["8"], show.STAGE_COLOURS["4"])))
title = f"Here the pipeline's busiest rank sends {activations / ring:.0%} of what the ring sends"
show.bars(
    heights, "sent by the busiest rank (MB)", title, kind="counted; ring derived", colours=colours
)

# %% [markdown]
r"""
## Both at once

Pipelines can stand side by side, each on its share of the data. Ranks that hold the same stage average their
gradients with the ring of lesson 04. With 4 ranks: 2 pipelines of 2 ranks. On each rank it is one call,
`stage8_pipeline.train(model, share, lr=0.3, stages=2)`, and the share is that of its pipeline:
"""


# %% check-grid folded=true
# NBVAL_CHECK_OUTPUT
def on_a_grid():
    text = problems.make("bytes", parameters=100_000, dtype=torch.float64)
    replica = dist.get_rank() // 2
    replicas = dist.get_world_size() // 2
    share = text.batches(16, 3, rank=replica, world_size=replicas)
    model = text.model()
    stage8_pipeline.train(model, share, lr=0.3, stages=2)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


text = problems.make("bytes", parameters=100_000, dtype=torch.float64)
model = text.model()
stage1_single.train(model, text.batches(16, 3), lr=0.3)
alone = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
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
## On your GPUs

The pipeline on the devices of this machine, in real time: 1F1B with four micro-batches. Each device waits while the
pipeline fills and empties, and for the slowest part. *Compute* is all but
waiting for others, Python between two operations included, which the lanes leave white. (The thin
*communication* before the update is the average over all ranks with the same stage. Here there is one, so it sends nothing.)
"""

# %% on-your-gpus
yours = on_your_gpus("8")
assert yours.max_abs_diff < 1e-4, "the weights are not one device's"
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

| here | in PyTorch | paper |
|---|---|---|
| lists of instructions | `torch/distributed/pipelining/schedules.py`: `_Action`, a kind, a stage, a micro-batch | |
| `gpipe` | `ScheduleGPipe` | Huang et al., *GPipe*, 2019 |
| `one_forward_one_backward` | `Schedule1F1B` | Narayanan et al., *PipeDream*, 2019 |
| `interleaved` | `ScheduleInterleaved1F1B` | Narayanan et al., *Megatron-LM*, 2021 |
| `zero_bubble` | `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble` | Qi et al., *Zero bubble*, ICLR 2024 |
| B and W | `_backward.py`: `stage_backward_input`, `stage_backward_weight` | the same |

The largest models use three splits at once: **tensor parallel** (each matrix cut into pieces) inside a machine,
pipelines between machines, data parallel around it all.

## Check yourself

**1.** Why not use very many micro-batches, and forget about the bubble?
<details><summary>Answer</summary>
Each must be large enough to keep the device busy, each message pays its latency, and the batch has an end: M cannot
be more than its samples.
</details>

**2.** One stage takes twice as long as the others. What is the speed of the pipeline?
<details><summary>Answer</summary>
That of the slowest stage; all others idle half of the time. That is why the model is cut evenly by computing.
</details>

**3.** Which needs the faster links: data parallel or pipeline?
<details><summary>Answer</summary>
Usually data parallel: gradients of all parameters in every step. Pipelines send one activation tensor per micro-batch
to the next rank, and its gradient back. So between machines people use pipelines.
</details>

## In three lines

1. A pipeline splits layers over ranks; a schedule is a list of F, B and W per rank, run by one loop, torch's lists too.
2. GPipe and 1F1B idle for (K-1)/(M+K-1); 1F1B keeps less; interleaved stages and a split backward pass idle less.
3. What travels grows with samples and width, not with depth: pipelines suit slow links between hosts.

**Exercise:** [8](../exercises/08_pipeline.ipynb), `exercises/08_pipeline.ipynb`. **Next:**
[9, tensor parallelism and the mesh](09_tensor_and_mesh.ipynb).

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
