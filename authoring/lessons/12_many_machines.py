# %% [markdown]
r"""
# 11 · Many machines

Inside a machine, devices talk over fast links; between machines the links are ten to a hundred times slower, and
all devices of a machine share them. This lesson crosses that border: first with two emulated hosts, then with `torchrun`,
then in the simulator, up to 4,096 devices. And it ends with the question that everyone asks first: which of all these
do I use?

**After this lesson you can**

- explain why an all-reduce in two levels beats a flat ring on several hosts, and by how much,
- start the same training on several machines,
- read a scaling curve and find its knee,
- choose between DDP, sharding and pipelines.

*35 minutes, under a minute of computing.*
"""

# %% imports
from itertools import pairwise

from ddp_course import (
    Device, Link, claims, collectives, dist, facts, launch, one_host, plans, predict, problems, published,
    ring_all_reduce, show, simulate, stage1_single, stage5_bucketed, theory, timeline, timing, torch,
)  # fmt: skip

K = 4  # how many ranks, on two hosts; 2 works as well

# %% [markdown]
r"""
## Two hosts

`Link("200Mbit", hosts=2)` puts the first half of the ranks on one emulated host, the second half on another. Inside a host
messages are fast; between the hosts all share one slow cable.

In a flat ring every rank passes on $2\frac{K-1}{K}p$ bytes to the next, and one of these streams crosses the cable in each
direction. In two levels:

1. reduce-scatter **inside** each host: each of its R ranks owns a part of the host's sum,
2. all-reduce of that part **between** the hosts,
3. allgather inside each host.

## Predict
"""

# %% predict
guess = show.predict("Between 2 hosts, what crosses the cable in each direction, compared with the gradient p?",
                     ["flat ring 1.5 p, two levels 1 p", "flat ring 3 p, two levels 1.5 p", "the same for both"])  # fmt: skip
guess

# %% source
show.source(collectives.hierarchical_all_reduce)


