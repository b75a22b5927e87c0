# %% [markdown]
r"""
# 5 · Bucketed DDP

So far everyone computes, then everyone communicates. But the gradients of the last layers are ready long before
those of the first. Why not send them already, while backward still works on the rest?

**After this lesson you can**

- say in which order gradients appear, and hook into that moment,
- explain what a bucket is for, and what is wrong with too small and too large ones,
- predict from two numbers, one of the device and one of the link, when overlap pays,
- show on a timeline that communication runs under the backward pass, and how much of it is hidden.

*40 minutes, under a minute of computing.*
"""

# %% imports
import torch
import torch.distributed as dist

from ddp_course import BucketedDDP, Device, Link, claims, launch, on_your_gpus, problems
from ddp_course import ring_all_reduce, show, simulate, stage1_single, stage4_ring
from ddp_course import stage5_bucketed, theory, timeline, timing, traces
from ddp_course.checking import task
from ddp_course.running import presets

K = 4  # how many ranks; 2 works as well

# %% [markdown]
r"""
## In which order do gradients appear?

A **hook** is a function that autograd calls at a certain moment. This one is called as soon as a parameter's
gradient is complete. We let each parameter write down its name.
"""

# %% hooks
digits = problems.make("digits")
model = digits.model()
order = []
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
inputs, targets = next(digits.batches(24, 1))
torch.nn.functional.cross_entropy(model(inputs), targets).backward()
order

# %% check-order
# NBVAL_CHECK_OUTPUT
layers = [int(name.split(".")[0]) for name in order]
assert layers == sorted(layers, reverse=True)
print("the last layer's gradients come first")

# %% [markdown]
r"""
## Buckets

One all-reduce per parameter would be many small messages, each with its latency. A single all-reduce for all parameters
would have to wait for the last gradient. So parameters are put into **buckets**, last layer first. A bucket is closed
when its size reaches a limit, the *cap*, and travels as one message when all of its gradients are there. In PyTorch the
cap is 25 MiB; here is the digits' model with a cap of 0.03 MiB, which is 31 KiB.
"""

# %% bucket-sketch
names = {parameter: name for name, parameter in model.named_parameters()}
for number, bucket in enumerate(stage5_bucketed.assign_buckets(list(names), bucket_cap_mb=0.03)):
    nbytes = sum(parameter.nbytes for parameter in bucket)
    inside = [names[parameter] for parameter in bucket]
    print(f"bucket {number}, {nbytes / 1024:5.1f} KiB:", ", ".join(inside))

# %% [markdown]
r"""
All ranks must reduce the buckets in the same order, or they would add up different parameters. The ranks may fill their
buckets in different orders, so a full bucket must not leave at once: bucket 1 waits until bucket 0 has left.

A parameter is never cut in two: a bucket ends with the parameter that fills it. So a layer larger than the cap makes a
bucket larger than the cap.

## Predict

On the emulated devices and links below, with 4 ranks, the byte GPT's all-reduce takes nearly as long as its backward pass,
about four fifths of it.
"""

# %% predict
guess = show.predict(
    "How much of the communication can be hidden under the backward pass?",
    ["none", "about a third", "about two thirds", "all of it"],
)
guess

# %% [markdown]
r"""
## The code

In the iteration of lesson 04 the ring began after backward. Now it runs below it, bucket by bucket:

![Each of three ranks takes a third of the batch and goes forward and backward with equal weights. Backward begins with layer 3. As soon as its gradient is there, bucket 0 travels around the ring while backward computes layer 2; the last bucket travels when backward is over. Every rank makes the same update, so the weights stay equal](../docs/figures/iteration_05.svg)

**Possible because** backward finishes one layer after the other, and the sum of a bucket needs no other bucket.

Two moments matter. The hook: mark this gradient as ready, and hand every complete bucket, in order, to the
communication thread. The end of backward: wait for that thread (`torch.autograd.graph.queue_callback`, public since torch
2.15, has a function called then). Tasks 5.1 to 5.3 of
[exercise 5](../exercises/05_bucketed_ddp.ipynb) ask you to write the parts, which is worth more before you look. Here is the first.
Buckets are filled from the last parameter to the first. One is closed as soon as it holds `cap_bytes` or more; parameters of
different dtypes never share one. Return them in the order in which they were closed, and then those that were never filled.
"""

