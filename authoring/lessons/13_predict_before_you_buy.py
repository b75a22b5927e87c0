# %% [markdown]
r"""
# 13 · Predict before you buy

A thousand GPUs cost as much in a week as a house. You should know how long a step will take before you rent them. This lesson
builds predictions from a few numbers, each fitted to runs that others have published. Then it compares the predictions with
published runs that the fit did not see, and in the end it uses them to choose between all ways of this course. Nothing here
is timed on your machine.

**After this lesson you can**

- read a scaling curve and find its knee,
- write the computing and the sending of an FSDP step as formulas, and say which term bounds which run,
- say how many GPUs a batch feeds before they wait for the network,
- judge a prediction by rows that its fit did not see,
- choose between DDP, sharding, and tensor and pipeline parallelism.

*50 minutes, under a minute of computing.* Some cells show only three dots: run them like all others; a click on the dots shows the code.
"""

# %% imports
from operator import itemgetter
from statistics import median

from ddp_course.lab import claims, facts, show, simulate, theory
from ddp_exercises import check, fill_in, task
from ddp_predictions import figures, frozen, scoreboard
from ddp_predictions.answers import predict
from ddp_predictions.plans import decide, score
from manyranks.presets import ACCELERATORS, LINKS

# %% opening-questions
show.questions(13)

# %% [markdown]
r"""
## A question worth money

You have a model of 174.6 billion parameters, 1,536 A100s, and a batch of 1,536 sequences. You can train it in two ways. With
**ZeRO-3** each GPU keeps a 1,536th of the model and gathers the rest layer by layer (lesson 07). With **three ways at once** each layer
is split over the 8 GPUs of a host, the layers are split over 12 hosts, and the batch over 16 such pipelines (lessons 08 and 09).

## Predict
"""

# %% predict
guess = show.predict(
    "Which is faster on 1,536 GPUs?",
    [
        "ZeRO-3, by far",
        "about the same",
        "three ways, about 1.5 times",
        "three ways, about 3 times",
    ],
)
guess

# %% [markdown]
r"""
## One step, simulated

A step of bucketed DDP is a timetable: backward fills buckets, the buckets travel one after another, and the update follows. All
ranks do the same at the same time, so the simulator plays one of them, and computes the time of each bucket by the formulas of
lesson 04. Two numbers are not on any datasheet: what a V100's link really carries, and how much a running all-reduce slows
computing down. They are fitted to published steps of four networks on 1 and 2 GPUs. A latency of 10 µs per message is assumed, and
everything else is computed.
"""

# %% calibrate
bandwidth, interference = frozen.numbers("steps of V100s")
print(
    f"fitted at 1 and 2 GPUs: a link carries {bandwidth / 1e9:.1f} GB/s,"
    f" and a bucket on its way takes {interference:.0%} of a GPU's speed"
)

# %% scaling folded=true
wire = theory.Costs(1e-5, 1 / bandwidth)  # 10 µs per message are assumed
resnet = simulate.resnets.profile("resnet50", 0.097)
devices = [2**k for k in range(13)]
steps = {}
# So many streams cross between two hosts at once.
for name, streams in (("ring", 1), ("hierarchical", 8)):
    between = theory.Costs(2 * wire.alpha, max(8 / 400e9, wire.beta / streams))
    hosts = simulate.Network(between, wire, per_host=8)
    steps[name] = [
        simulate.simulate(resnet, k, hosts, name, interference=interference) for k in devices
    ]
show.scaling_figure(steps, title="ResNet-50: two levels reach further than a flat ring")

# %% [markdown]
r"""
Each host has 8 V100s, and 4 network cards of 100 Gbit/s. The **knee** (circle) is the last K before efficiency falls below
90 %, the dotted line. Up to the knee, all buckets but the last hide behind the backward pass. The rest, up to 100 %, is lost
to that last bucket, and to what running all-reduces take from the computing. Beyond the knee the latencies of the flat ring,
2(K-1) for each bucket, become visible. A ring in two levels (the hierarchical ring) has few latencies, and its curve falls
later.

Finding the knee is half written here. Every GPU has a batch of its own, so without any loss a step would always take as long as on one
GPU.
"""


# %% faded-knee
def knee(alone, points, least=0.9):
    """Return the last K before the efficiency falls below `least`. A step takes `alone` seconds on one
    GPU, and `points` are (K, seconds of a step).
    """
    last = 1
    for devices, step in points:
        efficiency = ...
        if efficiency < least:
            break
        last = devices
    return last


