# %% [markdown]
r"""
# 11 · When things fail

Four processes fail four times as often as one, and they fail in new ways. One of them may die while the others wait for it. Two
of them may disagree about what to do next. Or one of them may be merely slow. This lesson breaks things on purpose, so that you
know what each failure looks like.

**After this lesson you can**

- read an error of a distributed run and name the rank that caused it,
- find out where a run hangs,
- resume from a checkpoint exactly where the run was,
- find a slow rank, and a slow loader, in a timeline and in the traces of all ranks,
- say what a restart costs, and how often to save.

*80 minutes, about a minute of computing.*
"""

# %% imports
import os
import pickle
import queue
import tempfile
import threading
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_course import Device, checkpoint, launch, problems, ring_all_reduce
from ddp_course import stage4_ring, stage5_bucketed, train
from ddp_course.lab import claims, facts, show, timeline, traces
from ddp_exercises import fill_in, task
from manyranks import watch_finite
from manyranks.errors import LaunchError, LaunchTimeout

K = 4  # how many ranks; 2 works as well

# %% opening-questions
show.questions(11)

# %% [markdown]
r"""
## Predict: one rank raises

Rank 1 divides by zero. All other ranks are waiting for its part of the sum.
"""

# %% predict
guess = show.predict(
    "What do the other ranks report?",
    ["nothing is wrong", "a division by zero too", "at most a lost connection"],
)
guess


# %% exception
def failing(fn, **options):
    try:
        launch(fn, world_size=K, **options)
    except LaunchError as error:
        return error


def divide():
    if dist.get_rank() == 1:
        1 / 0
    return ring_all_reduce(torch.ones(1000))


error = failing(divide)
print(error)
others = "; ".join({failure.type_name for failure in error.failures[1:]})
guess.reveal(
    others or "at most a lost connection; here they were ended before they noticed it",
    "at most a lost connection",
)

# %% check-culprit folded=true
# NBVAL_CHECK_OUTPUT
assert error.rank == 1 and error.type_name == "ZeroDivisionError"
print("the culprit is rank 1: a ZeroDivisionError")

# %% [markdown]
r"""
With plain `torchrun` you see the tracebacks of all ranks mixed, and often those of the victims come first. Look for the
*earliest* one that is not about connections. Our launcher does that for you.

## One rank is killed

The system kills processes that use too much memory with SIGKILL (signal 9). Such a process leaves no traceback and no message.
"""


# %% check-killed
# NBVAL_CHECK_OUTPUT
def out_of_memory():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)  # SIGKILL
    dist.barrier()


killed = failing(out_of_memory)
assert killed.rank == 1 and "SIGKILL" in str(killed)
print("the culprit is rank 1, killed by SIGKILL")

# %% [markdown]
r"""
## A rank does not come

Rank 0 skips the all-reduce, perhaps because of an `if` that depends on its data. Nobody raises an error; everyone
waits. After `timeout` seconds the launcher stops all ranks, and shows where each of them was and which collective was its last.
"""


# %% hang
def skips():
    ring_all_reduce(torch.ones(1000))
    if dist.get_rank() > 0:
        ring_all_reduce(torch.ones(1000))
    dist.barrier()


hang = failing(skips, timeout=4)
for state in hang.states:
    print(f"rank {state.rank}: {state.status}; last collective: {state.collective}")

# %% check-hang folded=true
# NBVAL_CHECK_OUTPUT
assert isinstance(hang, LaunchTimeout) and len(hang.states) == K
print("a timeout, with the state of every rank")

# %% [markdown]
r"""
Read the last collectives: rank 0 has gone on to a barrier, all others are inside call 2 of the all-reduce, which rank 0 never
entered.

## On a cluster no launcher tells you

There you have torchrun's log, and tools that work on any process. The first one is **py-spy**: it prints the stack of a
running process from outside, without touching it (`py-spy dump --pid …`, for each rank). The script `patient_02.py` of the folder
`exercises/clinic` trains on three ranks and then hangs. `stacks.py` there runs it under torchrun and, when the ranks stand
still, asks py-spy about each. In which line does each rank stand?
"""

