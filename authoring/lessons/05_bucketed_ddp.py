# %% [markdown]
r"""
# 5 · Bucketed DDP

So far all ranks compute first and communicate afterwards. But the gradients of the last layers are ready long before
those of the first layers. Why not send them while backward still works on the rest?

**After this lesson you can**

- say in which order gradients appear, and hook into that moment,
- explain what a bucket is for, and what is wrong with buckets that are too small or too large,
- predict from two numbers, one of the device and one of the link, when overlap pays,
- show on a timeline that communication runs under the backward pass, and how much of it is hidden.

*50 minutes, two of them computing; the optional part at the end takes 5 more.*
"""

# %% imports
import torch
import torch.distributed as dist

from ddp_course import BucketedDDP, Device, Link, average_on_server, launch, problems
from ddp_course import stage1_single, stage3_paramserver, stage4_ring, stage5_bucketed
from ddp_course.lab import claims, compare, on_your_gpus, show, simulate
from ddp_course.lab import theory, timeline, traces
from ddp_exercises import fill_in, task
from manyranks import presets

K = 4  # how many ranks; 2 works as well

# %% opening-questions
show.questions(5)

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

One all-reduce per parameter would be many small messages, and each of them has its latency. A single all-reduce for all
parameters would have to wait for the last gradient. So parameters are put into **buckets**, last layer first. A bucket is
closed when its size reaches a limit, the *cap*. It travels as one message when all of its gradients are there. A parameter
is never cut in two, so a layer larger than the cap makes a bucket larger than the cap.

In PyTorch the cap is 25 MiB. Here are the buckets of the digits' model with a cap of 0.03 MiB, which is 31 KiB. The first
one is ten times as large, because `8.weight` alone has 256 KiB.
"""

# %% bucket-sketch
names = {parameter: name for name, parameter in model.named_parameters()}
for number, bucket in enumerate(stage5_bucketed.assign_buckets(list(names), bucket_cap_mb=0.03)):
    size = sum(parameter.nbytes for parameter in bucket)
    inside = [names[parameter] for parameter in bucket]
    print(f"bucket {number}, {size / 1024:5.1f} KiB:", ", ".join(inside))

# %% [markdown]
r"""
Parameters are put into buckets in the reverse of the model's own order. That is nearly the order in which backward finishes
them. It differs only within a layer: above, the weights of layers 3, 2 and 0 came before their biases.

All ranks must reduce the buckets in the same order, or they would add up different parameters. The ranks may fill their
buckets in different orders, so a full bucket must not leave at once: bucket 1 waits until bucket 0 has left. The rule is half
written here:
"""


# %% faded-next-to-leave
def next_to_leave(full, left):
    """Return the number of the bucket that may leave now, or None: `full` are the numbers of the buckets that are full, and the first `left` buckets have left."""
    following = left
    return ...


fill_in(next_to_leave, {((0, 1), 0): 0, ((1, 2), 0): None, ((0, 2), 1): None, ((0, 1, 2), 2): 2})

# %% [markdown]
r"""
<details><summary>The line</summary><code>return following if following in full else None</code></details>
"""

# %% [markdown]
r"""
## The code

In the iteration of lesson 04 the ring began after backward. Now the ring runs while backward computes, bucket by bucket:

![Each of three ranks takes a third of the batch and goes forward and backward with equal weights. Backward begins with layer 3. As soon as its gradient is there, bucket 0 travels around the ring while backward computes layer 2; the last bucket travels when backward is over. Every rank makes the same update, so the weights stay equal](../docs/figures/iteration_05.svg)

**Possible because** backward finishes one layer after the other, and the sum of a bucket needs no other bucket.

Two moments matter. When a gradient is ready, the hook notes it and hands every complete bucket, in order, to the
communication thread. When backward ends, the rank waits for that thread. (`torch.autograd.graph.queue_callback`, which is public
since torch 2.15, registers a function for this moment.)