points = ((8, 2.1), (64, 2.2), (512, 2.5))
fill_in(knee, {(2.0, points): 64, (2.0, points[:1]): 8, (1.9, points): 8, (1.0, points): 1})

# %% [markdown]
r"""
<details><summary>The line</summary><code>efficiency = alone / step</code></details>

The same condition decides on a sentence that you will often read:
"""

# %% claim-20
# NBVAL_CHECK_OUTPUT
flat = {step.world_size: step.efficiency for step in steps["ring"]}
claims.decide(
    20, "Speed-up is linear: K devices are K times as fast.", "simulated",
    {f"K = {k}": flat[k] >= 0.9 for k in (2, 8, 32, 128, 1024, 4096)},
    "At 90 % of linear or more (ResNet-50, a flat ring). Its 2(K-1) latencies per bucket grow with K.",
)

# %% [markdown]
r"""
How far can you trust this simulation? In the next figure the published times are points, including those of 2 GPUs, which the
fit saw. The predictions for 4, 8 and 16 GPUs are lines. They start from the published step on 2 GPUs, and multiply it by the
simulated growth. (The curve above starts from one GPU instead, and there ResNet-50 is 1.7 points higher.) Efficiency is the
step of one GPU without DDP, divided by a step with DDP. The dotted lines are a second predictor, which knows nothing and says
"as on 2 GPUs, always".
"""

# %% published folded=true
tables = {table.name: table for table in scoreboard.scoreboard()}
ddp_rows = [row for row in tables["ddp_step_seconds_v100"].rows if not row["calibrated"]]
measured = {}
simulated_lines = {}
errors = {"the simulator": [abs(row["error"]) for row in ddp_rows], "“as on 2 GPUs”": []}
colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]
for row, colour in zip(facts.rows("ddp_step_seconds_v100"), colours):
    model, alone, _, *seconds = row.values()
    measured[model] = ([2, 4, 8, 16], [100 * alone / step for step in seconds], colour)
    simulated = [100 * alone / case["predicted"] for case in ddp_rows if case["model"] == model]
    simulated_lines[f"{model}, simulated"] = ([4, 8, 16], simulated, colour)
    errors["“as on 2 GPUs”"] += [abs(seconds[0] / step - 1) for step in seconds[1:]]
title = "Median error: " + ", ".join(f"{median(off):.1%} for {way}" for way, off in errors.items())
picture = show.curves(measured, "GPUs", "efficiency (%)", title, theory=simulated_lines, log="x",
                      ticks=[2, 4, 8, 16], kind="published; simulated")
for _, percents, colour in measured.values():
    picture.axes[0].plot([2, 16], [percents[0]] * 2, ":", color=colour, linewidth=1.2)
picture.axes[0].plot([], [], ":", color="#777777", label="as on 2 GPUs")
picture.axes[0].set_ylim(80, 101)
picture.axes[0].legend(ncols=2, loc="lower left")
picture

# %% [markdown]
r"""
Look closely: the predictor that knows nothing does as well as the simulator. From 2 to 16 GPUs the times hardly grow, since backward
hides the communication, and a table without a knee cannot tell a good simulator from a bad one. What our simulator says about 4,096
GPUs is not tested by anything here. To test a model we need tables in which something happens.

## A table in which something happens

Such a table is that of NCCL's ring on 8 A100s of one host, for messages from 32 KiB to 8 GiB. A latency and a rate alone, α + βp, fail
in the middle, because NCCL has three **protocols**. *LL* sends a flag with every 4 bytes, so that nobody waits for a signal, and
carries half as much. *LL128* sends one flag with every 120 bytes. *Simple* sends no flags, and signals when a whole block has arrived.
Each protocol has a latency and a rate, and NCCL uses the fastest. (By the fit LL takes ten times as long per byte as Simple, not
twice as long, so flags alone do not explain it.)
"""

# %% protocols folded=true
known = {row["KiB"]: row["time_us"] for row in facts.rows("nccl_ring_a100x8_sizes")}
numbers = frozen.numbers("protocols")
sizes = [2**k for k in range(5, 24)]
lines = {}
for name, latency, rate in zip(("LL", "LL128", "Simple"), numbers[:3], numbers[3:], strict=True):
    lines[name] = (sizes, [latency + rate * kib for kib in sizes])
