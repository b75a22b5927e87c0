# %% [markdown]
r"""
# 1 · One device

All later lessons only add something to the middle of one loop. So look at this loop closely first: what a training step is
made of, where its time goes, and what the batch size does to it.

**After this lesson you can**

- name the three parts of a step and read them off a timeline,
- say which part grows with the batch and which does not,
- read a roofline: what is bound by computing, what by memory,
- explain why a larger batch has a less noisy gradient, and how much less.

*30 minutes, under a minute of computing.*
"""

# %% imports
import torch

from ddp_course import Device, problems, stage1_single
from ddp_course.lab import on_your_gpus, show, timeline
from ddp_exercises import check, task

# %% opening-questions
show.questions(1)

# %% [markdown]
r"""
## The loop

A **step** has three parts: *forward* (inputs to loss), *backward* (loss to gradients), and *update* (gradients to new weights).
The whole of stage 1 is a loop of such steps over `batches`, which is anything that yields pairs of inputs and targets. (In the
picture the loss has a number of its own. In the timelines it belongs to neither bar: it is the white gap between forward and
backward.) You may already know how to write a step, so the first task of [exercise 1](../exercises/01_single_device.ipynb) stands below
the picture, too. Write it there and run the cell. If you leave it open, the lesson runs all the same.

**Possible because** the chain rule goes from layer to layer: one walk back from the loss finds all gradients.

![A batch goes forward through the model to a loss; backward makes a gradient for each parameter, the last layer's first; the update changes the weights, and the next batch meets new weights](../docs/figures/training_step.svg)
"""

# %% task-1-1
def train_step(model, optimizer, inputs, targets):
    """Make one update on a batch; return its mean cross-entropy before the update, as a plain number."""
    raise NotImplementedError("Exercise 1.1: A training step")


show.source(task("1.1", train_step), click="Write it first, then open: one solution")

# %% source
show.source(stage1_single.train, click="Open after task 1.1: stage 1")

# %% [markdown]
r"""
## Two real problems

Every stage of the course trains on the same two data sets, which need no download.

- `digits`: 1,797 handwritten digits of 8 by 8 pixels. A small convolutional network names them.
- `bytes`: the source code of Python's own standard library, as bytes. A small GPT guesses each byte from those
  before it. Its loss is often given in **bits per byte**: at 8 the model guesses, and at 0 it knows the text by heart.
"""

# %% digits
digits = problems.make("digits")
inputs, targets = next(digits.batches(global_batch=8, steps=1))
show.images(inputs, targets.tolist(), "Eight digits and their targets")

# %% bytes
text = problems.make("bytes", parameters=100_000)
inputs, targets = next(text.batches(global_batch=1, steps=1))
print("input: ", bytes(inputs[0].tolist())[:48])
print("target:", bytes(targets[0].tolist())[:48])

# %% [markdown]
r"""
## Predict

Each weight takes part in the forward pass once. The backward pass computes two things for every layer: the
gradient of its weights, and the gradient of its inputs, which the layer before it needs.
"""

# %% predict
guess = show.predict(
    "How many times longer than forward does backward take?",
    ["half", "the same", "about twice", "ten times"],
)
guess

# %% [markdown]
r"""
## Run

`timeline.recording()` notes when each part began and ended. We train both models for a few steps. Of each we keep the
step that was disturbed least by whatever else this machine does.
"""


# %% record-a-step
def calmest_step(problem, global_batch, steps=12):
    with timeline.recording() as spans:
        stage1_single.train(problem.model(), problem.batches(global_batch, steps), lr=0.1)
    steps = [spans[start : start + 3] for start in range(0, len(spans), 3)]
    return min(steps, key=lambda step: step[-1].end - step[0].start)


steps = [calmest_step(*setting) for setting in show.progress([(digits, 96), (text, 32)])]

# %% timeline
forward, backward, update = (span.seconds for span in steps[1])
ratio = backward / forward
title = f"One step of each problem: on bytes, backward takes {ratio:.1f} times as long as forward"
calm = 1.4 < ratio < 3.2
if not calm:
    title = "One step of each problem, on a machine that was busy with something else, too"
show.timeline_figure(
    steps,
    title,
    labels=["digits", "bytes"],
    align=True,
    kind="measured",
)

# %% reveal
parts = {"forward": forward, "backward": backward, "update": update}
print("bytes:", ", ".join(f"{name} {1000 * part:.1f} ms" for name, part in parts.items()))
two = "For each product of forward there are two in backward: one for the weights, one for the inputs."
why = {"half": two, "the same": two, "ten times": two}
answer = f"{ratio:.1f} times"
if not calm:
    answer += " here, where something else ran, too; about twice on a calm machine"
guess.reveal(answer, "about twice", why=why)