Tasks 5.1 to 5.3 of [exercise 5](../exercises/05_bucketed_ddp.ipynb) ask you to write these parts, and you learn more if you write
them before you look. Here is the first. Buckets are filled from the last parameter to the first. A bucket is closed as soon as it holds
`cap_bytes` or more; parameters of different dtypes never share a bucket. Return the buckets in the order in which they were
closed, and after them the buckets that were never filled.
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
All gradients of a bucket lie in one tensor, which the code calls `flat`. Each `parameter.grad` is a *view* into this tensor, so
nothing has to be packed or unpacked: when the all-reduce is done, `parameter.grad` already has the average.

## Run

The small byte GPT trains on emulated devices and links, once with stage 4's loop and once with buckets of 0.1 MiB. Each rank
records what it did and when, in virtual time. A message now has a latency of 1 ms. Work out stage 4's step before you run it:
forward and backward take 243 ms, and 427 kB of gradients go around a ring of four, on links of 40 Mbit/s, in six messages one after
the other.

Both rows of the figure are rank 0's. In stage 4's row communication begins when backward is over. In the row of the buckets the
lower half is the communication thread, which idles until the next bucket is full. The brown part is the time that backward
has to wait at its end.
"""


# %% record
device = Device("700MFLOP/s")
link = Link("40Mbit", "1ms")
text = problems.make("bytes", parameters=100_000, context=32)
nbytes = sum(parameter.nbytes for parameter in text.model().parameters())
with device.emulate(record=True, sleep=False) as one_step:
    stage1_single.train(text.model(), text.batches(8, 1), 0.3)
forward = 1000 * one_step.busy_s / 3  # milliseconds; backward takes twice as long
backward = 2 * forward


def last_step(train, **options):
    batches = text.batches(8 * K, 2, rank=dist.get_rank(), world_size=K)
    with timeline.recording() as spans:
        train(text.model(), batches, 0.3, **options)
    return timeline.by_step(spans)[-1]


def step_ms(lanes):
    return 1000 * (max(lane[-1].end for lane in lanes) - min(lane[0].start for lane in lanes))


def on_devices(train, link=link, device=device, **options):
    return launch(last_step, train, world_size=K, link=link, device=device, **options)


# %% run
plain = on_devices(stage4_ring.train, progress=("stage 4", 2))
overlapped = on_devices(stage5_bucketed.train, bucket_cap_mb=0.1, progress=("buckets", 2))
print(f"stage 4: {step_ms(plain):.0f} ms per step; with buckets: {step_ms(overlapped):.0f} ms")
share = sum(map(timeline.hidden_share, overlapped)) / K
show.timeline_figure(
    [plain[0], overlapped[0]],
    f"Buckets hide {100 * share:.0f} % of the communication under backward",
    labels=["stage 4", "buckets"],
    align=True,
)

# %% [markdown]
r"""
Buckets never hide all of the communication. The last bucket has the first layers' gradients, and it is complete only when backward
ends.

Do the two really overlap? The order of events shows it exactly: on every rank the first bucket's all-reduce must begin before
backward has finished computing.
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
assert step_ms(overlapped) < 0.95 * step_ms(plain)
print("stage 4 communicates after backward; buckets begin inside it, on every rank, and the step is shorter")

# %% [markdown]
r"""
## Predict

A cap of 0.1 MiB makes four buckets of this model. More buckets begin to travel earlier, and the last one, which nothing can
hide, is smaller. But each bucket goes around the ring in six messages, and each message has a latency of 1 ms.
"""

# %% predict
guess = show.predict(
    "Into how many buckets must the gradients be cut, so that the step is the shortest?",
    [1, 2, 7, 31],
)
guess

# %% [markdown]
r"""
## The bucket cap

We run the same program with several caps: on this link, and then on one whose messages have no latency. At the end we run
it on devices that compute in no time, so that communication has nothing to hide behind.
"""

