# %% [markdown]
r"""
# Start here

You know how to train a network on one device. In this course you build what turns one device into many:
**distributed data parallel training** (DDP). The whole of it rests on one sentence: if each device computes the gradient of
its share of a batch, the average of these gradients is the gradient of the whole batch. So all devices can make the same
update, as long as each gets that average, and how it gets there fast is what you will build. Each lesson adds one idea, runs
it, plots it, and holds it against PyTorch's own and against a formula.

**After this lesson you can**

- start several processes from a notebook cell and get a result back from each,
- write a ring that adds up what all of them have,
- read the comparison figure that the whole course works towards,
- say what this machine will and will not show you.

*25 minutes, about half a minute of computing.*

**How to use this page.** The boxes with code are *cells*. Click into the first one and press Shift+Enter: the cell runs, what it
prints or draws appears below it, and the next cell is chosen. Beside a cell stands `[ ]` as long as it has not run, its seconds while it
runs, and then a number. Run all cells from top to bottom, also those that show nothing, because later ones need what they
make. The program that runs them and remembers what they made is called the *kernel*. When it was restarted, or you come back another day,
run the cells from the top again.

You may change any cell and run it again. Guess before you run: a wrong guess that you wrote down teaches more than a right answer
that you read. From lesson 03 on, some cells show a single line and three dots: they measure or draw. Run them like all others; a
click on the dots shows their code.
"""

# %% imports
import torch
import torch.distributed as dist

from ddp_course import launch, wire
from ddp_course.lab import compare, doctor, on_your_gpus, show

K = 4  # how many ranks to train on; 2 works as well

# %% [markdown]
r"""
## The first launch

`launch(fn, world_size=K)` starts K processes, calls `fn` in each, and returns a list with K results. Each process
is a **rank**, numbered from 0; how many there are is the **world size**. The function can come straight from a
cell, and what a rank prints arrives here with its number in front.
"""


# %% first-launch
def hello():
    rank = dist.get_rank()
    print(f"hello, I am rank {rank} of {dist.get_world_size()}")
    return rank**2


squares = launch(hello, world_size=K)
squares

# %% [markdown]
r"""
A cell like the next one is a *check*: it prints one line, and raises an error if something is wrong. (Its first line,
`# NBVAL_CHECK_OUTPUT`, is a note for the tests of the course, and does nothing: what such a cell prints is the same on every
machine.)
"""

# %% check-launch
# NBVAL_CHECK_OUTPUT
assert squares == [rank**2 for rank in range(K)]
print("one result from each rank, in rank order")

# %% [markdown]
r"""
## Your turn: a ring

Each rank has a gradient, and all of them need the sum. One rank could collect all gradients and send the sum back: a
*server*. But then everything passes the link of that rank, and the others wait. In a **ring** nobody waits: rank r has a left
and a right neighbour. Everyone sends to the right and receives from the left, all at the same time. What came in is added to
the sum, and is what is sent on next. After K-1 rounds everyone has the sum.

Write the two lines in place of the three dots, indented as far as the line above them, and run the cell. It runs your ring on
four ranks that begin with 1, 10, 100 and 1000, so that each digit of a sum counts how often one rank's number was added. If the
sum is right, it shows your ring's time beside the server's.
"""


# %% your-ring
def my_ring(tensor):
    """Every rank ends with the sum of all ranks' tensors."""
    _, world_size, left, right = wire.neighbours()
    outgoing = tensor.clone()
    for _ in range(world_size - 1):
        incoming = torch.empty_like(tensor)
        wire.exchange(outgoing, right, incoming, left)
        ...  # your turn: two lines


show.first_ring(my_ring)

# %% [markdown]
r"""
<details><summary>The two lines</summary>

```python
        tensor += incoming
        outgoing = incoming
```

</details>

With them the ring takes half the server's time (virtual time, which the next part explains), and all links are busy all the time.
Lesson 04 cuts the gradient into pieces, which halves the time again.
"""

