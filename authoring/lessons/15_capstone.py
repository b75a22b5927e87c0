# %% [markdown]
r"""
# 15 · Capstone: your own model

Everything so far used our models and data. Now use yours: predict what a step takes, train with torchrun and torch's own DDP,
shard, measure, explain what the prediction missed, and go on after a kill. The template works as it is; run it once, then
change it.

**After this lesson you can**

- rehearse your own script on GPUs that you do not have,
- predict the step time of a model on K devices and a link before you train it,
- train it with torchrun, by DDP and by `fully_shard`, and explain a gap of more than a tenth,
- go on from a checkpoint after a kill, with the same loss.

*An hour or two with a model of your own; about a minute of computing as it is.*
"""

# %% imports
import importlib
import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.lab import show, theory, timing
from ddp_course.lab.folders import course_folder
from ddp_predictions.answers import predict
from manyranks.presets import ACCELERATORS

K = 2  # how many ranks; each imports torch, so that few cores do not make you wait
K = max(K, torch.cuda.device_count())  # a rank for each GPU
FOLDER = Path("runs")  # where the runs write
DEVICE = "cuda" if torch.cuda.device_count() >= K else "cpu"  # a GPU per rank, or the processor
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # torchrun does so for several ranks, but not for one

# %% opening-questions
show.questions(15)

# %% [markdown]
r"""
## Where you are

The next cell shows your points and the next task of each exercise, and how many of your guesses were right, as in
lesson 00. (Outside a copy of the course, as where this notebook was stored, one line says how to make one.) You can solve
what is still open before this lesson or after it.
"""

# %% where-you-are
_ = show.command("ddp-course check")

# %% [markdown]
r"""
## Your model and your data

The template is a script for torchrun: `exercises/15_capstone.py`. This cell writes a copy beside the notebook, once.
"""

# %% copy
script = Path("my_capstone.py")
if not script.exists():
    shutil.copy(course_folder("exercises") / "15_capstone.py", script)
mine = importlib.import_module(script.stem)

# %% [markdown]
r"""
Two of its functions are yours to change:
"""

# %% model
show.source(mine.make_model)

# %% data
show.source(mine.make_batch)

# %% [markdown]
r"""
Open `my_capstone.py`, change the two functions, and run the rest again. Let a batch depend on nothing but the step and the
rank: then a run that goes on after a kill sees the same data.
"""


# %% torchrun
def torchrun(name, ranks=K, options="", resume=False):
    if not resume:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    command = f"torchrun --standalone --nproc-per-node={ranks} {script} {FOLDER / name}"
    print("exit code", show.command(f"{command} --device {DEVICE} {options}")[0])
    written = FOLDER / name / "run.json"
    return json.loads(written.read_text()) if written.exists() else None


# %% [markdown]
r"""
## Rehearse

Before anything is rented: how would your script run on GPUs that you do not have? `manyranks run` runs it as it is, on ranks that
pretend to have an A100 each. What it computes is real, and its time is virtual. Replace the GPU and the link by what you could rent
(`--device "H100" --link NVLink`), and add `--sizes-only --answer 0` when your model is larger than this machine.
"""

# %% rehearse
rehearsal = f'python -m manyranks run --ranks {K} --device A100 --link "PCIe 4" {script}'
ddp = f"{rehearsal} FOLDER/ddp --steps 3"
sharded = f"{rehearsal} FOLDER/sharded --steps 3 --wrap fully_shard"
_ = show.command(ddp, sharded, timeout=240)

# %% [markdown]
r"""
Read the first line of each report: how long a step takes on such GPUs, and how much of the sending hides under computing. If
most of it is exposed, more GPUs will not help; a larger batch or a faster link will. The table names the lines of your script
that communicate, and *peak memory* says whether the model fits. (Kernels reach all of the datasheet here, and Python costs
nothing: real steps of a model as small as the template's are far longer, as you will see. What you can compare is one
rehearsal with another.)

## Predict

Rank 1 will be killed after step 25. The script saves every 10 steps.
"""

# %% predict
guess = show.predict("With which step does the next run go on (counted from 0)?", [0, 20, 25, 30])
guess

# %% [markdown]
r"""
Now the step time. Two numbers are enough for a first prediction: the time of one rank alone with its share of the batch,
and the all-reduce of as many bytes as there are gradients. A model of few buckets hides little, so add them up.
"""

# %% two-numbers
alone = torchrun("alone", 1, "--wrap none")
nbytes = 4 * alone["parameters"]
average_s = timing.time_collective(dist.all_reduce, nbytes, K, device=DEVICE)
predicted = alone["step_s"] + average_s
print(f"computing {1000 * alone['step_s']:.0f} ms + all-reduce {1000 * average_s:.0f} ms", end=" ")
print(f"= {1000 * predicted:.0f} ms predicted")

# %% [markdown]
r"""
Lesson 13's model predicts without any run. It needs the shape of a transformer, and a GPU's datasheet. If this machine has a GPU that
the course knows by name, the prediction is for K of those; otherwise it is for K A100s, which are not here. Whenever you change
`make_model`, change `SHAPE` too. If your model is no transformer, give the shape of one whose layers have as many weights.
"""