# %% caps
caps = [0.001, 0.02, 0.05, 0.1, 0.2, 0.5]
settings = {
    "1 ms": (caps, link, device),
    "none": ([0.001, 0.05, 0.2, 0.5], Link("40Mbit"), device),
    "nothing to hide behind": ([0.001, 0.05, 0.5], link, Device("100GFLOP/s")),
}
by_setting = {}
for setting, (tried, carrier, computer) in settings.items():
    by_setting[setting] = {}
    for cap in show.progress(tried):
        lanes = on_devices(stage5_bucketed.train, carrier, computer, bucket_cap_mb=cap)
        by_setting[setting][cap] = step_ms(lanes)
program = by_setting  # only when all are there, so an interrupted cell leaves no half of a figure

# %% [markdown]
r"""
Beside the program we put a **simulator**. It knows how long each layer takes, how large its gradient is, what the link
carries, and the latency of a message. It shares the time of forward and backward out among the layers by their number of
parameters. The points are the program in virtual time, and the line is simulated. The strip above shows the simulated step for
the cap that you choose with the slider, which moves the dotted line. Where must the lowest point lie if your guess was right?
"""

# %% simulate folded=true
layers = []
for number, parameter in enumerate(text.model().parameters()):
    seconds = one_step.busy_s * parameter.nbytes / nbytes
    layers.append(simulate.Layer(str(number), seconds / 3, seconds * 2 / 3, parameter.nbytes))
profile = simulate.Profile(tuple(layers))
networks = {}
for name, latency in {"1 ms": 1e-3, "none": 0}.items():
    networks[name] = simulate.Network(theory.Costs.of_link(40e6, latency))
more_caps = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)

# %% explorer
show.widgets.bucket_explorer(profile, K, networks["1 ms"], program["1 ms"], caps=more_caps)

# %% reveal
taken = program["1 ms"]
best_cap = min(taken, key=taken.get)
counts = {}
for cap in caps:
    counts[cap] = len(simulate.simulate(profile, K, networks["1 ms"], bucket_cap_mb=cap).buckets)
for cap, ms in taken.items():
    print(f"buckets: {counts[cap]}, step {ms:.0f} ms")
best_answer = show.widgets.nearest(counts[best_cap], guess.answers)
why = {
    1: "A single bucket is full when backward has ended, so nothing is hidden.",
    2: "The last bucket, which nothing hides, is still a large part of all gradients.",
    31: "Each bucket pays the latencies of six messages, and so many are no longer hidden.",
}
guess.reveal(f"{counts[best_cap]} buckets", best_answer, "virtual time", why)

# %% [markdown]
r"""
Of the caps that the program tried, the one that makes seven buckets is the best. With one bucket nothing is hidden. With 31 buckets the latencies alone take 31 · 6 · 1 ms = 186 ms,
more than the 162 ms of the backward pass: the step is even longer than stage 4's, which hides nothing.

And without a latency? The second figure has both links.
"""

# %% two-links folded=true
labels = {"1 ms": "a latency of 1 ms", "none": "no latency"}
series = {}
lines = {}
# Blue is the ring's colour, and both series have buckets.
for name, colour in {"1 ms": show.STAGE_COLOURS["5"], "none": "#C48400"}.items():
    series[f"program, {labels[name]}"] = (*zip(*program[name].items()), colour)
    steps = [simulate.simulate(profile, K, networks[name], bucket_cap_mb=cap) for cap in more_caps]
    simulated = [1000 * step.step_s for step in steps]
    lines[f"simulated, {labels[name]}"] = (more_caps, simulated, colour)
show.curves(
    series,
    "bucket cap (MiB)",
    "time per step (ms)",
    "Small buckets cost most at a latency of 1 ms, and nothing without one",
    theory=lines,
    log="x",
    ticks=caps,
    kind="virtual time; lines simulated",
)

# %% [markdown]
r"""
Without a latency there is no reason for buckets: the smallest cap, which makes 31 of them, is as good as any. So it is the
latency that forbids small buckets, and backward that forbids large ones. The simulator is a few percent off, because the
program's last gradients are those of the embeddings. They are large and cost almost no computing, so that less time is left to
hide them under.
"""