# %% [markdown]
r"""
## Predict

Soon seven strategies train the same small network on the same handwritten digits. Each rank computes on an **emulated
device** with a known speed, and the ranks are joined by **emulated links**. The arithmetic is real, and so are the messages,
losses, weights and bytes. Only the time is **virtual**: each rank has a clock, every operation moves it on by what the device
needs for it, and every message by what the link needs. So a busy laptop shows the same times as an idle one, and a time that
a formula predicts comes out as predicted: guess before you run, for afterwards it looks obvious. Figures say
*measured* where a real clock ran, and *virtual time* where this one did.

How much is won depends on one ratio, communication to computing. The course *chooses* it here: the links are so fast
that a ring of four ranks spends about a third of its step on sending, as on a cluster with ordinary network cables. Faster links would
bring all strategies closer together, slower ones would drive them apart. What will you build, and how much faster is it
than one device?
"""

# %% predict
guess = show.predict(
    f"{K} devices, the same batches: how many times as fast is the best strategy?",
    [1.2, 2, 3.5, 8],
)
guess

# %% [markdown]
r"""
## Run

Seven strategies, each from the same weights, on the same batches. The first two are one process; all others are K
processes. The last one is PyTorch's own DDP. We time ten steps of each on emulated devices and links. The rest of the training
runs without emulation: this gives the same weights with less waiting. It takes half a minute, and the bar says how far it is. (The
terminal command `ddp-course compare` does the same, and `--device-speed none` shows your processor as it is. It takes [your own model](../docs/YOUR_MODEL.md), too.)
"""

# %% compare
results = compare.run("digits", world_size=K, device="cpu", progress=True)
compare.table(results)

# %% [markdown]
r"""
## Plot

Read the panels one by one:

1. **Loss** (measured): all curves lie on one another. However the work is split, the same thing is learned.
2. **Step time** (virtual time; the marks are derived): the hatched part is waiting for what travels: gradients, and under
   DataParallel weights, too. This is what the course fights, and from stage 2 to stage 5 there is less and less of it.
3. **Bytes** (counted): what the busiest rank sends in a step; the lines across are the formula. The server sends twice as much
   as a rank of the ring, and yet makes all wait four times as long, since it must receive as much before it sends. Only
   stages that send through the course's own wire are counted.
4. **Timeline** (virtual time): one step of each, one row per rank. In the server's rows you see ranks that wait for their
   turn (as part of the communication, in its colour); in the rows of buckets communication runs *below* the backward pass,
   at the same time. In virtual time only matrix products take time. An update has none, so its bar has no length.

The server's rows are shifted against each other: a rank that has its average begins the next step while the server still
answers the others. A bar is the time from one step of a rank to its next.
"""

# %% comparison-figure
show.compare_figure(results)

# %% reveal
speed_up = {stage.stage: stage.speed_up for stage in results.stages}
best = max(speed_up.values())
why = {
    1.2: f"So little is won if all wait for a server: {speed_up['3']:.1f} times.",
    2: f"A ring alone wins {speed_up['4']:.1f}; buckets send while the backward pass computes.",
    3.5: f"{K} devices compute {K} times as fast, and buckets hide nearly all of the sending.",
    8: f"{K} devices compute {K} times as fast as one, and sending takes time besides.",
}
guess.reveal(
    f"{best:.1f} times", show.widgets.nearest(best, guess.answers), "virtual time", why
)

# %% what-you-will-build
labels = {stage.stage: stage.name.replace(" ", "\n", 1) for stage in results.stages}
show.bars(
    {labels[stage]: times for stage, times in speed_up.items()},
    "times as fast as one device",
    f"What you will build: from 1 to {best:.1f} times as fast on {K} devices",
    colours={label: show.STAGE_COLOURS[stage] for stage, label in labels.items()},
    form="{:.1f}",
    kind="virtual time",
)

# %% [markdown]
r"""
All of this depends on how fast the links are. Move the sliders: which strategy wins when links are fast, when they are
slow, when there are more ranks, when each message costs something? Sharding, pipeline and tensor parallelism (lessons
07 to 09) are for models that are too large for one device. This one is small: here sharding is slower than buckets, and
pipeline and tensor parallelism are slower than one device. The whole-gradient ring is the first try of lesson 04.
The bars are computed by the formulas of the column *predicted*. The first slider is the time in which one link carries all
gradients once. Later lessons write it p/b: p is the bytes of all gradients, and b the bytes per second that a link carries.
"""

