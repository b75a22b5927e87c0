"""Fits all constants of the predictions anew, and compares them with those that are frozen.

Few numbers are fitted to each table; where a constant of the transformer has an expected value,
straying by its factor costs the fit as much as a row that is 3 % off. Outliers count less.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product
from math import exp, inf, log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import LinearConstraint, least_squares, milp

from ddp_course.base.files import replace_file
from ddp_course.lab.measuring import facts
from ddp_predictions import frozen, one_host, transformers
from ddp_predictions.runs import read_run
from ddp_predictions.scoreboard import LEFT_OUT

from . import published, scoreboard
from .harness import Benchmark, Part, Promise
from .published import QI, Model, Row
from .scoreboard import OF_2021, TODAY

SPREAD = 0.03
V100_WIRES = {
    (0, 1): 1,
    (0, 2): 1,
    (0, 3): 2,
    (0, 4): 2,
    (1, 2): 2,
    (1, 3): 1,
    (1, 5): 2,
    (2, 3): 2,
    (2, 6): 1,
    (3, 7): 1,
    (4, 5): 1,
    (4, 6): 1,
    (4, 7): 2,
    (5, 6): 2,
    (5, 7): 1,
    (6, 7): 2,
}


def packed_rings(gpus: int) -> int:
    """Return how many rings over the first `gpus` V100s fit on the wires at once.

    Each wire is used once in each direction. Where no ring exists along wires, a step may pass
    through a GPU in between and take two wires.
    """
    free = {}
    for (first, second), count in V100_WIRES.items():
        if second < gpus:
            free[first, second] = count
            free[second, first] = count
    ways = list(free)
    around = list(cycles(gpus, free, through=False)) or list(cycles(gpus, free, through=True))
    different = {tuple(sorted(ring)) for ring in around}
    counts = []
    for ring in different:
        counts.append([ring.count(way) for way in ways])
    used = np.array(counts).T
    limit = LinearConstraint(used, ub=[free[way] for way in ways])
    packed = milp(-np.ones(used.shape[1]), constraints=limit, integrality=np.ones(used.shape[1]))
    return round(-packed.fun)


def cycles(gpus: int, free: dict, through: bool) -> Iterator[list[tuple[int, int]]]:
    """Yield each way around all GPUs, as a list of wires (from, to).

    Where two GPUs have no wire, `through` allows one GPU in between.
    """

    def steps(source, target):
        """Return each way from one GPU to another, as a list of the wires that it takes."""
        if (source, target) in free:
            return [[(source, target)]]
        if not through:
            return []
        ways = []
        for between in range(gpus):
            if (source, between) in free and (between, target) in free:
                ways.append([(source, between), (between, target)])
        return ways

    for order in permutations(range(1, gpus)):
        ring = (0, *order, 0)
        choices = [steps(source, target) for source, target in pairwise(ring)]
        for chosen in product(*choices):
            yield [wire for step in chosen for wire in step]


def fit(
    model: Model, rows: Sequence[Row], quantity: str, start: Sequence[float]
) -> tuple[Any, ...]:
    """Return the positive numbers near `start` with which `model` comes nearest to all rows.

    Outliers count less.
    """

    def errors(logarithms):
        numbers = np.exp(logarithms)
        return [np.log(model(row, numbers) / row[quantity]) for row in rows]

    result = least_squares(errors, np.log(start), loss="soft_l1", f_scale=0.05)
    return tuple(np.exp(result.x).tolist())


def fit_within(
    model: Model,
    rows: Sequence[Row],
    quantity: str,
    start: Sequence[float],
    bounds: Any,
    step: float | None = None,
) -> tuple[float, ...]:
    """Return the numbers within `bounds` with the least squares of relative errors.

    `step` is that of the derivatives.
    """

    def errors(numbers):
        return [model(row, numbers) / row[quantity] - 1 for row in rows]

    return tuple(least_squares(errors, start, bounds=bounds, diff_step=step).x.tolist())


def fit_shaped_links(rows: Sequence[Row]) -> tuple[float, ...]:
    """Return the two numbers of `shaped_link_ms` for rows of one library."""
    start = (0.95, 1.0)
    bounds = ((0.1, 0.0), (1.0, 100.0))
    return fit_within(published.shaped_link_ms, rows, "ms", start, bounds, step=1e-3)


def calibrate_v100(rows: Sequence[Row]) -> tuple[float, float]:
    """Return (bytes per second, interference) that explain best how 2 GPUs are slower than 1."""

    def step_on_two_gpus(row, numbers):
        exponent, interference = numbers
        one_gpu_s = row["gpus_1"]
        return published.v100_step_s(row["model"], one_gpu_s, 2, 10**exponent, interference)

    start = (10.3, 0.5)
    bounds = ((8, 0), (12, 10))
    exponent, interference = fit_within(step_on_two_gpus, rows, "gpus_2", start, bounds, step=1e-2)
    return 10**exponent, interference


def fit_schedules(rows: Sequence[Row]) -> tuple[float, ...]:
    """Return the numbers of `samples_per_s`, from rows with all models."""
    highest = []
    for model in QI:
        speeds = [row["samples_per_gpu_per_s"] for row in rows if row["model"] == model]
        highest.append(max(speeds))
    start = (8e4, 0.4, 0.95, 0.99, *highest)
    return fit(published.samples_per_s, rows, "samples_per_gpu_per_s", start)


def fit_protocols(rows: Sequence[Row]) -> tuple[float, ...]:
    """Return the latencies and rates of the three protocols from rows by size, the largest last.

    LL sends a flag with every 4 bytes, LL128 with every 120, Simple none; so the lines are steep,
    flatter, flattest.
    """
    latency = min(row["time_us"] for row in rows)
    rate = rows[-1]["time_us"] / rows[-1]["KiB"]
    start = (0.9 * latency, 1.7 * latency, 5 * latency, 10 * rate, 1.2 * rate, rate)
    return fit(published.protocol_us, rows, "time_us", start)


def fit_host(gpu: str) -> tuple[float, ...]:
    """Return the four numbers that explain best the published times of "A100" or "V100"."""
    known = [row for row in facts.rows("nccl_all_reduce_in_one_host") if row["gpu"] == gpu]
    start = (30.0, 3.0, 5.0, 1.0)
    return fit_within(one_host.all_reduce_us, known, "microseconds", start, bounds=(0, 1e4))


class MeasuredRun(NamedTuple):
    """A published run, and the tokens per second and GPU that it reached."""

    run: Any
    tokens_per_s: float


def today() -> list[MeasuredRun]:
    """Return today's published runs."""
    measured = []
    for row in facts.rows("transformer_throughput"):
        run, *_ = read_run(row)
        measured.append(MeasuredRun(run, row["tokens_per_s_per_gpu"]))
    return measured