# %% [markdown]
r"""
Backward computes two results where forward computes one, so it has about twice the operations. The GPT's backward pass also takes
about twice as long as forward, if the machine does nothing else. But time does not follow operations alone: on the digits' small convolutions backward may be as
fast as forward. Remember the picture: gradients appear *during* the long backward pass, the last layer's first. Lesson 05 makes
use of exactly that.

## The loss falls

Both problems learn within seconds. The dashed lines are what a blind guess would cost: $\ln 10$ for ten digits,
$\ln 256$ for bytes. A single step may stick out: some batches of source text, such as a table of numbers, look like
nothing the model has seen. (A cell that begins with `# NBVAL_CHECK_OUTPUT` is a check: it prints one line, or raises an error.
The note is for the tests of the course, and does nothing.)
"""

# %% train-both
models = {"digits": digits.model(), "bytes": text.model()}
losses = {}
for problem, global_batch in ((digits, 96), (text, 32)):
    batches = show.progress(problem.batches(global_batch, 80), total=80)
    model = models[problem.name]
    losses[problem.name] = stage1_single.train(model, batches, lr=problem.learning_rate)

# %% losses
guessing = {"digits": 2.303, "bytes": 5.545}
show.curves(
    {name: (range(1, 81), loss) for name, loss in losses.items()},
    "step", "loss (nats)", "Both problems learn in 80 steps",
    theory={
        f"guessing, {name}": ([1, 80], [loss, loss], "#808080") for name, loss in guessing.items()
    },
    points=False,
)

# %% check-learning
# NBVAL_CHECK_OUTPUT
accuracy = digits.evaluate(models["digits"])["accuracy"]
bits = text.evaluate(models["bytes"])["bits_per_byte"]
assert accuracy > 0.85 and bits < 5, (accuracy, bits)
print("digits it has never seen are mostly right, and bytes take less than 5 of 8 bits each")

# %% [markdown]
r"""
What does the byte model write after so little training? It makes no sense yet. The model has found out which bytes are common
and which often follow each other. Words take longer.
"""

# %% sample
print(text.sample(models["bytes"], prompt="def ", length=120))

# %% [markdown]
r"""
## What the batch size does to time

A step on a batch of B samples does B times the work of one sample. A fixed part is added to it, for the update and for starting
each operation, and small batches pay this part again and again. (Very large batches may pay for something else: what no longer
fits into the processor's caches has to come from memory.)
"""


# %% time-by-batch
def step_seconds(batch):
    return sum(span.seconds for span in calmest_step(digits, batch))


sizes = [2, 8, 32, 128, 512]
per_sample = []
for batch in show.progress(sizes):
    seconds = min(step_seconds(batch) for _ in range(3))
    per_sample.append(1e6 * seconds / batch)
cheapest = sizes[per_sample.index(min(per_sample))]
title = f"A sample is cheapest in a batch of {cheapest}"
if per_sample[-1] > 1.6 * min(per_sample) or cheapest == sizes[0]:
    title = "This machine was busy with something else: ask again for a calm curve"
show.curves(
    {"": (sizes, per_sample)},
    "batch size B (samples)",
    "time per sample (µs)",
    title,
    log="xy",
)

# %% [markdown]
r"""
## What bounds a layer?

A device has two limits: how many operations it computes per second (**flops**), and how many bytes its memory carries
per second. The flops that an operation does per byte are its **arithmetic intensity**. If it is high, the first limit
bounds the operation, and if it is low, the second does. Drawn against it, the highest possible speed is a slanted line that turns into
a flat one: the **roofline**. The next figure has the operations of one step of the byte GPT, with flops and bytes counted in float32. The
line is derived from two numbers of the A100, whose products are in bfloat16. The points lie *on* the line because an emulated device gives
every operation exactly the roofline's time. A real one stays below.
"""

# %% roofline
device = Device("A100")
with device.emulate(record=True, sleep=False) as emulation:
    stage1_single.train(text.model(), text.batches(32, 1), lr=0.1)
with device.emulate(record=True, sleep=False) as product:
    torch.ones(1024, 1024) @ torch.ones(1024, 1024)


def points(operations):
    counted = [operation for operation in operations if operation.flops and operation.nbytes]
    intensities = [operation.flops / operation.nbytes for operation in counted]
    return intensities, [operation.flops / operation.seconds / 1e12 for operation in counted]


intensities = [1, 10, device.rate / device.memory, 1000]
roofline = [min(device.rate, intensity * device.memory) / 1e12 for intensity in intensities]
show.curves(
    {
        "an operation of the step": points(emulation.operations),
        "a product of 1024 x 1024": points(product.operations),
    },
    "arithmetic intensity (flops per byte)", "highest speed (TFLOP/s)",
    "By the roofline this small model is bound by memory",
    theory={"roofline of an A100": (intensities, roofline)}, log="xy", kind="counted; derived",
)

# %% bounds
operations = emulation.operations
shares = []
for bound in ("flops", "memory"):
    seconds = sum(operation.seconds for operation in operations if operation.bound == bound)
    percent = 100 * seconds / emulation.busy_s
    shares.append(f"bound by {bound}: {percent:.0f} % of the step's time")
print(", ".join(shares))
launches = len(operations)
starting = f"to start {launches} operations at 5 µs each: {5 * launches:,} µs (derived)"
print(f"the roofline's time: {1e6 * emulation.busy_s:.0f} µs; {starting}")