# %% task-5-1
def assign_buckets(parameters, cap_bytes):
    """Return lists of parameters, last parameter first, each list of one dtype and closed on reaching `cap_bytes`."""
    raise NotImplementedError("Exercise 5.1: Buckets")


show.source(task("5.1", assign_buckets), click="Write it first, then open: one solution")

# %% source
show.source(BucketedDDP.gradient_ready, BucketedDDP.reduce, BucketedDDP.finish,
            click="Open after tasks 5.1 to 5.3: the hook, and the end of backward")

# %% [markdown]
r"""
`flat` is the bucket's memory. Each gradient is a *view* into it, so nothing has to be packed or unpacked:
when the all-reduce is done, `parameter.grad` has the average already.

## Run

The small byte GPT, on emulated devices and links: once with stage 4's loop, once with buckets of 0.1 MiB. Each rank
records when it did what, in virtual time. Work out the first number before you run it: forward and backward take 243 ms, and
427 kB of gradients go around a ring of four on links of 40 Mbit/s.
"""


# %% record
device = Device("700MFLOP/s")
link = Link("40Mbit")


def last_step(train, **options):
    text = problems.make("bytes", parameters=100_000, context=32)
    batches = text.batches(8 * K, 4, rank=dist.get_rank(), world_size=K)
    with timeline.recording() as spans:
        train(text.model(), batches, 0.3, **options)
    return timeline.by_step(spans)[-1]


def step_s(lanes):
    return max(lane[-1].end for lane in lanes) - min(lane[0].start for lane in lanes)


def on_devices(train, link=link, **options):
    return launch(last_step, train, world_size=K, link=link, device=device, **options)


# %% run
plain = on_devices(stage4_ring.train, progress=("stage 4", 4))
overlapped = on_devices(stage5_bucketed.train, bucket_cap_mb=0.1, progress=("buckets", 4))
plain_ms = 1000 * step_s(plain)
print(f"stage 4: {plain_ms:.0f} ms per step; with buckets: {1000 * step_s(overlapped):.0f} ms")

# %% [markdown]
r"""
## Plot

Rank 0 of both, on one axis. Above, stage 4: communication begins when backward is over. Below, the buckets: the lower
half of the row is the communication thread, idle until the next bucket is full. The brown part is what is left to wait for.
"""

# %% timelines
share = sum(map(timeline.hidden_share, overlapped)) / K
show.timeline_figure(
    [plain[0], overlapped[0]],
    f"Buckets hide {100 * share:.0f} % of the communication under backward",
    labels=["stage 4", "buckets"],
    align=True,
)

# %% reveal
answers = dict(zip([0.01, 0.33, 0.67, 1], guess.answers))
right = answers[show.widgets.nearest(max(share, 0.01), answers)]
guess.reveal(f"{100 * share:.0f} %", right, kind="virtual time")

# %% [markdown]
r"""
Never all of it: the last bucket, with the first layers' gradients, is complete only when backward ends.

Do the two really overlap? That can be checked exactly, by the order of events: on every rank the first bucket's all-reduce
must begin before backward has finished computing.
"""


# %% check-overlap
# NBVAL_CHECK_OUTPUT
def first(name, spans):
    return min(span.start for span in spans if span.name == name)


def backward_until(spans):
    return max(span.end for span in spans if span.name == "backward")


for spans in overlapped:
    assert first("communication", spans) < backward_until(spans) - timeline.exposed(spans)
