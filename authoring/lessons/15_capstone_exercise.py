# %% [markdown]
# # Exercise 15: your own run
#
# Change the two functions of `my_capstone.py` as lesson 15 says, to your own model and data, and run its four trainings. What
# is looked at here is what they wrote: each leaves a `run.json` in its folder, and prints it as its last line.
#
# Stuck? `hint("15.1")` gives the first of three hints for a task, and
# `hint("15.1", 2)` the next.
# %% imports
from ddp_course.checking import check, hint


# %% [markdown]
# ## 15.1 One training, three ways
#
# *60 minutes · hard*
#
# On two ranks or more: by DDP, by `fully_shard`, and by DDP in a run that was killed and went on. Paste what each `run.json` says.
# %% answer-15-1
def what_the_runs_wrote():
    """Return {"ddp": …, "fully_shard": …, "killed": …}: of each run the dict that its `run.json` holds."""
    ### BEGIN SOLUTION
    about = {"world_size": 2, "steps": 30, "parameters": 867328, "loss": 0.013899652349209646}
    return {
        "ddp": {**about, "wrap": "ddp", "resumed": 0, "step_s": 0.14544021549954778},
        "fully_shard": {**about, "wrap": "fully_shard", "resumed": 0, "step_s": 0.21282562550004513},
        "killed": {**about, "wrap": "ddp", "resumed": 20, "step_s": 0.12474761350131303},
    }
    ### END SOLUTION


# %% check-15-1 points=4
check("15.1", what_the_runs_wrote)


# %% [markdown]
# ## 15.2 Explain the gap
#
# *30 minutes · medium*
#
# What did you predict for a step with DDP before you ran it, and what did it take? If the gap is more than a tenth of the
# measured step, measure what it is made of, one cause at a time: each in some words, with its seconds, which may be less
# than 0. What is left over must be at most a tenth of the measured step.
# %% answer-15-2
def explained():
    """Return (predicted seconds, measured seconds, {a cause in four words or more: its seconds})."""
    ### BEGIN SOLUTION
    causes = {"two ranks share two cores": 0.0889, "waiting beyond the all-reduce alone": 0.007}
    return 0.0495, 0.1454, causes
    ### END SOLUTION


# %% check-15-2 points=4
check("15.2", explained)
