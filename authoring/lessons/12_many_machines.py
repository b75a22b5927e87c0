# %% [markdown]
r"""
# 12 · Many machines

Inside a machine, devices talk over fast links. Between machines a device has about a tenth of that bandwidth, or less, and
on many machines all devices share one network card. This lesson crosses that border. It uses two emulated hosts,
`torchrun`, and timings that others have published: of the wires inside a host, and of several network cards between hosts.

**After this lesson you can**

- explain why an all-reduce in two levels beats a flat ring on several hosts, and by how much,
- start the same training on several machines, and rehearse it before you rent them,
- tell from how a host is wired how long its all-reduce takes,
- say when a second network card (NIC) helps, and when it does not.

*45 minutes, a minute of computing.*
"""

# %% imports
import torch

from ddp_course import Link, collectives, launch, ring_all_reduce
from ddp_course.lab import claims, facts, show, theory, timing
from ddp_exercises import fill_in, task
from ddp_predictions import one_host
from manyranks import links

K = 4  # how many ranks, on two hosts; 2 works as well

# %% opening-questions
show.questions(12)

# %% [markdown]
r"""
## Two hosts

`Link("200Mbit", hosts=2)` puts the first half of the ranks on one emulated host, the second half on another. Inside a host
messages are fast; between the hosts all share one slow cable.

In a flat ring every rank sends $2\frac{K-1}{K}p$ bytes to the next, and in each direction one of these streams crosses the
cable. In two levels:

1. reduce-scatter **inside** each host: each of its R ranks owns a part of the host's sum,
2. all-reduce of that part **between** the hosts,
3. allgather inside each host.

## Predict
"""

# %% predict
guess = show.predict(
    "Between 2 hosts, what crosses the cable in each direction, compared with the gradient p?",
    ["flat ring 1.5 p, two levels 1 p", "flat ring 3 p, two levels 1.5 p", "the same for both"],
)
guess

# %% [markdown]
r"""
Write it yourself first (task 12.1 of [exercise 12](../exercises/12_many_machines.ipynb)), for four ranks on two hosts. `inside` is the
group of this rank and its neighbour on the same host; `between` that of this rank and the one in the same place on the other
host. You have `reduce_scatter(chunks, group)`, after which rank r of the *group* holds the sum of chunk r+1,
`allgather(chunks, group)`, which starts from there, and `ring_all_reduce(tensor, group)`.
"""


# %% task-12-1
def two_levels(tensor, inside, between):
    """Sum `tensor` over all ranks of all hosts, in place.

    A cable may carry 2 (H-1)/H p bytes in each direction.
    """
    raise NotImplementedError("Exercise 12.1: Two levels")


show.source(task("12.1", two_levels), click="Write it first, then open: one solution")

# %% source
show.source(collectives.hierarchical_all_reduce, click="Open after task 12.1: two levels")