assert all(first("communication", spans) >= backward_until(spans) for spans in plain)
assert step_s(overlapped) < 0.95 * step_s(plain)
print("stage 4 communicates after backward; buckets begin inside it, on every rank, and the step is shorter")

# %% [markdown]
r"""
## The bucket cap

Small buckets start early, but each pays its latencies. Large ones start late. We run the step with several caps, and put
a **simulator** beside it. It knows how long each layer takes, how large its gradient is, what the link carries, and the
latency of a message. The latency comes first: an all-reduce of 64 bytes is 2(K-1) latencies and nothing else.
"""

# %% measure-caps
caps = [0.001, 0.02, 0.05, 0.1, 0.2, 0.5]
latency = timing.time_collective(ring_all_reduce, 64, K, link) / (2 * (K - 1))
measured = {}
for cap in caps:
    progress = (f"{cap:g} MiB", 4)
    lanes = on_devices(stage5_bucketed.train, bucket_cap_mb=cap, progress=progress)
    measured[cap] = 1000 * step_s(lanes)

# %% simulate
text = problems.make("bytes", parameters=100_000, context=32)
with device.emulate(record=True, sleep=False) as emulation:
    stage1_single.train(text.model(), text.batches(8, 1), 0.3)
sizes = [4.0 * p.numel() for p in text.model().parameters()]
unit = emulation.busy_s / sum(sizes)  # computing goes with the parameters
layers = []
for number, size in enumerate(sizes):
    # A third of the time is forward, the rest backward.
    layers.append(simulate.Layer(str(number), unit * size / 3, unit * size * 2 / 3, size))
profile = simulate.Profile(tuple(layers))
network = simulate.Network(theory.Costs.of_link(40e6, latency=latency))

# %% [markdown]
r"""
The points are the real program in virtual time, the line is simulated, and the strip above shows the simulated step for
the cap that you choose. They differ by a few percent, since the simulator shares the computing out by parameters. For the
same reason it hides 79 % of the communication at a cap of 0.1 MiB, and the program 70 %: there the last gradients are
those of the embeddings, which are large and cost almost no computing, so that less is left to hide them under. Drag the
slider, which moves the dotted line: why is the largest cap the worst? And why does the smallest one lose nothing here? On
this link a message has hardly any latency. Where it has 50 µs, as in the first row of numbers above claim 8, the best cap is neither
the smallest nor the largest.
"""

# %% explorer
show.widgets.bucket_explorer(profile, K, network, measured, caps=tuple(caps))

# %% [markdown]
r"""
## When does it pay?

One number for the device: how long backward takes, C. One for the link: how long the all-reduce takes, T. Without
overlap a step takes forward + C + T. With overlap a step takes forward + max(C, T) plus the time of one bucket. If C is
longer, it is the last bucket, which can only leave when backward ends. If T is longer, it is the first one, which the
link has to wait for. So there are three regimes. The link is fast: there is little to save. T is below C: all but about
one bucket is hidden. T is above C: at most C of it is hidden, and you pay T - C and one bucket. The green line in the
figure leaves this one bucket out, so the points lie above it. Where T = C is predicted from the two
numbers alone; then we run it at several link speeds.
"""

# %% sweep
megabits = [10, 20, 40, 80, 160]
trainings = (
    ("ring", stage4_ring.train, {}),
    ("buckets", stage5_bucketed.train, {"bucket_cap_mb": 0.1}),
)
points = {}
for name, train, cap in trainings:
    points[name] = []
    for speed in show.progress(megabits):
        lanes = on_devices(train, link=Link(f"{speed}Mbit"), **cap)
        points[name].append(1000 * step_s(lanes))