picture = show.curves(
    {"published": (list(known), list(known.values()), "#000000")},
    "message (KiB)",
    "all-reduce (µs)",
    "Each of the three protocols is the fastest for some messages",
    theory=lines,
    log="xy",
    kind="measured (published); lines fitted",
)
picture.axes[0].set_ylim(30, 1e5)
picture

# %% check-protocols folded=true
# NBVAL_CHECK_OUTPUT
place = sizes.index(2048)
at_2_mib = {name: round(times[place] / known[2048], 1) for name, (_, times) in lines.items()}
print("predicted over measured at 2 MiB:", at_2_mib)

# %% [markdown]
r"""
One point, that of 8 MiB, lies a sixth below all lines, and the model cannot explain it. So near 8 MiB expect a prediction that is a
fifth too long.

## A transformer's step, term by term

A layer has W weights and the width h. A micro-batch has n tokens, in sequences of s tokens. What a GPU computes can be counted:

| term | forward | backward |
|---|---|---|
| products with weights | 2 W n flops | twice as many |
| attention (half of the scores is masked) | 2 s h n flops | 2.5 times as many |
| bytes through memory | a third of b n h | two thirds |
| launching, which no rate explains | a third of a few ms | two thirds |

FSDP gathers 2 W bytes before each of the two passes, and scatters as many bytes of gradients after the second pass. (Where gradients
are summed in float32, *reduce bytes 4* below, it scatters twice as many.) While one layer computes, the next layer's bytes travel. The
longer of the two times counts, and a part (0.15) of the shorter one.

Three more things are counted: 12 bytes through memory per weight (in the figures below they are part of *launch*), 24 bytes per
output word (logit) in each micro-batch, and 10 µs per GPU of a ring. A term stays in the model only if errors grow without it
(`docs/PREDICTIONS.md`).

Five numbers cannot be counted. They are fitted to 102 recent published runs:
"""

# %% constants folded=true
values = frozen.constants()
print(f"products     {values['matmul']:.0%} of the datasheet's flops")
print(f"attention    {values['attend']:.0%} of an A100's flops")
print(f"b            {values['touched']:.0f} bytes through memory per value of an activation")
print(f"launching    {1000 * values['launch']:.1f} ms per layer and micro-batch")
print(f"ZeRO-1       {1000 * values['shard']:.1f} ms per shard")

# %% [markdown]
r"""
(b is not physics alone: the fit puts everything into it that no other term names.)

Write the first two terms and the sending yourself (task 13.5). Products run at 0.75 of 312 Tflop/s, and attention at 0.32 of it. A
gather or scatter sends (K-1)/K of its bytes at `rate`.
"""

# %% task-13-5
def passes(weights, width, tokens, context):
    """Return the seconds of the forward and of the backward pass."""
    raise NotImplementedError("Exercise 13.5: A layer under FSDP")


def fsdp_layer(forward, backward, weights, gpus, rate):
    """Return the seconds of both passes of a layer with all that is sent."""
    raise NotImplementedError("Exercise 13.5: A layer under FSDP")


show.source(task("13.5", passes, fsdp_layer), click="Write it first, then open: one solution")

# %% [markdown]
r"""
The lesson goes on with two functions of its own, `both_passes` and `whole_layer`, which do the same as yours. Open the next cell when
you have written yours.
"""


# %% terms folded=true
def both_passes(weights, width, tokens, context):
    products = 2 * weights * tokens / (0.75 * 312e12)
    attention = 2 * context * width * tokens / (0.32 * 312e12)
    return products + attention, 2 * products + 2.5 * attention


def whole_layer(forward, backward, weights, gpus, rate):
    ring = (gpus - 1) / gpus * 2 * weights / rate
    before = max(forward, ring) + 0.15 * min(forward, ring)
    return before + max(backward, 2 * ring) + 0.15 * min(backward, 2 * ring)


# %% check-terms
# NBVAL_CHECK_OUTPUT
check("13.5", both_passes, whole_layer, seed=13)

# %% [markdown]
r"""
## Predict before you look

We predict MPT-7b on 8 A100s of 40 GB, which are one host: first by these two functions alone, and then by the whole model. What was
published is shown one cell later. (With recomputing, the forward pass is run again before the backward pass.) This row was in the
fit, so the cell also predicts a run that no fit saw: Llama 3.1 8B on 128 H100s, by other people with other code.
"""

# %% one-run
chosen = {"model": "MPT-7b", "gpus": 8, "seq": 2048}
run = next(row for row in facts.rows("transformer_throughput") if chosen.items() <= row.items())
weights = 12 * 4096**2
tokens = run["micro_batch"] * run["seq"]
forward, backward = both_passes(weights, 4096, tokens, run["seq"])
if run["recompute"] == "full":
    backward += forward
