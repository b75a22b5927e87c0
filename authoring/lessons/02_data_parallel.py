# %% [markdown]
r"""
# 2 · Data parallel

The oldest way to use several devices: keep one process, cut every batch into shards, and let each device work on
one of them. Is the result still the same? And what does it cost?

**After this lesson you can**

- prove, and check on a real model, that averaged gradients of shards are the gradient of the batch,
- say when this is *not* true,
- draw what DataParallel does with a batch, and name the device that is overloaded,
- say what Python's global lock prevents, and what it does not.

*35 minutes, under a minute of computing.*
"""

# %% imports
import threading
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from ddp_course import DataParallel, launch, problems, stage1_single
from ddp_course import stage2_dataparallel
from ddp_course.lab import claims, compare, on_your_gpus, show, timeline, timing
from ddp_exercises import task

K = 4  # how many devices; 2 works as well

# %% opening-questions
show.questions(2)

# %% [markdown]
r"""
## Why averaging is right

The loss of a batch is the mean of its samples' losses. Cut B samples into K shards of B/K. Then

$$\underbrace{\frac1B \sum_{i=1}^{B} \nabla\ell_i}_{\text{the batch}}
= \frac1K \sum_{k=1}^{K} \underbrace{\frac{1}{B/K} \sum_{i \in \text{shard } k} \nabla\ell_i}_{\text{gradient of shard } k}$$

The gradient of the batch *is* the mean of the shards' gradients, and no approximation of it. This needs two things: the
loss is a mean, and the shards are equally large.

**Possible because** the gradient of a mean is the mean of the gradients.

## Predict

Now let the shards have 1, 7 and 16 samples.
"""

# %% predict
guess = show.predict(
    "Unequal shards: does the plain mean of their gradients still equal the batch's gradient?",
    ["yes", "no"],
)
guess

# %% [markdown]
r"""
## Run

We compute in float64, where rounding errors are of the size $10^{-16}$, so that nothing hides behind them.
"""


# %% shards-against-batch
exact = problems.make("digits", dtype=torch.float64)
model = exact.model()
inputs, targets = next(exact.batches(global_batch=24, steps=1))


def gradient(inputs, targets):
    loss = cross_entropy(model(inputs), targets)
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def error(sizes, weights):
    parts = [gradient(*pair) for pair in zip(inputs.split(sizes), targets.split(sizes))]
    mean = sum(weight * part for weight, part in zip(weights, parts))
    return float((mean - gradient(inputs, targets)).abs().max())