# %% derived
forward = 1000 * emulation.busy_s / 3
backward = 1000 * emulation.busy_s * 2 / 3
crossing = 1e-6 * 8 * 2 * (K - 1) / K * sum(sizes) / (backward / 1000)
speeds = sorted([*megabits, crossing])
one_by_one = []
hidden = []
for speed in speeds:
    costs = theory.Costs.of_link(1e6 * speed, latency)
    ring = 1000 * theory.seconds("ring", sum(sizes), K, costs)
    one_by_one.append(forward + backward + ring)
    hidden.append(forward + max(backward, ring))

# %% regimes
colours = {"ring": show.STAGE_COLOURS["4"], "buckets": show.STAGE_COLOURS["5"]}
show.curves(
    {name: (megabits, points[name], colour) for name, colour in colours.items()},
    "link (Mbit/s)",
    "time per step (ms)",
    f"Buckets save the largest share near {crossing:.0f} Mbit/s, where backward equals all-reduce",
    log="x",
    ticks=megabits,
    theory={
        "no overlap": (speeds, one_by_one, colours["ring"]),
        "all hidden that can be": (speeds, hidden, colours["buckets"]),
    },
    kind="virtual time; lines derived",
)

# %% check-regimes
# NBVAL_CHECK_OUTPUT
saved = {}
for speed, slow, fast in zip(megabits, points["ring"], points["buckets"]):
    saved[speed] = 1 - fast / slow
best = max(saved, key=saved.get)
assert saved[best] > 0.08 and saved[best] > 1.2 * saved[160]
assert crossing / 4 < best < 4 * crossing
print("buckets save the largest share of a step where the all-reduce takes about as long as backward")

# %% bucket-sizes
caps_mb = [0.5, 4, 25, 100, 1000]
fast = simulate.Network(theory.Costs.of_link(10e9, latency=50e-6))
cases = {"backward can hide communication": 0.1, "there is nothing to hide it behind": 0.0}
steps = {}
for name, backward in cases.items():
    layers = [simulate.Layer(f"layer {n}", 0.05 / 50, backward / 50, 2 * 2**20) for n in range(50)]
    large = simulate.Profile(tuple(layers))
    steps[name] = [simulate.simulate(large, 16, fast, bucket_cap_mb=cap).step_s for cap in caps_mb]
    printed = [f"{cap:g} MiB {1000 * step:.0f} ms" for cap, step in zip(caps_mb, steps[name])]
    print(f"{name}:", ", ".join(printed))

# %% claim-8
# NBVAL_CHECK_OUTPUT
claims.decide(
    8, "Bigger buckets are always better.", "simulated",
    {name: taken == sorted(taken, reverse=True) for name, taken in steps.items()},
    "Small buckets pay many latencies; one large bucket starts only when backward is over. The best lies between.",
)

# %% [markdown]
r"""
## Can the layout change the result?

Buckets decide where a ring's chunks begin, and a chunk decides on which rank its sum starts.
"""


# %% layouts
def averaged(cap):
    problem = problems.make("synthetic", parameters=2**18)
    batches = problem.batches(24, 1, rank=dist.get_rank(), world_size=dist.get_world_size())
    inputs, targets = next(batches)
    parallel = BucketedDDP(problem.model(), bucket_cap_mb=cap)
    torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
    return torch.cat([parameter.grad.flatten() for parameter in parallel.parameters()])


alike = {}
for ranks in (2, 4):
    small = launch(averaged, 0.01, world_size=ranks)[0]
    large = launch(averaged, 25, world_size=ranks)[0]
    different = int((small != large).sum())
    most = (small - large).abs().max()
    print(f"{ranks} ranks: {different:,} of {len(small):,} gradients differ, by at most {most:.0e}")
    alike[f"K = {ranks}"] = different == 0

# %% claim-9
# NBVAL_CHECK_OUTPUT
claims.decide(
    9, "The bucket layout cannot change results.", "measured", alike,
    "Where a chunk begins decides in which order the ranks' values are added; sums of three or more depend on the order.",
)