def gpts() -> list[MeasuredRun]:
    """Return the GPT steps of 2021."""
    measured = []
    for row in facts.rows(published.GPT):
        run, *_ = read_run(row)
        seconds = row[published.GPT_MS] / 1000
        measured.append(MeasuredRun(run, transformers.tokens_per_s(run, seconds)))
    return measured


def misses(measured: Sequence[MeasuredRun], numbers: Any) -> np.ndarray:
    """Return the errors of the predictions: predicted over measured, minus 1."""
    ratios = []
    for run, tokens_per_s in measured:
        seconds = transformers.step(run, None, numbers).seconds
        ratios.append(transformers.tokens_per_s(run, seconds) / tokens_per_s - 1)
    return np.array(ratios)


def fit_transformer(
    measured: Sequence[MeasuredRun],
    free: Sequence[str],
    column: str = "today",
    fixed: Any = None,
) -> dict[str, float]:
    """Return the constants, of which those in `free` are fitted to measured runs.

    `fixed` {constant: value} are not fitted; a value that is a name is that constant's value.
    """
    expected = frozen.constants("expected")
    factors = frozen.constants("factor")
    fixed = fixed or {}
    free = [name for name in free if name not in fixed]

    def values(logarithms):
        found = {name: exp(value) for name, value in zip(free, logarithms, strict=True)}
        known = frozen.constants(column) | found
        return known | {name: known.get(value, value) for name, value in fixed.items()}

    def errors(logarithms):
        numbers = values(logarithms)
        strayed = [
            SPREAD * log(numbers[name] / expected[name]) / log(factors[name])
            for name in free
            if factors[name]
        ]
        return [*np.log(1 + misses(measured, numbers)), *strayed]

    start = [log(expected[name]) for name in free]
    result = least_squares(errors, start, loss="soft_l1", f_scale=SPREAD)
    return values(result.x)


