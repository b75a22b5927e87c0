"""Exercise 15: what the capstone's runs wrote, and which of them explain the gap.

It is the gap between prediction and measurement. A task's `draw`, `probe` and `read` are what
`ddp_exercises.tasks.Task` says.
"""

import hashlib
import json
from operator import itemgetter

from ddp_exercises.tasks import task

from .shared import require, require_explanation, several

TYPES = {  # what a run.json holds
    "wrap": str,
    "world_size": int,
    "resumed": int,
    "steps": int,
    "parameters": int,
    "loss": float,
    "step_s": float,
    "took_s": float,
    "signature": str,
}


def nothing(random):
    """Draw nothing: the runs are the learner's."""
    return {}


def close(run, other):
    """Return whether two runs end with the same loss, up to a thousandth."""
    return abs(run["loss"] - other["loss"]) <= 1e-3 * abs(run["loss"])


def read_runs(runs, *names):
    """Return the runs of these names, each a dict with all that `run.json` holds."""
    chosen = []
    for name in names:
        run = runs.get(name) if isinstance(runs, dict) else None
        require(isinstance(run, dict), f'the run.json of "{name}" is missing: a dict was expected')
        for key, kind in TYPES.items():
            require(key in run, f'"{name}": "{key}" is missing: paste all that its run.json holds')
            require(
                isinstance(run[key], kind),
                f'"{name}": "{key}" is {run[key]!r:.40}, not what a run.json holds: paste all of it',
            )
        chosen.append(run)
    return chosen


def require_signed(names, runs):
    """Raise Wrong if a run is not as the script wrote it: nothing can be seen in other numbers."""
    for name, run in zip(names, runs, strict=True):
        fault = unlike_a_run(run)
        require(not fault, f'run "{name}": {fault}')


def unlike_a_run(run):
    """Return in words what shows that no run of the script wrote this; "" if nothing does."""
    unsigned = {key: value for key, value in run.items() if key != "signature"}
    text = json.dumps(unsigned, sort_keys=True)
    if hashlib.sha256(text.encode()).hexdigest()[:16] != run["signature"]:
        return "this is not what the script wrote: paste all of run.json, and change nothing"
    # Steps differ, and clocks are coarse: only what is far from possible is refused.
    if run["step_s"] * (run["steps"] - run["resumed"]) > 3 * run["took_s"] + 1:
        return f"so many steps of {run['step_s']:.3g} s do not fit into {run['took_s']} s"
    return ""


@task("15.1", "what_the_runs_wrote", {"evidence": 1, "the same training": 1, "after a kill": 1})
class WhatTheRunsWrote:
    """DDP, fully_shard and a run that was killed, as the script wrote them.

    They have the same model, steps, ranks and last loss, and one of them was resumed.
    """

    draw = nothing

    def probe(what_the_runs_wrote):
        names = ("ddp", "fully_shard", "killed")
        runs = read_runs(what_the_runs_wrote(), *names)
        require_signed(names, runs)
        yield "evidence", "the runs", "as the script wrote them"
        ddp, sharded, killed = runs
        job_of = itemgetter("world_size", "steps", "parameters")
        part = "the same training"
        both = "DDP and fully_shard"
        same_job = job_of(ddp) == job_of(sharded)
        yield part, "the wraps", [ddp["wrap"], sharded["wrap"]]
        yield part, "whether there are two ranks or more", ddp["world_size"] > 1
        yield part, f"whether {both} train the same model, as long, on as many ranks", same_job
        yield part, f"whether {both} end with the same loss", close(ddp, sharded)
        part = "after a kill"
        same_job = job_of(ddp) == job_of(killed)
        yield part, "whether it went on from a checkpoint", 0 < killed["resumed"] < killed["steps"]
        yield part, "whether it trains the same model, as long, on as many ranks", same_job
        yield (
            part,
            "whether it ends with the loss of the run that was not killed",
            close(ddp, killed),
        )


@task("15.2", ("three_runs", "explained"), {"evidence": 1, "predicted": 1, "explained": 2})
class Explained:
    """The prediction in seconds, and two of three signed runs: the largest part of the gap.

    It is the difference of these two runs.
    """

    draw = nothing

    def probe(three_runs, explained):
        names = ("alone", "none", "ddp")
        runs = dict(zip(names, read_runs(three_runs(), *names), strict=True))
        require_signed(names, runs.values())
        settings = [(run["wrap"], run["world_size"] > 1) for run in runs.values()]
        yield "evidence", "wrap, and whether there are several ranks", settings
        three = "three were expected: predicted seconds, two names of runs, your sentences"
        predicted, pair, why = several(explained(), 3, three)
        require(
            type(predicted) is float and predicted > 0,
            "predicted seconds are a number such as 0.05",
        )
        longer, shorter = several(pair, 2, "the cause is a pair of runs: (the longer, the shorter)")
        yield "predicted", "whether a step takes less than a minute", predicted < 60
        measured = runs["ddp"]["step_s"]
        # Nobody predicts a step to a thousandth.
        another = abs(predicted - measured) > 1e-3 * measured
        yield "predicted", "whether it is another number than the measurement", another
        # Ranks beside each other without messages, and messages: each explains a part of the gap.
        beside = runs["none"]["step_s"] - runs["alone"]["step_s"]
        messages = measured - runs["none"]["step_s"] - (predicted - runs["alone"]["step_s"])
        part_sizes = {("alone", "none"): abs(beside), ("ddp", "none"): abs(messages)}
        size = part_sizes.get(tuple(sorted((str(longer), str(shorter)))))
        fault_of_order = ""
        fault_of_size = ""
        if size is not None:
            if runs[longer]["step_s"] < runs[shorter]["step_s"]:
                fault_of_order = (
                    f"a step of {longer} is shorter than one of {shorter}: the longer comes first"
                )
            # Two parts are equal if a twentieth of a step would decide between them.
            if size < max(part_sizes.values()) - measured / 20:
                fault_of_size = (
                    "the other pair of runs differs by more: ranks beside each other"
                    f" {beside:+.3f} s, messages {messages:+.3f} s"
                )
        yield "explained", "whether the two runs differ in one thing only", size is not None
        yield "explained", "the longer run, then the shorter", fault_of_order
        yield "explained", "the larger part of the gap", fault_of_size
        require_explanation(why)
        yield "explained", "the form of the sentences", "as asked"
