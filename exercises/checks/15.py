"""Exercise 15: what the capstone's runs wrote, and what explains the gap between prediction and measurement."""

from ddp_course.grading.checks import require, task

HOLDS = {"wrap": str, "world_size": int, "resumed": int, "steps": int, "parameters": int, "loss": float}


def nothing(random, hidden):
    """Nothing is drawn: the runs are the learner's."""
    return {}


def close(run, other):
    """Whether two runs end with the same loss, up to a thousandth."""
    return abs(run["loss"] - other["loss"]) <= 1e-3 * abs(run["loss"])


@task("15.1", "what_the_runs_wrote", {"the same training": 1, "after a kill": 1})
class WhatTheRunsWrote:
    """DDP, fully_shard and a run that was killed: the same model, steps, ranks and last loss; one of them resumed."""

    draw = nothing

    def probe(what_the_runs_wrote):
        """What three runs must have in common, as yes and no."""
        runs = what_the_runs_wrote()
        for name in ("ddp", "fully_shard", "killed"):
            run = runs.get(name) if isinstance(runs, dict) else None
            require(isinstance(run, dict), f'the run.json of "{name}" is missing: a dict was expected')
            odd = [key for key, kind in HOLDS.items() if not isinstance(run.get(key), kind)]
            require(not odd, f'"{name}": run.json has another "{odd[:1]}"')
        ddp, sharded, killed = (runs[name] for name in ("ddp", "fully_shard", "killed"))
        jobs = [{key: run[key] for key in ("world_size", "steps", "parameters")} for run in (ddp, sharded, killed)]
        return {
            "the same training": {
                "the wraps": [ddp["wrap"], sharded["wrap"]],
                "two ranks or more": ddp["world_size"] > 1,
                "DDP and fully_shard train the same model, as long, on as many ranks": jobs[0] == jobs[1],
                "DDP and fully_shard end with the same loss": close(ddp, sharded),
            },
            "after a kill": {
                "it went on from a checkpoint": 0 < killed["resumed"] < killed["steps"],
                "it trains the same model, as long, on as many ranks": jobs[0] == jobs[2],
                "it ends with the loss of the run that was not killed": close(ddp, killed),
            },
        }


@task("15.2", "explained", {"predicted": 1, "explained": 1})
class Explained:
    """Both times in seconds, and causes that leave at most a tenth of the measured step unexplained."""

    draw = nothing

    def probe(explained):
        """Whether the numbers are seconds, and whether the causes add up to the gap."""
        answer = explained()
        triple = isinstance(answer, tuple) and len(answer) == 3 and isinstance(answer[2], dict)
        require(triple, "three were expected: predicted seconds, measured seconds, a dict of causes")
        predicted, measured, causes = answer
        numbers = all(type(value) in (int, float) for value in (predicted, measured, *causes.values()))
        require(numbers and predicted > 0 and measured > 0, "seconds are numbers, and a step takes more than 0")
        return {
            "predicted": {
                "a step takes less than a minute": predicted < 60 > measured,
                "the prediction is another number than the measurement": predicted != measured,
            },
            "explained": {
                "the causes add up to the gap": abs(measured - predicted - sum(causes.values())) <= measured / 10,
                "each cause has four words or more": all(len(str(cause).split()) >= 4 for cause in causes),
            },
        }
