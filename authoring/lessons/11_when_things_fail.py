# %% [markdown]
r"""
# 11 · When things fail

Four processes fail four times as often as one, and in new ways: one dies and the others wait for it; two disagree
about what to do next; one is merely slow. This lesson breaks things on purpose, so that you know what it looks like.

**After this lesson you can**

- read an error of a distributed run and name the rank that caused it,
- find out where a run hangs,
- resume from a checkpoint exactly where the run was,
- find a slow rank, and a slow loader, in a timeline, and read a profiler's trace.

*30 minutes, under a minute of computing.*
"""

# %% imports
import json
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
from pathlib import Path

from ddp_course import (
    Device, checkpoint, claims, dist, errors, facts, finite, launch, problems, ring_all_reduce,
    show, stage4_ring, stage5_bucketed, stragglers, timeline, torch, train,
)  # fmt: skip

K = 4  # how many ranks; 2 works as well


def failing(fn, **options):
    try:
        launch(fn, world_size=K, **options)
    except errors.CourseError as error:
        return error


# %% [markdown]
r"""
## Predict: one rank raises

Rank 1 divides by zero. All other ranks are waiting for its part of the sum.
"""

# %% predict
guess = show.predict(
    "What do the other ranks report?", ["nothing is wrong", "a division by zero too", "at most a lost connection"]
)
guess


# %% exception
def divide():
    tensor = torch.ones(1000)
    if dist.get_rank() == 1:
        1 / 0
    return ring_all_reduce(tensor)


error = failing(divide)
print(error)

# %% check-culprit
# NBVAL_CHECK_OUTPUT
assert error.rank == 1 and error.type_name == "ZeroDivisionError"
print("the culprit is rank 1: a ZeroDivisionError")

# %% reveal
others = sorted({failure.type_name for failure in error.failures[1:]})
guess.reveal("; ".join(others) or "they were still waiting when the launcher ended them", "at most a lost connection")

# %% [markdown]
r"""
With plain `torchrun` you see all tracebacks mixed, often those of the victims first. Look for the *earliest*, and for
the one that is not about connections. Our launcher does that for you.

## One rank is killed

The system kills processes that use too much memory, with SIGKILL (signal 9): no traceback, nothing.
"""


# %% check-killed
# NBVAL_CHECK_OUTPUT
def out_of_memory():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


error = failing(out_of_memory)
assert error.rank == 1 and "SIGKILL" in str(error)
print("the culprit is rank 1, killed by SIGKILL")

# %% [markdown]
r"""
## A rank does not come

Rank 0 skips the all-reduce, perhaps because of an `if` that depends on its data. Nobody raises an error; everyone
waits. After `timeout` seconds the launcher stops all, and shows where each rank was, and its last collective.
"""


# %% hang
def skips():
    ring_all_reduce(torch.ones(1000))
    if dist.get_rank() > 0:
        ring_all_reduce(torch.ones(1000))
    dist.barrier()


error = failing(skips, timeout=4)
for state in error.states:
    print(f"rank {state.rank}: {state.status}; last collective: {state.collective}")

# %% check-hang
# NBVAL_CHECK_OUTPUT
assert isinstance(error, errors.LaunchTimeout) and len(error.states) == K
print("a timeout, with the state of every rank")

# %% [markdown]
r"""
Read the last collectives: rank 0 has gone on to a barrier, all others are inside call 2 of the all-reduce, which rank 0 never
entered.

## On a cluster there is no launcher to say it

There you have torchrun's log, and the tools that work on any process. The first one is **py-spy**: it prints the stack of a
running process from outside, without touching it (`py-spy dump --pid …`, for each rank). This script trains on three ranks and
then hangs (`CLINIC` stands for the folder `exercises/clinic`). Where does each of them stand?
"""

# %% py-spy
show.stacks("torchrun --standalone --nproc-per-node=3 CLINIC/patient_02.py")

# %% [markdown]
r"""
All ranks wait in the same line, so nobody has gone astray: they wait for *different* collectives. Which ones, PyTorch's own
**flight recorder** knows. It keeps each rank's last collectives if `TORCH_FR_BUFFER_SIZE` is set. Here rank 1 comes too late:
"""