# %% [markdown]
r"""
So runs can be repeated to the last bit only with the same world size and the same buckets. Within one run all ranks
still have equal bits, which is what matters for the replicas.

## What changed

The sum has moved out of the loop, into `backward()`.
"""

# %% diff
show.diff(stage4_ring.train, stage5_bucketed.train)

# %% [markdown]
r"""
## How far does data parallelism reach?

The same two times say how many devices are worth having. Let the batch of a step be fixed, since a larger one trains
differently (lesson 10): G tokens, shared by K devices of R flop/s. A model of n parameters takes 4 n flops per token backward,
and its n gradients have e bytes each; links carry W bytes/s. All is hidden while backward takes longer than the ring. Up to which
K is that so? Write both times down and see what cancels: this is task 5.8, whose check says whether you are right.

<details><summary>Write it first, then open: the largest K</summary>

K devices compute for $4\,n\,G / (K R)$ seconds, and a ring sends for $2\,\frac{K-1}{K}\,n\,e / W$ seconds. n cancels, and so
do the two denominators K; of K only K-1 is left:

$$K \le 1 + \frac{2\,G\,W}{e\,R}$$

In words: a device must have at least $\frac{e}{2}\cdot\frac{R}{W}$ tokens in its share.

</details>

The answer has R/W in it, flops per byte, which belongs to the machine. An H100 with 4·10¹⁴ flop/s (bfloat16, what one reaches in
practice) and 50 GB/s per GPU has 8,000, so each GPU needs about 8,000 tokens for gradients of two bytes, however large the model is. A
batch of four million tokens then feeds 500 such GPUs. Beyond that, more devices wait for the network.

The figure takes 0.4 of what datasheets say, and the network cards that such hosts have. Before you run the cell: an H100 computes
eight times as fast as a V100. Does the same batch feed more H100s, or fewer?
"""

# %% reach folded=true
millions = [0.25, 0.5, 1, 2, 4, 8, 16]  # tokens in a batch
sheets = presets.ACCELERATORS
machines = (
    ("V100", sheets["V100"].network, "#0072B2"),
    ("A100", sheets["A100"].network, "#009E73"),
    ("H100", sheets["H100"].network, "#D55E00"),
    ("H100", 100e9, "#CC79A7"),
)
reach = {}
for gpu, cards, colour in machines:
    per_gpu = cards / 8 / 8  # bytes per second: 8 GPUs of a host share its cards
    most = [int(1 + 1e6 * tokens * per_gpu / (0.4 * sheets[gpu].rate)) for tokens in millions]
    reach[f"{gpu}s, {cards / 1e9:,.0f} Gbit/s per host"] = millions, most, colour

# %% reach-figure folded=true
own, slow = (most[millions.index(4)] for _, most, _ in list(reach.values())[2:])
picture = show.curves(
    reach,
    "tokens in the batch (millions)",
    "largest K",
    f"4 million tokens feed {own} H100s, or {slow} at 100 Gbit/s per host",
    log="xy",
    points=False,
    ticks=millions,
    kind="derived",
)
picture.axes[0].lines[0].set_linestyle(":")  # V100s: another line lies on theirs
picture.axes[0].lines[0].set_zorder(3)
picture.axes[0].legend(fontsize=8)
picture

# %% [markdown]
r"""
As many: the cards of a host have become eight times as fast, too, so that the dotted line lies on that of the H100s. (A100s lie above: four times a V100's network for 2.5
times its speed.) On the same GPUs
with one card of 100 Gbit/s per host K falls to a thirtieth, since R/W is 32 times as large. All lines are as steep as each other:
twice the batch, twice the devices. The model is in none of them.
"""

# %% [markdown]
r"""
## On your GPUs

The same on the devices of this machine, in real time, beside torch's. In the timeline communication lies below the backward
pass if it is hidden. On a processor it takes cores from the backward pass, so that hiding it wins
little, and buckets may even take longer than the ring.
"""