two_functions = tokens / 32 / whole_layer(forward, backward, weights, 8, 0.79 * 300e9)
whole = predict(**run).tokens_per_s_per_gpu
print(
    f"two functions {two_functions:,.0f} tokens/s per GPU,"
    f" the whole model {whole:,.0f} (derived)"
)
unseen = predict(
    model="llama-3.1-8b", gpu="H100 HBM2e", gpus=128, micro_batch=2, recompute="selective"
)
print(f"Llama on 128 H100s: {unseen.tokens_per_s_per_gpu:,.0f} tokens/s per GPU (derived)")

# %% one-run-published
reached = run["tokens_per_s_per_gpu"]
print(
    f"measured {reached:,.0f} tokens/s per GPU (published):"
    f" two functions {two_functions / reached - 1:+.0%}, the whole model {whole / reached - 1:+.0%}"
)
tokens_per_s = facts.rows("fsdp_llama3_8b_h100")[-1]["tokens_per_gpu_per_s"]
error = unseen.tokens_per_s_per_gpu / tokens_per_s - 1
print(f"Llama: measured {tokens_per_s:,.0f} (published, torchtitan): {error:+.0%}")

# %% [markdown]
r"""
The two functions promise too much, since they leave out memory traffic, launching and output words. The whole model is as good on the
run that it has never seen.

## Which term bounds which run?

A step is *bound* by the part that would save the most time if it were twice as fast. Here are three runs:
"""

# %% check-bounds
# NBVAL_CHECK_OUTPUT
llama = {"model": "llama-3.1-8b", "gpu": "H100-80GB", "gpus": 64, "accumulate": 2}
runs = {"8B on 64 H100s": llama, "with 100 Gbit/s per host": llama | {"network": 100},
        "GPT-2, sequences of 128": {"model": "gpt2", "gpu": "H100-80GB", "gpus": 8, "seq": 128}}
for name, fields in runs.items():
    answer = predict(**fields)
    print(f"{name}: bound by {answer.bound}, MFU {answer.mfu:.1%}")

# %% picture
predict(**llama).figure()

# %% [markdown]
r"""
Three numbers describe how well a run uses its GPUs. **Tokens per second per GPU** compares runs of one model. **MFU** (model
flops utilisation) compares models and GPUs. It is the share of the datasheet's flops that the step needs by PaLM's count,
6 N + 12 L s h per token, in which recomputing does not count. Both numbers describe a step. **Goodput** describes weeks: it
is the share of the time that went into steps which were kept, and not into restarts, checkpoints and steps done twice
(lesson 11). A run with 40 % MFU and 90 % goodput trains as if it had 36 % MFU all the time.

MFU is half written here. (N are the parameters, L the layers, s the context and h the width.)
"""


# %% faded-mfu
def mfu(tokens_per_s, parameters, layers, context, width, datasheet):
    """Return the MFU of so many tokens per second and GPU; `datasheet` is a GPU's flops per second."""
    flops_per_token = ...
    return tokens_per_s * flops_per_token / datasheet


small = (100, 5e8, 10, 1000, 1000, 1e12)
fill_in(mfu, {small: 0.312, (1000, 1e9, 24, 512, 2048, 1e14): 0.06301989888})

# %% [markdown]
r"""
<details><summary>The line</summary><code>flops_per_token = 6 * parameters + 12 * layers * context * width</code></details>

Now back to the figure above. The first bar is the run that was asked for. Below it are the other ways, the fastest first; `zero1 in
host` divides the optimizer's state over the GPUs of a host only. Thin bars are sending that hides under computing and costs nothing.
The expected error is that of 52 other published runs on H100s, which are in no table here (docs/PREDICTIONS.md).

## 1,536 GPUs

We return to the first question. In 2021 attention wrote all its scores to memory, and nothing was hidden under a pipeline; our model
has a switch for each of these. Two numbers of ZeRO-3, its share of the network cards and the part of its sending that is not hidden, are fitted
to its rows of 384 and 768 GPUs. For three ways at once nothing is fitted. No fit has seen a run on 1,536 GPUs. Write down what you
expect of both ways before you run the cell after next.
"""