# %% correct
def same_sum():
    mine = torch.arange(1000.0) * (1 + torch.distributed.get_rank())
    theirs = mine.clone()
    collectives.hierarchical_all_reduce(mine, ranks_per_host=max(1, torch.distributed.get_world_size() // 2))
    return torch.equal(mine, ring_all_reduce(theirs))


# %% check-correct
# NBVAL_CHECK_OUTPUT
assert all(launch(same_sum, world_size=K))
print("two levels, the same sum")


# %% two-levels-figure
def two_levels(tensor):
    collectives.hierarchical_all_reduce(tensor, ranks_per_host=K // 2)


link, p = Link("200Mbit", hosts=2), 2**20
seconds = {
    "flat ring": timing.time_collective(ring_all_reduce, p, K, link),
    "flat ring, plain TCP": timing.time_collective(collectives.pipelined_ring_all_reduce, p, K, link),
    "two levels": timing.time_collective(two_levels, p, K, link),
}
slow = theory.Costs.of_link(200e6)
formula = dict.fromkeys(seconds, theory.seconds("ring", p, K, slow))
formula["two levels"] = theory.seconds("ring", p, 2, slow)
found = "2(K-1)/K p = 1.5 p for 4 ranks in a flat ring; 2(H-1)/H p = p for 2 hosts"
guess.reveal(found, guess.answers[0], kind="derived")
show.bars(
    {name: 1000 * s for name, s in seconds.items()}, "time to add up 1 MiB (ms)",
    f"Two levels take {seconds['two levels'] / seconds['flat ring']:.2f} of the flat ring's time",
    theory={name: 1000 * s for name, s in formula.items()}, form="{:.0f}",
)  # fmt: skip

# %% check-two-levels
# NBVAL_CHECK_OUTPUT
assert K == 2 or seconds["two levels"] < 1.1 * seconds["flat ring"], seconds
print("two levels are not slower than the flat ring")

# %% [markdown]
r"""
The dashes are bytes over bandwidth and nothing else. On virtual hosts the flat ring of four ranks takes up to half as
long again as its dash, one time more, another time less. Latency is not the reason: the bar in the middle is the same
ring, as many bytes in as many steps, within a tenth of its dash. What the formula leaves out is a question: *gloo asks
before it sends*. The receiver says "ready" in a small message, and the sender waits for it. In a ring over two hosts
this message has to cross a cable on which the other stream's chunk is on its way, and queues up behind it: 6 to 9 ms
there and back, measured with 4 bytes beside a chunk, where an idle cable takes 0.3 ms and the chunk itself 10. With
all receives announced before the first send, gloo's ring takes 67 ms instead of 90 (measured). The ring in the middle
goes over plain TCP streams and asks nobody, because in a ring everybody knows what comes next. Two levels ask across
the cable in two steps, the flat ring in 2(K-1).

With 8 devices on each of 16 hosts the difference is far larger, because in a flat ring over 128 devices all latencies
add up, 254 of them; in two levels there are 30 between the hosts.

## The same training on several machines

`launch` is for notebooks. On a cluster every machine runs **torchrun**, which starts the ranks there and agrees with the
other machines on who is who. Here it runs lesson 06's script on two virtual hosts, one rank on each:
"""

# %% torchrun
rendezvous = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=host0:29400"
torchrun = f"python -m ddp_course.running.links.on_hosts --hosts 2 -- torchrun {rendezvous}"
alone = "torchrun --standalone --nproc-per-node=2"  # where virtual hosts are not allowed
codes = show.command(f"{torchrun if link.mode == 'hosts' else alone} -m ddp_course.script FOLDER")

# %% check-torchrun
# NBVAL_CHECK_OUTPUT
assert codes == [0]
print("torchrun: done")

# %% [markdown]
r"""
On two real machines, on both of them, with the first one's name and a free port:

```bash
torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=FIRST:29400 -m ddp_course.train --stage 6
```

Under **Slurm**, a scheduler for clusters, one line a rank is enough; rank and world size come from its environment:

```bash
srun --nodes=2 --ntasks-per-node=8 --gpus-per-task=1 python -m ddp_course.train --stage 6
```

Files for both are in `deploy/`.

A few machines of your own need no script at all: `launch` reaches them from a cell. Once, in terminals:

```bash
pip install "ddp-course[hosts]"                                 # on every machine
ddp-course hosts start --ip 192.168.1.10 --engines engines.json # on this one; leave it running
ddp-course hosts join engines.json                              # on each of the others, with a copy of that file
```

Then any launch of this course, with one word more. On three hosts, a rank on each:

```python
def place():
    print("here")
    return socket.gethostname()

launch(place, world_size=3, hosts="all")     # prints, as they come: [rank 1 host2] here
# ['host1', 'host2', 'host3']
```

An error names rank and host, and a machine whose cable is pulled ends the launch instead of hanging it.
`docs/CLUSTERS.md` says which of the four ways is right when.

## Inside one host: switches and wires

Before thousands, look at eight. How long does NCCL take for the same message on 2, 3 and 4 GPUs of one host? The ring's
formula says: a little longer with each. On A100s, which hang on switches, it does. On V100s it is the other way round:
"""


# %% one-host
def at(gpu, mib=64):
    rows = [row for row in facts.rows("nccl_all_reduce_in_one_host") if row["gpu"] == gpu and row["message_mib"] == mib]
    return [int(row["K"]) for row in rows], [row["microseconds"] / 1000 for row in rows]


foreseen = one_host.predictions()
later = {gpu: [row["predicted_us"] / 1000 for row in foreseen["rows"] if row["gpu"] == gpu and row["message_mib"] == 64]
         for gpu in one_host.GPUS}  # fmt: skip
colours = {"A100": "#0072B2", "V100": "#D55E00"}
show.curves({f"{gpu}, published": (*at(gpu), colours[gpu]) for gpu in colours}, "GPUs of one host", "all-reduce of 64 MiB (ms)",
            "More V100s are faster: their wires allow more rings at once", ticks=range(2, 9), kind="published; derived",
            theory={f"{gpu}, predicted": ([5, 6, 7, 8], times, colours[gpu]) for gpu, times in later.items()})  # fmt: skip

# %% check-rings
# NBVAL_CHECK_OUTPUT
assert [foreseen["rings"][count] for count in (2, 3, 4)] == [1, 2, 4]
print("rings that fit on the wires of V100s, by number of GPUs:", foreseen["rings"])

# %% [markdown]
r"""
A V100 has six **NVLink** wires, soldered to certain partners. A ring exists along wires only, and several rings share a
message; how many fit depends on which GPUs take part. Four GPUs have four rings, two have one. The prediction for 5 to 8
packs rings onto the wires by computer: 5 GPUs are slow again, because the fifth has no second partner among them.

## Eight A100s on your machine, in slow motion

An emulated link can play any real one, slowed down. Here is NVLink by its datasheet, 1,000 times slower, with a
message 64 times smaller: the ratio of bandwidth to latency, and so the figure's shape, is the real link's, and
measured times divided by 1,000 estimate the real ones. Why so slow? Up to 16 ranks take turns on this machine's cores.
The 480 messages of 16 ranks cost two cores 0.15 s of real work, which has to be little beside the 0.5 s that the
emulated all-reduce takes.
"""

# %% slow-motion
slowed, scale, counts = 1000, 64, [2, 4, 8, 16]
cable = Link.like("NVLink A100", slowed=slowed, scale=scale)
network = simulate.Network(theory.Costs.of_link(cable.bandwidth, cable.latency))
played = [1000 * timing.time_collective(ring_all_reduce, 2**20, k, cable, repeats=3) / slowed for k in counts]
simulated = [1000 * simulate.play("ring", 2**20, k, network) / slowed for k in counts]
times = at("A100")[1][2] / simulated[1]
show.curves({"emulated, slow motion": (counts, played, "#009E73"), "A100, published": (*at("A100"), colours["A100"])},
            "GPUs", "all-reduce of 64 MiB (ms)", f"NCCL on 4 A100s takes {times:.1f} times what the datasheet's link would",
            theory={"simulated": (counts, simulated, "#009E73")}, log="x", ticks=counts,
            kind="measured; published; simulated")  # fmt: skip

# %% [markdown]
r"""
Emulation and simulator agree, but for the work of this machine's cores that lifts 16 ranks a little above the line.
The real thing is slower: no protocol carries all that a datasheet promises. That is why the section after the next
figure does not begin with datasheets, but fits its numbers to measured step times.

That was the link alone. Now devices as well: A100s by their datasheet, joined by NVLink, both 180 times slower and for a
model 1,000 times larger than the one that trains here (65 thousand weights stand for 65 million). Each has 256 samples,
however many there are. Beside them the simulator, which knows the same two datasheets, and what PyTorch published for
ResNet-50 on V100s: another machine and model, so it says how such curves look, not where this one should lie.
"""


# %% emulated-devices
gpu, nvlink = (kind.like(name, slowed=180, scale=1000) for kind, name in ((Device, "A100"), (Link, "NVLink A100")))


def training(ranks=1, rank=0):
    problem = problems.make("synthetic", parameters=4 * 128**2, width=128)
    return problem.model(), list(problem.batches(256 * ranks, 3, rank=rank, world_size=ranks)), 0.01


def shortest_step():
    with timeline.recording() as spans:
        stage5_bucketed.train(*training(dist.get_world_size(), dist.get_rank()), bucket_cap_mb=0.1)
    begins = [span.start for span in spans if span.name == "forward"]
    return min(after - before for before, after in pairwise(begins))


counts = [1, 2, 4, 8, 16]
played = [max(launch(shortest_step, world_size=k, device=gpu, link=nvlink)) for k in show.progress(counts)]

# %% emulated-devices-figure
model, batches, rate = training()
with gpu.emulate(record=True, sleep=False) as emulation:
    stage1_single.train(model, batches[:1], rate)
sizes = [4.0 * parameter.numel() for parameter in model.parameters()]
unit = emulation.busy_s / sum(sizes)  # computing goes with the parameters: a third forward, the rest backward
layers = tuple(simulate.Layer("", unit * size / 3, unit * size * 2 / 3, size) for size in sizes)
network = simulate.Network(theory.Costs.of_link(nvlink.bandwidth, nvlink.latency))
steps = [simulate.simulate(simulate.Profile(layers), k, network, bucket_cap_mb=0.1) for k in counts]
row = facts.rows("ddp_step_seconds_v100")[0]
show.curves({"A100, emulated": (counts, [100 * played[0] / seconds for seconds in played], "#009E73"),
             "V100, ResNet-50, published": (counts, [100 * row["gpus_1"] / row[f"gpus_{k}"] for k in counts], colours["V100"])},
            "GPUs", "efficiency (%)", f"8 emulated A100s are {8 * played[0] / played[3]:.1f} times as fast as one",
            theory={"A100, simulated": (counts, [100 * step.efficiency for step in steps], "#009E73")}, log="x", ticks=counts,
            kind="measured; published; simulated")  # fmt: skip

# %% [markdown]
r"""
One step on the emulated machine is one on the real one, 180 times longer. What the small model lacks in size, `scale`
gives back: bytes and flops, but not the latencies, which are what they are. The 180 has a reason. The arithmetic and
the messages of 16 ranks are real work, 0.45 s of two cores for each step (measured), and the emulated step must be
longer than that: it takes 0.9 s. Devices only 100 times slower would have to be through after 0.45 s, and the point at
16 would lie far below the line.

## Thousands of devices

The simulator plays a step message by message. Its numbers come from a **calibration**: what a V100's link carries, and
how much a running all-reduce slows computing down, are fitted to published step times on 1 and 2 GPUs. ResNet-50, 8 V100
to a host, 4 x 100 Gbit/s between hosts. The flat ring is one stream between two hosts, which is no faster than one GPU's
link; in two levels eight GPUs send at the same time and share the four cables:
"""

# %% simulate
bandwidth, interference = published.calibrate_v100(facts.rows("ddp_step_seconds_v100"))
wire = theory.Costs(published.GPU_LATENCY, 1 / bandwidth)
profile = simulate.resnets.profile("resnet50", 0.097)
devices = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
steps = {}
for name, streams in (("ring", 1), ("hierarchical_ring", 8)):  # that cross between two hosts at once
    between = theory.Costs(2 * wire.alpha, max(published.HOST_LINK, wire.beta / streams))
    hosts = simulate.Network(between, wire, per_host=8)
    steps[name] = [simulate.simulate(profile, k, hosts, name, interference=interference) for k in devices]
show.scaling_figure(steps, title="ResNet-50: two levels hold where the flat ring falls")

# %% check-scaling
# NBVAL_CHECK_OUTPUT
efficiency = {name: [step.efficiency for step in row] for name, row in steps.items()}
assert efficiency["ring"][-1] < 0.5 < efficiency["hierarchical_ring"][-1]
print("at 4,096 devices the flat ring has collapsed, the two levels have not")

# %% [markdown]
r"""
The **knee** is where efficiency falls below 90 %. Up to there, communication hides behind the backward pass; then the
latencies of the ring, twice K-1 of them for each bucket, stick out. In two levels there are few, and the curve goes on. (Up to 32
devices the two are nearly alike: as many bytes, and latencies to spare.) Find the knee for other cables, with one device
to a host: a faster cable moves it to the right, larger buckets too, until one bucket holds everything and nothing can hide.
"""

# %% explorer
show.widgets.simulator_explorer(profile, bandwidth="100Gbit")

# %% [markdown]
r"""

How far can one believe a simulator? Published step times (PyTorch's own benchmark) are points. The lines are its
predictions for 4, 8 and 16 GPUs. And a second predictor, dotted, which knows nothing: "as on 2 GPUs, always".
"""

# %% published
gpus, measured, lines = [1, 2, 4, 8, 16], {}, {}
tested = [step for step in predict.v100_steps().rows if not step["calibrated"]]
for row, colour in zip(facts.rows("ddp_step_seconds_v100"), ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]):
    model, alone = row["model"], row["no_ddp"]
    steps_s = {step["gpus"]: step["predicted"] for step in tested if step["model"] == model}
    measured[model] = (gpus, [100 * alone / row[f"gpus_{k}"] for k in gpus], colour)
    lines[f"{model}, simulated"] = (list(steps_s), [100 * alone / s for s in steps_s.values()], colour)
at_two = {row["model"]: row["gpus_2"] for row in facts.rows("ddp_step_seconds_v100")}
errors = [sum(abs(step["error"]) for step in tested) / len(tested),
          sum(abs(at_two[step["model"]] / step["measured"] - 1) for step in tested) / len(tested)]  # fmt: skip
picture = show.curves(measured, "GPUs", "efficiency (%)", "Mean error: simulator {:.1%}, constant {:.1%}".format(*errors),
                      theory=lines, log="x", ticks=gpus, kind="published; simulated")  # fmt: skip
for _, percent, colour in measured.values():
    picture.axes[0].plot([2, 16], [percent[1]] * 2, ":", color=colour, linewidth=1.2)
picture.axes[0].set_ylim(80, 101)
picture.axes[0].legend(ncols=2, loc="lower left")
picture

# %% [markdown]
r"""
Look closely: the one that knows nothing does as well. From 2 to 16 GPUs the times hardly grow, since backward hides the
communication; a table without a knee cannot tell a good simulator from none. What it says about 4,096 is a derivation.
Others have measured larger runs:
"""

# %% larger
for row in facts.rows("published_scaling"):
    print("{training}: {efficiency_percent:g} % on {devices:g} devices, compared with {compared_with:g}".format(**row))

# %% claim-9
# NBVAL_CHECK_OUTPUT
resnet, network = (
    published.resnets.profile("resnet50", 0.097),
    simulate.Network(theory.Costs.of_link(100e9, latency=10e-6)),
)
efficient = {f"K = {k}": simulate.simulate(resnet, k, network).efficiency >= 0.9 for k in (2, 16, 128, 1024, 4096)}
claims.decide(
    9, "Speed-up is linear: K devices are K times as fast.", "simulated", efficient,
    "At 90 % of linear or more. 2(K-1) latencies per bucket grow with K, until the backward pass cannot hide them.",
)  # fmt: skip

# %% [markdown]
r"""
Which all-reduce is the fastest depends on the message and on K. The map, for links of 100 Gbit/s with 10 µs, if every
rank has a cable of its own and nothing is pipelined: on shared cables halving-doubling can lose ground (lesson 04). The
stripes come from the K that are no powers of two, where it must first fold the surplus ranks in, with whole messages.
"""

# %% winners
show.winners_figure(theory.Costs.of_link(100e9, 10e-6))

# %% [markdown]
r"""
## Which do I use?

Choose your model and your machines. Grey bars do not fit, the black one is the recommendation: the *simplest* way within
a tenth of the fastest. Everything here is derived: 16 bytes a parameter for float32 and Adam, activations from samples and
context, a step's time from what a device computes and a link carries, communication hidden where it can be.
"""

# %% decision-chart
show.widgets.decision_chart(plans.decide)

# %% [markdown]
r"""
As a plain figure, for a model of 30 billion parameters on 64 devices of 80 GB:
"""

# %% decision-figure
setting = {"billions": 30, "memory_gb": 80, "devices": 64, "bandwidth": "100Gbit"}
show.widgets.decision_figure(setting, *plans.decide(**setting))

# %% check-decision
# NBVAL_CHECK_OUTPUT
cases = [(0.3, 24, 8, "100Gbit"), (3, 80, 8, "1Gbit", 1), (3, 40, 8, "100Gbit"), (7, 80, 64, "100Gbit"),
         (30, 80, 64, "1Gbit"), (400, 24, 8, "100Gbit")]  # fmt: skip
for case in cases:
    chosen, _, _ = plans.decide(*case)
    print(case, "->", chosen.name if chosen else "more devices")

# %% [markdown]
r"""
The second case is worth a look: three billion parameters would fit on each of the eight devices, but over links of 1
Gbit/s a single all-reduce takes 168 s. A pipeline sends activations only.

## What torch does

The same all-reduce call uses NCCL's own topology search: rings or trees over NVLink inside a machine, InfiniBand or
Ethernet between. `torch.distributed.device_mesh` names the levels, such as `("replicate", "shard")`: shard inside a host,
replicate between hosts.

## Check yourself

**1.** 2 hosts of 8 GPUs. Which bytes cross between them, in two levels, for a gradient of 1 GB?
<details><summary>Answer</summary>
2(H-1)/H · 1 GB = 1 GB in each direction, an eighth of it from each GPU.
</details>

**2.** Efficiency is 60 % at 512 GPUs. Which three things could help?
<details><summary>Answer</summary>
A larger batch a GPU (more computing per byte), two-level or tree all-reduce (fewer latencies), fewer bytes
(half-precision gradients).
</details>

**3.** Why does everyone use DDP as long as the model fits?
<details><summary>Answer</summary>
Least traffic, hidden behind backward, nothing to configure, and exactly the mathematics of one device.
</details>

## In three lines

1. Two levels send less between hosts and pay fewer latencies: 30 instead of 254 on 16 hosts of 8.
2. Scaling is linear up to a knee; where it lies follows from computing, bandwidth and latency, and inside a host from wires.
3. Take the simplest way that fits and is not much slower: DDP, then sharding, then pipelines between hosts.

**Exercise:** [12](../exercises/12_many_machines.ipynb), `exercises/12_many_machines.ipynb`. **Next:**
[14, communicate less](14_communicate_less.ipynb): when the link is slow whatever you do.
"""
