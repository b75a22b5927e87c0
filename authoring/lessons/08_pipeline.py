# %% [markdown]
r"""
# 8 · Pipelines: split the model

So far every rank ran all layers on a part of the data. In this lesson each rank runs a part of the layers, on all of the data. Only
activations and their gradients travel, from one rank to the next and back. The question is how to keep the ranks busy.

**After this lesson you can**

- cut a model into stages and a batch into micro-batches,
- write a pipeline's step on plain messages, with any schedule,
- draw four schedules, GPipe, 1F1B, interleaved and zero bubble, and predict how long the ranks idle,
- combine pipelines with data parallel training.

*50 minutes, one of them computing.* Some cells show only three dots. They measure, check or draw, or they hold what you are asked to
write first. Run them like all others; a click on the dots shows the code.
"""

# %% imports
from importlib import import_module

import torch
import torch.distributed as dist

from ddp_course import Device, launch, problems, stage1_single, stage5_bucketed
from ddp_course import stage8_pipeline, wire
from ddp_course.lab import claims, on_your_gpus, show, timing
from ddp_exercises import fill_in, task

K = 4  # how many ranks; 2 works as well
cross_entropy = torch.nn.functional.cross_entropy

# %% opening-questions
show.questions(8)

# %% [markdown]
r"""
## Cut the model

Each rank gets some consecutive layers, which are a *stage* of the pipeline. The slowest rank holds up all others, so the cut
should give each rank the same amount of *computing*. We count the flops of every layer's forward pass, and cut twice: evenly by
parameters, as stage 8's `split` does, and evenly by flops. The first layer of our byte model only looks up rows of a
table. It has many parameters and needs no flops.
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
Real programs cut by measured times. Below, either all layers are alike, or we use `split`: where a model is cut makes no
difference to the result.

## Build: one step on messages

In an iteration of a pipeline no rank averages gradients any more. Activations travel forward, and their gradients
travel back:

![Rank 0 has layer 1, rank 1 layer 2, rank 2 layer 3. The whole batch is cut into three micro-batches. Their activations go down from rank to rank, then the gradients of the activations go up. At the beginning, in the middle and at the end ranks idle. Each rank updates its own layer; no gradient of a weight is sent](../docs/figures/iteration_08.svg)

**Possible because** layers compose: a layer needs nothing but what the layer before it gives.

In a step a rank receives activations from the left, computes, and sends to the right. For gradients it is the other way round.
Each message carries a number, its *tag*, made of micro-batch, sender and receiver, so that every receive gets the
message that is meant for it. `isend` does not wait until the other side receives. `send` would wait, and two ranks that both send
first would wait for ever. The next cell makes the job: a stack of equal layers, and a batch in M parts, the same on all ranks.
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
    # This is stage `number` of 0…last; it lives on rank number % K.
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
Now we need forward and backward. Autograd knows one rank only: its graph starts at the activations that were received, and its
backward pass starts with the gradient that comes from the right. Only the last stage knows the loss. It divides the loss by
M, so that the gradients of M equal micro-batches add up to that of the whole batch.

Task 8.7 of [exercise 8](../exercises/08_pipeline.ipynb) asks you to write these two functions. Write them before you open the next
cell, which has them as methods. What must a stage keep of a micro-batch from its forward to its backward pass?
"""


# %% forward-and-backward folded=true
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
With a single batch, rank 1 waits for rank 0's activations, and rank 2 waits for rank 1's. On the way back each rank waits for its
right neighbour. In the figure F is a forward pass, B is a backward pass, and in the white time a rank is idle.
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
Therefore we cut the batch into M **micro-batches**, and let them follow one another.

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

A schedule says who does what, and in which order. It consists of one list of instructions per rank, and nothing else. Write the
simplest schedule first, **GPipe**: all forward passes, then all backward passes, each in the order of the micro-batches (task 8.1).
"""

# %% task-8-1
def gpipe(stage, stages, micro_batches):
    """Return the list of steps of one stage: pairs of "F" or "B" and a micro-batch's number."""
    raise NotImplementedError("Exercise 8.1: GPipe")