# %% explorer
show.widgets.strategies_explorer(K)

# %% check-order
# NBVAL_CHECK_OUTPUT
assert speed_up["3"] < speed_up["4"] < speed_up["5"] and speed_up["5"] > 1.2
print("the ring is faster than the server, buckets are faster than the ring")

# %% [markdown]
r"""
## What did not change

The strategies differ in speed. They must not differ in result: every weight must end where the single device's ends, but
for rounding. In float32 rounding is of the size of $10^{-7}$, and now and then it tips an activation over zero, so that
even right strategies end up to a ten-thousandth apart. A bound so wide would let small mistakes pass. So three steps once
more in float64, which has nine more digits, and a bound to match:
"""

# %% in-float64
exact = compare.run(
    "digits", world_size=K, steps=3, dtype="float64", device_speed="none", link=None, progress=True
)
for name, comparison in (("float32, all steps", results), ("float64, three steps", exact)):
    apart = comparison.max_abs_diff
    print(f"{name}: no weight is further than {apart:.1e} from the single device's (measured)")

# %% check-same-training
# NBVAL_CHECK_OUTPUT
apart = exact.max_abs_diff
assert apart < 1e-12, f"some strategy ended {apart} away from the single device"
print("every strategy trained the same weights")

# %% check-bytes
# NBVAL_CHECK_OUTPUT
sent = {stage.stage: stage.bytes_sent_max for stage in results.stages}
p = results.gradient_bytes
assert sent["3"] == (K - 1) * p
assert abs(sent["4"] - 2 * (K - 1) / K * p) <= 4 * 2 * (K - 1)
print("the bytes counted are the bytes of the formulas")

# %% [markdown]
r"""
## On your GPUs

The figures above are in virtual time, and the same on every machine. The next one is not: the same stages on the GPUs of this
machine, in real time. There are as many ranks as GPUs, at least two, and a GPT so large that one GPU needs 50 ms or more
for a step. Without a GPU two processes train a small GPT on the processor, which shows that all end with the same weights; times
would say nothing there, so the figure shows what another machine measured.

On one NVIDIA H200, which two ranks had to share, a step of 25,515,264 parameters and 256 samples took 64 ms on the GPU alone,
145 ms with the server, 139 ms with the ring and 104 ms with buckets. Nothing could become faster there, but what buckets
hide can be seen: the ring adds 76 ms to the single device's time, buckets add 41.
(Both differences are taken before rounding.)
Lessons 01 to 09, 12 and 15 have such a cell near their end.
"""

# %% on-your-gpus
yours = on_your_gpus("3,4,5,torch")
assert yours.max_abs_diff < 1e-4, "some strategy's weights are not one device's"
show.compare_figure(yours)