# %% answer
large = tables["zero3_and_3d_parallel_a100"].rows
rows = {(row["plan"], row["gpus"]): row for row in large if row["parameters"] == "174.6B"}
gpus = [384, 768, 1536]
zero = [rows["ZeRO-3", count]["predicted"] for count in gpus]
ptd = [rows["PTD", count]["predicted"] for count in gpus]
ahead = ptd[2] / zero[2]
for count, one_way, three_ways in zip(gpus, zero, ptd):
    print(
        f"predicted on {count:,} GPUs: ZeRO-3 {one_way:.0f},"
        f" three ways {three_ways:.0f} Tflop/s per GPU (derived)"
    )

# %% answer-published folded=true
*zero_fitted, slow = [rows["ZeRO-3", count]["measured"] for count in gpus]
ptd_measured = [rows["PTD", count]["measured"] for count in gpus]
fast = ptd_measured[2]
truth = f"{fast:.0f} against {slow:.0f} Tflop/s per GPU: {fast / slow:.1f} times, {ahead:.1f} were predicted"
guess.reveal(truth, guess.answers[3], kind="published")
print(f"predicted over measured: ZeRO-3 {zero[2] / slow - 1:+.0%}, three ways {ptd[2] / fast - 1:+.0%}")
points = {
    "ZeRO-3, fitted": (gpus[:2], zero_fitted, "#C46A3C"),
    "ZeRO-3, unseen": ([1536], [slow], "#D55E00"),
    "three ways, unseen": (gpus, ptd_measured, "#0072B2"),
}
predicted = {
    "ZeRO-3, predicted": (gpus, zero, "#D55E00"),
    "three ways, predicted": (gpus, ptd, "#0072B2"),
}
title = f"On 1,536 GPUs three ways were {fast / slow:.1f} times as fast as ZeRO-3"
kind = "published; lines derived"
show.curves(
    points, "GPUs", "Tflop/s per GPU", title, theory=predicted, log="x", ticks=gpus, kind=kind
)

# %% [markdown]
r"""
Why? ZeRO-3 gathers all weights for each pass, whatever K is. The seconds of sending stay the same, while the seconds of computing
halve with twice the GPUs. From 768 GPUs on, only the sending matters. Three ways at once send activations inside a host, where
links are fast, and little between hosts. The price is a pipeline that idles more: 10 % of the time on 1,536 GPUs, after 3 % on 384.

## A miss, and its reason
"""

# %% miss
for row in facts.rows("transformer_throughput"):
    if row["model"] == "MPT-70b":
        speed = predict(**row).tokens_per_s_per_gpu
        print(
            f"{row['model']}, {row['gpus']:.0f} GPUs:"
            f" measured {row['tokens_per_s_per_gpu']:.0f} tokens/s per GPU, predicted {speed:.0f}"
        )

# %% [markdown]
r"""
On 64 GPUs our prediction is a third too high. But on 128 GPUs, where more must be sent, the same table has a third more
tokens per second on each GPU, and no smooth model can meet both rows. We name rows that disagree with their neighbours, and
do not bend the model around them.

## The program itself, rehearsed

A formula knows layers, bytes and rates. It does not know your program: when torch gathers a layer, what it copies, which kernels it
launches. A **rehearsal** runs the program itself, in virtual time. With *sizes only*, tensors have shapes and no memory, messages carry
lengths, and nothing is multiplied. So the model may be one that nobody in the room could hold.

The program is `13_fsdp.py`, which lies beside this lesson: a plain script for torchrun. (`LESSONS` stands for the course's own folder
of lessons. If you change your copy of the script, leave `LESSONS/` out to run it.) The next cell trains layers of Llama 3.1 70B under
torch's own `fully_shard` on 64 H100s. To keep the cell short it takes 4 of the 80 layers; even these need 88 GB for weights,
gradients and optimizer. `--fold` runs the first and the last rank, and books the other 62 as their copies, since all ranks do the
same.
"""

# %% rehearsed
machines = "--ranks 64 --hosts 8 --device H100 --link NVLink --between 3200Gbit"
llama_70b = "--gated --hidden 8192 --heads 64 --kv-heads 8 --ff 28672 --vocab 128256 --seq 8192"
program = f"LESSONS/13_fsdp.py {llama_70b} --micro-batch 1 --recompute-every 1"
_ = show.command(f"python -m manyranks run {machines} --sizes-only --fold {program} --layers 4", timeout=300)

