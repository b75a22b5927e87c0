# %% [markdown]
r"""
# 5 · Bucketed DDP

So far everyone computes, then everyone communicates. But the gradients of the last layers are ready long before
those of the first. Why not send them already, while backward still works on the rest?

**After this lesson you can**

- say in which order gradients appear, and hook into that moment,
- explain what a bucket is for, and what is wrong with too small and too large ones,
- show on a timeline that communication runs under the backward pass, and how much of it is hidden.

*40 minutes, under a minute of computing.*
"""

# %% imports
from ddp_course import (
    BucketedDDP, Link, claims, launch, problems, show, simulate,
    stage4_ring, stage5_bucketed, theory, timeline, timing, torch,
)  # fmt: skip

K = 4  # how many ranks; 2 works as well

# %% [markdown]
r"""
## In which order do gradients appear?

A **hook** is a function that autograd calls at a certain moment. This one is called as soon as a parameter's
gradient is complete. We let each parameter write down its name.
"""

# %% hooks
digits = problems.make("digits")
model, order = digits.model(), []
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

One all-reduce a parameter would be many small messages, each with its latency. One for all would have to wait for the
last gradient. So parameters are put into **buckets**, last layer first. A bucket is closed when it has reached the
cap, and travels as one message when all of its gradients are there. In PyTorch the cap is 25 MiB; our model is
small, so here it is 0.02 MiB.
"""

# %% bucket-sketch
show.sketches.buckets(digits.model(), bucket_cap_mb=0.02)

# %% [markdown]
r"""
All ranks must reduce the buckets in the same order, or they would add up different parameters. Ranks do not
finish their layers at the same moments, so it is not enough to send whatever is ready: bucket 1 waits for bucket 0.

## Predict

On links of 200 Mbit/s and 4 ranks, our next model's all-reduce takes about as long as its backward pass.
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

Two moments matter. The hook: mark this gradient as ready, and hand every complete bucket, in order, to the
communication thread. The end of backward: wait for that thread.
"""

# %% source
show.source(BucketedDDP.gradient_ready, BucketedDDP.reduce, BucketedDDP.finish)

# %% [markdown]
r"""
`flat` is the bucket's memory. Each gradient is a *view* into it, so nothing has to be packed or unpacked:
when the all-reduce is done, `parameter.grad` has the average already.

## Run

On a machine with few cores the ranks slow each other down, and timelines get ragged. So this model's layers just take a
known *time*: 8 layers, 0.8 ms forward and 4 ms backward each, and a real weight matrix of 64 KiB. It is trained over
emulated links: once with stage 4's loop, once with buckets of 0.12 MiB. Each rank records when it did what. We keep the
last step.
"""


# %% record
def steps_of(train, count=4, **options):
    layers = [part for _ in range(8) for part in (torch.nn.Linear(128, 128, bias=False), timing.Delay(0.1, 0.5))]
    batch = torch.randn(8, 128), torch.zeros(8, dtype=torch.int64)
    with timeline.recording() as spans:
        train(torch.nn.Sequential(*layers), [batch] * count, 0.1, **options)
    begins = [span.start for span in spans if span.name == "forward"][1:]  # without the first, which warms up
    ends = [*begins[1:], float("inf")]
    return [[span for span in spans if begin <= span.start < end] for begin, end in zip(begins, ends)]


# %% run
link = Link("200Mbit")
plain = [steps[-1] for steps in launch(steps_of, stage4_ring.train, world_size=K, link=link, device="cpu")]
overlapped = [
    steps[-1]
    for steps in launch(steps_of, stage5_bucketed.train, bucket_cap_mb=0.12, world_size=K, link=link, device="cpu")
]

# %% [markdown]
r"""
## Plot

First stage 4: communication begins when backward is over. Then the buckets: the lower half of each row is the
communication thread. The pale part is what is left to wait for.
"""

# %% timeline-4
show.timeline_figure(plain, title="Stage 4: first compute, then communicate")

# %% timeline-5
share = sum(map(timeline.hidden_share, overlapped)) / K
show.timeline_figure(overlapped, title=f"Buckets: {100 * share:.0f} % of the communication is hidden under backward")

# %% reveal
answers = dict(zip([0.01, 0.33, 0.67, 1], guess.answers))
guess.reveal(f"{100 * share:.0f} %", answers[show.widgets.nearest(max(share, 0.01), answers)])

# %% [markdown]
r"""
Never all of it: the last bucket, with the first layers' gradients, is complete only when backward ends.

That the two really overlap is a statement about the order of events, so it can be checked exactly: on every rank the
first bucket's all-reduce has begun before backward has finished computing.
"""


# %% check-overlap
# NBVAL_CHECK_OUTPUT
def first(name, spans):
    return min(span.start for span in spans if span.name == name)


assert all(first("communication", spans) < first("wait", spans) for spans in overlapped)
assert all(first("communication", spans) >= max(s.end for s in spans if s.name == "backward") for spans in plain)
print("stage 4 communicates after backward; with buckets communication begins inside it, on every rank")

# %% [markdown]
r"""
## The bucket cap

Small buckets start early, but each pays its latencies. Large ones wait. We measure the step for several caps, and put the
**simulator** beside it. It knows how long each layer takes, how large its gradient is, and what the link carries; it plays
a step as a sequence of events.
"""


# %% measure-caps
def step_ms(cap):
    ranks = launch(steps_of, stage5_bucketed.train, count=6, bucket_cap_mb=cap, world_size=K, link=link, device="cpu")
    return 1000 * min(max(steps[i][-1].end - steps[i][0].start for steps in ranks) for i in range(5))


measured = {cap: step_ms(cap) for cap in [0.06, 0.12, 0.25, 0.5]}

# %% simulate
layers = [simulate.Layer(f"layer {i}", 0.0008, 0.004, 4 * 128**2) for i in range(8)]
profile = simulate.Profile(tuple(layers))
network = simulate.Network(theory.Costs.of_link(200e6, latency=300e-6))

# %% [markdown]
r"""
The points are measured, the line is simulated, and the strip above shows the simulated step for the cap that you
choose. Drag the slider: where is the best cap, and why is it neither the smallest nor the largest?
"""

# %% explorer
explorer = show.widgets.bucket_explorer(profile, K, network, measured)
explorer

# %% [markdown]
r"""
The same as a plain figure, for the largest cap: one bucket, nothing hidden.
"""

# %% plain-explorer
show.widgets.bucket_figure(profile, K, network, measured, cap=0.5)

# %% claim-11
# NBVAL_CHECK_OUTPUT
finding = claims.test(11)
print(finding.line)

# %% claim-11-numbers
finding

# %% [markdown]
r"""
## Can the layout change the result?

Buckets decide where a ring's chunks begin, and so on which rank each sum starts.
"""

# %% claim-20
# NBVAL_CHECK_OUTPUT
finding = claims.test(20)
print(finding.line)

# %% claim-20-numbers
finding

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
## What torch does

`DistributedDataParallel` is this, in C++: the same hooks, the same reverse order, 25 MiB buckets with a first one
of 1 MiB, views into the buckets if you ask for `gradient_as_bucket_view=True`. After the first step it rebuilds its
buckets in the order in which gradients really appeared. Lesson 06 adds that, and everything else that is missing.

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

**3.** The all-reduce takes three times as long as backward. Do buckets help?
<details><summary>Answer</summary>
They hide at most the backward pass: 1/3 of the communication. Then you need faster links, fewer bytes
(compression, lesson 06) or more computing per step (larger batches, accumulation).
</details>

## Exercise

`exercises/05_bucketed_ddp.ipynb`
"""