# %% correct
def same_sum():
    size = torch.distributed.get_world_size()
    mine = torch.arange(1000.0) * (1 + torch.distributed.get_rank())
    theirs = mine.clone()
    collectives.hierarchical_all_reduce(mine, ranks_per_host=max(1, size // 2))
    return torch.equal(mine, ring_all_reduce(theirs))


# %% check-correct
# NBVAL_CHECK_OUTPUT
assert all(launch(same_sum, world_size=K))
print("two levels give the same sum")


# %% two-levels-figure folded=true
def in_two_levels(tensor):
    collectives.hierarchical_all_reduce(tensor, ranks_per_host=K // 2)


link = Link("200Mbit", hosts=2)
p = 2**20
seconds = {
    "flat ring": timing.time_collective(ring_all_reduce, p, K, link),
    "two levels": timing.time_collective(in_two_levels, p, K, link),
}
slow = theory.Costs.of_link(200e6)
formula = dict.fromkeys(seconds, theory.seconds("ring", p, K, slow))
formula["two levels"] = theory.seconds("ring", p, 2, slow)
traffic = "2(K-1)/K p = 1.5 p for 4 ranks in a flat ring; 2(H-1)/H p = p for 2 hosts"
guess.reveal(traffic, guess.answers[0], kind="derived")
show.bars(
    {name: 1000 * s for name, s in seconds.items()}, "time to add up 1 MiB (ms)",
    f"Two levels take {seconds['two levels'] / seconds['flat ring']:.2f} of the flat ring's time",
    theory={name: 1000 * s for name, s in formula.items()}, form="{:.0f}", kind="virtual time",
)

# %% check-two-levels folded=true
# NBVAL_CHECK_OUTPUT
assert K == 2 or seconds["two levels"] < 1.1 * seconds["flat ring"], seconds
print("two levels are not slower than the flat ring")
flat = formula["flat ring"]
claims.decide(
    25, "Over several hosts an all-reduce takes 2(K-1)/K p/b of the cable between them.", "virtual time",
    {"the ring is flat": seconds["flat ring"] > 0.9 * flat,
     "it goes in two levels": K > 2 and seconds["two levels"] > 0.9 * flat},
    "Where the ranks of a host add up first, only 2(H-1)/H p cross the cable of each of H hosts.",
)

# %% [markdown]
r"""
The dashes are bytes over bandwidth and nothing else. Virtual time has nothing else either, so the bars meet them. Where packets really travel
(`Link("200Mbit", mode="hosts", hosts=2)`), gloo's flat ring of four ranks took up to 1.5 times as long as its dash (measured once):
before each chunk the receiver says "ready" in a small message, and on a busy cable this message waits behind a chunk. With two levels a rank
waits for two such messages from the other host, and with a flat ring for 2(K-1) of them.

Two levels also have fewer latencies on the way. How many messages follow one another between the hosts?
"""


# %% faded-latencies
def latencies(hosts, ranks_per_host):
    """Return the messages one after the other: in a flat ring, and in two levels those between the hosts."""
    flat = 2 * (hosts * ranks_per_host - 1)
    between_hosts = ...
    return flat, between_hosts


fill_in(latencies, {(2, 2): (6, 2), (4, 8): (62, 6), (16, 8): (254, 30)})

# %% [markdown]
r"""
<details><summary>The line</summary><code>between_hosts = 2 * (hosts - 1)</code></details>

The last case has 16 hosts with 8 devices each. A flat ring over these 128 devices pays 254 latencies, one after the other, and two levels
pay 30 between the hosts. (Their 14 inside a host are those of NVLink, and short.)

## The same training on several machines

`launch` is for notebooks. On a cluster every machine runs **torchrun**, which starts the ranks there and agrees with the
other machines which rank is where. Here it runs lesson 06's script on two virtual hosts, one rank on each; where the system
allows no virtual hosts, both ranks are on this machine:
"""

# %% torchrun
rendezvous = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=host0:29400"
torchrun = f"python -m manyranks.hosts.on_hosts --hosts 2 -- torchrun {rendezvous}"
if links.available()["hosts"] is not None:  # the system allows no virtual hosts
    torchrun = "torchrun --standalone --nproc-per-node=2"
codes = show.command(f"{torchrun} -m ddp_course.script FOLDER", timeout=240)

# %% check-torchrun
# NBVAL_CHECK_OUTPUT
assert codes == [0]
print("torchrun: done")

# %% [markdown]
r"""
With two real machines, run this on both of them, with the first one's name and a free port:

```bash
torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=FIRST:29400 -m ddp_course.train --stage 6
```

Under **Slurm**, a scheduler for clusters, one line is enough; rank and world size come from its environment:

```bash
srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python -m ddp_course.train --stage 6
```

Do not use `--gpus-per-task=1`: a rank then sees only its own GPU, and on some clusters NCCL can no longer copy directly
between GPUs. With `--gpus-per-node` all ranks see all GPUs, and each takes that of its local rank.

Files for both are in `deploy/`.

A few machines of your own can take part from a cell, too: `docs/CLUSTERS.md` has the lines, and says when to use which way.

## Rehearse it before you rent it

Suppose you could rent two hosts of two A100s each, with 10 Gbit/s between them, or with 400 Gbit/s for more money. Nobody has
to rent anything to compare them. `manyranks run` runs the same script as it is, on as many ranks as you like. The arithmetic
and the messages are real, on your processor. Only the time is a model: of an A100, of NVLink inside each host, and of the
cable between the hosts. Guess before you look: how much shorter is a step when the cable is 40 times as fast?
"""

# %% rehearsed
rehearsal = f"python -m manyranks run --ranks {K} --hosts 2 --device A100 --link NVLink"
both_codes = show.command(
    f"{rehearsal} --between 10Gbit -m ddp_course.script FOLDER/slow",
    f"{rehearsal} --between 400Gbit -m ddp_course.script FOLDER/fast",
    timeout=240,
)

# %% check-rehearsed
# NBVAL_CHECK_OUTPUT
assert both_codes == [0, 0]
print("one script, two clusters, nothing rented")

# %% [markdown]
r"""
The losses are those of a real training, and they are the same on both clusters. The line that begins with *step* is the answer. With
the slow cable a step takes 0.426 ms of virtual time, of which 0.003 ms are computing. With the fast one it takes 0.014 ms, a thirtieth.
Nothing of the sending is hidden, since a model this small has a single bucket. Even with the fast cable the GPUs wait for most of the
step. So this training belongs on one GPU, and that decision was free.

The table further down names the line of your script that communicates. Kernels reach everything that a datasheet promises in
these two runs, so trust the comparison of two rehearsals more than the seconds of one. `docs/REHEARSE.md` says how to bring
your own script, and what such a rehearsal cannot show.

## Inside one host: switches and wires

How long does NCCL take for the same message on 2, 3 and 4 GPUs of one host? By the ring's formula it takes a little longer with
each GPU. On A100s, which are joined by switches, this is so. On V100s it is the other way round:
"""


# %% one-host
def published(gpu):
    rows = facts.rows("nccl_all_reduce_in_one_host")
    rows = [row for row in rows if row["gpu"] == gpu and row["message_mib"] == 64]
    return [int(row["K"]) for row in rows], [row["microseconds"] / 1000 for row in rows]


def predicted(gpu):
    sizes = [5, 6, 7, 8]
    rows = [{"gpu": gpu, "K": k, "message_mib": 64} for k in sizes]
    fitted = one_host.fitted(gpu)
    return sizes, [one_host.all_reduce_us(row, fitted) / 1000 for row in rows]


colours = {"A100": "#0072B2", "V100": "#D55E00"}
show.curves(
    {f"{gpu}, published": (*published(gpu), colours[gpu]) for gpu in colours},
    "GPUs of one host",
    "all-reduce of 64 MiB (ms)",
    "4 V100s are faster than 2 or 3: their wires allow more rings at once",
    ticks=range(2, 9),
    kind="published; derived",
    theory={f"{gpu}, predicted": (*predicted(gpu), colours[gpu]) for gpu in colours},
)

# %% check-rings
# NBVAL_CHECK_OUTPUT
rings = {count: one_host.rings(count) for count in range(2, 9)}
assert [rings[count] for count in (2, 3, 4)] == [1, 2, 4]
print("rings that fit on the wires of V100s, by number of GPUs:", rings)

# %% [markdown]
r"""
A V100 has six **NVLink** wires, and each leads to one particular partner. A ring can only follow wires. Several rings can
share a message, and how many of them find room depends on which GPUs take part: two GPUs have one ring, and four have four.
For 5 to 8 GPUs the prediction searches how many rings fit onto the wires. With 5 GPUs it is slow again, since only two rings
fit.

## Between hosts: several network cards

A flat ring is *one* stream between two hosts, and one stream leaves a host through one card. Hosts for training have
several cards, as a rule eight, one beside each GPU. Two levels use them all: the eight parts of the host's sum travel at the
same time, each through its own card. How long is the sum of p bytes on its way between the hosts, apart from latency?
"""


# %% faded-seconds-between
def seconds_between(nbytes, hosts, cards, bytes_per_s):
    """Return how long the ring between the hosts takes, if each card carries a part of the sum."""
    part = ...
    return 2 * (hosts - 1) / hosts * part / bytes_per_s


fill_in(seconds_between, {(800, 2, 1, 100): 8.0, (800, 2, 8, 100): 1.0, (800, 4, 8, 100): 1.5})

# %% [markdown]
r"""
<details><summary>The line</summary><code>part = nbytes / cards</code></details>

NCCL gets the same from eight rings, each of which leaves the host by another card.

The next figure has four hosts of 8 B200 GPUs, with 400 Gbit/s per card. Beside them stands one such host, whose messages need no card. The
unit is **bus bandwidth**, $2\frac{K-1}{K}p$ over the time. On a ring this is what each link carries.
"""


# %% several-nics folded=true
def bus(machine):
    rows = [row for row in facts.rows("nccl_bus_bandwidth_h200_b200") if row["machine"] == machine]
    return [row["KiB"] / 1024 for row in rows], [row["busbw_GBps"] for row in rows]


hosts = {
    "1 host, no card": (*bus("B200 1 host"), "#0072B2"),
    "4 hosts": (*bus("B200 4 hosts"), "#D55E00"),
}
sizes = hosts["4 hosts"][0]
card = 50  # GB/s of 400 Gbit/s
lines = {
    f"eight cards: {8 * card} GB/s": (sizes, [8 * card] * len(sizes), "#000000"),
    f"one card: {card} GB/s": (sizes, [card] * len(sizes), "#777777"),
}
most = hosts["4 hosts"][1][-1]
title = f"4 hosts reach {most:.0f} of the 400 GB/s of eight cards"
kind = "published; lines derived"
show.curves(
    hosts, "message (MiB)", "bus bandwidth (GB/s)", title, theory=lines, log="xy", kind=kind
)

# %% check-nics folded=true
# NBVAL_CHECK_OUTPUT
assert card < most <= 8 * card
print(f"large messages use {most / card:.1f} of 8 cards")

# %% [markdown]
r"""
A large message fills nearly all eight cards, while a flat ring through one of them would take eight times as long. A message of 1 MiB
on 4 hosts does not even fill one card: it takes 0.38 ms, and nearly all of this is latency. (The lowest
point, 32 KiB on 4 hosts, would be 6 ms: an odd row of the table, of which lesson 13 says more.) So more cards help large messages only. For small ones,
use an algorithm with fewer steps, or put several of them into one bucket.

## On your GPUs: which way does NCCL go?

Two programs tell you. `nvidia-smi topo -m` prints how each pair of GPUs and cards is joined, from near to far: `NV12` means
12 NVLinks; `PIX`, one PCIe bridge; `PXB`, several of them; `PHB`, by way of the processor; `NODE`, between two PCIe roots of
one processor; `SYS`, by way of the wires between two processors. A card beside a GPU (`PIX`) is the one that its messages
should leave by. `NCCL_DEBUG=INFO torchrun …` lets NCCL say what it has chosen. Look for three kinds of line:

    NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE …      the cards; NET/Socket means plain TCP, several times slower
    NCCL INFO Channel 00/16 : 0 1 2 3 4 5 6 7        the first of 16 rings, as an order of ranks
    NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P    how one hop goes

`via P2P` is the direct way between two GPUs. `via SHM` goes through the host's memory: fine across `SYS`, a pity across
`NV12`. `via NET/IB/0/GDRDMA` leaves the host straight from the GPU's memory; without `GDRDMA` the bytes pass through the
processor first. If `SHM` or `NET/Socket` stands where you paid for more, ask for more lines
(`NCCL_DEBUG_SUBSYS=INIT,GRAPH,NET`), and look for a variable such as `NCCL_P2P_DISABLE`, `NCCL_IB_DISABLE`, `NCCL_IB_HCA` or
`NCCL_SOCKET_IFNAME` that somebody has set. Then measure: `make gpu` draws NCCL's all-reduce on your GPUs beside lesson 04's
ring and lesson 03's server, and the closed forms with α and β of your machine.

## What torch does

The same call of all-reduce uses NCCL's own search through the topology. It lays rings or trees over NVLink inside a machine and over
InfiniBand or Ethernet between machines, with one ring per card. `torch.distributed.device_mesh` names the levels: with
`("replicate", "shard")` you shard inside a host and replicate between hosts.

## Check yourself

**1.** How many bytes cross between 2 hosts of 8 GPUs, in two levels, for a gradient of 1 GB?
<details><summary>Answer</summary>
2(H-1)/H · 1 GB = 1 GB in each direction, an eighth of it from each GPU.
</details>

**2.** Your hosts have eight InfiniBand cards, but `NCCL_IB_HCA` names one. What do you see?
<details><summary>Answer</summary>
Large all-reduces take eight times as long. Small ones take as long as before.
</details>

**3.** The model says that five V100s of one host would be slower than four. Which number tells you so before you
buy them?
<details><summary>Answer</summary>
How many rings fit on the wires among these five: fewer than among four.
</details>

## In three lines

1. Two levels send less between hosts and pay fewer latencies there: 30, where a flat ring pays 254 on 16 hosts of 8.
2. Inside a host the wiring decides: V100s have rings along wires only, A100s are joined by switches.
3. Several cards multiply bandwidth if several streams leave the host; they do nothing for latency.

**Exercise:** [12](../exercises/12_many_machines.ipynb), `exercises/12_many_machines.ipynb`. **Next:**
[13, predict before you buy](13_predict_before_you_buy.ipynb): how long would it take on machines that you do not have?

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