show.source(task("8.1", gpipe), click="Write it first, then open: one solution")

# %% [markdown]
r"""
Then write **1F1B**, one forward, one backward, which starts backward as early as possible (task 8.2). The last stage goes backward
right after its first forward pass, the stage before it after its second forward pass, and so on. From then on forward and backward
take turns. At the end come the backward passes that are left. There may be fewer micro-batches than stages.
"""

# %% task-8-2
def one_forward_one_backward(stage, stages, micro_batches):
    """Return the list of steps of one stage in the 1F1B schedule."""
    raise NotImplementedError("Exercise 8.2: One forward, one backward")


show.source(task("8.2", one_forward_one_backward), click="Write it first, then open: one solution")

# %% [markdown]
r"""
The next cell prints both schedules as stage 8 has them, for 3 ranks and 4 micro-batches. Before you run it: which is the first
instruction after which rank 0 has to wait, in GPipe and in 1F1B?
"""

# %% as-data
for schedule in (stage8_pipeline.gpipe, stage8_pipeline.one_forward_one_backward):
    print(schedule.__name__)
    for rank, row in enumerate(schedule(3, 4)):
        print(f"   rank {rank}: ", " ".join(f"{step.letter}{step.microbatch}" for step in row))

# %% [markdown]
r"""
Rank 0 first waits when it needs a gradient from the right: after F3 in GPipe, and after F2 in 1F1B.

## A backward pass is two things

The rank to the left waits for the gradient of the *inputs* (B). No rank waits for the gradients of the *weights* (W), which are
needed only at the end of the step. **Zero bubble** schedules split the backward pass in two, and a rank does W when it would
otherwise be idle.
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
A few lines run any such list, since a rank that receives waits by itself:
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
**Interleaved** schedules go another way: each rank gets two thinner stages, for example rank 0 gets stages 0 and K. The
pipeline fills in half the time, and about twice as many messages travel.

## Run

We run all four lists on real messages, and compare the gradients with those of one device:
"""