# %% [markdown]
r"""
## A map of the course

| lesson | what you build | the idea | possible because |
|---|---|---|---|
| 01 | [one device](01_single_device.ipynb) | forward, backward, update: where does the time go? | the chain rule goes from layer to layer: one walk back from the loss finds all gradients |
| 02 | [DataParallel](02_data_parallel.ipynb) | split the batch, not the model; averages of gradients are gradients | the gradient of a mean is the mean of the gradients |
| 03 | [parameter server](03_parameter_server.ipynb) | one process per device; one of them collects and averages | an update depends on weights and gradients alone: ranks that agree on both stay equal |
| 04 | [ring all-reduce](04_ring_all_reduce.ipynb) | no server: everyone talks to a neighbour, all the time | a sum can be taken in any order, and piece by piece |
| 05 | [bucketed DDP](05_bucketed_ddp.ipynb) | talk while you still compute | backward finishes one layer after the other, and the sum of a bucket needs no other bucket |
| 06 | [complete DDP](06_complete_ddp.ipynb) | everything that PyTorch's DDP can do, and why | zeros change no sum, and gradients of micro-batches add up before anybody sends them |
| 07 | [sharding](07_sharding.ipynb) | each rank keeps a part of the state only | the optimizer's step is elementwise, and a layer's weights are needed only while it computes |
| 08 | [pipeline](08_pipeline.ipynb) | split the model by layers, not the data | layers compose: a layer needs nothing but what the layer before it gives |
| 09 | [tensor and mesh](09_tensor_and_mesh.ipynb) | split the layers too, and combine the ways | a matrix product splits by columns and by rows |
| 10 | [batch size and learning rate](10_batch_size_and_learning_rate.ipynb) | what more devices do to learning | |
| 11 | [when things fail](11_when_things_fail.ipynb) | killed, hung, slow: read the error, go on exactly where you were | |
| 12 | [many machines](12_many_machines.ipynb) | two hosts, rings inside and between them, torchrun and Slurm | |
| 13 | [predict before you buy](13_predict_before_you_buy.ipynb) | one model of a step, held against what others measured | |
| 14 | [communicate less](14_communicate_less.ipynb) | fewer bytes, less often, without waiting: time won, accuracy lost | |
| 15 | [capstone](15_capstone.ipynb) | your own model and data, predicted, trained, measured | |

Lessons 01 to 05 are one story; read them in order. Each has its exercise in `exercises/`, with the same number.
The [glossary](../docs/GLOSSARY.md) has every term. Three ways through, and how to read on:

- **Twenty minutes**: [on one page](../docs/TWENTY_MINUTES.md), to a ring of your own that beats the server.
- **Two hours**: this lesson, [04](04_ring_all_reduce.ipynb) and [05](05_bucketed_ddp.ipynb), to the step that hides its
  communication. Both open with questions about lessons 01 to 03, which you can leave out.
- **Everything**: a lesson and its exercise at a time, about 34 hours.

*Ctrl+B* shows the list of files and hides it again. After a restart of the kernel a figure with sliders stands still
until its cell is run again.

## Where you are

When you come back, run this cell again: points and the next task of each exercise that you have begun, and how many of your guesses
were right.
It says the same as `ddp-course check` in a terminal; `ddp-course certificate` writes it on a page to keep, with your guesses
and figures. (Outside a copy of the course, such as here where it was stored, one line says how to make one.)
"""

# %% where-you-are
_ = show.command("ddp-course check")

# %% [markdown]
r"""
## This machine

The course needs no GPU. Where there is none, every *rank* is a process on the CPU, and the links between them are
emulated. What each place can show:

| opened | what you have there |
|---|---|
| on Linux | everything, virtual hosts too, where the system allows them (lesson 12) |
| on macOS | everything but virtual hosts |
| in Codespaces | as on macOS: containers forbid virtual hosts; take a machine with at least two cores |
| on Binder | the same with little memory and about one core: set `K = 2` |
| on Colab, Kaggle | the same on two cores; with a GPU, if you ask for one, which all ranks share; no terminal for `make` |

The doctor looks at the machine that this notebook runs on, and has the last word:
"""

# %% this-machine
_ = doctor.main()

# %% [markdown]
r"""
## Check yourself

**1.** All ranks trained on different shares of each batch. Why do they not end with different weights?
<details><summary>Answer</summary>
Before each update they average their gradients. All start with the same weights and add the same update, so they
stay equal. Lesson 02 shows that the average is also the <em>right</em> gradient.
</details>

**2.** A single device has no hatched bar at all, and yet more devices are faster. When would they not be?
<details><summary>Answer</summary>
When computing a share takes less time than sending the gradients: small models, small batches, slow links. Lesson 05
predicts from two numbers, one of the device and one of the link, where that begins.
</details>

**3.** Why is the ring's bar shorter than the server's, although every rank's gradient has to reach every other?
<details><summary>Answer</summary>
With a server, everything passes one link. On the ring all links work at the same time, each carrying a small
piece. Lessons 03 and 04 turn this sentence into two formulas, and measure both.
</details>

## In three lines

1. K ranks with a share each train the same weights as one device.
2. What they wait for is communication: a server, a ring and buckets differ in how long.
3. Every figure says where its numbers come from: measured, in virtual time, counted, simulated or derived.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.

There is no exercise for this lesson. **Next:** [1, one device](01_single_device.ipynb) looks inside one step.
"""