# %% [markdown]
r"""
No weight existed in that cell, and yet the program said line by line what it sends. Of 451 ms (virtual time) 411 are computing.
The gathers of the layers hide under it nearly completely. What shows is the sending of the vocabulary's weights, at both ends of the
model: nothing computes before the first layer that could hide their gather, and nothing after the last one that could hide the scatter
of their gradients.

How good are rehearsals? The same program has rehearsed 70 published runs: all
those in these tables whose GPUs all do the same, in at most 128 passes of layers. Its kernels reach the shares of products and
attention that were fitted for the formulas, by a fit that left out the row's model (and no fit saw any run of Llama). The seconds of
launching are spread over the kernels of a layer. Nothing else is given, and nothing is fitted to a rehearsal. All GPUs are virtual.
"""

# %% rehearsals folded=true
by_model = {}
for row in scoreboard.rehearsed():
    by_model.setdefault(row["model"], []).append(row)


def off_by(rows, way):
    """Return the median error of some rows, as a share of what was measured."""
    return median(abs(row[way] / row["measured"] - 1) for row in rows)


print("Each model on the most GPUs, in tokens/s per GPU               Median error of all its rows")
print("                    GPUs  tokens   formula  rehearsal  measured  rows  formula  rehearsal")
for model, of_model in by_model.items():
    most = max(of_model, key=itemgetter("gpus"))
    rates = f"{most['formula']:9,.0f} {most['rehearsal']:10,.0f} {most['measured']:9,.0f}"
    errors = f"{off_by(of_model, 'formula'):8.1%} {off_by(of_model, 'rehearsal'):10.1%}"
    print(f"{model:19} {most['gpus']:4.0f} {most['seq']:7,.0f} {rates} {len(of_model):5} {errors}")

# %% check-rehearsals folded=true
# NBVAL_CHECK_OUTPUT
all_rows = scoreboard.rehearsed()
for way in ("formula", "rehearsal"):
    errors = [row[way] / row["measured"] - 1 for row in all_rows]
    near = sum(abs(error) < 0.1 for error in errors)
    print(f"{way}: median error {off_by(all_rows, way):.1%}, from {min(errors):+.1%} to", end=" ")
    print(f"{max(errors):+.1%}; {near} of {len(all_rows)} rows within a tenth")

# %% [markdown]
r"""
Both are about equally exact, and both miss two rows by more than a fifth. One is MPT-70b on 64 GPUs, the odd row that you
have met above. The other is MPT-1b on 32 GPUs, which was measured slower than on 16 and on 64. For MPT of 7 to 30 billion
parameters every rehearsal is within 2 %. For MPT of up to 760 million it is too fast, mostly by 3 to 9 %. It knows nothing of
what a running collective takes from the kernels beside it (the formula's 0.15), and its rates were fitted for the formula.
For Llama, whose gates and rotations the formula counts as a lump sum, the program has the kernels themselves, and is closer.
InternLM's rows are ZeRO-1: each rank keeps all weights and gradients, and gathers and averages once a step. So use the
formula to compare a hundred plans in a second. Then rehearse the script that you will run on the two plans that remain.

## The scoreboard

The figure has all published tables that this course predicts. A point is a row: what was predicted over what was measured, in the
table's own unit. To the right of 1 a predicted time is too long, or a predicted rate (bus bandwidth, speed-up, throughput, tokens per second) is too
high. Hollow points are rows that the fit saw. Below the name of each table are the median and the worst error of *all* its rows.

The list below the figure has only unseen rows: the median error, the error within which nine in ten lie, and the worst. For tables of
which the fit saw every row, it gives the error on rows that a second fit left out. (The 66 rows of `nccl_all_reduce_in_one_host` are
all in the fit, and none was left out.) EFA is the network between Amazon's hosts.
"""

# %% scoreboard
figures.predictions_figure([row for table in tables.values() for row in table.rows])

# %% scoreboard-numbers folded=true
for table in tables.values():
    new = scoreboard.percents(table.errors(calibrated=False))
    left_out = scoreboard.percents([table.left_out])
    print(f"{table.name:29} unseen {new:>16}   left out {left_out:>5}")
measured_rows = scoreboard.known_rows(tables["nccl_bus_bandwidth_h200_b200"].rows)
odd = max(measured_rows, key=lambda row: row["error"])
print(f"{odd['error']:.0%} is one row: {odd['machine']}, {odd['KiB']} KiB,", end=" ")
print(f"published as {odd['measured']} GB/s (explained below)")