# %% datasheet
SHAPE = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 256}  # of make_model
inputs, _ = mine.make_batch(0, 0)
here = torch.cuda.get_device_name() if DEVICE == "cuda" else "none for each rank"
own = []
for name in ACCELERATORS:
    words = name.replace("-", " ").split()
    if all(word in here for word in words):
        own.append(name)
gpu = max(own, key=len, default="A100-40GB")
batch = {"seq": inputs.shape[1], "micro_batch": len(inputs)}
foretold = predict(model="my model", **SHAPE, **batch, gpu=gpu, gpus=K, way="ddp")
where = "are here" if own else "are not here"
print(f"GPU of this machine: {here};", end=" ")
print(f"the prediction is for {K} of {gpu}, which {where} (derived)\n")
print(foretold)

# %% [markdown]
r"""
The template is bound by launching. A model so small leaves a GPU idle between two kernels, and twice the network or twice the flops
would save nothing. Ask the same of a model 100 times as large before you rent anything. The prediction assumes bfloat16 and fused
attention, while the template trains in float32: where products count, a GPU of yours will be slower than predicted.

## Run

With two GPUs or more there is a rank for each, and NCCL carries the gradients; the model of the template is too small to gain by
that, so give it more layers. Otherwise K processes share the processor, even beside one GPU: `fully_shard` talks through NCCL where
there is a GPU, and NCCL wants one for each rank. The line above the figure says which it was.

The first run trains with DDP, and the second with `fully_shard`. In the third, ranks train side by side without any message, which
shows how much ranks on one machine slow each other down. The fourth has `fully_shard` on a single rank, where it sends nothing.
(Losses are means over the ranks, and each rank has its own samples. So DDP and `fully_shard` end with the same loss on K ranks, and
the two runs on one rank end with another one, which is also the same.)
"""

# %% runs
runs = {name: torchrun(name, K, f"--wrap {name}") for name in ("ddp", "fully_shard", "none")}
runs["sharded alone"] = torchrun("sharded_alone", 1, "--wrap fully_shard")

# %% figure
times = {
    "predicted": predicted,
    "no messages": runs["none"]["step_s"],
    "DDP": runs["ddp"]["step_s"],
    "fully_shard": runs["fully_shard"]["step_s"],
    "one rank,\nno wrapper": alone["step_s"],
    "one rank,\nfully_shard": runs["sharded alone"]["step_s"],
}
gap = times["DDP"] / predicted - 1
longer = "longer" if gap > 0 else "shorter"
print("measured on", runs["ddp"]["devices"])
show.bars(
    {name: 1000 * seconds for name, seconds in times.items()},
    "step (ms)",
    f"DDP's step is {abs(gap):.0%} {longer} than predicted",
    form="{:.0f}",
    kind="measured; predicted is derived",
)

# %% datasheet-measured
print(f"{inputs.numel() / times['DDP']:,.0f} tokens per second and rank with DDP (measured)")
datasheet_ms = 1000 * foretold.step_s
ddp_ms = 1000 * times["DDP"]
if own:
    mfu = foretold.mfu * datasheet_ms / ddp_ms
    print(f"by the datasheet {datasheet_ms:.1f} ms,", end=" ")
    print(f"measured {ddp_ms:.1f} ms on {K} of {gpu}: MFU {mfu:.1%}")
else:
    print("No GPU here to hold the datasheet against:", end=" ")
    print(f"{datasheet_ms:.0f} ms stay a prediction for {K} of {gpu}.")

# %% [markdown]
r"""
## On your GPUs

The figure has DDP on all GPUs of this machine, in real time, beside one rank alone. With one GPU there is one rank, which trains on
it. Without a GPU, the figure has the run with DDP from above, on the processor.
"""

# %% on-your-gpus
gpus = torch.cuda.device_count()
if gpus == 0:
    print("No GPU that CUDA can use is here: this is measured on the processor.")
yours = torchrun("yours", 1, "--wrap ddp --device cuda") if gpus == 1 else runs["ddp"]
same = alone if gpus == 1 else runs["fully_shard"]  # it trains on the same samples
assert abs(yours["loss"] - same["loss"]) < 0.01 * same["loss"], "the GPUs train another model"
before = len(inputs) / alone["step_s"]
after = yours["world_size"] * len(inputs) / yours["step_s"]
show.bars(
    {f"one rank: {alone['devices']}": before, f"DDP: {yours['devices']}": after},
    "samples per second",
    f"Measured on {yours['devices']}: {after / before:.1f} times the samples per second of one rank alone",
    form="{:.0f}",
    kind="measured",
)