# %% py-spy
_ = show.command("python CLINIC/stacks.py CLINIC/patient_02.py")

# %% [markdown]
r"""
All ranks wait in the same line, but for *different* collectives. A stack does not say which; PyTorch's own **flight
recorder** does. It keeps each rank's last collectives if `TORCH_FR_BUFFER_SIZE` is set, and its **analyzer** compares the
files of all ranks. Here rank 1 comes too late:
"""


# %% flight-recorder folded=true
def recorded(folder):
    tensor = torch.ones(1000)
    late = dist.get_rank() == 1
    dist.all_reduce(tensor)
    work = None if late else dist.all_reduce(tensor, async_op=True)
    time.sleep(1)  # here a run would hang
    dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False))
    group = {"name": "0", "desc": "default_pg", "ranks": str([*range(K)])}
    # gloo gives no name (up to torch 2.15), and the analyzer stops at a KeyError.
    dump["pg_config"] = {"0": group}
    Path(folder, f"trace_{dist.get_rank()}").write_bytes(pickle.dumps(dump))
    (work or dist.all_reduce(tensor, async_op=True)).wait()
    return len(dump["entries"])


os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
folder = Path("runs", f"flight_recorder_{K}")
folder.mkdir(parents=True, exist_ok=True)
calls = launch(recorded, folder, world_size=K)
show.command(f"python -m torch.distributed.flight_recorder.fr_trace -p trace_ {folder}")
assert calls[1] == 1 and set(calls[:1] + calls[2:]) == {2}, calls

# %% [markdown]
r"""
| tool | how | what it shows |
|---|---|---|
| py-spy | `py-spy dump --pid PID` | where a process stands; where ptrace is forbidden, put `faulthandler.dump_traceback_later(60)` into the script |
| monitored barrier | `dist.monitored_barrier(timeout=…)`, gloo only | the ranks that did not come, by number |
| mismatch checks | `TORCH_DISTRIBUTED_DEBUG=DETAIL` | two ranks in different collectives, with both shapes (with gloo, up to torch 2.15, the constructor of torch's DDP crashes under it; plain collectives work) |
| debug server | `torch.distributed.debug.start_debug_server()` in the script, then port 25999 of rank 0 | stacks and flight recorders of all ranks, as a web page |
| flight recorder, NCCL | `TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1`, then the analyzer as above | the first collective that not all ranks joined; each rank writes its file when the watchdog finds a timeout |
| NCCL's watchdog | on by itself; `init_process_group(timeout=…)` says how long a collective may take | ends the job after ten minutes; `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` switches that off, then it hangs for ever |
| NCCL's heartbeat | on by itself; `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` | ends a process whose watchdog itself hangs |
| NCCL's log | `NCCL_DEBUG=INFO` | versions, network cards, rings; the last line before a hang |

All of these work under torchrun on a cluster. `launch` prints the same after a timeout: stacks and last collectives.

Here is a sample of what NCCL and its watchdog print (published). The first job trained well on one host and hung on two;
the last two lines are from another job.
"""

# %% nccl-log
for row in facts.rows("nccl_log"):
    print(f"{row['line']}\n    → {row['tells']}")

# %% [markdown]
r"""
Most timeouts that the watchdog reports are caused by Python code on one rank, such as a branch, a loader or an exception
that was caught. So begin with the stacks. Eleven faulty scripts, and a table from symptoms to usual causes, are in
[exercises/clinic](../exercises/clinic/README.md); exercise 11 takes your diagnoses.

## Debug without ranks

torch has a process group that sends nothing, `fake`. With it one process can be any rank of any number of ranks, and an
ordinary debugger works. Here are two bugs: the last rank has fewer rows than it must have, and rank 1 leaves out the sum.
"""


# %% without-ranks folded=true
def added(rows, absent=None):
    rank = dist.get_rank()
    mine = torch.zeros(3)
    mine.copy_(torch.arange(float(rows)).chunk(dist.get_world_size())[rank])
    if rank != absent:
        dist.all_reduce(mine)
    return mine.sum().item()


