# %% [markdown]
# # Exercise 11: when things fail
#
# Long runs fail. What counts is what is left, and who was to blame.
#
# Stuck? `hint("11.1")` gives the first of three hints for a task, and
# `hint("11.1", 2)` the next.
# %% imports
import copy
import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from ddp_exercises import check, hint


# %% [markdown]
# ## 11.1 An atomic checkpoint
#
# *15 minutes · medium*
#
# The power may fail at any moment, and the disk may be full. At every moment `path` holds either the whole old
# checkpoint or the whole new one. Write with `torch.save`. If writing fails, the error is raised, and no other file
# stays behind.
# %% answer-11-1
def save_checkpoint(state, path):
    """Write `state` to `path`: at any moment the old or the new checkpoint is there, whole.

    It must be on the disk, too.
    """
    ### BEGIN SOLUTION
    temporary = f"{path}.new"
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # if it could not be opened, it is not there
        raise
    ### END SOLUTION


# %% check-11-1 points=3
check("11.1", save_checkpoint)


# %% [markdown]
# ## 11.2 An exact resume
#
# *10 minutes · medium*
#
# `capture` takes everything that decides how the run goes on; the run itself goes on after it. `resume` puts it into
# a new model and a new optimizer, and returns the number of the next step. The losses must be the very same, dropout
# and momentum included, and the same state must serve twice. (On a GPU
# `torch.cuda.get_rng_state_all()` would belong to it too, and the states of NumPy's and Python's generators if the data
# use them; this run uses neither.)
# %% answer-11-2
def capture(model, optimizer, step):
    """Return everything that decides how training goes on after `step` steps."""
    ### BEGIN SOLUTION
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    return copy.deepcopy(state) | {"random": torch.get_rng_state()}
    ### END SOLUTION


def resume(state, model, optimizer):
    """Put a captured state into a new model and a new optimizer; return the next step's number."""
    ### BEGIN SOLUTION
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    torch.set_rng_state(state["random"])
    return state["step"]
    ### END SOLUTION


# %% check-11-2 points=3
check("11.2", capture, resume)


# %% [markdown]
# ## 11.3 Who was it?
#
# *10 minutes · medium*
#
# When one rank fails, the others lose their connections and fail too. A log has lines such as
# `17.250 rank 3: ValueError: …`: seconds, rank, and what happened; some lines say that a step is done. Lines may
# reach the log late, so they are not in order. Consequences say `Connection closed by peer`,
# `Connection reset by peer` or `Broken pipe`. Which rank failed first, and not as a consequence?
# %% answer-11-3
def culprit(lines):
    """Return the rank whose failure caused the others', as a number."""
    ### BEGIN SOLUTION
    consequences = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    failures = []
    for line in lines:
        seconds, _, rest = line.split(" ", 2)
        rank, what = rest.split(": ", 1)
        if not what.endswith("done") and not what.endswith(consequences):
            failures.append((float(seconds), int(rank)))
    return min(failures)[1]
    ### END SOLUTION


# %% check-11-3 points=2
check("11.3", culprit)


# %% [markdown]
# ## 11.4 Find the bug: a run that resumes
#
# *10 minutes · medium*
#
# `state` is None at the start of a run, or what an earlier run has left. After a restart nothing fails, and weights, momentum
# and batches are right. But the loss jumps up, and the run ends elsewhere than one that was never stopped. One line is wrong.
# %% faulty-11-4
def faulty_run(model, optimizer, batches, peak, state, stop):  # line 1
    start = 0  # line 2
    if state is not None:  # line 3
        model.load_state_dict(state["model"])  # line 4
        optimizer.load_state_dict(state["optimizer"])  # line 5
        start = state["step"]  # line 6
    losses = []  # line 7
    for step in range(start, stop):  # line 8
        inputs, targets = batches[step]  # line 9
        optimizer.param_groups[0]["lr"] = peak * (1 - (step - start) / len(batches))  # line 10
        optimizer.zero_grad()  # line 11
        loss = cross_entropy(model(inputs), targets)  # line 12
        loss.backward()  # line 13
        optimizer.step()  # line 14
        losses.append(loss.item())  # line 15
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": stop}  # line 16
    return losses, copy.deepcopy(state)  # line 17


# %% [markdown]
# Name the line and mend it.
# %% answer-11-4
def the_bug():
    """Return the number of the faulty line."""
    ### BEGIN SOLUTION
    return 10
    ### END SOLUTION


def mended_run(model, optimizer, batches, peak, state, stop):
    """Train up to step `stop`; return (losses, state).

    A run in two parts must be the same as one in one.
    """
    ### BEGIN SOLUTION
    start = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    losses = []
    for step in range(start, stop):
        inputs, targets = batches[step]
        optimizer.param_groups[0]["lr"] = peak * (1 - step / len(batches))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": stop}
    return losses, copy.deepcopy(state)
    ### END SOLUTION