# %% check-core folded=true
# NBVAL_CHECK_OUTPUT
schedules = {
    "GPipe": stage8_pipeline.gpipe,
    "1F1B": stage8_pipeline.one_forward_one_backward,
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
One loop runs the four schedules, and all of them give the same gradients. They differ in time. A forward pass of a micro-batch
takes one unit of time on all of a rank's layers, B and W take one unit each, and a whole backward pass takes two:
"""

# %% four folded=true
rows = {}
for name, schedule in schedules.items():
    rows[name] = timetable(schedule, M, chunks=2 if name == "interleaved" else 1)
show.sketches.schedules(rows)

# %% [markdown]
r"""
The white parts in the figure are the **bubble**: a rank waits while the pipeline fills, turns round and empties. (The outlined boxes
are the second stage of an interleaved rank, and no part of the bubble.) In GPipe and 1F1B the bubble is a share of

$$\frac{K-1}{M+K-1}$$

With two stages per rank the white parts are half as long, and their share is $\frac{K-1}{2M+K-1}$. In this zero bubble
schedule they are a third as long, and their share is $\frac{K-1}{3M+K-1}$. (Then why *zero* bubble? This variant keeps no more
micro-batches than 1F1B's first rank. With twice that memory only the white parts around the update are left.)

How long does a whole step take? Half of the count is written. One unit of time passes for each micro-batch's forward pass on a rank.
"""


# %% faded-step-time
def step_time(stages, micro_batches, forward=1, backward=2):
    """Return how long a step takes under GPipe or 1F1B, from the first forward pass to the last backward pass."""
    working = micro_batches * (forward + backward)
    idle = ...
    return working + idle


fill_in(step_time, {(4, 8): 33, (1, 8): 24, (4, 1): 12, (3, 4, 2, 3): 30})

# %% [markdown]
r"""
<details><summary>The line</summary><code>idle = (stages - 1) * (forward + backward)</code></details>

1F1B idles as long as GPipe, so what is it for? Activations must be kept from a micro-batch's forward to its backward pass. GPipe
keeps those of all M micro-batches, and 1F1B keeps those of at most K. (Interleaving has a price here: with K = 4, by the lists above,
rank 0 keeps 11 thin micro-batches, as much as 5.5 whole ones.)

Move the sliders: which makes the bubble small, more ranks or more micro-batches?
"""

# %% explorer
show.widgets.pipeline_explorer(K, M)

# %% [markdown]
r"""
## The real one

`torch.distributed.pipelining` has the same schedules. Its schedules with several stages per rank are lists as well. We translate
these lists into our instructions, and let our own loop run them too. Before you look: will torch's interleaved list be the one that
we have? And will its zero bubble be ours? torch's zero bubble is also interleaved, with two stages per rank, and B and W apart.
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
torch's interleaved list is ours, instruction by instruction. Its zero bubble joins both ideas: thin stages make zero bubble's white
parts half as long, for about twice as many messages. (If you try `ScheduleZBVZeroBubble` in the cell above, all ranks wait for ever.
Its stages lie in a V, so rank r has stages r and 2K-1-r, not r and r+K, and stages in the wrong places wait for messages that no rank
sends. With its stages in the right places it runs, and our `Pipeline` runs its list too.)

## What stage 8 adds

`stage8_pipeline.Pipeline` runs the same lists by the same loop. It adds what our core leaves out. Activations may have any shape, and
M need not divide the batch. Receives are posted ahead. Intermediate results are saved for W, while our core recomputes them. And lists
in which ranks would wait for each other in a circle are refused in plain words. It trains like one device:
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

Each rank gets an emulated device and the same work: a stack of layers and 48 samples. We take the virtual time of a batch with
GPipe's schedule, for 12 and other numbers of micro-batches, and see for what share of this time a rank is idle.
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
devices the points lie above the line, and the more so the more micro-batches there are, since each has its messages and its small
operations. The next cell runs all four schedules with M = 8. Before you run it: how high will the bars be, by the timetables above?
"""

# %% four-measured folded=true
derived = {name: 100 * show.sketches.idle(table) for name, table in rows.items()}
percent = {"GPipe": 100 * measured[M], "1F1B": 100 * idle(M, schedules["1F1B"]),
           "interleaved": 100 * idle(M, stage8_pipeline.interleaved, 2),
           "zero bubble": 100 * idle(M, stage8_pipeline.zero_bubble)}
title = "Ranks idle for as long as the schedule says"
show.bars(percent, "idle (%)", title, form="{:.0f}", theory=derived, kind="virtual time",
          dash="timetable", colours=dict.fromkeys(percent, show.STAGE_COLOURS["8"]))

# %% claim-23
# NBVAL_CHECK_OUTPUT
claims.decide(
    23, "1F1B has a smaller bubble than GPipe.", "virtual time",
    {"all micro-batches take equally long": percent["1F1B"] < percent["GPipe"] - 0.5},
    "Both idle for (K-1)/(M+K-1) of the time. What 1F1B saves is memory: it keeps the activations of K micro-batches, not of M.",
)

# %% [markdown]
r"""
On real devices the bars reach above the black line by the fixed cost of the micro-batches. Interleaved stages send twice
as many messages, each with half as much computing to hide it. In GPipe a rank waits for one neighbour at a time. In the
other schedules it alternates between its neighbours, and a delay of either holds it up. More micro-batches and thinner stages
therefore help only up to a point, and a measurement decides where this point is.

## Measure what is kept

A batch has twelve micro-batches. The activations of how many does each rank keep at once, at most? Complete the count for
1F1B first:
"""


# %% faded-kept-in-1f1b
def kept_in_1f1b(stage, stages, micro_batches):
    """Return how many micro-batches' activations a stage, counted from 0, keeps at once, at most."""
    behind_it = stages - 1 - stage
    return ...


fill_in(kept_in_1f1b, {(0, 4, 12): 4, (3, 4, 12): 1, (0, 4, 2): 2})

# %% [markdown]
r"""
<details><summary>The line</summary><code>return min(behind_it + 1, micro_batches)</code></details>

Now count what a pipeline really keeps:
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
activations. Their number is that of the samples (in a text: of its bytes) times the *width* of the model, but not times its
depth. The figure shows what the busiest rank sends in a step of our byte model, beside what a rank of the ring sends of its gradients.
(From three ranks on, the ranks in the middle are the busiest: they send activations forward and gradients of activations back.)
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

Pipelines can run side by side, each on its share of the data. Ranks that hold the same stage average their
gradients with the ring of lesson 04. Four ranks make 2 pipelines of 2 ranks. Each rank makes one call,
`stage8_pipeline.train(model, share, lr=0.3, stages=2)`, and `share` is the share of its pipeline:
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

In stage 5's loop forward, loss and backward were three lines. Here they are one call, `pipeline.step`, because forward and backward
passes alternate.
"""

# %% diff
show.diff(stage5_bucketed.train, stage8_pipeline.train)

# %% [markdown]
r"""
## On your GPUs

The pipeline runs on the devices of this machine, in real time, as 1F1B with four micro-batches. Each device waits while the
pipeline fills and empties, and for the slowest part. With a GPU the figure has each rank's timeline, too: *compute* is all
time but the waiting for others. It includes Python's time between two operations, which the lanes leave white. (The thin
*communication* before the update is the average over all ranks with the same stage. Here each stage has one rank, so nothing
is sent.) Without a GPU the figure shows what one NVIDIA H200 needed. Two ranks shared it, and what
the pipeline adds to one device's time is messages, idle time, and the fixed cost of each small micro-batch.
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
| lists of instructions | `torch/distributed/pipelining/schedules.py`: an `_Action` has a kind, a stage and a micro-batch | |
| `gpipe` | `ScheduleGPipe` | Huang et al., *GPipe*, 2019 |
| `one_forward_one_backward` | `Schedule1F1B` | Narayanan et al., *PipeDream*, 2019 |
| `interleaved` | `ScheduleInterleaved1F1B` | Narayanan et al., *Megatron-LM*, 2021 |
| `zero_bubble` | `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble` | Qi et al., *Zero bubble*, ICLR 2024 |
| B and W | `_backward.py`: `stage_backward_input`, `stage_backward_weight` | the same |
| what is kept | `analyze_pipeline_activation_liveness`, since torch 2.15 | |

The largest models are split in three ways at once: **tensor parallel** (each matrix cut into pieces) inside a machine,
pipelines between machines, and data parallel around both.

## Check yourself

**1.** Why not use very many micro-batches, and forget about the bubble?
<details><summary>Answer</summary>
Each must be large enough to keep the device busy, each message pays its latency, and the batch is finite: M cannot
be larger than the number of its samples.
</details>

**2.** One stage takes twice as long as the others. What is the speed of the pipeline?
<details><summary>Answer</summary>
The pipeline is as fast as its slowest stage, and all others idle half of the time. This is why the model is cut evenly by computing.
</details>

**3.** Which needs the faster links: data parallel or pipeline?
<details><summary>Answer</summary>
Usually data parallel does, since it sends the gradients of all parameters in every step. Pipelines send one activation tensor per
micro-batch to the next rank, and its gradient back. So people use pipelines between machines.
</details>

## In three lines

1. A pipeline splits layers over ranks. A schedule is a list of F, B and W per rank, and one loop runs all of them, torch's too.
2. GPipe and 1F1B idle for (K-1)/(M+K-1) of the time. 1F1B keeps less; interleaved stages and a split backward pass idle less.
3. The bytes grow with samples and width, but not with depth, so pipelines suit slow links between hosts.

**Exercise:** [8](../exercises/08_pipeline.ipynb), `exercises/08_pipeline.ipynb`. **Next:**
[9, tensor parallelism and the mesh](09_tensor_and_mesh.ipynb).

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