# %% compare-gradients
equal = error([24 // K] * K, [1 / K] * K)
unequal = error([1, 7, 16], [1 / 3, 1 / 3, 1 / 3])
weighted = error([1, 7, 16], [1 / 24, 7 / 24, 16 / 24])
print(f"equal shards, plain mean:     {equal:.1g}")
print(f"unequal shards, plain mean:   {unequal:.1g}")
print(f"unequal shards, weighted:     {weighted:.1g}")
why = {"yes": "One sample of a small shard would weigh more than one of a large shard."}
guess.reveal(f"off by {unequal:.1g}", "no", why=why)

# %% claim-1
# NBVAL_CHECK_OUTPUT
assert weighted < 1e-12
claims.decide(
    1, "The mean of the devices' means is the mean of the batch.", "measured",
    {"all shards are equally large": equal < 1e-12, "shards differ in size": unequal < 1e-12},
    "A sample in a small shard counts more in a plain mean: weight each shard by its number of samples.",
)

# %% [markdown]
r"""
This was one of the course's *claims*: sentences that one reads about distributed training. Each is put to the test in the
lesson where it belongs, and `ddp-course claims` lists them all by their numbers. The cell decides under each condition
whether the claim holds, prints the verdict, and says why.

So K devices with B/K samples each do *the same step* as one device with B samples, at the same learning rate. You
will read that the rate has to be multiplied by K "because the gradient is divided by K". Here is the experiment:
train with the gradients of four shards averaged, and on whole batches, and compare the weights at the end. It is done
twice: with the mean of the losses, which is what everyone uses, and with their sum.
"""


# %% rates
def weights(shards, rate, reduction):
    model = exact.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for inputs, targets in exact.batches(global_batch=24, steps=8):
        pairs = zip(inputs.chunk(shards), targets.chunk(shards))
        losses = [cross_entropy(model(x), y, reduction=reduction) for x, y in pairs]
        optimizer.zero_grad()
        (sum(losses) / shards).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


rates = {"mean": 0.02, "sum": 0.02 / 24}
apart = {}
for reduction, rate in rates.items():
    for factor in (1, 4):
        by_shards = weights(4, factor * rate, reduction) - weights(1, rate, reduction)
        apart[reduction, factor] = float(by_shards.abs().max())
for (reduction, factor), most in apart.items():
    print(f"{reduction} of the losses, rate times {factor}: weights differ by {most:.1g}")

# %% claim-2
# NBVAL_CHECK_OUTPUT
claims.decide(
    2,
    "Averaging over N devices divides the gradient by N, so the learning rate must be multiplied by N.",
    "measured",
    {f"the loss is a {name}": apart[name, 4] < 1e-12 < apart[name, 1] for name in rates},
    "The mean of the shards' means is the mean of the batch: the same rate makes the same step. Only a summed loss loses a factor of N.",
)

# %% [markdown]
r"""
## One step, drawn

`DataParallel` does this with every batch, here on three devices. Only forward and backward run on all of them: the master's row is
the fullest. Such a picture stands in every lesson up to 09, with thick outlines around what is new in it.

![The master, device 0, gives each other device a shard of the batch and a copy of the model. Every device goes forward. The master gathers all outputs, computes the loss and sends its gradient out. Every device goes backward. The master adds up the three gradients and makes the update alone; the copies are thrown away](../docs/figures/iteration_02.svg)

In code each purple box is one or two functions. Tasks 2.1 and 2.2 of [exercise 2](../exercises/02_data_parallel.ipynb) ask you to write
two of them, and you learn more if you do so before you look. Here is the first. Sizes differ by one at most, the longer shards come
first, and a device without samples gets no shard.
"""

# %% task-2-1
def scatter(tensor, devices):
    """Cut `tensor` along dimension 0; return a list with one shard per device, each on its device."""
    raise NotImplementedError("Exercise 2.1: Scatter")


show.source(task("2.1", scatter), click="Write it first, then open: one solution")

# %% source
show.source(stage2_dataparallel.scatter, stage2_dataparallel.replicate, DataParallel.forward,
            stage2_dataparallel.gather, stage2_dataparallel.reduce,
            click="Open after tasks 2.1 and 2.2: scatter, replicate, forward, gather, reduce")

# %% [markdown]
r"""
## What changed

From stage 1 to stage 2 only two lines change in the loop itself. The model is wrapped, and after `loss.backward()`, which
ends at the gathered outputs, the wrapper carries on through the replicas.
"""

# %% diff
show.diff(stage1_single.train, stage2_dataparallel.train)

# %% same-training
digits = problems.make("digits")
single = digits.model()
many = digits.model()
stage1_single.train(single, digits.batches(48, 30), lr=0.05)
stage2_dataparallel.train(many, digits.batches(48, 30), lr=0.05, devices=["cpu"] * K)
difference = parameters_to_vector(many.parameters()) - parameters_to_vector(single.parameters())

# %% check-same-training
# NBVAL_CHECK_OUTPUT
assert difference.abs().max() < 1e-4, difference.abs().max()
print("one device and DataParallel: the same weights after 30 steps")

# %% [markdown]
r"""
## The master's load

Who holds what? Halfway through a step, after forward, we count the bytes of weights and outputs on each device (the
shards of the inputs, a few kB, are left out). The input of the whole batch and all outputs lie on the master and are
counted there. We do not count activations. Each device keeps its own,
and in a large model they dominate (lesson 09), so there the master's excess is less visible. After backward the master
also receives K-1 gradients and adds them up, one after another.
"""


# %% count-memory
def nbytes(*tensors):
    return sum(tensor.nbytes for tensor in tensors)


text = problems.make("bytes", parameters=100_000)
tokens, following = next(text.batches(global_batch=24, steps=1))
parallel = DataParallel(text.model(), ["cpu"] * K)
outputs = parallel(tokens)
pairs = zip(parallel.replicas, parallel.outputs)
held = [nbytes(*replica.parameters(), output) for replica, output in pairs]
held[0] += nbytes(tokens, following, outputs)

# %% memory-figure
labels = ["master"] + [f"device {k}" for k in range(1, K)]
times = held[0] / held[-1]
show.bars(
    dict(zip(labels, [count / 2**20 for count in held])),
    "weights, inputs and outputs (MiB)",
    f"Weights, inputs and outputs: the master holds {times:.1f} times as many bytes as another device",
    colours={"master": show.STAGE_COLOURS["2"]},
    kind="counted",
)

# %% check-master
# NBVAL_CHECK_OUTPUT
assert held[0] > 1.3 * max(held[1:])
print("the master holds more than any other device")

# %% [markdown]
r"""
In every step the master also copies all weights to all others again. With p bytes of weights, (K-1) p bytes go out through
its link, and (K-1) p bytes of gradients come back.

## Claim: "a single process can use only one core"

This is said to be why DataParallel is slow: Python's *global interpreter lock* (GIL) lets only one thread run Python
code at a time. But most of a training step is not Python code. In the experiment one thread calls something that takes a
fraction of a second. Does another thread get a turn *during* that one call?
"""


# %% turns
def turns_of_another(work):
    turns = []
    over = threading.Event()

    def watch():
        while not over.wait(0.001):
            turns.append(time.perf_counter())

    watching = threading.Thread(target=watch)
    watching.start()
    start = time.perf_counter()
    work()
    quarter = (time.perf_counter() - start) / 4
    over.set()
    watching.join()
    # Only what came in the middle half of the call.
    return sum(start + quarter < turn < start + 3 * quarter for turn in turns)


# %% turns-counted
big = torch.ones(2000, 2000)
turns = {
    "Python's own": turns_of_another(lambda: sum(range(20_000_000))),
    "torch's": turns_of_another(lambda: big @ big),
}
print(f"turns of another thread during one call: {turns}")

# %% claim-3
# NBVAL_CHECK_OUTPUT
claims.decide(
    3, "A single Python process can use only one core.", "measured",
    {f"the work is {whose}": count <= 1 for whose, count in turns.items()},
    "Python keeps its lock during a call of its own; torch lets go of it inside its operations, forward and backward.",
)

# %% [markdown]
r"""
(Since version 3.13 Python is also built *without* this lock, and since 3.14 this build is officially supported: PEP 703 and PEP 779. There the
other thread gets its turns during Python's own work too, so the claim is false without a condition. `sys._is_gil_enabled()` says which
build you have.)

Between two steps of Python code the lock changes hands, every 5 ms. So two threads of Python code take turns, but never
run at the same moment. How many cores do two threads keep busy? That is their **processor time over wall time**: 1 if
they take turns, up to 2 if they run side by side (on a machine with two free cores). Each pair works for 0.3 s. The size of
torch's operations matters: a large product runs for a while without the lock, a tiny one hands it back at once.
"""


# %% cores
def python_work(until):
    while time.perf_counter() < until:
        sum(number * number for number in range(1000))


def torch_work(size, until):
    matrix = torch.ones(size, size)
    while time.perf_counter() < until:
        matrix = matrix @ matrix / size


def cores(*works):
    torch.set_num_threads(1)
    busy = time.process_time()
    begin = time.perf_counter()
    stage2_dataparallel.in_threads(lambda work: work(begin + 0.3), works)
    return (time.process_time() - busy) / (time.perf_counter() - begin)


# %% cores-kept-busy
large, tiny = (partial(torch_work, size) for size in (500, 4))
pairs = {
    "both Python": (python_work, python_work),
    "Python and\nlarge products": (python_work, large),
    "both tiny\nproducts": (tiny, tiny),
    "both large\nproducts": (large, large),
}
busy = {}
for name, works in show.progress(pairs.items()):
    busy[name] = max(launch(cores, *works, world_size=1)[0] for _ in range(3))
of_python, _, of_tiny, of_large = busy.values()
title = f"Two threads keep {of_large:.1f} cores busy with large products, {of_tiny:.1f} with tiny ones, {of_python:.1f} with Python"
if of_large < 1.2:
    title = "Nothing to see here: this machine is too busy, or has one core"
show.bars(
    busy,
    "cores busy (processor/wall time)",
    title,
    kind="measured",
)

# %% [markdown]
r"""
So threads help where torch's operations are large, and much less where they are many and tiny: then most of the time is
Python's, and a process per device is the way out. Beside a thread of Python code even large products help little (the
second bar): after each of them their thread waits for the lock, for up to 5 ms. And too many threads? torch itself uses
threads inside its operations. If every rank of K takes a thread for each core, there are K times as many threads as
cores, and they push each other aside: **thrashing**. Here each of the K ranks computes the same matrix products with 1,
2, 4 or 8 threads, all at the same time.
"""


# %% thrashing
def with_threads(count):
    torch.set_num_threads(count)
    matrix = torch.ones(384, 384)
    tries = []
    for _ in range(3):
        dist.barrier()  # all ranks at once
        with timing.stopwatch() as watch:
            for _ in range(20):
                matrix = matrix @ matrix / 384
            dist.barrier()
        tries.append(watch.seconds)
    return min(tries)


# %% thrashing-figure
threads = {}
for count in show.progress((1, 2, 4, 8)):
    threads[count] = 1000 * max(launch(with_threads, count, world_size=K))
worst = max(threads, key=threads.get)
times = threads[worst] / threads[1]
title = f"With {worst} threads each, {K} ranks take {times:.1f} times as long as with 1"
if threads[1] > 1.5 * min(threads.values()):
    title = "Nothing to see here: this machine was busy with something else, too"
show.bars(
    {f"{count} per rank": ms for count, ms in threads.items()},
    "time for the same work (ms)",
    title,
    form="{:.0f}",
    kind="measured",
)

# %% [markdown]
r"""
More threads gain nothing, and may lose a lot: threads that have finished their part wait *spinning*, on cores that others
need. (Where a rank alone has more threads than the machine has cores, OpenMP soon lets waiting threads sleep, so the bars on the
right may be shorter.) This is why `torchrun` sets OMP_NUM_THREADS to 1, and `launch` gives each rank its share of the cores.

## Is it the threads, then?

Two limits of `DataParallel` have nothing to do with threads: the replicas are made anew in every step, and the master does
everything else alone. To see these two limits by themselves, we give each thread an emulated device of its own, with links between the
devices. Now the threads do compute at the same time, on any number of cores.
"""

# %% on-devices
results = compare.run("digits", world_size=K, steps=6, stages="1,2", device="cpu", progress=True)
alone, many = results.stages
lanes = []
for lane in many.timeline:
    lanes.append([timeline.Span(*span) for span in lane])
title = f"{K} devices are only {many.speed_up:.1f} times as fast as one, since the master copies"
show.timeline_figure(lanes, title, labels=labels)

# %% check-on-devices
# NBVAL_CHECK_OUTPUT
forward = []
copying = []
for lane in lanes:
    forward.append([span for span in lane if span.name == "forward"])
    copying.append(sum(span.seconds for span in lane if span.name == "communication"))
assert max(spans[0].start for spans in forward) < min(spans[-1].end for spans in forward), forward
assert copying[0] > 0 and max(copying[1:]) == 0, copying
print("all devices compute at the same time, and only the master copies before and after")

# %% [markdown]
r"""
(Virtual time, as in lesson 00.) The master copies the model out before each forward pass and the gradients in after each
backward pass, one device after the other. In between it computes its own share, as all others do; while it copies, they have
nothing to do. (At the thin line outputs come in, and their gradient goes out.) Threads are not the limit here: the link of one
device is.

## On your GPUs

Now `DataParallel` trains on the devices of this machine, in real time. The master is the first GPU, and copies go over whatever joins
the GPUs. Copies count as compute here, and their bytes are not counted, since torch makes them and not the course's wire. Without a
GPU the figure shows what one NVIDIA H200 needed, which two replicas shared.
"""

# %% on-your-gpus
yours = on_your_gpus("2")
assert yours.max_abs_diff < 1e-4, "DataParallel's weights are not one device's"
show.compare_figure(yours)

# %% [markdown]
r"""
## What torch does

`torch.nn.DataParallel` is this algorithm, on GPUs. Its documentation recommends `DistributedDataParallel` instead,
even on a single machine. `DataParallel` does not average: its loss is that of the gathered outputs, so the *sum* of the
replicas' gradients is right, as it is in ours.

## Check yourself

**1.** Why does `reduce` add, when we have just proved that averages are right?
<details><summary>Answer</summary>
The loss was taken over the whole batch, on the master, so each sample's part was already divided by B. Averages
are right when every shard takes the mean over its own B/K samples.
</details>

**2.** Your last batch has 10 samples, and K = 4. What does the mean of the ranks' means do wrong?
<details><summary>Answer</summary>
The shards have 3, 3, 2 and 2 samples. A sample in a small shard counts for 1/8, in a large one for 1/12. Weight
each mean by its number of samples, or leave the last two samples out.
</details>

**3.** Does DataParallel help if the model does not fit into the memory of one device?
<details><summary>Answer</summary>
No. Every device holds a whole copy, and the master holds even more. Lessons 07 and 08 help.
</details>

## In three lines

1. The mean of equal shards' gradients *is* the batch's gradient, so the learning rate stays as it is.
2. DataParallel copies weights out and gradients in through one device, the master, in every step.
3. Large operations of torch let go of Python's lock, tiny ones for moments only; more threads than cores push each other aside.

**Exercise:** [2](../exercises/02_data_parallel.ipynb), `exercises/02_data_parallel.ipynb`. **Next:**
[3, the parameter server](03_parameter_server.ipynb): a process per device.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
