# %% [markdown]
# Answers to exercise 15 as learners write them. docs/CONTRIBUTING.md says how to read this.
# A run with other numbers has another signature: the first 16 digits of the SHA-256 of its JSON, keys
# sorted, without the signature.

# %% 15.1 right: four ranks
#- "wrap": "ddp", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 4, "resumed": 0, "steps": 30, "parameters": 867328,
#- "signature": "7871be978a73c3db",
#+ "signature": "05259d48c36d7fa9",
#- "wrap": "fully_shard", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "fully_shard", "world_size": 4, "resumed": 0, "steps": 30, "parameters": 867328,
#- "loss": 0.013899652232794324, "step_s": 0.15254788849779288,
#+ "loss": 0.0139, "step_s": 0.15254788849779288,
#- "signature": "1d2acdfce2d7080a",
#+ "signature": "df93f9e9c4825a90",
#- "wrap": "ddp", "world_size": 2, "resumed": 20, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 4, "resumed": 20, "steps": 30, "parameters": 867328,
#- "signature": "e69abc27fe6a94ff",
#+ "signature": "b0714d086525f880",
# %% 15.1 right: killed while sharded
#- "wrap": "ddp", "world_size": 2, "resumed": 20, "steps": 30, "parameters": 867328,
#+ "wrap": "fully_shard", "world_size": 2, "resumed": 10, "steps": 30, "parameters": 867328,
#- "signature": "e69abc27fe6a94ff",
#+ "signature": "fa1806d662635005",
# %% 15.1 told: another number than the script's | is not what the script wrote
#- "wrap": "ddp", "world_size": 2, "resumed": 20, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 2, "resumed": 10, "steps": 30, "parameters": 867328,
# %% 15.1 told: lazy, made-up signatures | is not what the script wrote
#- 7871be978a73c3db
#+ 0123456789abcdef
#- 1d2acdfce2d7080a
#+ 0123456789abcdef
#- e69abc27fe6a94ff
#+ 0123456789abcdef
# %% 15.1 told: so long, in so little time | do not fit into
#- "devices": "this machine's processor (2 processes)", "began": 1795704857, "took_s": 3.3,
#+ "devices": "this machine's processor (2 processes)", "began": 1795704857, "took_s": 0.1,
#- "signature": "7871be978a73c3db",
#+ "signature": "fe804e65805ba113",
# %% 15.1 wrong: began anew | it began anew: was there a checkpoint before the kill, and was it the same folder?
#- "wrap": "ddp", "world_size": 2, "resumed": 20, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#- "signature": "e69abc27fe6a94ff",
#+ "signature": "ef59df233e01f644",
# %% 15.1 wrong: another loss after the kill | the loss is another one: are the optimizer's state and the data those of the step that it went on with?
#- "loss": 0.013899652232794324, "step_s": 0.07921694700416992,
#+ "loss": 0.02, "step_s": 0.07921694700416992,
#- "signature": "e69abc27fe6a94ff",
#+ "signature": "c8605ad94edd3803",
# %% 15.1 wrong: another loss when sharded | they train differently: does every rank begin with the same weights, and see the same data with both?
#- "loss": 0.013899652232794324, "step_s": 0.15254788849779288,
#+ "loss": 0.02, "step_s": 0.15254788849779288,
#- "signature": "1d2acdfce2d7080a",
#+ "signature": "69287f3719f191f1",
# %% 15.1 wrong: one rank | one rank alone has nothing to average: --nproc-per-node=2
#- "wrap": "ddp", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 1, "resumed": 0, "steps": 30, "parameters": 867328,
#- "signature": "7871be978a73c3db",
#+ "signature": "e98b715084660359",
#- "wrap": "fully_shard", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "fully_shard", "world_size": 1, "resumed": 0, "steps": 30, "parameters": 867328,
#- "signature": "1d2acdfce2d7080a",
#+ "signature": "1569c24b4acb2375",
#- "wrap": "ddp", "world_size": 2, "resumed": 20, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 1, "resumed": 20, "steps": 30, "parameters": 867328,
#- "signature": "e69abc27fe6a94ff",
#+ "signature": "8f6f8762e03875d4",
# %% 15.1 wrong: DDP on one rank | a run on one rank beside one on two: all three on equally many ranks, two or more
#- "wrap": "ddp", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 1, "resumed": 0, "steps": 30, "parameters": 867328,
#- "signature": "7871be978a73c3db",
#+ "signature": "e98b715084660359",
# %% 15.1 wrong: fewer steps when sharded | the two runs differ in their steps, their ranks or their model: only --wrap may differ
#- "wrap": "fully_shard", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "fully_shard", "world_size": 2, "resumed": 0, "steps": 10, "parameters": 867328,
#- "signature": "1d2acdfce2d7080a",
#+ "signature": "fdb9763f462903a0",
# %% 15.1 wrong: lazy, DDP twice | that is DDP's run twice: --wrap fully_shard
#- "wrap": "fully_shard", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#- "signature": "1d2acdfce2d7080a",
#+ "signature": "75b1598ad563eb43",
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
#- "loss": 0.013899652232794324, "step_s": 0.08047338600226794,
#+ "loss": 0.013899652232794324, "step_s": 0.11,
#- "signature": "7871be978a73c3db",
#+ "signature": "8337be1f226fb6b6",
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.062, ("ddp", "none"), "the link is slow and little is hidden"
# %% 15.2 right: half of it is hidden
#- "loss": 0.013899652232794324, "step_s": 0.08047338600226794,
#+ "loss": 0.013899652232794324, "step_s": 0.08,
#- "signature": "7871be978a73c3db",
#+ "signature": "28bbf05c3b4433a7",
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.14, ["ddp", "none"], "half of the all-reduce hides under backward"
# %% 15.2 right: a small gap, either part
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.062, ("ddp", "none"), "there is hardly any gap at all"
# %% 15.2 right: alone was disturbed
#- "loss": 0.04291767254471779, "step_s": 0.058713552502013044,
#+ "loss": 0.04291767254471779, "step_s": 0.1,
#- "signature": "68022f8a8f7ae709",
#+ "signature": "678d7532c204d68e",
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.1, ("alone", "none"), "another job ran beside the first run"
# %% 15.2 wrong: the smaller part | the other pair of runs differs by more
#- "loss": 0.02152334483253071, "step_s": 0.0698414774997218,
#+ "loss": 0.02152334483253071, "step_s": 0.075,
#- "signature": "3698ad6c26b13f27",
#+ "signature": "ca19b2b2f856d157",
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.062, ("ddp", "none"), "it is a slow machine today"
# %% 15.2 wrong: the longer run last | the longer comes first
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.062, ("alone", "none"), "the two ranks share the cores of one machine"
# %% 15.2 wrong: two things at once | these two differ in ranks and in messages: choose two that differ in one thing
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.062, ("ddp", "alone"), "DDP is slower than one rank"
# %% 15.2 wrong: lazy, written down afterwards | that is the measurement: write down what you predicted before it
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.08047338600226794, ("none", "alone"), "the ranks share their cores"
# %% 15.2 wrong: milliseconds | are these milliseconds? Seconds were asked for
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 62.0, ("ddp", "none"), "the link is slow and little is hidden"
# %% 15.2 wrong: a word | say it so that somebody else understands it: four words or more
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.062, ("none", "alone"), "contention"
# %% 15.2 told: invented | is not what the script wrote
#- "loss": 0.013899652232794324, "step_s": 0.08047338600226794,
#+ "loss": 0.013899652232794324, "step_s": 0.2,
# %% 15.2 wrong: DDP in all three | alone and none have --wrap none, and alone is one rank
#- "wrap": "none", "world_size": 1, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#- "signature": "68022f8a8f7ae709",
#+ "signature": "889f8425ee82051e",
#- "wrap": "none", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#+ "wrap": "ddp", "world_size": 2, "resumed": 0, "steps": 30, "parameters": 867328,
#- "signature": "3698ad6c26b13f27",
#+ "signature": "2f5286eca764a861",
# %% 15.2 wrong: changed places | `alone` and `ddp` have changed places: alone is one rank, without messages
#- "alone": {
#+ "DDP": {
#- "ddp": {
#+ "alone": {
#- "DDP": {
#+ "ddp": {
# %% 15.2 told: two things | three were expected
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.062, ("none", "alone")
# %% 15.2 told: as text | predicted seconds are a number
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return "62 ms", ("none", "alone"), "the ranks share their cores"
# %% 15.2 told: lazy, the measurement, rounded | that is the measurement: write down what you predicted before it
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.0805, ("none", "alone"), "the two ranks share the cores of one machine"
# %% 15.2 told: lazy, a word four times | four different words or more say why
#- return 0.062, ("none", "alone"), "the two ranks share the cores of one machine"
#+ return 0.062, ("none", "alone"), "because because because because"
