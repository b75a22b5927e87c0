# %% [markdown]
# # Exercise 15: your own run
#
# Change the two functions of `my_capstone.py` as lesson 15 says, to your own model and data, and run its trainings. The
# checks look at what these wrote: each leaves a `run.json` in its folder, and prints it as its last line. It is a Python dict
# as it stands: paste it whole. Its `signature` belongs to these numbers and to no others.
#
# Stuck? `hint("15.1")` gives the first of three hints for a task, and
# `hint("15.1", 2)` the next.
# %% imports
from ddp_exercises import check, hint


# %% [markdown]
# ## 15.1 One training, three ways
#
# *60 minutes · hard*
#
# Train on two ranks or more, in three ways: by DDP, by `fully_shard`, and by DDP in a run that was killed and went on. Paste
# what each `run.json` says.
# %% answer-15-1
def what_the_runs_wrote():
    """Return {"ddp": …, "fully_shard": …, "killed": …}: of each run the dict that its `run.json` holds."""
    ### BEGIN SOLUTION
    return {
        "ddp": {
            "wrap": "ddp", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
            "loss": 0.013899652232794324, "step_s": 0.08047338600226794,
            "devices": "this machine's processor (2 processes)", "began": 1795704857, "took_s": 3.3,
            "signature": "7871be978a73c3db",
        },
        "fully_shard": {
            "wrap": "fully_shard", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
            "loss": 0.013899652232794324, "step_s": 0.15254788849779288,
            "devices": "this machine's processor (2 processes)", "began": 1795704868, "took_s": 6.0,
            "signature": "1d2acdfce2d7080a",
        },
        "killed": {
            "wrap": "ddp", "world_size": 2, "resumed": 20, "steps": 30, "parameters": 867328,
            "loss": 0.013899652232794324, "step_s": 0.07921694700416992,
            "devices": "this machine's processor (2 processes)", "began": 1795704912, "took_s": 2.0,
            "signature": "e69abc27fe6a94ff",
        },
    }
    ### END SOLUTION


# %% check-15-1 points=4
check("15.1", what_the_runs_wrote)


# %% [markdown]
# ## 15.2 Explain the gap
#
# *30 minutes · medium*
#
# What did you predict for a step with DDP before you ran it? Between one rank alone and DDP stands a third run, without messages.
# So the gap has two parts, and two of three runs differ by each: `("none", "alone")` in ranks that run beside each other,
# `("ddp", "none")` in messages; your prediction includes the all-reduce already. Which part is the larger one, whether it makes the
# step longer or shorter, and why is it there? (If the two are within a twentieth of a step, either will do.)
#
# Answer the last question in one to three sentences of your own, with a number of your figure. Your teacher reads them; the check
# looks at their form only.
# %% answer-15-2
def three_runs():
    """Return {"alone": …, "none": …, "ddp": …}: of each run the dict that its `run.json` holds."""
    ### BEGIN SOLUTION
    return {
        "alone": {
            "wrap": "none", "world_size": 1, "resumed": 0, "steps": 30, "parameters": 867328,
            "loss": 0.04291767254471779, "step_s": 0.058713552502013044,
            "devices": "this machine's processor (1 process)", "began": 1795704845, "took_s": 2.6,
            "signature": "68022f8a8f7ae709",
        },
        "none": {
            "wrap": "none", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
            "loss": 0.02152334483253071, "step_s": 0.0698414774997218,
            "devices": "this machine's processor (2 processes)", "began": 1795704881, "took_s": 3.0,
            "signature": "3698ad6c26b13f27",
        },
        "ddp": {
            "wrap": "ddp", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
            "loss": 0.013899652232794324, "step_s": 0.08047338600226794,
            "devices": "this machine's processor (2 processes)", "began": 1795704857, "took_s": 3.3,
            "signature": "7871be978a73c3db",
        },
    }
    ### END SOLUTION


def explained():
    """Return (predicted seconds, (the longer run, the shorter run), why, in sentences of your own)."""
    ### BEGIN SOLUTION
    why = (
        "A step takes 0.059 s on one rank and 0.070 s on two that exchange nothing: both share the "
        "cores, the caches and the memory of this machine."
    )
    return 0.062, ("none", "alone"), why
    ### END SOLUTION


# %% check-15-2 points=4
check("15.2", three_runs, explained)