# %% flight-recorder
def recorded():
    tensor, late = torch.ones(1000), dist.get_rank() == 1
    dist.all_reduce(tensor)
    work = None if late else dist.all_reduce(tensor, async_op=True)
    time.sleep(1)  # here a run would hang
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]
    (work or dist.all_reduce(tensor, async_op=True)).wait()
    return f"{len(entries)} collectives, the last: {entries[-1]['profiling_name']} of {entries[-1]['input_sizes']}"


os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
calls = launch(recorded, world_size=K)
for rank, call in enumerate(calls):
    print(f"rank {rank}: {call}")

# %% check-flight-recorder
# NBVAL_CHECK_OUTPUT
assert [int(call.split()[0]) for call in calls] == [1 if rank == 1 else 2 for rank in range(K)], calls
print("rank 1 is one collective behind the others")

# %% [markdown]
r"""
| tool | how | what it shows |
|---|---|---|
| py-spy | `py-spy dump --pid PID` | where a process stands; where ptrace is forbidden, put `faulthandler.dump_traceback_later(60)` into the script |
| monitored barrier | `dist.monitored_barrier(timeout=…)`, gloo only | the ranks that did not come, by number |
| mismatch checks | `TORCH_DISTRIBUTED_DEBUG=DETAIL` | two ranks in different collectives, with both shapes. (With torch 2.13 and gloo the constructor of torch's DDP crashes under it; plain collectives work.) |
| debug server | `torch.distributed.debug.start_debug_server()` in the script, then port 25999 of rank 0 | stacks and flight recorders of all ranks, as a web page |
| flight recorder, NCCL | `TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1`, then `python -m torch.distributed.flight_recorder.fr_trace DIR` | the first collective that not all ranks joined |
| NCCL's watchdog | on by itself; `TORCH_NCCL_ASYNC_ERROR_HANDLING`, `init_process_group(timeout=…)` | ends the job after ten minutes: "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=…, OpType=ALLREDUCE, …)" |
| NCCL's log | `NCCL_DEBUG=INFO` | versions, network cards, rings; the last line before a hang |

Most time-outs that the watchdog reports have their cause in Python on one rank: a branch, a loader, an exception that was
caught. So begin with the stacks. Ten more such scripts wait in `exercises/clinic/`; exercise 11 takes your diagnoses. What `launch`
prints after a time-out, stacks and last collectives, is the same information, and you have it in a notebook only.

## Ranks that disagree

Different shapes in the same all-reduce would mix up memory, or wait for ever. Our collectives compare notes first.
"""


