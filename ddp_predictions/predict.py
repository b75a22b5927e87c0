"""Predictions beside what others measured: one function per published table, and the page that
shows them.

A row is a dict: the table, the keys of the setting, the `quantity` with its unit, `measured` (None:
not known here), `predicted`, `error` (predicted over measured, minus 1) and `calibrated`: whether
the fit saw this row. Where the fit saw every row, `left_out` is the model's median error on rows
that a second fit did not see.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from tabulate import tabulate

from ddp_course.measuring import facts

from . import one_host, published
from .published import Model, Row

PAGE = """# What we predict, beside what others measured

Written by `ddp-course predict`. Error: predicted over measured, minus 1, without its sign; \
median / worst.
Rows that the fit saw are *calibrated*; *left out* is the median error on rows that a second fit \
did not see;
*held back* rows are predicted in predictions.json, and their truth is known to others only.

![predicted over measured, a point per row](predictions.png)

{}"""


class Table(NamedTuple):
    """Predictions for one published table, what was `fitted`, in words, and the median error on
    rows left out.
    """

    name: str
    rows: list[Row]
    fitted: str
    left_out: float | None = None


def scoreboard() -> list[Table]:
    """All tables, predicted anew."""
    return [table() for table in TABLES]


def shaped_links() -> Table:
    """All-reduces over shaped links: fitted at 4 ranks, predicted at 8, and at 16 and 32, which are
    not published.
    """
    name, rows = "allreduce_on_shaped_links", []
    for library in ("gloo", "nccl"):
        table = [
            {"library": library, "ms": row[f"{library}_ms"], **row} for row in facts.rows(name)
        ]
        known = [row for row in table if row["K"] == 4]
        numbers = published.fit_shaped_links(known)
        for row in table + [row | {"K": ranks, "ms": None} for row in known for ranks in (16, 32)]:
            keys = {
                key: row[key]
                for key in ("library", "K", "link_gbit_s", "link_delay_ms", "message_mib")
            }
            rows.append(
                entry(
                    name,
                    keys,
                    "ms",
                    row["ms"],
                    published.shaped_link_ms(row, numbers),
                    row["K"] == 4,
                )
            )
    return Table(
        name, rows, "per library: the share of the link that TCP reaches, and one delay; at K = 4"
    )


def v100_steps() -> Table:
    """Steps of torch's DDP: a network's own time at 2 GPUs times the simulated growth from
    there.
    """
    name, rows = "ddp_step_seconds_v100", []
    table = facts.rows(name)
    bandwidth, interference = published.calibrate_v100(table)
    step_s = partial(published.v100_step_s, bandwidth=bandwidth, interference=interference)
    for row in table:
        seconds = {count: step_s(row["model"], row["gpus_1"], count) for count in (2, 4, 8, 16)}
        for count, at in seconds.items():
            predicted = at if count == 2 else row["gpus_2"] * at / seconds[2]
            keys = {"model": row["model"], "gpus": count}
            rows.append(entry(name, keys, "seconds", row[f"gpus_{count}"], predicted, count == 2))
    words = (
        f"{bandwidth / 1e9:.3g} GB/s per GPU, {interference:.0%} of a GPU taken by a collective; at"
        " 1 and 2 GPUs"
    )
    return Table(name, rows, words)


def nccl_in_one_host() -> Table:
    """NCCL on 2 to 8 GPUs of a host, from how they are wired."""
    name, rows = "nccl_all_reduce_in_one_host", []
    sizes = sorted({row["message_mib"] for row in facts.rows(name)})
    for gpu in one_host.GPUS:
        settings = [
            {"gpu": gpu, "K": count, "message_mib": mib}
            for count, mib in product(range(2, 9), sizes)
        ]
        model = partial(one_host.all_reduce_us, numbers=one_host.fit_host(gpu))
        rows += entries(name, "microseconds", settings, model)
    return Table(
        name,
        rows,
        "per machine: start, latency, rate of a wire, rate of the memory; at K = 2, 3 and 4",
    )


def nccl_sizes() -> Table:
    """NCCL's ring on 8 A100s, every power of two from the smallest published size to twice the
    largest.

    The error of rows left out is that on 4 A100s of another host, for which all sizes are
    published.
    """
    name, quantity = "nccl_ring_a100x8_sizes", "time_us"
    numbers = published.fit_protocols(facts.rows(name))
    settings = [{"KiB": 2**power} for power in range(5, 25)]
    words = ", ".join(
        f"{protocol} {us:.0f} µs and {1.024 / rate:.3g} GB/s"
        for protocol, us, rate in zip(published.PROTOCOLS, numbers[:3], numbers[3:], strict=True)
    )
    four = [
        row
        for row in facts.rows("nccl_all_reduce_in_one_host")
        if row["gpu"] == "A100" and row["K"] == 4
    ]
    sizes = [{"KiB": 1024 * row["message_mib"], quantity: row["microseconds"]} for row in four]
    error = left_out(halves(sizes), published.fit_protocols, published.protocol_us, quantity)
    rows = entries(name, quantity, settings, partial(published.protocol_us, numbers=numbers))
    return Table(name, rows, f"per protocol latency and bytes per time: {words}", error)


def schedules() -> Table:
    """Pipeline schedules; one row is known of each of the two larger models.

    The second fit sees one row of a model, 1F1B with the most micro-batches, and predicts the
    model's other rows.
    """
    name, quantity = "pipeline_schedules_a100", "samples_per_gpu_per_s"
    table = facts.rows(name)
    numbers = published.fit_schedules(table)
    counts = {
        "1.5B": (24, 32, 64),
        "6.2B": (24, 32, 64),
        "14.6B": (48, 64, 128),
        "28.3B": (96, 128, 256),
    }
    settings = [
        {
            "model": model,
            "stages": {"14.6B": 16, "28.3B": 32}.get(model, 8),
            "micro_batches": count,
            "schedule": order,
        }
        for model in counts
        for count, order in product(counts[model], published.ORDERS)
    ]
    other, left_over, interleaving, postponing, *_ = numbers
    words = (
        f"a rate per model; {other:.0f} operations per token and unit of width that are no products"
        f" with weights; {left_over:.2f} of what ZB-2p's formula idles; interleaving keeps"
        f" {interleaving:.2f} of the speed, postponing {postponing:.2f}"
    )
    splits = []
    for model in ("1.5B", "6.2B"):
        unseen = [
            r
            for r in table
            if r["model"] == model and (r["schedule"], r["micro_batches"]) != ("1F1B", 64)
        ]
        splits.append(([row for row in table if row not in unseen], unseen))
    error = left_out(splits, published.fit_schedules, published.samples_per_s, quantity)
    rows = entries(name, quantity, settings, partial(published.samples_per_s, numbers=numbers))
    return Table(name, rows, words, error)


def zero3_and_3d() -> Table:
    """ZeRO-3 against tensor, pipeline and data parallelism."""
    slower, sharding = published.megatron()
    settings = [
        {"plan": plan, "parameters": parameters, "gpus": gpus}
        for plan, first in (("ZeRO-3", 640), ("PTD", 560))
        for parameters, counts in (("174.6B", (384, 768, 1536)), ("529.6B", (first, 1120, 2240)))
        for gpus in counts
    ]
    words = (
        f"{slower:.3f} times the seconds of the GPT steps' machine with twice its links; ZeRO-3's"
        f" ring {sharding.ring / 1e9:.3g} GB/s, and {sharding.shows:.0%} of the shorter of"
        " computing and sending shows"
    )
    model = partial(published.megatron_tflops, slower=slower, sharding=sharding)
    return Table(
        published.ZERO3, entries(published.ZERO3, "tflops_per_gpu", settings, model), words
    )


def fsdp() -> Table:
    """Llama 3.1 8B on H100s: the A100s' share of their datasheet gives the speed; the loss up to
    128 GPUs is fitted.
    """
    sharding = published.sharding_of_today()
    model = partial(published.fsdp_tokens_per_s, sharding=sharding)
    settings = [{"gpus": 8}, {"gpus": 128}]
    rows = entries(
        published.FSDP, "tokens_per_gpu_per_s", settings, model, lambda row: row["gpus"] > 8
    )
    words = (
        f"{sharding.shows:.0%} of the shorter of computing and sending shows, from 128 over 8 GPUs"
    )
    return Table(published.FSDP, rows, words)


def gpt_steps() -> Table:
    """GPT steps by tensor, data and pipeline parallelism."""
    name, quantity, numbers = published.GPT, published.GPT_MS, published.machine()
    table = facts.rows(name)
    settings = [{key: value for key, value in row.items() if key != quantity} for row in table]
    words = (
        f"{numbers.matmul:.0%} of the A100's flops in products, {numbers.touched:.0f} bytes per"
        f" value of an activation, {1e3 * numbers.launch_s:.2f} ms per layer and micro-batch,"
        f" {numbers.inside / 1e9:.0f} GB/s between GPUs of a host, {numbers.host_link / 1e9:.0f}"
        " GB/s between hosts"
    )
    error = left_out(halves(table), published.fit_machine, published.gpt_ms, quantity)
    return Table(
        name,
        entries(name, quantity, settings, partial(published.gpt_ms, machine=numbers)),
        words,
        error,
    )


def bus_bandwidth() -> Table:
    """All-reduces on H200 and B200 hosts by a latency and a rate from two sizes, to show what a
    plain model misses.
    """
    name, quantity, rows = "nccl_bus_bandwidth_h200_b200", "busbw_GBps", []
    for machine, gpus in (("H200x8", 8), ("B200 1 host", 8), ("B200 4 hosts", 32)):
        sizes = {row["KiB"]: row[quantity] for row in facts.rows(name) if row["machine"] == machine}
        moved = {kib: 2 * (gpus - 1) / gpus * kib * 1024 / 1e9 for kib in sizes}
        small, large = 1024, max(sizes)
        rate = (moved[large] - moved[small]) / (
            moved[large] / sizes[large] - moved[small] / sizes[small]
        )
        latency_s = moved[small] / sizes[small] - moved[small] / rate
        for kib, measured in sizes.items():
            predicted = moved[kib] / (latency_s + moved[kib] / rate)
            rows.append(
                entry(
                    name,
                    {"machine": machine, "KiB": kib},
                    quantity,
                    measured,
                    predicted,
                    kib in (small, large),
                )
            )
    return Table(name, rows, "per machine latency and rate, from 1 MiB and 16 GiB")


TABLES: tuple[Callable[[], Table], ...] = (
    shaped_links,
    v100_steps,
    nccl_in_one_host,
    nccl_sizes,
    bus_bandwidth,
    schedules,
    zero3_and_3d,
    fsdp,
    gpt_steps,
)


def entries(
    table: str,
    quantity: str,
    settings: Sequence[Row],
    model: Callable[[Row], float],
    calibrated: Callable[[Row], bool] = bool,
) -> list[Row]:
    """The scoreboard's rows of a table: what `model` predicts for each setting, beside the
    published row of that one.

    Unless `calibrated` says otherwise, every measured row counts as seen by the fit.
    """
    known, rows = facts.rows(table), []
    for setting in settings:
        measured = next((row[quantity] for row in known if setting.items() <= row.items()), None)
        seen = measured is not None and calibrated(setting)
        rows.append(entry(table, setting, quantity, measured, model(setting), seen))
    return rows


def entry(
    table: str, keys: Row, quantity: str, measured: float | None, predicted: float, calibrated: bool
) -> Row:
    """One row of the scoreboard."""
    keys = {
        key: int(value) if isinstance(value, float) and value == int(value) else value
        for key, value in keys.items()
    }
    error = None if measured is None else round(predicted / measured - 1, 4)
    numbers = {"measured": measured, "predicted": float(f"{predicted:.5g}"), "error": error}
    return {"table": table, **keys, "quantity": quantity, **numbers, "calibrated": calibrated}


def halves(rows: Sequence[Row]) -> list[tuple[Sequence[Row], Sequence[Row]]]:
    """(rows to fit, rows to predict), twice: the even and the odd rows, and the other way round."""
    return [(rows[::2], rows[1::2]), (rows[1::2], rows[::2])]


def left_out(
    splits: Iterable[tuple[Any, Any]], fit: Callable, model: Model, quantity: str
) -> float:
    """The median error of `model(row, fit(known))`, predicted over measured, on the rows that a fit
    did not see.
    """
    errors = []
    for known, others in splits:
        numbers = fit(known)
        errors += [abs(model(row, numbers) / row[quantity] - 1) for row in others]
    return median(errors)


def summary(table: Table) -> Row:
    """Errors of a table: (median, worst) of "calibrated" and "predicted" rows, median "left out";
    rows "held back".
    """
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in table.rows:
        if row["error"] is not None:
            errors[row["calibrated"]].append(abs(row["error"]))
    fitted, new = (
        (median(errors[seen]), max(errors[seen])) if errors[seen] else None
        for seen in (True, False)
    )
    unknown = sum(row["measured"] is None for row in table.rows)
    return {
        "calibrated": fitted,
        "predicted": new,
        "left out": table.left_out,
        "held back": unknown,
    }


def overview(tables: Sequence[Table]) -> str:
    """The errors of all tables as text, which is a table in Markdown too."""
    titles = ["table", "rows", "calibrated", "predicted", "left out", "held back"]
    rows = []
    for table in tables:
        errors = summary(table)
        cells = [
            percents(errors["calibrated"]),
            percents(errors["predicted"]),
            percents([table.left_out]),
        ]
        rows.append([table.name, len(table.rows), *cells, errors["held back"]])
    return tabulate(rows, titles, "pipe", colalign=["left"] + ["right"] * 5, disable_numparse=True)


def page(tables: Sequence[Table]) -> str:
    """The scoreboard in Markdown: errors by table, what was fitted, and the rows that were held
    back.
    """
    parts = [PAGE.format(overview(tables))]
    for table in tables:
        parts += [f"## {table.name}", facts.SOURCES[table.name], f"Fitted: {table.fitted}."]
        parts += [f"Assumed: {facts.ASSUMED[table.name]}."] * bool(facts.ASSUMED[table.name])
    return "\n\n".join(parts) + "\n"


def percents(errors: Any) -> str:
    """Errors as text, "1.2% / 3.4%"; a dash where there are none."""
    return (
        " / ".join(f"{error:.1%}" for error in errors) if errors and errors[0] is not None else "–"
    )
