# %% [markdown]
# Answers to exercise 15 as learners write them. docs/CONTRIBUTING.md says how to read this.
# The code below stands above each of them.

import hashlib
import json


def signed_anew(answer):
    """Sign what an answer returns, as the script would have signed these numbers."""

    def answer_with_signatures():
        runs = answer()
        for run in runs.values():
            del run["signature"]
            text = json.dumps(run, sort_keys=True)
            run["signature"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return runs

    return answer_with_signatures


# %% 15.1 right: four ranks
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "wrap": "ddp", "world_size": 2, "resumed": 0
#+ "wrap": "ddp", "world_size": 4, "resumed": 0
#- "wrap": "fully_shard", "world_size": 2, "resumed": 0
#+ "wrap": "fully_shard", "world_size": 4, "resumed": 0
#- "loss": 0.013899652232794324, "step_s": 0.15254788849779288,
#+ "loss": 0.0139, "step_s": 0.15254788849779288,
#- "wrap": "ddp", "world_size": 2, "resumed": 20
#+ "wrap": "ddp", "world_size": 4, "resumed": 20
# %% 15.1 right: killed while sharded
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "wrap": "ddp", "world_size": 2, "resumed": 20
#+ "wrap": "fully_shard", "world_size": 2, "resumed": 10
# %% 15.1 told: another number than the script's | is not what the script wrote
#- "wrap": "ddp", "world_size": 2, "resumed": 20
#+ "wrap": "ddp", "world_size": 2, "resumed": 10
# %% 15.1 told: lazy, made-up signatures | is not what the script wrote
#- 7871be978a73c3db
#+ 0123456789abcdef
#- 1d2acdfce2d7080a
#+ 0123456789abcdef
#- e69abc27fe6a94ff
#+ 0123456789abcdef
# %% 15.1 told: so long, in so little time | do not fit into
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "devices": "this machine's processor (2 processes)", "began": 1795704857, "took_s": 3.3,
#+ "devices": "this machine's processor (2 processes)", "began": 1795704857, "took_s": 0.1,
# %% 15.1 wrong: began anew | it began anew: was there a checkpoint before the kill, and was it the same folder?
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "wrap": "ddp", "world_size": 2, "resumed": 20
#+ "wrap": "ddp", "world_size": 2, "resumed": 0
# %% 15.1 wrong: another loss after the kill | the loss is another one: are the optimizer's state and the data those of the step that it went on with?
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "loss": 0.013899652232794324, "step_s": 0.07921694700416992,
#+ "loss": 0.02, "step_s": 0.07921694700416992,
# %% 15.1 wrong: another loss when sharded | they train differently: does every rank begin with the same weights, and see the same data with both?
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "loss": 0.013899652232794324, "step_s": 0.15254788849779288,
#+ "loss": 0.02, "step_s": 0.15254788849779288,
# %% 15.1 wrong: one rank | one rank alone has nothing to average: --nproc-per-node=2
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "wrap": "ddp", "world_size": 2, "resumed": 0
#+ "wrap": "ddp", "world_size": 1, "resumed": 0
#- "wrap": "fully_shard", "world_size": 2, "resumed": 0
#+ "wrap": "fully_shard", "world_size": 1, "resumed": 0
#- "wrap": "ddp", "world_size": 2, "resumed": 20
#+ "wrap": "ddp", "world_size": 1, "resumed": 20
# %% 15.1 wrong: DDP on one rank | a run on one rank beside one on two: all three on equally many ranks, two or more
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "wrap": "ddp", "world_size": 2, "resumed": 0
#+ "wrap": "ddp", "world_size": 1, "resumed": 0
# %% 15.1 wrong: fewer steps when sharded | the two runs differ in their steps, their ranks or their model: only --wrap may differ
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "wrap": "fully_shard", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "fully_shard", "world_size": 2, "resumed": 0, "steps": 10, "parameters": 867328,
# %% 15.1 wrong: lazy, DDP twice | that is DDP's run twice: --wrap fully_shard
#- def what_the_runs_wrote():
#+ @signed_anew
#+ def what_the_runs_wrote():
#- "wrap": "fully_shard", "world_size": 2, "resumed": 0
#+ "wrap": "ddp", "world_size": 2, "resumed": 0
# %% 15.1 told: no killed run | the run.json of "killed" is missing
#- "killed": {
#+ "kill": {
# %% 15.1 told: made up | "wrap" is missing: paste all that its run.json holds
def what_the_runs_wrote():
    return {name: {"world_size": 2, "loss": 0.02, "step_s": 0.1} for name in ("ddp", "fully_shard", "killed")}


# %% 15.1 told: text | a dict was expected
def what_the_runs_wrote():
    return '{"ddp": {}}'


# %% 15.2 right: messages
#- def three_runs():
#+ @signed_anew
#+ def three_runs():
#- "step_s": 0.08047338600226794
#+ "step_s": 0.11
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("ddp", "none"), "The ranks exchange over a slow link: of 110 ms per step 40 are messages, and backward hides little of them."
# %% 15.2 right: half of it is hidden
#- def three_runs():
#+ @signed_anew
#+ def three_runs():
#- "step_s": 0.08047338600226794
#+ "step_s": 0.08
#- return 0.062, ("none", "alone"), why
#+ return 0.14, ["ddp", "none"], "I added the whole all-reduce, 80 ms, to the computing, but half of it hides under the backward pass."
# %% 15.2 right: a small gap, either part
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("ddp", "none"), "There is hardly any gap to explain: 62 ms predicted, 80 measured, and each part is about 10 of these."
# %% 15.2 right: alone was disturbed
#- def three_runs():
#+ @signed_anew
#+ def three_runs():
#- "step_s": 0.058713552502013044
#+ "step_s": 0.1
#- return 0.062, ("none", "alone"), why
#+ return 0.1, ("alone", "none"), "Another job ran beside the first run, so one rank alone took 100 ms although it had all cores for itself."
# %% 15.2 wrong: the smaller part | the other pair of runs differs by more
#- def three_runs():
#+ @signed_anew
#+ def three_runs():
#- "step_s": 0.0698414774997218
#+ "step_s": 0.075
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("ddp", "none"), why
# %% 15.2 wrong: the longer run last | the longer comes first
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("alone", "none"), why
# %% 15.2 wrong: two things at once | these two differ in ranks and in messages: choose two that differ in one thing
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("ddp", "alone"), why
# %% 15.2 wrong: lazy, written down afterwards | that is the measurement: write down what you predicted before it
#- return 0.062, ("none", "alone"), why
#+ return 0.08047338600226794, ("none", "alone"), why
# %% 15.2 wrong: milliseconds | are these milliseconds? Seconds were asked for
#- return 0.062, ("none", "alone"), why
#+ return 62.0, ("ddp", "none"), why
# %% 15.2 told: lazy, a word | at least twelve different words
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("none", "alone"), "contention"
# %% 15.2 told: invented | is not what the script wrote
#- "step_s": 0.08047338600226794
#+ "step_s": 0.2
# %% 15.2 wrong: DDP in all three | alone and none have --wrap none, and alone is one rank
#- def three_runs():
#+ @signed_anew
#+ def three_runs():
#- "wrap": "none", "world_size": 1, "resumed": 0
#+ "wrap": "ddp", "world_size": 2, "resumed": 0
#- "wrap": "none", "world_size": 2, "resumed": 0
#+ "wrap": "ddp", "world_size": 2, "resumed": 0
# %% 15.2 wrong: changed places | `alone` and `ddp` have changed places: alone is one rank, without messages
#- "alone": {
#+ "DDP": {
#- "ddp": {
#+ "alone": {
#- "DDP": {
#+ "ddp": {
# %% 15.2 told: two things | three were expected
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("none", "alone")
# %% 15.2 told: as text | predicted seconds are a number
#- return 0.062, ("none", "alone"), why
#+ return "62 ms", ("none", "alone"), why
# %% 15.2 told: lazy, the measurement, rounded | that is the measurement: write down what you predicted before it
#- return 0.062, ("none", "alone"), why
#+ return 0.0805, ("none", "alone"), why
# %% 15.2 told: lazy, four words | at least twelve different words
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("none", "alone"), "they share the cores"
# %% 15.2 told: lazy, one word many times | at least twelve different words
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("none", "alone"), "because " * 20 + "4"
# %% 15.2 told: lazy, the lesson's own sentence | this stands in a lesson
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("none", "alone"), why + " The ranks are in each other's way, or wait for data: give them cores."
# %% 15.2 told: no number | name a number of the figure
#- return 0.062, ("none", "alone"), why
#+ return 0.062, ("none", "alone"), "".join(sign for sign in why if not sign.isdigit())