# %% claim-8
# NBVAL_CHECK_OUTPUT
falling = {}
for name, times in program.items():
    falling[name] = list(times.values()) == sorted(times.values(), reverse=True)
taken_by_31 = taken[min(caps)]
assert K == 2 or (min(caps) < best_cap < max(caps) and taken_by_31 > step_ms(plain))
assert program["none"][0.001] < 1.01 * min(program["none"].values())
claims.decide(
    8, "Bigger buckets are always better.", "virtual time",
    {
        "there is a backward pass to hide them under": falling["1 ms"] or falling["none"],
        "there is nothing to hide them under": falling["nothing to hide behind"],
    },
    "Small buckets pay many latencies; one large bucket starts only when backward is over. The best lies between.",
)

# %% [markdown]
r"""
## Is it the ring that hides?

One reads that a device has to wait for the whole backward pass because of the server, and that the ring ended the wait. Try it:
here are buckets whose sums are made by lesson 03's server. `BucketedDDP` takes any function that sums in place.
"""


# %% server
def sum_on_server(flat, group=None):
    average_on_server([flat], group=group)
    flat.mul_(dist.get_world_size(group))


def bucketed_server(model, batches, lr):
    parallel = BucketedDDP(model, bucket_cap_mb=0.1, all_reduce=sum_on_server)
    stage1_single.train(parallel, batches, lr)


served = on_devices(stage3_paramserver.train)
served_in_buckets = on_devices(bucketed_server)
at_once, bucketed = (step_ms([lanes[1]]) for lanes in (served, served_in_buckets))
show.timeline_figure(
    [served[1], served_in_buckets[1]],
    f"With buckets a step with a server takes {bucketed:.0f} ms instead of {at_once:.0f} ms",
    labels=["server", "server,\nin buckets"],
    align=True,
)

# %% claim-21
# NBVAL_CHECK_OUTPUT
def hides(lanes):
    return max(map(timeline.hidden_share, lanes)) > 0.1


claims.decide(
    21, "With a server, communication has to wait for the whole backward pass; on a ring it need not.", "virtual time",
    {
        "gradients are sent all at once": hides(plain) and not hides(served),
        "gradients are sent in buckets": hides(overlapped) and not hides(served_in_buckets),
    },
    "Buckets hide communication, whoever adds them up: without them neither way hides any, with them both do.",
)

# %% [markdown]
r"""
Both rows are rank 1's. Its buckets travel under backward, as they did on the ring. But all ranks' gradients still go in and
out through the server's one link, which takes far longer than backward: the ring's steps of 377 and 294 ms remain shorter.

## When does it pay?

Two numbers decide. C is how long backward takes on the device, and T is how long the all-reduce takes on the link. Without
overlap a step takes forward + C + T. With overlap it takes forward, the longer of C and T, and one bucket more:

| link | C and T | the step takes forward + … | what overlap saves |
|---|---|---|---|
| fast | T is much shorter than C | C + the last bucket, which leaves when backward ends | little, since T is short anyway |
| medium | T is about as long as C | C + one bucket | the most: all of T but one bucket |
| slow | T is longer than C | T + the first bucket, for which the link has to wait | at most C |

How long a step takes follows from when its last bucket has arrived. Buckets leave one after the other, each when it is full and
the link is free. Here is half of a function that works this out:
"""


# %% faded-sums-end
def sums_end(full_at, seconds):
    """Return when the last sum ends: bucket n is full at `full_at[n]`, and takes `seconds[n]` on the link."""
    link_is_free = 0
    for full, takes in zip(full_at, seconds):
        begins = ...
        link_is_free = begins + takes
    return link_is_free


fill_in(sums_end, {((1, 2, 3), (1, 1, 1)): 4, ((1, 2, 3), (2, 2, 2)): 7, ((1, 5), (1, 1)): 6})