def fit_zero3() -> tuple[float, ...]:
    """Return the share of the cards and the part that shows, of the two rows of ZeRO-3 of 2021."""
    rows = [row for row in facts.rows(published.ZERO3) if row["plan"] == "ZeRO-3"]
    known = [row for row in rows if row["gpus"] < 1536]
    return fit(published.megatron_tflops, known, "tflops_per_gpu", (0.1, 0.5))


def refit() -> dict[str, Sequence[float]]:
    """Return all numbers of numbers.json that have a fit, anew."""
    links = facts.rows("allreduce_on_shaped_links")
    fresh: dict[str, Sequence[float]] = {}
    for library in ("gloo", "nccl"):
        known = [row | {"library": library, "ms": row[f"{library}_ms"]} for row in links]
        four = [row for row in known if row["K"] == 4]
        fresh[f"shaped links, {library}"] = fit_shaped_links(four)
    fresh["steps of V100s"] = calibrate_v100(facts.rows("ddp_step_seconds_v100"))
    for gpu in one_host.GPUS:
        fresh[f"one host, {gpu}"] = fit_host(gpu)
    fresh["protocols"] = fit_protocols(facts.rows("nccl_ring_a100x8_sizes"))
    fresh["schedules"] = fit_schedules(facts.rows("pipeline_schedules_a100"))
    fresh["rings of V100s"] = [packed_rings(gpus) for gpus in range(2, 9)]
    fresh["ZeRO-3 of 2021"] = fit_zero3()
    return fresh


def left_out_models(measured: Sequence[MeasuredRun] | None = None, fixed: Any = None) -> np.ndarray:
    """Return the errors of today's runs, each foretold by a fit that did not see its model."""
    measured = measured or today()
    errors = np.zeros(len(measured))
    for model in {each.run.model for each in measured}:
        unseen = [place for place, each in enumerate(measured) if each.run.model == model]
        seen = [each for each in measured if each.run.model != model]
        fitted = fit_transformer(seen, TODAY, fixed=fixed)
        errors[unseen] = misses([measured[place] for place in unseen], fitted)
    return errors


def left_out_halves(
    rows: Sequence[Any], fit_rows: Callable, errors_of: Callable[[Any, Any], Any]
) -> float:
    """Return the median error on every other row, by a fit to the rows between, both ways round."""
    errors = []
    for known, others in ((rows[::2], rows[1::2]), (rows[1::2], rows[::2])):
        errors += list(np.abs(errors_of(others, fit_rows(known))))
    return median(errors)


def left_out_schedules() -> float:
    """Return the median error on a model's rows, when a fit saw one of them.

    That one is 1F1B with most micro-batches.
    """
    table = facts.rows("pipeline_schedules_a100")
    errors = []
    for model in ("1.5B", "6.2B"):
        rows = [row for row in table if row["model"] == model]
        unseen = [row for row in rows if (row["schedule"], row["micro_batches"]) != ("1F1B", 64)]
        fitted = fit_schedules([row for row in table if row not in unseen])
        for row in unseen:
            predicted = published.samples_per_s(row, fitted)
            errors.append(abs(predicted / row["samples_per_gpu_per_s"] - 1))
    return median(errors)


def left_out() -> dict[str, float]:
    """Return the median error of each table on rows that a fit did not see."""

    def protocol_errors(rows, numbers):
        return [published.protocol_us(row, numbers) / row["time_us"] - 1 for row in rows]

    four = [
        {"KiB": 1024 * row["message_mib"], "time_us": row["microseconds"]}
        for row in facts.rows("nccl_all_reduce_in_one_host")
        if row["gpu"] == "A100" and row["K"] == 4
    ]

    def fit_gpts(measured):
        return fit_transformer(measured, OF_2021, "of_2021")

    return {
        "nccl_ring_a100x8_sizes": left_out_halves(four, fit_protocols, protocol_errors),
        "pipeline_schedules_a100": left_out_schedules(),
        "gpt_step_ms_a100_3d": left_out_halves(gpts(), fit_gpts, misses),
        "transformer_throughput": float(np.median(np.abs(left_out_models()))),
    }