# %% [markdown]
r"""
## Explain

Is the gap more than 10 %? Then take one thing away at a time. The step of "no messages" is longer than the computing of
one rank alone, since ranks on one machine share cores and memory. What DDP's bar has beyond it is the communication that
overlap did not hide. Is that more than the all-reduce alone takes? Then the rest is waiting for the other rank, and work
of DDP's own: hooks, and copies into buckets. Is DDP's bar the *shorter* one? Messages cannot shorten a step. Two runs of one
program then differ here by more than the messages cost, and the gap is noise.

`fully_shard` sends half as many bytes again as DDP. If its bar is longer than DDP's by more than half of the all-reduce, bytes are not
the only reason. The last two bars show another one: on one rank `fully_shard` sends nothing, and still takes longer than the bare
model. A profile of that run (`torch.profiler`, as in lesson 11) has hooks, copies, and an optimizer that steps over DTensors. The rest
comes with the second rank: each block has collectives of its own, and in each of these both ranks wait until the other one has come,
while they share the cores. All of this costs as much for a small block as for a large one, so in a larger model it is a smaller part of
the step.
"""

# %% explain
gap_ms = 1000 * (times["DDP"] - predicted)
contention_ms = 1000 * (runs["none"]["step_s"] - alone["step_s"])
messages_ms = 1000 * (runs["ddp"]["step_s"] - runs["none"]["step_s"] - average_s)
own_work_ms = 1000 * (runs["sharded alone"]["step_s"] - alone["step_s"])
more_ms = 1000 * (runs["fully_shard"]["step_s"] - runs["ddp"]["step_s"])
print(
    f"gap {gap_ms:+.1f} ms: ranks beside each other {contention_ms:+.1f} ms, "
    f"messages {messages_ms:+.1f} ms beyond the all-reduce alone (measured)"
)
print(
    f"fully_shard takes {more_ms:+.1f} ms beyond DDP; on one rank, without a message, "
    f"{own_work_ms:+.1f} ms beyond the bare model; "
    f"half of the all-reduce is {1000 * average_s / 2:.1f} ms (measured)"
)

# %% elsewhere
for gigabits, ranks in ((1, 8), (10, 8), (100, 64)):
    costs = theory.Costs.of_link(1e9 * gigabits, 50e-6)
    step_s = alone["step_s"] + theory.seconds("ring", nbytes, ranks, costs)
    print(f"{ranks:3} hosts with {gigabits:3} Gbit/s: {1000 * step_s:.0f} ms per step (derived)")

# %% [markdown]
r"""
On hosts of their own, ranks do not share cores: the prediction from two numbers is better there.

## Kill it

The first run ends with a torchrun that reports a dead rank. The second run is the same command again. It computes the steps since the
last checkpoint a second time. The share of computed steps that were kept is the goodput, one of lesson 13's three numbers; here it
leaves out the time of the restart.
"""

# %% killed
killed_after = 25
command = f"--wrap ddp --kill-after {killed_after}"
assert torchrun("killed", K, command) is None, "it was not killed before its end"
again = torchrun("killed", K, command, resume=True)
guess.reveal(f"step {again['resumed']}", again["resumed"])
steps = again["steps"]
computed = killed_after + steps - again["resumed"]
goodput = steps / computed
print(f"{steps} of {computed} steps were kept: the goodput is at most {goodput:.0%} (counted)")

# %% check
# NBVAL_CHECK_OUTPUT
written = {}
for name in ("ddp", "fully_shard", "killed"):
    written[name] = json.loads((FOLDER / name / "run.json").read_text())
assert all(run["world_size"] == K and run["step_s"] > 0 for run in written.values()), written
loss = written["ddp"]["loss"]
assert abs(loss - written["fully_shard"]["loss"]) < 1e-3 * loss, written
assert written["killed"]["resumed"] > 0, "it was not killed, or did not go on from a checkpoint"
assert abs(loss - written["killed"]["loss"]) < 1e-3 * loss, written
print("DDP, fully_shard and the run that was killed end with the same loss")

# %% [markdown]
r"""
## What torch does

All of it: `DistributedDataParallel`, `torch.distributed.fsdp.fully_shard`, and
`torch.distributed.checkpoint.state_dict`, which gives one state dict for both, so that a run may go on with another wrap
or another number of ranks. Large models are saved by `torch.distributed.checkpoint.save`, each rank its own part.

## Check yourself

**1.** Your step is 40 % longer than predicted, and so is the one without messages. What do you change?
<details><summary>Answer</summary>
Nothing about communication. The ranks are in each other's way, or wait for data: give them cores, fewer threads, a faster loader.
</details>

**2.** After the resume the loss is not the same. Name three possible reasons.
<details><summary>Answer</summary>
The optimizer's state was not saved; the data began anew; random numbers, such as those of dropout, began anew.
</details>

**3.** When does <code>fully_shard</code> pay here?
<details><summary>Answer</summary>
Not for a model this small: it sends more, and memory was no problem. It pays as soon as DDP does not fit.
</details>

## In three lines

1. Predict first, from two numbers; then a gap between prediction and measurement is a question to answer.
2. DDP, `fully_shard` and a run that was killed end with the same loss, or something is wrong.
3. Explain a gap by taking one thing away at a time: messages, neighbours, data.

**Exercise:** [15](../exercises/15_capstone.ipynb), `exercises/15_capstone.ipynb`.

This was the last lesson. You have built what trains large models, and measured it.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