# %% mismatch
def shapes():
    ring_all_reduce(torch.ones(1000 + dist.get_rank() // (dist.get_world_size() - 1)))


error = failing(shapes)
print(str(error).splitlines()[0])

# %% check-mismatch
# NBVAL_CHECK_OUTPUT
assert error.type_name == "MismatchError" and "[1001]" in error.message
print("a mismatch, with the shapes")

# %% [markdown]
r"""
## NaN: name it before it spreads

One rank has a NaN in its gradient. After averaging, all ranks have it, and nobody knows where it came from. `finite.watch`
checks each gradient before it leaves the rank.
"""


# %% nan
def poisoned():
    problem = problems.make("synthetic", parameters=2 * 64**2, width=64)
    model = problem.model()
    finite.watch(model)
    batches = [
        (inputs * (float("nan") if dist.get_rank() == 1 else 1), targets) for inputs, targets in problem.batches(48, 1)
    ]
    stage5_bucketed.train(model, batches, 0.1)


error = failing(poisoned)
print(error.message)

# %% check-nan
# NBVAL_CHECK_OUTPUT
assert error.type_name == "NotFiniteError" and "rank 1" in error.message
print("rank 1 is named before anything was averaged")

# %% [markdown]
r"""
## A slow rank

No error at all, and the worst to find: every rank's step takes as long as the slowest. Look at what each *computes*. Here
all ranks have an emulated device, and rank 1's has half the rate.
"""


# %% straggler
def steps():
    problem = problems.make("synthetic", parameters=2 * 128**2, width=128)
    with timeline.recording() as spans:
        stage4_ring.train(problem.model(), problem.batches(24 * K, 3, rank=dist.get_rank(), world_size=K), 0.1)
    begins = [span.start for span in spans if span.name == "forward"]
    return [[span for span in spans if begin <= span.start < end] for begin, end in zip(begins, [*begins[1:], 1e99])]


rates = [Device("50MFLOP/s" if rank == 1 else "100MFLOP/s") for rank in range(K)]
ranks = launch(steps, world_size=K, device=rates)
spans = min(zip(*ranks), key=lambda step: max(lane[-1].end - lane[0].start for lane in step))  # disturbed least
show.timeline_figure(spans, title="Rank 1 computes, all others wait for it")

# %% check-straggler
# NBVAL_CHECK_OUTPUT
found = stragglers.stragglers(spans)
assert [one.rank for one in found] == [1], found
print("the straggler is rank 1")

# %% [markdown]
r"""
## Or is it the data?

A device can also starve: the step waits for its next batch, because a loader reads and decodes too slowly. On a timeline
that is a gap *before* forward, which no span of the model explains. So time the two apart: how long until the batch is
there, how long the step. A loader that works ahead (`DataLoader` with workers, or `prefetch_factor`) hides its time.
"""


# %% input-stalls
def slow_loader(problem, ahead):
    def read():
        for batch in problem.batches(24 * K, 12, rank=dist.get_rank(), world_size=K):
            time.sleep(0.02)  # reading and decoding
            yield batch

    if not ahead:
        return read()
    waiting = queue.Queue(maxsize=2)
    threading.Thread(target=lambda: [waiting.put(batch) for batch in [*read(), None]], daemon=True).start()
    return iter(waiting.get, None)


def stalls(ahead):
    problem, waited, last = problems.make("synthetic", parameters=2 * 128**2, width=128), [], [time.perf_counter()]

    def watched(batches):
        for batch in batches:
            waited.append(time.perf_counter() - last[0])
            yield batch
            last[0] = time.perf_counter()

    stage4_ring.train(problem.model(), watched(slow_loader(problem, ahead)), 0.1)
    return sorted(waited)[len(waited) // 2]


# %% input-stalls-figure
waits = {name: 1000 * max(launch(stalls, ahead, world_size=K, device=Device("100MFLOP/s")))
         for name, ahead in {"reads when asked": False, "reads ahead": True}.items()}  # fmt: skip
asked, ahead = waits.values()
show.bars(waits, "waiting for a batch (ms, median)", form="{:.1f}",
          title=f"Reading ahead hides {100 * (1 - ahead / asked):.0f} % of the time that a batch takes")  # fmt: skip

# %% [markdown]
r"""
## Read a trace

`torch.profiler` sees more than our timeline: every operation. `export_chrome_trace` writes a file that
[Perfetto](https://ui.perfetto.dev) and `chrome://tracing` show. Here is the same step twice, on emulated devices: as our
spans, and as those events of the trace that belong to them.
"""


# %% profiler
def profiled():
    os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler announces itself otherwise
    digits = problems.make("digits")
    batches = digits.batches(24 * K, 2, rank=dist.get_rank(), world_size=K)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        timeline.recording() as spans,
    ):
        stage5_bucketed.train(digits.model(), batches, 0.05, bucket_cap_mb=0.1)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return spans, [event for event in events if event.get("ph") == "X"]


# %% trace
kinds = {"autograd::engine": "backward", "Optimizer.step": "update",
         **dict.fromkeys(["aten::conv2d", "aten::relu", "aten::linear", "aten::cross_entropy_loss"], "forward")}  # fmt: skip
spans, events = launch(profiled, world_size=K, device=Device("500MFLOP/s"))[0]
begins = [event["ts"] for event in events if event["name"] == "aten::conv2d"]
first = sorted(begins)[len(begins) // 2]  # of the second step of two
step = [event for event in events if event["ts"] >= first]
theirs = [[kind, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, "compute"]
          for event in step for prefix, kind in kinds.items() if event["name"].startswith(prefix)]  # fmt: skip
start = [span for span in spans if span.name == "forward"][-1].start
ours = [span for span in spans if span.start >= start]
both = step + [{"ph": "X", "pid": "our spans", "tid": span.lane, "name": span.name, "dur": 1e6 * span.seconds,
                "ts": first + 1e6 * (span.start - start)} for span in ours]  # fmt: skip
Path("trace.json").write_text(json.dumps({"traceEvents": both}))
show.timeline_figure([ours, theirs], labels=["our spans", "profiler"], align=True,
                     title=f"The same step in {len(ours)} spans, and in {len(step):,} events")  # fmt: skip

# %% [markdown]
r"""
Both rows show the same work at the same places. Two things are missing below. Our *wait* is a gap: the profiler records
operations, and waiting is none; in a real trace look for such gaps first. And the communication thread, the lower half of
our row: this profiler watches the thread that started it, and the backward pass. Open `trace.json`, which now lies beside
this notebook, in Perfetto: it has all events of the step, and our spans as a process of their own.

## Checkpoints

If one fails, all must stop. What is lost is the time since the last **checkpoint**: weights, optimizer state, position in
the data, random states. It must be written so that a crash *while writing* destroys nothing: to a new file, flushed to
disk, then renamed over the old name.
"""

# %% save-source
show.source(checkpoint.save)

# %% [markdown]
r"""
The script form of every stage, `python -m ddp_course.train`, does all this with `--checkpoint DIR`. Here it trains with
dropout for 12 steps, and then rank 1 is killed; a second run goes on from the folder to step 24; a third does 24 in one
go. Are the two curves the same, to the last bit?
"""


# %% resume
def run(folder, steps, victim=None):
    words = (
        f"--problem bytes --parameters 20000 --dropout 0.1 --stage 5 --every 4 --steps {steps} --checkpoint {folder}"
    )
    losses = train.run(train.parse(words.split()))["losses"]
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return losses


with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
    halted = failing(lambda: run(first, 12, victim=1))
    resumed = launch(run, first, 24, world_size=K)[0]
    straight = launch(run, second, 24, world_size=K)[0]

# %% claim-10
# NBVAL_CHECK_OUTPUT
assert len(resumed) == 24
claims.decide(
    10, "If one device fails, the whole run halts; use checkpoints.", "measured",
    {"a rank is killed": halted.rank == 1 and resumed == straight},
    "The others wait for a partner that is gone, so all must end. From the checkpoint the run goes on bit for bit.",
)  # fmt: skip

# %% [markdown]
r"""
## Starting again by itself

On a cluster nobody sits there to start it again. `torchrun` restarts all ranks when one fails, and with a checkpoint they
go on where they were. With a range of nodes it even goes on with fewer, or more, than before (*elastic*); that too counts as
a restart, and the default of `--max-restarts` is 0, which ends the job with the first lost node:

```bash
torchrun --nproc-per-node=4 --max-restarts=3 -m ddp_course.train --stage 6 --checkpoint runs/a
torchrun --nnodes=1:3 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 -m ddp_course.train --checkpoint runs/a
```

How often does it fail? On 16,384 GPUs Llama 3 was interrupted 419 times in 54 days by something unexpected (published: its
Table 5):
"""

# %% interruptions
table = facts.rows("llama3_interruptions")
total, days = sum(row["interruptions"] for row in table), 54
worst = max(table, key=lambda row: row["interruptions"])
print(
    f"one interruption every {24 * days / total:.1f} hours; {worst['cause']}: {worst['interruptions'] / total:.1%} of all"
)
print(
    f"a checkpoint of 60 s: save every {(2 * 60 * 86400 * days / total) ** 0.5 / 60:.0f} minutes (derived, Young's formula)"
)

# %% [markdown]
r"""
(The paper's text prints 30.1 % for faulty GPUs; its own numbers give another share. Count again whatever you quote.) Smaller
clusters fail less often: every 47.7 days on 8 GPUs, every 7.9 hours on 1,024 (measured, published: Kokolis et al., 2024).

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
Too often costs writing, too rarely costs repeated work. By Young's formula (1974) the optimum is √(2 · 60 s · 86,400 s), nearly
an hour: with a failure every M seconds and a checkpoint of C seconds, save every √(2 C M) seconds.
</details>

## In three lines

1. The earliest error that is not about connections is the cause; a hang shows in each rank's last collective.
2. A slow rank or loader raises nothing: compare what each rank computes, and time the waiting for data apart.
3. A checkpoint that is whole (weights, optimizer, position, random states) and atomic makes a run go on bit for bit.

**Exercise:** [11](../exercises/11_when_things_fail.ipynb), `exercises/11_when_things_fail.ipynb`. **Next:**
[12, many machines](12_many_machines.ipynb).
"""