WITHOUT: dict[str, Row] = {  # What a model lacks, as constants that are fixed.
    "nothing": {},
    "launch": {"launch": 0.0},
    "touched": {"touched": 0.0},
    "shard": {"shard": 0.0},
    "hop": {"hop": 0.0},
    "moved": {"moved": 0.0},
    "logit": {"logit": 0.0},
    "score": {"score": 0.0},
    "a rate of its own for attention": {"attend": "matmul"},
    "sending": {"inside": inf, "outside": inf, "hop": 0.0, "shard": 0.0},
    "hiding under computing": {"shows": 1.0},
}
OF_BOTH = ("nothing", "launch", "touched", "hop", "moved", "logit", "score")  # 2021 has these.


def ablation() -> list[Row]:
    """Return the median errors, in percent, of models that lack a term, each fitted anew.

    They are those of today's runs, of models left out, of the GPTs of 2021, and of three ways at
    once, which no fit sees.
    """
    rows = [without(title, today(), fixed) for title, fixed in WITHOUT.items()]
    without_recomputing = []
    for run, tokens_per_s in today():
        without_recomputing.append(MeasuredRun(replace(run, recompute=0.0), tokens_per_s))
    rows.append(without("the cost of recomputing", without_recomputing, {}))
    three_ways = [row for row in facts.rows(published.ZERO3) if row["plan"] == "PTD"]
    for row in rows:
        name = row["without"]
        row |= {"GPTs": "", "three ways": ""}
        if name in OF_BOTH:
            fitted = fit_transformer(gpts(), OF_2021, "of_2021", WITHOUT[name])
            row["GPTs"] = percent(misses(gpts(), fitted))
            errors = []
            for run in three_ways:
                tflops = published.megatron_tflops(run, values=fitted)
                errors.append(tflops / run["tflops_per_gpu"] - 1)
            row["three ways"] = percent(errors)
    return rows


def without(title: str, measured: Sequence[MeasuredRun], fixed: Row) -> Row:
    """Return a row of the ablation with the errors of today's runs."""
    fitted = misses(measured, fit_transformer(measured, TODAY, fixed=fixed))
    unseen = left_out_models(measured, fixed)
    return {"without": title, "fitted": percent(fitted), "model left out": percent(unseen)}


def percent(errors: Any) -> float:
    """Return the median size of errors in percent."""
    return round(100 * float(np.median(np.abs(errors))), 2)


def strayed(args: Any) -> Part:
    """Return how far the frozen constants are from a fit to the tables."""
    rows: list[Row] = []
    for column, measured, free in (("today", today(), TODAY), ("of_2021", gpts(), OF_2021)):
        fitted = fit_transformer(measured, free, column)
        known = frozen.constants(column)
        for name in free:
            rows.append({"constant": f"{name}, {column}", "fit": fitted[name], "is": known[name]})
    for name, values in refit().items():
        for place, value in enumerate(values):
            frozen_value = frozen.numbers(name)[place]
            rows.append({"constant": f"{name}, {place}", "fit": value, "is": frozen_value})
    for name, value in left_out().items():
        rows.append({"constant": f"left out, {name}", "fit": value, "is": LEFT_OUT[name]})
    furthest = max(abs(row["fit"] / row["is"] - 1) for row in rows)
    return Part(rows, [Promise("frozen constants, furthest from a fit", furthest, 0.02)], rows)


def write_scoreboard(report: Row, folder: Any) -> list[Any]:
    """Write the package's scoreboard anew."""
    tables = [table._asdict() for table in scoreboard.scoreboard()]
    path = Path(scoreboard.__file__).parents[1] / "ddp_predictions" / "scoreboard.json"
    parts = []
    for table in tables:
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in table.pop("rows"))
        words = json.dumps(table, ensure_ascii=False)[:-1]
        parts.append(f'{words}, "rows": [\n  {rows}\n]}}')
    replace_file(path, ("[\n" + ",\n".join(parts) + "\n]\n").encode())
    return [path]


def terms(args: Any) -> Part:
    """Return what each term of the model is worth."""
    rows = ablation()
    return Part(rows, table=rows)


BENCHMARK = Benchmark(
    "predictions",
    "fit the constants of the predictions anew, and leave out each term",
    {"constants": strayed, "terms": terms},
    finish=write_scoreboard,
)