# %% [markdown]
r"""
Large matrices have a high intensity. Additions, norms and the optimizer's update, which the figure leaves out, have
hardly any. That is why libraries fuse small operations. It is also why lower precision helps twice: products become faster, and
bytes become fewer.

The last line shows a third regime, which no roofline knows: **overhead**. Starting an operation on a GPU takes about 5 µs of
Python, PyTorch and driver, however little it computes. A model as small as this one would leave a real A100 idle most of the
time (Horace He, "Making Deep Learning Go Brrrr", 2022, tells the three regimes apart).

## What the batch size does to the gradient

A batch's gradient is an estimate of the gradient over *all* data. How far off is it? We draw batches of different
sizes, and compare each gradient with that of the whole training set: the length of the difference over the length
of the true gradient is the relative **noise**.

If samples are drawn at random, the error of a mean of B samples falls as $1/\sqrt{B}$.
"""


# %% gradient-noise
def gradient(model, inputs, targets):
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.reshape(-1) for part in parts])


def noise(batch, draws=40):
    model = digits.model()
    truth = gradient(model, digits.inputs, digits.targets)
    errors = [(gradient(model, *pair) - truth).norm() for pair in digits.batches(batch, draws)]
    return float(torch.stack(errors).mean() / truth.norm())


measured = {batch: noise(batch) for batch in show.progress([1, 4, 16, 64, 256])}

# %% noise-figure
sizes = list(measured)
root = [measured[1] / size**0.5 for size in sizes]
show.curves(
    {"measured": (sizes, list(measured.values()))},
    "batch size B (samples)",
    "relative noise of the gradient",
    "A batch 16 times as large has a quarter of the noise",
    theory={"1/√B": (sizes, root)},
    log="xy",
)

# %% check-noise
# NBVAL_CHECK_OUTPUT
assert 3 < measured[4] / measured[64] < 5.5, measured
print("16 times the batch, about a quarter of the noise")

# %% [markdown]
r"""
(The line is 1/√B through the first point. The last point lies below it, since 256 samples are a good part of the whole training set.)

This is what data parallel training offers: K devices make the batch K times larger in about the same
time, and the gradient $\sqrt K$ times less noisy. Whether the *learning* gets K times faster is another question:
lesson 10.

## When a check fails

From here on each lesson has an exercise, and below each answer stands a check. Here is one that fails, on a wrong answer to
task 1.3: how many bytes do a model's gradients take?
"""


# %% failing-check
# NBVAL_CHECK_OUTPUT
def gradient_bytes(model):
    return 4 * sum(parameter.numel() for parameter in model.parameters())


try:
    check("1.3", gradient_bytes, seed=7)
except Exception as wrong:  # in an exercise the cell ends with it, in one line
    print(wrong)

# %% [markdown]
r"""
Read the message from left to right. It says *where* the answer first differs from a right one (on a model in float64, for which it
returned this number), *what* the fault probably is, and how to get the same numbers again: with `seed=7` in the call. Without
a seed, each check draws new numbers. If a fault is none of the known ones, the check names the first number that differs.

## On your GPUs

Above, steps were measured on this machine's processor, and the roof was that of an emulated device. Here is a step on
this machine's own GPU, or, if it has none, how long one took on another machine's. The model is so large that a step takes 50 ms
or more. In a step of a small model, Python and the starting of kernels would take most of the time.
"""

# %% on-your-gpus
yours = on_your_gpus("1")
assert yours.max_abs_diff < 1e-4, "the weights differ"
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

Torch does exactly this. `loss.backward()` walks the graph that forward recorded, from the loss to the inputs, and adds each
result to `parameter.grad`. Because it *adds*, the loop begins with `zero_grad()`. For finer timelines than ours
there is `torch.profiler`, which sees single kernels.

## Check yourself

**1.** Why does the update's time not depend on the batch size?
<details><summary>Answer</summary>
It touches each weight once, whatever the batch. The same holds for the gradients, which later lessons send: how many
bytes they are depends on the model only.
</details>

**2.** A step on 64 samples takes 8 ms, on 128 samples 14 ms. What would a step on 512 samples take, roughly?
<details><summary>Answer</summary>
A sample takes (14 - 8)/64 = 0.094 ms, so the fixed part is 8 - 64 · 0.094 = 2 ms. A step on 512 samples takes 2 + 512 · 0.094 = 50 ms.
</details>

**3.** You forget `zero_grad()`. What happens to the gradient in step 3?
<details><summary>Answer</summary>
It is the sum of the gradients of steps 1 to 3. Done on purpose this is called gradient accumulation: the way to a
large batch on a small device. Exercise 1 makes use of it.
</details>

## In three lines

1. A step is forward, backward (about twice the operations) and update; gradients appear during backward.
2. The time of a step grows with the batch, but that of the update does not. An operation is bound by computing, by memory, or by the time to start it.
3. The noise of the gradient falls as 1/√B, and this is what more devices buy.

**Exercise:** [1](../exercises/01_single_device.ipynb), `exercises/01_single_device.ipynb`. **Next:**
[2, data parallel](02_data_parallel.ipynb): split the batch.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