for bug in ((3 * K - 1,), (3 * K, 1)):
    for rank in range(K):
        dist.init_process_group("fake", rank=rank, world_size=K, store=FakeStore())
        try:
            result = added(*bug)
        except RuntimeError as error:
            result = error
        dist.destroy_process_group()
        print(f"as rank {rank}, alone: {result}")
    failure = failing(lambda bug=bug: added(*bug), device=Device("1GFLOP/s"))
    print(f"with all ranks: {str(failure).splitlines()[0]}")

# %% [markdown]
r"""
Alone, the process finds the first bug as soon as it is the last rank, in the very line where the debugger stands. It cannot find
the second bug, which takes another rank: a "sum" is just what this rank had, and nobody misses rank 1. With all ranks as processes
and with real messages, both bugs are named. Between the two ways is torch's `LocalTensor` (`torch.distributed._local_tensor`, private),
a tensor with the values of all ranks in one process. Its sums are right. But in that process all ranks run the same lines, so you cannot
even write down a rank that stays away.

## Ranks that disagree

Different shapes in the same all-reduce would mix up memory, or let all ranks wait for ever. Our collectives compare shapes first. Torch's
collectives do so if you ask for it, and its monitored barrier names a rank that does not come:
"""


# %% mismatch
def uneven():
    return torch.ones(1000 + dist.get_rank() // (dist.get_world_size() - 1))


def shapes():
    ring_all_reduce(uneven())


def shapes_in_torch():
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # under torchrun: TORCH_DISTRIBUTED_DEBUG=DETAIL
    dist.all_reduce(uneven(), group=dist.new_group())


def absent():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch logs the same words once more
    # With GPUs the group is NCCL's, too, which has no such barrier.
    gloo = dist.new_group(backend="gloo")
    if dist.get_rank() != 1:
        dist.monitored_barrier(gloo, timeout=timedelta(seconds=2))
    time.sleep(3)


ours, theirs, absence = [failing(case) for case in show.progress((shapes, shapes_in_torch, absent))]
# The others know less than rank 0.
missing = next(failure.message for failure in absence.failures if failure.rank == 0)
print(ours.message, theirs.message[:520], missing.splitlines()[0], sep="\n")
assert "[1001]" in ours.message and "[1001]" in theirs.message
assert "Rank 1 failed to pass" in missing

# %% [markdown]
r"""
## NaN: name it before it spreads

One rank has a NaN in its gradient. After averaging, all ranks have it, and nobody knows where it came from. `watch_finite`
checks each gradient before it leaves the rank.
"""


# %% check-nan
# NBVAL_CHECK_OUTPUT
def poisoned():
    problem = problems.make("synthetic", parameters=2 * 64**2, width=64)
    model = problem.model()
    watch_finite(model)
    factor = float("nan") if dist.get_rank() == 1 else 1
    batches = [(inputs * factor, targets) for inputs, targets in problem.batches(48, 1)]
    stage5_bucketed.train(model, batches, 0.1)


poison = failing(poisoned)
assert poison.type_name == "NotFiniteError"
print(poison.message)

# %% [markdown]
r"""
## A slow rank

A slow rank raises no error, and it is the hardest fault to find: every rank's step takes as long as that of the slowest. A recording
misleads, too, since a rank that waits *inside* the all-reduce seems to communicate. The rank that comes last does not wait at all, so
its time in the all-reduce is the transfer alone. How long does each of the others wait?
"""


# %% faded-waiting
def waiting(in_all_reduce):
    """Return how long each rank waits, from the seconds that each has spent in the same all-reduce."""
    transfer = min(in_all_reduce)
    return ...


fill_in(waiting, {((5, 2, 5, 4),): [3, 0, 3, 2], ((7, 7),): [0, 0], ((1, 9, 9),): [0, 8, 8]})

# %% [markdown]
r"""
<details><summary>The line</summary><code>return [seconds - transfer for seconds in in_all_reduce]</code></details>

In the next figure all ranks have an emulated device, and rank 1's has half the rate. What the others spend in the all-reduce beyond
rank 1's time is drawn as "wait". (The links cost nothing here, so no transfer is left to see.)
"""


# %% straggler folded=true
def last_step():
    problem = problems.make("synthetic", parameters=2 * 128**2, width=128)
    share = problem.batches(24 * K, 8, rank=dist.get_rank(), world_size=K)
    with timeline.recording() as spans:
        stage4_ring.train(problem.model(), share, 0.1)
    return timeline.by_step(spans)[-1]


rates = [Device("50MFLOP/s" if rank == 1 else "100MFLOP/s") for rank in range(K)]
spans = launch(last_step, world_size=K, device=rates)
transfer = min(span.seconds for lane in spans for span in lane if span.name == "communication")
lanes = []
for lane in spans:
    rows = [span for span in lane if span.name != "communication"]
    for span in lane:
        if span.name == "communication":
            begun = span.end - transfer
            rows.append(["wait", span.start, begun, "compute"])
            rows.append(["communication", begun, span.end, "compute"])
    lanes.append(rows)
show.timeline_figure(lanes, title="Rank 1 computes, all others wait for it")

# %% check-straggler folded=true
# NBVAL_CHECK_OUTPUT
computing = torch.zeros(K)
for rank, lane in enumerate(spans):
    computing[rank] = sum(span.seconds for span in lane if span.name != "communication")
assert computing.argmax() == 1 and computing[1] > 1.5 * computing.median()
print("the straggler is rank 1")

# %% [markdown]
r"""
## Or is it the data?

A device can also starve: the step waits for its next batch, because a loader reads and decodes too slowly. On a timeline
that is a gap *before* forward, in which the model does nothing. So time two things separately: how long it takes until the
batch is there, and how long the step takes. A loader that works ahead (`DataLoader` with workers) hides its time.
"""


# %% input-stalls folded=true
def slow_loader(problem, ahead):
    def read():
        for batch in problem.batches(24 * K, 12, rank=dist.get_rank(), world_size=K):
            time.sleep(0.02)  # reading and decoding
            yield batch

    if not ahead:
        return read()
    waiting = queue.Queue(maxsize=2)

    def fill():
        for batch in [*read(), None]:
            waiting.put(batch)

    threading.Thread(target=fill, daemon=True).start()
    return iter(waiting.get, None)


# %% input-stalls-figure folded=true
def stalls(ahead):
    problem = problems.make("synthetic", parameters=2 * 128**2, width=128)
    waited = []

    def watched(batches):
        last = time.perf_counter()
        for batch in batches:
            waited.append(time.perf_counter() - last)
            yield batch
            last = time.perf_counter()

    stage4_ring.train(problem.model(), watched(slow_loader(problem, ahead)), 0.1)
    return sorted(waited)[len(waited) // 2]


waits = {}
for name, ahead in {"reads when asked": False, "reads ahead": True}.items():
    waits[name] = 1000 * max(launch(stalls, ahead, world_size=K, device=Device("100MFLOP/s")))
hidden = 1 - waits["reads ahead"] / waits["reads when asked"]
title = f"Reading ahead hides {100 * hidden:.0f} % of the time that reading takes"
show.bars(waits, "waiting for a batch (ms, median)", title, form="{:.1f}", kind="virtual time")

# %% [markdown]
r"""
## Traces of all ranks, side by side

On a cluster there is `torch.profiler`: it records every operation of a rank, and `export_chrome_trace` writes them to a file.
Record a few steps on each rank, into a file with the rank in its name:

```python
schedule = torch.profiler.schedule(wait=10, warmup=2, active=3)
with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda p: p.export_chrome_trace(f"trace_{rank}.json")) as profile:
    for inputs, targets in loader:
        ...  # forward, backward, update
        profile.step()
```

Open the files in [ui.perfetto.dev](https://ui.perfetto.dev); they stay in your browser. In a trace, waiting looks like
communicating: the all-reduce of a rank that comes early lasts until the last one has come, and on a GPU its kernel spins all
that time. So compare the *same* collective on all ranks, as above: the rank with the shortest one is the straggler. The
clocks of hosts differ by milliseconds. Therefore shift each rank's trace so that an all-reduce ends everywhere at the same
time.

## A GPU that has nothing to do

Now a real trace: the step of ResNet-50 on two A100s that you saw in [lesson 5](05_bucketed_ddp.ipynb). It takes 220 ms,
and the GPU computes for 38 of them. Whose fault is that: the network's, the loader's, the other GPU's, the processor's?
Collect the evidence first, and decide before you read on. (Enlarged are the milliseconds around the first all-reduce;
below each all-reduce stands how many numbers it adds up.)
"""

# %% whose-fault folded=true
step = traces.read()[1]
kernels = [span for span in step.gpu if span.lane == "compute"]
gaps = [after.start - before.end for before, after in pairwise(kernels)]
reduces = [span for span, _ in step.reduced]
passes = step.processor
after_backward = reduces[-1].end - max(span.end for span in passes if span.name == "backward")
kernel_s = median([kernel.seconds for kernel in kernels])
first_long = min(kernel.start for kernel in kernels if kernel.seconds > 1e-4)
print(
    f"{len(kernels)} kernels; half of them take less than {1e6 * kernel_s:.0f} µs, "
    f"half of the gaps between them more than {1e6 * median(gaps):.0f} µs\n"
    f"all-reduces: {1000 * step.seconds_in('network'):.0f} ms, "
    f"of which {1000 * after_backward:.0f} after backward\n"
    f"forward begins {1000 * min(span.start for span in passes):.1f} ms into the step, "
    f"and its first long kernel {1000 * first_long:.0f} ms into it"
)
show.trace(step=1)

# %% [markdown]
r"""
It is the processor. The network delays the step by 2 ms, and forward begins at once, so no loader is late. But each kernel
must be launched by Python and C++, which takes longer than the kernel itself: the GPU has done its work before the next one
is there. (Part of that is the profiler, which writes down every call: time a step without it as well.) What helps is fewer
or longer kernels: more images per GPU, `torch.compile`, CUDA graphs. A faster network or another GPU would change nothing.

And what happens in the first 40 ms of forward? DDP broadcasts rank 0's buffers, three for each of 53 BatchNorm layers: it packs
159 small tensors into two messages and copies each of them back. `broadcast_buffers=False` saves that, where buffers
need not be equal on all ranks. In the white 17 ms after backward, DDP copies 161 gradients out of its buckets, one by one, which
`gradient_as_bucket_view=True` saves. One thing this trace cannot tell: in its third step the first three all-reduces take 6 ms each, not
2.5. Did this rank wait for the other one? That needs the other rank's trace.

## Checkpoints

If one rank fails, all must stop, and the work since the last **checkpoint** is lost. A checkpoint has the weights, the
optimizer's state, the position in the data and the random states. It must be written so that a crash *while writing* destroys
nothing: into a new file, which is flushed to the disk and then renamed to the old name. Task 11.1 of
[exercise 11](../exercises/11_when_things_fail.ipynb) asks you to write it. You learn more if you do so before you look.
"""

# %% task-11-1
def save_checkpoint(state, path):
    """Write `state` to `path`: at any moment the old or the new checkpoint is there, whole.

    It must be on the disk, too.
    """
    raise NotImplementedError("Exercise 11.1: An atomic checkpoint")


show.source(task("11.1", save_checkpoint), click="Write it first, then open: one solution")

# %% source
show.source(
    checkpoint.files.write_whole, click="Open after task 11.1: a file that is whole at any moment"
)

# %% [markdown]
r"""
The script form of every stage, `python -m ddp_course.train`, does all this with `--checkpoint DIR`. Here it trains with
dropout for 12 steps, and then rank 1 is killed; a second run goes on from the folder to step 24; a third does 24 in one
go. Are the two curves the same, to the last bit?
"""


# %% resume
def run(folder, steps, victim=None):
    words = (
        "--problem bytes --parameters 20000 --dropout 0.1"
        f" --stage 5 --every 4 --steps {steps} --checkpoint {folder}"
    )
    losses = train.run(train.parse(words.split()))["losses"]
    if dist.get_rank() == victim:
        os.kill(os.getpid(), 9)  # SIGKILL
    dist.barrier()
    return losses


with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
    halted = failing(lambda: run(first, 12, victim=1))
    resumed = launch(run, first, 24, world_size=K)[0]
    straight = launch(run, second, 24, world_size=K)[0]

# %% claim-19 folded=true
# NBVAL_CHECK_OUTPUT
assert len(resumed) == 24
claims.decide(
    19, "If one device fails, the whole run halts; use checkpoints.", "measured",
    {"a rank is killed": halted.rank == 1 and resumed == straight},
    "The others wait for a partner that is gone, so all must end. From the checkpoint the run goes on bit for bit.",
)

# %% [markdown]
r"""
## Starting again by itself

On a cluster nobody is there to start it again. `torchrun` restarts all ranks when one fails, and with a checkpoint they go
on where they were. With a range of nodes it even goes on with fewer, or more, than before (*elastic*). That too counts as a
restart. The default of `--max-restarts` is 0, with which the first lost node ends the job:

```bash
torchrun --nproc-per-node=4 --max-restarts=3 -m ddp_course.train --stage 6 --checkpoint runs/a
torchrun --nnodes=1:3 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 -m ddp_course.train --checkpoint runs/a
```

What does a restart cost? `python exercises/clinic/elastic.py runs/elastic` measures it in a terminal, in a minute or
two: one of two hosts loses its power, and later a third host joins. The hosts are virtual; in each step a rank
sleeps for a tenth of a second, and every second step is saved. Here is one such run, on two cores:
"""

# %% elastic folded=true
saved = [row for row in facts.rows("elastic_job") if row["event"] == "saved"]
lost, joined = (n for n in range(1, len(saved)) if saved[n]["hosts"] != saved[n - 1]["hosts"])
pauses = [saved[n]["seconds"] - saved[n - 1]["seconds"] for n in (lost, joined)]
phases = {
    "host 0 and host 1": saved[:lost],
    "host 0 alone": saved[lost:joined],
    "host 0 and host 2": saved[joined:],
}
print(f"host 1 is lost: no step for {pauses[0]:.0f} s; host 2 joins: no step for {pauses[1]:.0f} s")
series = {}
for name, rows in phases.items():
    series[name] = ([row["seconds"] for row in rows], [row["step"] for row in rows])
title = f"A restart costs all ranks {min(pauses):.0f} to {max(pauses):.0f} s"
show.curves(series, "time (s)", "steps saved", title)

# %% [markdown]
r"""
All ranks pay for each change. First torchrun must notice it. Then the ranks must start anew, import torch, meet, and load the
checkpoint. On a cluster, add the time for a spare host and for a large checkpoint. A script of your own that calls
`init_process_group` needs `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` for this, up to torch 2.15: torchrun keeps one store over
all restarts, and ranks that are started again may find the addresses of dead ones there, and hang. (`ddp_course.train`
and the capstone open a new store each time.)

## How often to save

If you save too often, writing costs much time. If you save too rarely, much work is repeated after a failure. Let a failure come every
M seconds on average, and let a checkpoint take C seconds. Which share of the time is lost, if you save every T seconds? On average a
failure comes in the middle between two checkpoints.
"""


# %% faded-lost
def lost(interval, checkpoint_s, failure_s):
    """Return the share of time that is lost, if a checkpoint is written after each `interval`; all in seconds."""
    writing = checkpoint_s / interval
    repeating = ...
    return writing + repeating


fill_in(lost, {(100, 5, 1000): 0.1, (50, 5, 1000): 0.125, (200, 5, 1000): 0.125})

# %% [markdown]
r"""
<details><summary>The line</summary><code>repeating = interval / 2 / failure_s</code></details>

The sum is smallest where its two terms are equal, at an interval of √(2 C M) (Young, 1974). For C = 5 s and M = 1,000 s, as
above, this is 100 s. Llama 3 was trained on 16,384 GPUs and interrupted 419 times in 54 days (published: its Table 5). Let a
checkpoint take a minute. Before you look: how often would you save? We simulate 20 runs of 54 days for each interval, with
failures at random moments; the line is what theory expects.
"""


# %% how-often
def lost_share(every, seed):
    """Return the share of 54 days that goes into saving and repeating.

    A checkpoint is saved after `every` seconds.
    """
    random = torch.Generator().manual_seed(seed)
    now = 0.0
    useful = 0.0
    failure = 0.0
    while now < 54 * day:
        if now + every + saving > failure:  # what was done since the last checkpoint is lost
            now = max(now, failure)
            failure = now + torch.empty(()).exponential_(1 / mean, generator=random).item()
        else:
            now += every + saving
            useful += every
    return 100 * (1 - useful / now)


# %% how-often-figure folded=true
day = 86400
saving = 60
mean = 54 * day / sum(row["interruptions"] for row in facts.rows("llama3_interruptions"))
young = (2 * saving * mean) ** 0.5
minutes = [factor * young / 60 for factor in (1 / 8, 1 / 3, 1, 3, 8)]
losses = [lost_share(60 * interval, seed) for interval in minutes for seed in range(20)]
shares = [sum(losses[start : start + 20]) / 20 for start in range(0, 100, 20)]
every = young * torch.logspace(-1, 1, 41)
expected = 100 * (1 - every / mean / torch.expm1((every + saving) / mean))
print(f"an interruption every {mean / 3600:.1f} hours (published): save every {young / 60:.0f} minutes (derived)")
show.curves(
    {"mean of 20 runs": (minutes, shares)},
    "time between checkpoints (minutes)",
    "time lost (%)",
    f"Saved every {minutes[2]:.0f} minutes, {shares[2]:.0f} % is lost; every {minutes[0]:.1f}, {shares[0]:.0f} %;"
    f" every {minutes[4]:.0f}, {shares[4]:.0f} %",
    theory={"expected": ((every / 60).tolist(), expected.tolist())},
    log="x",
    kind="simulated; line derived",
)

# %% [markdown]
r"""
Where the line is lowest, it is flat: twice Young's interval costs little. (Of Llama 3's 419 interruptions 148 were faulty
GPUs, which is 35.3 %, not the 30.1 % that the paper's table prints.) Smaller clusters fail less often: every 47.7 days on 8
GPUs, every 7.9 hours on 1,024 (published: Kokolis et al., 2024).

## What torch does

`torch.save` writes a file, and nothing more: rename and flush are up to you. `torch.distributed.checkpoint` writes one
file per rank for sharded models. `torchrun` restarts, but does not checkpoint.

## Check yourself

**1.** The log shows "connection closed by peer" on ranks 0, 2 and 3, and "CUDA out of memory" on rank 1. Who is to blame?
<details><summary>Answer</summary>
Rank 1. The others lost their partner.
</details>

**2.** All GPUs show 100 % load, but no step is finished. What has happened?
<details><summary>Answer</summary>
Probably a collective that one rank never entered: NCCL waits by spinning, which looks like work. Look at each rank's
stack and last collective.
</details>

**3.** Writing a checkpoint takes 60 s, and the run fails once a day. How often do you save?
<details><summary>Answer</summary>
By Young's formula (1974) you save every √(2 · 60 s · 86,400 s), which is nearly an hour. Saving more often costs writing, and saving
more rarely costs repeated work.
</details>

## In three lines

1. The earliest error that is not about connections is the cause; a hang shows in each rank's last collective.
2. A slow rank or loader raises nothing: compare what each rank computes, and time the waiting for data apart.
3. A checkpoint that is whole (weights, optimizer, position, random states) and atomic makes a run go on bit for bit.

**Exercise:** [11](../exercises/11_when_things_fail.ipynb), `exercises/11_when_things_fail.ipynb`. **Next:**
[12, many machines](12_many_machines.ipynb).

When you are done, *Kernel › Shut Down Kernel* gives its memory back.
"""