# %% [markdown]
r"""
<details><summary>The line</summary><code>begins = max(full, link_is_free)</code></details>

The link at which T = C follows from C alone. Backward takes 162 ms here. The ring's six messages have a latency of 1 ms each, so 1.5
times 427 kB must pass in the other 156 ms, at 33 Mbit/s. We run the program at several link speeds and see
whether overlap saves the most near that one. Each percentage in the figure is what buckets save. The lower line leaves the one
bucket out, so the points lie above it.
"""

# %% sweep
megabits = [10, 20, 40, 80, 160]
trainings = (
    ("ring", stage4_ring.train, {}),
    ("buckets", stage5_bucketed.train, {"bucket_cap_mb": 0.1}),
)
by_training = {}
for name, train, cap in trainings:
    by_training[name] = []
    for speed in show.progress(megabits):
        lanes = on_devices(train, link=Link(f"{speed}Mbit", "1ms"), **cap)
        by_training[name].append(step_ms(lanes))
points = by_training

# %% derived folded=true
latencies = 2 * (K - 1)  # of one millisecond each
crossing = 1e-6 * 8 * 2 * (K - 1) / K * nbytes / ((backward - latencies) / 1000)
speeds = sorted([*megabits, crossing])
one_by_one = []
hidden = []
for speed in speeds:
    costs = theory.Costs.of_link(1e6 * speed, 1e-3)
    ring = 1000 * theory.seconds("ring", nbytes, K, costs)
    one_by_one.append(forward + backward + ring)
    hidden.append(forward + max(backward, ring))
saved = [1 - fast / slow for slow, fast in zip(points["ring"], points["buckets"])]
colours = {"ring": show.STAGE_COLOURS["4"], "buckets": show.STAGE_COLOURS["5"]}

# %% regimes folded=true
picture = show.curves(
    {name: (megabits, points[name], colour) for name, colour in colours.items()},
    "link (Mbit/s)",
    "time per step (ms)",
    f"Buckets save most, {100 * max(saved):.0f} %, where all-reduce and backward take about equally long",
    log="x",
    ticks=megabits,
    theory={
        "forward + backward + all-reduce": (speeds, one_by_one, colours["ring"]),
        "forward + the longer of the two": (speeds, hidden, colours["buckets"]),
    },
    kind="virtual time; lines derived",
)
axes = picture.axes[0]
axes.set_ylim(0, 1.1 * max(points["ring"]))
axes.axvline(crossing, color="#777777", linestyle=":")
axes.text(1.02 * crossing, 30, f"backward (C) and all-reduce (T)\ntake equally long at {crossing:.0f} Mbit/s")
for speed, ms, share in zip(megabits, points["ring"], saved):
    axes.text(speed, ms + 20, f"−{100 * share:.0f} %")
picture

# %% check-regimes
# NBVAL_CHECK_OUTPUT
best = megabits[saved.index(max(saved))]
assert max(saved) > 0.08 and max(saved) > 1.2 * saved[-1]
assert crossing / 4 < best < 4 * crossing
print("buckets save the largest share of a step where the all-reduce takes about as long as backward")

# %% [markdown]
r"""
## Can the layout change the result?

Buckets decide where a ring's chunks begin, and the chunk of a gradient decides on which rank its sum starts.
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
    print(f"{ranks} ranks: {different:,} of {len(small):,} gradients differ, by at most {most:.0g}")
    alike[f"K = {ranks}"] = different == 0

# %% claim-9
# NBVAL_CHECK_OUTPUT
claims.decide(
    9, "The bucket layout cannot change results.", "measured", alike,
    "Where a chunk begins decides in which order the ranks' values are added; sums of three or more depend on the order.",
)

# %% [markdown]
r"""
A run can therefore be repeated to the last bit only with the same world size and the same buckets. Within one run all ranks
still have equal bits, which is what matters for the replicas.

## What changed

The sum has moved out of the loop, into `backward()`.
"""

# %% diff
show.diff(stage4_ring.train, stage5_bucketed.train)

# %% [markdown]
r"""
## On your GPUs