# %% check-scoreboard
# NBVAL_CHECK_OUTPUT
most = {
    "pipeline_schedules_a100": 0.02,
    "nccl_ring_a100x8_sizes": 0.05,
    "gpt_step_ms_a100_3d": 0.04,
    "transformer_throughput": 0.045,
}
assert all(tables[name].left_out < bound for name, bound in most.items())
print("on rows left out: schedules within 2 %, NCCL by size 5 %, GPT steps 4 %, recent runs 4.5 % (medians)")

# %% [markdown]
r"""
The rows that stick out teach the most. The worst of all (the arrow) is a message of 32 KiB on four hosts, published as 0.01 GB/s of
bus bandwidth. It took 6 ms; by our latency it should take 0.4 ms, and so have 17 times the bandwidth. No formula can foretell these
6 ms: in the same table 1 MiB, which is 32 times as many bytes, took 0.38 ms, a sixteenth of the time. One GPT step took 1.9 times as
long as predicted: its micro-batch is 64, a replica's whole share at once. And 12 of 27 unseen messages between two hosts over EFA took 1.4 to
2.1 times as long. Each of these may be a fault of the run, or something that we do not know. The tables do not say which.

`ddp-course predict` prints this list, `ddp-course predict FILE.csv` fills in a table of yours, and
`ddp-course predict --model llama-3.1-8b --gpu H100-80GB --gpus 64` answers for one run.

## Judge a table

A pipeline of P stages and M micro-batches should be P M/(M + P - 1) times as fast as one device. GPipe's authors published
throughputs, divided by the throughput of P = 2, M = 1. Do they fit the formula? Write the test (task 13.1 of
[exercise 13](../exercises/13_predict_before_you_buy.ipynb)). Each row is (stages, micro-batches, times), and is `times` as fast as the
*first* row. A tenth above the formula may pass, since numbers are rounded.
"""

# %% task-13-1
def too_good(rows):
    """Return the (stages, micro-batches) of all rows that are more than a tenth faster than the
    formula allows.
    """

    raise NotImplementedError("Exercise 13.1: Judge a table")


show.source(task("13.1", too_good), click="Write it first, then open: one solution")

# %% [markdown]
r"""
The next cell compares the whole table with the formula:
"""

# %% gpipe folded=true
for row in facts.rows("gpipe_throughput"):
    if row["model"] == "Transformer":
        batches = row["micro_batches"]
        ideal = {p: p * batches / (batches + p - 1) for p in (2, 4, 8)}
        off = ", ".join(f"P = {p}: {ideal[p] / row[f'partitions_{p}'] - 1:+.0%}" for p in ideal)
        print(f"M = {batches:2.0f}: formula over table {off}")

# %% [markdown]
r"""
With 4 micro-batches, 4 and 8 stages are *faster* than any schedule can be: the formula lies 29 and 39 % below the table. 8 stages with
one micro-batch are too fast as well (23 %). The paper gives the reason in half a sentence: the batch was adjusted to what fits the
memory, so the columns compare different work. A formula that no machine can beat is also a test of tables.

## What a model cannot know

- **Switches that add up.** 8 H200s reach a bus bandwidth of 473 GB/s where a forced ring on the same GPUs reaches 363 to 368
  (published). For 16 GiB they reach 482 GB/s, more than the 450 that a GPU's links carry. NVLink's switches sum inside the
  network (NVLS), so that each GPU sends p bytes and not $2\frac{K-1}{K}p$. "Bus bandwidth" is then only a unit, and not what a
  link carries.
- **Congestion.** Other jobs share the network. On the same cables times can differ widely from one day to the next.
- **Stragglers.** All ranks wait for the slowest, and among 1,000 GPUs one is always slow, or fails (lesson 11).

Therefore predict first, then rent two hosts for an hour, and compare the prediction with what they do.

## How far does each way reach?

Lessons 05, 07 and 09 each have a limit. The batch is fixed (lesson 10), so with more GPUs each has less to compute, and at some
number the messages no longer fit under the computing. A batch has G tokens, a GPU computes R flop/s, W is the bytes/s of a link, and
weights and gradients have two bytes. Up to which K does no pass wait, for DDP, fully sharded, and tensor parallel with T ranks? Task 13.6
of [exercise 13](../exercises/13_predict_before_you_buy.ipynb) asks for these limits, with weights and gradients of other sizes.

<details><summary>Write them first, then open: the limits</summary>

| way | no pass waits while | what does not help |
|---|---|---|
| DDP, fully sharded | K ≤ 1 + G W / R, W between hosts | a larger model |
| tensor parallel | T ≤ 1 + (inner width) W / R, W inside a host | a larger batch |
| both | T times the first K, since T ranks need no more tokens than one did | |

</details>

The next cell has these limits as code. Before you run it: an H100 computes eight times as fast as a V100. Does the same batch feed
more H100s than V100s, or fewer?
"""


