# %% [markdown]
# Answers to exercise 15 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 15.1 right: lines of text
import json


def what_the_runs_wrote():
    line = '{"wrap": "%s", "world_size": 4, "resumed": %d, "steps": 50, "parameters": 1210, "loss": %s, "step_s": 0.02}'
    runs = {"ddp": ("ddp", 0, 1.25), "fully_shard": ("fully_shard", 0, 1.2503), "killed": ("ddp", 40, 1.25)}
    return {name: json.loads(line % values) for name, values in runs.items()}


# %% 15.1 right: killed while sharded
#- "wrap": "ddp", "resumed": 20
#+ "wrap": "fully_shard", "resumed": 10
# %% 15.1 wrong: began anew | it began anew: was there a checkpoint before the kill, and was it the same folder?
#- "resumed": 20
#+ "resumed": 0
# %% 15.1 wrong: another loss after the kill | the loss is another one: are the optimizer's state and the data those of the step that it went on with?
#- "resumed": 20,
#+ "resumed": 20, "loss": 0.02,
# %% 15.1 wrong: another loss when sharded | they train differently: does every rank begin with the same weights, and see the same data with both?
#- "wrap": "fully_shard",
#+ "wrap": "fully_shard", "loss": 0.02,
# %% 15.1 wrong: one rank | one rank alone has nothing to average: --nproc-per-node=2
#- "world_size": 2
#+ "world_size": 1
# %% 15.1 wrong: DDP twice | that is DDP's run twice: --wrap fully_shard
#- "wrap": "fully_shard"
#+ "wrap": "ddp"
# %% 15.1 told: no killed run | the run.json of "killed" is missing
#- "killed": {
#+ "kill": {
# %% 15.1 told: text | a dict was expected
def what_the_runs_wrote():
    return '{"ddp": {}}'


# %% 15.2 right: a small gap needs no cause
def explained():
    return 0.050, 0.053, {}


# %% 15.2 right: faster than predicted
def explained():
    return 0.2, 0.15, {"half of it is hidden under backward": -0.06, "ranks share the cores": 0.012}


# %% 15.2 wrong: nothing explained | more than a tenth of the step is left over: take one more thing away and measure again
#- return 0.0495, 0.1454, causes
#+ return 0.0495, 0.1454, {}
# %% 15.2 wrong: more than there is | more than a tenth of the step is left over: take one more thing away and measure again
#- 0.0889
#+ 0.1889
# %% 15.2 wrong: written down afterwards | that is the measurement: write down what you predicted before it
#- 0.0495, 0.1454, causes
#+ 0.1454, 0.1454, {}
# %% 15.2 wrong: milliseconds | are these milliseconds? Seconds were asked for
#- 0.0889, "waiting beyond the all-reduce alone": 0.007}
#+ 88.9, "waiting beyond the all-reduce alone": 7.0}
#- 0.0495, 0.1454
#+ 49.5, 145.4
# %% 15.2 wrong: a word | say each cause so that somebody else understands it: four words or more
#- "two ranks share two cores"
#+ "contention"
# %% 15.2 told: two numbers | three were expected
#-  0.1454, causes
#+  0.1454
# %% 15.2 told: as text | seconds are numbers
#- return 0.0495
#+ return "49 ms"