Here ring and buckets run on the devices of this machine, in real time, beside torch's DDP. Where there are GPUs, a timeline shows
hidden communication below the backward pass. Without a GPU the figure shows what one NVIDIA H200 needed, which two ranks shared.
It has times only: a step with buckets exceeds one device's step by about half as much as a step on the ring does.
"""

# %% on-your-gpus
yours = on_your_gpus("4,5,torch")
assert yours.max_abs_diff < 1e-4, "the weights are not one device's"
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

`DistributedDataParallel` does the same in C++. It has the same hooks, the same reverse order, 25 MiB buckets with a first one
of 1 MiB, and views into the buckets if you ask for `gradient_as_bucket_view=True`. After the first step it rebuilds its
buckets in the order in which gradients really appeared. Lesson 06 adds this order, and everything else that is missing.

How much does overlap gain on GPUs? On 32 GPUs it saved 38.0 % of a step of ResNet-50 and 35.2 % of a step of BERT with NCCL. With
gloo it saved 26.8 % and 21.5 % (published: Li et al., "PyTorch Distributed", VLDB 2020).

What does such a step look like? This one is real: ResNet-50 under torch's DDP on two A100s, as torch's profiler
recorded it on rank 0 (published with HolisticTraceAnalysis, MIT licence). ResNet-50 has 25.6 million parameters, and its
last layer has 2.05 million of them. With its usual cap stage 5, too, closes the first bucket at 1 MiB and the others at 25 MiB, which
are 6.55 million numbers.
"""

# %% predict-resnet
guess_buckets = show.predict("Into how many buckets does stage 5 put ResNet-50?", [1, 4, 5, 54])
guess_buckets

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

# %% reveal-resnet
why = {
    1: "All of it has 102 MB, and a bucket is closed at 25 MiB.",
    4: "Four times 6.55 million would do, but the first bucket is closed at 1 MiB, with the last layer alone in it.",
    54: "There are so many layers, and most are small: many of them share a bucket.",
}
guess_buckets.reveal(f"{len(ours)} buckets", len(ours), "counted", why)

# %% [markdown]
r"""
The five numbers are the same. In the figure the upper half of the GPU's row is what it computes. The lower half is its
all-reduces, each with its number of gradients; below, a few milliseconds are enlarged. Kernels of the backward pass run beside
each of the first four all-reduces. None runs beside the last one, which begins when backward is over. All of this is as
derived above.

One thing is not: of 220 ms the GPU computes for only 38, and the processor is busy nearly all the time. (In the gap
before the update, which is drawn as no pass, it copies the averages out of the buckets.) Lesson 11 asks whose fault
this is.

And on your GPUs? The next cell records a step of stage 6 on all of them with `torch.profiler`, draws rank 0's and says how much
of its communication is hidden. `show.trace("my_trace.json")` draws a trace of your own program.
"""

# %% own-trace
show.own_trace()

# %% [markdown]
r"""
## Check yourself

**1.** Why is the first bucket of torch's DDP smaller than the others?
<details><summary>Answer</summary>
A small first bucket lets communication begin early: before the first bucket is full, nothing can be hidden.
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
The all-reduce over two nodes takes 500 MB / (1.25 GB/s) = 400 ms, and backward hides at most 80 ms of it. The step takes
40 + 400 + 5 ms. A faster link, fewer bytes (lesson 14), or more computing per step (a larger batch, accumulation) would help.
</details>
"""

