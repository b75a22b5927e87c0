"""Exercise 15: what the capstone's runs wrote, and what explains the gap between prediction and
measurement.
"""

from ddp_course.checking.checks import task

from .shared import require, several

HOLDS = {
    "wrap": str,
    "world_size": int,
    "resumed": int,
    "steps": int,
    "parameters": int,
    "loss": float,
}


def nothing(random):
    """Draw nothing: the runs are the learner's."""
    return {}


def close(run, other):
    """Whether two runs end with the same loss, up to a thousandth."""
    return abs(run["loss"] - other["loss"]) <= 1e-3 * abs(run["loss"])


@task("15.1", "what_the_runs_wrote", {"the same training": 1, "after a kill": 1})
class WhatTheRunsWrote:
    """DDP, fully_shard and a run that was killed: the same model, steps, ranks and last loss; one
    of them resumed.
    """

    draw = nothing

    def probe(what_the_runs_wrote):
        runs = what_the_runs_wrote()
        for name in ("ddp", "fully_shard", "killed"):
            run = runs.get(name) if isinstance(runs, dict) else None
            require(
                isinstance(run, dict), f'the run.json of "{name}" is missing: a dict was expected'
            )
            odd = [key for key, kind in HOLDS.items() if not isinstance(run.get(key), kind)]
            require(not odd, f'"{name}": run.json has another "{odd[:1]}"')
        ddp, sharded, killed = (runs[name] for name in ("ddp", "fully_shard", "killed"))
        jobs = [
            [run[key] for key in ("world_size", "steps", "parameters")]
            for run in (ddp, sharded, killed)
        ]
        alike, after = "DDP and fully_shard", "after a kill"
        yield "the same training", "the wraps", [ddp["wrap"], sharded["wrap"]]
        yield "the same training", "two ranks or more", ddp["world_size"] > 1
        yield (
            "the same training",
            f"{alike} train the same model, as long, on as many ranks",
            jobs[0] == jobs[1],
        )
        yield "the same training", f"{alike} end with the same loss", close(ddp, sharded)
        yield after, "it went on from a checkpoint", 0 < killed["resumed"] < killed["steps"]
        yield after, "it trains the same model, as long, on as many ranks", jobs[0] == jobs[2]
        yield after, "it ends with the loss of the run that was not killed", close(ddp, killed)


@task("15.2", "explained", {"predicted": 1, "explained": 1})
class Explained:
    """Both times in seconds, and causes that leave at most a tenth of the measured step
    unexplained.
    """

    draw = nothing

    def probe(explained):
        three = "three were expected: predicted seconds, measured seconds, a dict of causes"
        predicted, measured, causes = several(explained(), 3, three)
        require(isinstance(causes, dict), three)
        numbers = all(
            type(value) in (int, float) for value in (predicted, measured, *causes.values())
        )
        require(
            numbers and predicted > 0 and measured > 0,
            "seconds are numbers, and a step takes more than 0",
        )
        gap = measured - predicted - sum(causes.values())
        yield "predicted", "a step takes less than a minute", predicted < 60 > measured
        yield (
            "predicted",
            "the prediction is another number than the measurement",
            predicted != measured,
        )
        yield "explained", "the causes add up to the gap", abs(gap) <= measured / 10
        yield (
            "explained",
            "each cause has four words or more",
            all(len(str(cause).split()) >= 4 for cause in causes),
        )