# %% on-your-gpus
yours = on_your_gpus("4,5,torch")
assert yours.max_abs_diff < 1e-4, "the weights are not one device's"
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

`DistributedDataParallel` is this, in C++: the same hooks, the same reverse order, 25 MiB buckets with a first one
of 1 MiB, views into the buckets if you ask for `gradient_as_bucket_view=True`. After the first step it rebuilds its
buckets in the order in which gradients really appeared. Lesson 06 adds that, and everything else that is missing.

How much does it gain on GPUs? On 32 of them, overlap saved 38.0 % of a step of ResNet-50 and 35.2 % of BERT's with NCCL,
26.8 % and 21.5 % with gloo (published: Li et al., "PyTorch Distributed", VLDB 2020).

What does it look like there? This is a real step: ResNet-50 under torch's DDP on two A100s, as torch's profiler
recorded it on rank 0 (published with HolisticTraceAnalysis, MIT licence). ResNet-50 has 25.6 million parameters, and its
last layer has 2.05 million of them. Before you look: into how many buckets does stage 5 put them?
"""

# %% a100s
layers = simulate.resnets.layers("resnet50")
resnet50 = [torch.empty(numbers, device="meta") for numbers, _ in layers]
buckets = stage5_bucketed.assign_buckets(resnet50)
ours = []
for bucket in buckets:
    ours.append(sum(part.numel() for part in bucket))
theirs = [numbers for _, numbers in traces.read()[1].reduced]
print(f"stage 5's buckets:     {ours}\nall-reduces on A100s:  {theirs}")
assert ours == theirs
show.trace(step=1)

# %% [markdown]
r"""
They are the same five, to the number. The upper half of the GPU's row is what it computes, the lower half its
all-reduces, each with its number of gradients; below, a few milliseconds are enlarged. Kernels of the backward pass run beside each of the first four
all-reduces, and none beside the last one, which begins when backward is over. So far it is as derived.

One thing is not. Of 220 ms the GPU computes for 38, and the processor is busy nearly all the time (in the gap
before the update, which is drawn as no pass, it copies the averages out of the buckets). Lesson 11 asks whose fault
this is. And on your GPUs? This records a step of stage 6 on all of them with `torch.profiler`, draws rank 0's and says how much
is hidden. A trace of your own program, `show.trace("my_trace.json")` draws too.
"""

# %% own-trace
show.own_trace()

# %% [markdown]
r"""
## Check yourself

**1.** Why is the first bucket of torch's DDP smaller than the others?
<details><summary>Answer</summary>
So that communication can begin early: before the first bucket is full, nothing can be hidden.
</details>

**2.** Backward takes 100 ms, the all-reduce of all gradients 60 ms, with 6 equal buckets. How long must you wait at
least after backward?
<details><summary>Answer</summary>
The last bucket is complete when backward ends, and takes 10 ms. If all others are through by then, the step waits
10 ms instead of 60.
</details>

**3.** "Two nodes gave me no speed-up: why?" The log says: forward 40 ms, backward 80 ms, step on one node 125 ms, on two
445 ms; 500 MB of gradients, a link of 10 Gbit/s.
<details><summary>Answer</summary>
The all-reduce over two nodes takes 500 MB / (1.25 GB/s) = 400 ms, and backward hides 80 of them at most. The step is
40 + 400 + 5 ms. Faster links, fewer bytes (lesson 14), or more computing per step (a larger batch, accumulation) would help.
</details>

## In three lines

1. Gradients appear last layer first, so buckets can travel while backward still computes.
2. A step takes about forward + max(backward, all-reduce) and one bucket more (derived, and met in virtual time).
3. Overlap pays most where backward and all-reduce are equally long; caps too small pay latencies, caps too large start late.

**Exercise:** [5](../exercises/05_bucketed_ddp.ipynb), `exercises/05_bucketed_ddp.ipynb`. **Next:**
[6, a complete DDP](06_complete_ddp.ipynb).

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