# %% [markdown]
r"""
## Optional: how far does data parallelism reach?

The same two times say how many devices are worth having. The batch of a step is fixed, since a larger one trains
differently (lesson 10). These are the five numbers that count:

| | | an H100 in practice |
|---|---|---|
| G | tokens in the batch, shared by K devices | 4 million |
| n | parameters; backward takes 4 n flops per token | cancels |
| e | bytes of a gradient | 2 |
| R | flop/s of a device | 4·10¹⁴ (bfloat16) |
| W | bytes/s of a device's link | 50·10⁹ |

All communication is hidden while backward takes longer than the ring. Up to which K is that so? Write both times down and see
what cancels. This is task 5.8, whose check says whether you are right.

<details><summary>Write it first, then open: the largest K</summary>

K devices compute for $4\,n\,G / (K R)$ seconds, and a ring sends for $2\,\frac{K-1}{K}\,n\,e / W$ seconds. n cancels, and so
do the two denominators K; of the ring's factor only K-1 is left:

$$K \le 1 + \frac{2\,G\,W}{e\,R}$$

In words: a device must have at least $\frac{e}{2}\cdot\frac{R}{W}$ tokens in its share.

</details>

The answer contains R/W, flops per byte, which is a property of the machine. For the H100 of the table R/W is 8,000, so each
GPU needs about 8,000 tokens for gradients of two bytes, however large the model is. A batch of four million tokens then feeds
500 such GPUs. If there are more, they wait for the network.

The figure takes 0.4 of the speed that datasheets promise, and the network cards that such hosts have.
"""

# %% predict-reach
guess_reach = show.predict(
    "An H100 computes eight times as fast as a V100. How many H100s does the same batch feed?",
    ["fewer than V100s", "as many as V100s", "more than V100s"],
)
guess_reach

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
    "most GPUs that need not wait (K)",
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

# %% reveal-reach
feeds = {}
for name, (_, most, _) in reach.items():
    feeds[name] = most[millions.index(4)]
of_v100s, _, of_h100s, _ = feeds.values()
why = {
    "fewer than V100s": "With the network of a V100's host that would be so, but that of an H100's host is eight times as fast.",
    "more than V100s": "A faster device has done its share earlier, which leaves less time to hide the all-reduce under.",
}
fed = f"4 million tokens feed {of_v100s} V100s, and {of_h100s} H100s"
guess_reach.reveal(fed, "as many as V100s", "derived", why)

# %% [markdown]
r"""
The batch feeds as many H100s as V100s. The network cards of a host have become eight times as fast, too, so the dotted line of
the V100s lies on that of the H100s. The line of the A100s lies above both: they have four times a V100's network and only 2.5
times its speed. H100s with one card of 100 Gbit/s per host reach a thirtieth of K, since their R/W is 32 times as large. All
lines are equally steep: twice the batch feeds twice the devices. The size of the model plays no part in any of them.
"""

# %% [markdown]
r"""
## Yours in the comparison

Here each gradient is averaged by a hook as soon as it is there, on the ring of lesson 04. There is one bucket per parameter, and no
thread: while a gradient travels, nobody computes. So nothing is hidden, and the steps take about as long as the ring's. Let
`BucketedDDP` do it, or write a thread of your own (exercise 5 shows how), and watch the hatched part go. If a
gradient is averaged twice or never, the row says from which step on the weights differ from one device's.
"""


# %% my-train
def average_at_once(parameter):
    """Average a gradient over the ranks; the backward pass waits for it."""
    parameter.grad /= dist.get_world_size()
    stage4_ring.ring_all_reduce(parameter.grad.view(-1))


def my_train(model, batches, lr):
    """Train on this rank's share of each batch; return the losses."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average_at_once)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% compare-yours
results = compare.run(
    "digits", world_size=K, stages="1,4,5,torch", device="cpu", progress=True,
    yours={"at once": my_train}
)
compare.table(results)

# %% yours-in-the-comparison
show.compare_figure(results)

# %% [markdown]
r"""
## In three lines

1. Gradients appear last layer first, so buckets can travel while backward still computes, whether a ring adds them up or a server.
2. A step takes about forward + max(backward, all-reduce) and one bucket more (derived, and met in virtual time).
3. Buckets that are too small pay latencies, and buckets that are too large start late: the best size lies between.

**Exercise:** [5](../exercises/05_bucketed_ddp.ipynb), `exercises/05_bucketed_ddp.ipynb`. **Next:**
[6, a complete DDP](06_complete_ddp.ipynb).

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