# %% limits folded=true
def limits(gpu, tokens, inner=4 * 8192):
    """The most GPUs that a batch feeds: fully sharded, and with T ranks of a host on each layer
    as well.
    """
    sheet = ACCELERATORS[gpu]
    rate = 0.4 * sheet.rate  # what one reaches of the datasheet's flops
    between = sheet.network / 8 / 8  # bytes per second: 8 GPUs of a host share its cards
    inside = LINKS[sheet.link].bandwidth / 8
    tensor = max(t for t in (1, 2, 4, 8) if t <= 1 + inner * inside / rate)
    sharded = int(1 + tokens * between / rate)
    return sharded, tensor * sharded


# %% limits-figure folded=true
reach = {gpu: limits(gpu, 4e6) for gpu in ("V100", "A100", "H100")}
bars = {f"{gpu}s,\nfully sharded": sharded for gpu, (sharded, _) in reach.items()}
bars |= {f"{gpu}s,\n8 to a layer too": most for gpu, (_, most) in reach.items()}
alone, both = reach["H100"]
title = (
    f"A batch of 4 million tokens feeds {alone:.0f} H100s fully sharded,"
    f" {both:,.0f} with 8 to a layer"
)
show.bars(
    bars, "most GPUs that 4 million tokens feed", title, form="{:,.0f}", kind="derived", width=9
)

# %% check-limits folded=true
# NBVAL_CHECK_OUTPUT
tokens_per_gpu = {gpu: round(4e6 / (sharded - 1), -2) for gpu, (sharded, _) in reach.items()}
print("tokens that each GPU needs, fully sharded:", tokens_per_gpu)

# %% [markdown]
r"""
The batch feeds about as many H100s as V100s. Network cards and GPUs have become faster together, so R/W has stayed the same. (The A100, which came between
the two, needs fewer tokens than both.) Pipelines multiply these limits once more, by the number of stages, and pay with the bubble.

## Which do I use?

The same model can choose. It tries every way, combined with tensor and pipeline parallelism, micro-batches and recomputing. It keeps
the ways that fit with a twentieth of the memory left. Of these it takes the *simplest* one within 5 % of the fastest. (DDP is the
simplest; ZeRO-1, ZeRO-2 and FSDP count as equally simple, and of equals it takes the fastest.)
"""

# %% decision
print(decide(model="llama-3.1-8b", gpu="H100-80GB", gpus=64, batch=128).words())

# %% check-decision
# NBVAL_CHECK_OUTPUT
ours = score()
print(f"{ours.groups} groups of published runs of the same work: the choice keeps {ours.kept:.1%} of the best speed,")
print(f"a blind one {ours.blind_kept:.1%}; within 5 % of the best: {ours.within:.0%}, blind {ours.blind_within:.0%}")

# %% [markdown]
r"""
A choice that nobody has published is not scored. It remains a prediction.

## What torch does

torch predicts nothing. `torch.profiler` and NCCL's tests measure what you have, and torchtitan's `benchmarks/` lists what others had.

## Check yourself

**1.** A vendor shows 97 % efficiency from 8 to 128 GPUs. What do you ask?
<details><summary>Answer</summary>
Ask for the model and the batch per GPU, since more computing hides more. And ask "97 % of what?", since the speed on 8 GPUs may itself
be poor.
</details>

**2.** A model with ten fitted numbers meets all twelve rows of a table within 1 %. How good is it?
<details><summary>Answer</summary>
Nobody knows yet. Fit it to half of the rows, and look at its errors on the other half.
</details>

**3.** Why does everyone use DDP as long as the model fits?
<details><summary>Answer</summary>
DDP sends the least, hides it behind backward, needs no configuration, and does exactly the mathematics of one device.
</details>

## In three lines

1. Count what can be counted, fit the few rates that cannot, and say which rows the fit saw.
2. Scaling is linear up to a knee, whose place follows from computing, bandwidth and latency.
3. Take the simplest way that fits and is not much slower: first DDP, then sharding, then tensor and pipeline parallelism.

**Exercise:** [13](../exercises/13_predict_before_you_buy.ipynb), `exercises/13_predict_before_you_buy.ipynb`. **Next:**
[14, communicate less](14_communicate_less.ipynb): when the link is slow whatever you do.

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