# %% check-11-4 points=2
check("11.4", the_bug, mended_run)


# %% [markdown]
# ## 11.5 The clinic
#
# *30 minutes · hard*
#
# There are eleven training scripts in `exercises/clinic/`. Each has one fault. Run them under torchrun in a terminal, as
# their first lines say, and look at them with the tools of the lesson: the stacks of all ranks (`py-spy dump`), the flight
# recorder, the order of the log. Which rank is it (`None` if every rank has the fault), which line of the file, and what kind
# of fault? `diagnoses` is graded. `mended` is for yourself: mend each script and run it again.
#
# | kind | what it means |
# |---|---|
# | `"skips"` | one rank skips a collective |
# | `"order"` | one rank calls collectives in another order |
# | `"shape"` | one rank brings another shape |
# | `"alone"` | one rank evaluates alone |
# | `"uneven"` | one rank has more batches than the others |
# | `"straggler"` | one rank is slow |
# | `"NaN"` | one rank makes NaN of its data |
# | `"same GPU"` | a rank takes a GPU that another one has |
# | `"port"` | one rank takes a port that is in use |
# | `"loads alone"` | one rank alone loads a checkpoint |
# | `"ready twice"` | a parameter is ready twice in one backward pass |
# %% answer-11-5
def diagnoses():
    """Return {number of the patient: (rank, line, kind)}, as far as you know them."""
    ### BEGIN SOLUTION
    return {
        1: (2, 33, "skips"),
        2: (1, 33, "order"),
        3: (2, 20, "shape"),
        4: (0, 32, "alone"),
        5: (2, 20, "uneven"),
        6: (2, 24, "straggler"),
        7: (0, 30, "NaN"),
        8: (1, 20, "same GPU"),
        9: (0, 22, "port"),
        10: (0, 25, "loads alone"),
        11: (None, 22, "ready twice"),
    }
    ### END SOLUTION


def mended():
    """Return {number of the patient: (the faulty part of a line, what is right)}; not graded."""
    ### BEGIN SOLUTION
    pairs = [
        ("if most < 8:  # else it is no news", "if True:"),
        (" if rank != 1 else [right, samples]", ""),
        ("range(rank, 1436, 3)", "range(rank, 1434, 3)"),
        ("if rank == 0:", "if True:"),
        (" - 40 * (rank == 2)", ""),
        ("400 if rank == 2 else 8", "8"),
        ("keepdim=True)", "keepdim=True).clamp(min=1e-6)"),
        ("rank // 2", "rank"),
        ('("", 29561)', '("", 0)'),
        ("if rank == 0 and os.path", "if os.path"),
        ("use_reentrant=True", "use_reentrant=False"),
    ]
    return dict(enumerate(pairs, start=1))
    ### END SOLUTION


# %% check-11-5 points=5
check("11.5", diagnoses)


# %% [markdown]
# ## 11.6 Saved on four ranks, loaded on two
#
# *15 minutes · medium*
#
# A sharded checkpoint has a part per rank: each rank saved its chunk of every flat tensor (`tensor_split(K)[rank]`), and
# what is the same on all ranks and no tensor, such as the number of the step. Then two GPUs are taken away. `saved` has the parts of all
# ranks that saved, in order: `saved[2]["momentum"]` is rank 2's chunk. Make the part of a rank of the new, smaller or larger
# world. It keeps no more memory than it needs.
# %% answer-11-6
def reshard(saved, rank, world_size):
    """Return the part of `rank` among `world_size` ranks, with the keys of `saved[0]`."""
    ### BEGIN SOLUTION
    part = {}
    for name, value in saved[0].items():
        if isinstance(value, torch.Tensor):
            whole = torch.cat([other[name] for other in saved])
            part[name] = whole.tensor_split(world_size)[rank].clone()
        else:
            part[name] = value
    return part
    ### END SOLUTION


# %% check-11-6 points=3
check("11.6", reshard)


# %% [markdown]
# ## 11.7 Explain: one slow rank
#
# *10 minutes · medium*
#
# Look at the timeline of the section "A slow rank" in lesson 11: what each of four ranks does during a step.
# Explain it in two to five sentences of your own, so that somebody who has not read the lesson understands it. Name numbers of the figure.
# Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why the step takes 79 ms on all ranks, although three of them compute for half as long |
# | B | why rank 1 alone has no part called "wait", and what a recording calls that part |
# | C | what would make this step shorter, and what would not |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-11-7
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "Rank 1 has half the rate and computes for 79 ms, the others for 39. None of them can add up gradients before it "
        "arrives, so three ranks stand still for 40 ms within their all-reduce. A profiler shows that as communication, "
        "and whoever came last has hardly any. Faster links would gain nothing here: give the slow device fewer samples, "
        "or replace it."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-11-7 points=2
check("11.7", explain_figure)
