"""Predictions beside what others measured: one function per published table, and the page that shows them.

A row is a dict: the table, the keys of the setting, the `quantity` with its unit, `measured` (None: not known here),
`predicted`, `error` (predicted over measured, minus 1) and `calibrated`: whether the fit saw this row. Where the fit
saw every row, `left_out` says how well the model does on others: its median error on rows that a second fit left out.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from tabulate import tabulate

from . import facts
from .simulate import one_host, published
from .simulate.published import Row

PAGE = """# What we predict, beside what others measured

Written by `ddp-course predict`. Error: predicted over measured, minus 1, without its sign; median / worst.
Rows that the fit saw are *calibrated*; *left out* is the median error on rows that a second fit did not see;
*held back* rows are predicted in predictions.json, and their truth is known to others only.

![predicted over measured, a point per row](predictions.png)

{}"""


class Table(NamedTuple):
    """Predictions for one published table; in words what was fitted and assumed; the median error on rows left out."""

    name: str
    rows: list[Row]
    fitted: str
    left_out: float | None = None
    assumed: str = ""


def scoreboard() -> list[Table]:
    """All tables, predicted anew."""
    return [table() for table in TABLES]


def shaped_links(more: Sequence[int] = (16, 32)) -> Table:
    """All-reduces over shaped links: fitted at 4 ranks; 8 are predicted, and more, which nobody published."""
    name, rows = "allreduce_on_shaped_links", []
    table = facts.rows(name)
    known = [row for row in table if row["K"] == 4]
    for library in ("gloo", "nccl"):
        parameters = published.calibrate_shaped_links(library, known)
        for row in [*table, *(row | {"K": count, f"{library}_ms": None} for row in known for count in more)]:
            keys = {"library": library} | {k: row[k] for k in ("K", "link_gbit_s", "link_delay_ms", "message_mib")}
            predicted = published.shaped_link_ms(library, parameters, row)
            rows.append(entry(name, keys, "ms", row[f"{library}_ms"], predicted, row["K"] == 4))
    return Table(name, rows, "per library: the share of the link that TCP reaches, and one delay; at K = 4")


def v100_steps() -> Table:
    """Steps of torch's DDP: a network's own time at 2 GPUs times the simulated growth from there."""
    name, rows = "ddp_step_seconds_v100", []
    table = facts.rows(name)
    bandwidth, interference = published.calibrate_v100(table)
    for row in table:
        seconds = {
            k: published.v100_step_s(row["model"], row["gpus_1"], k, bandwidth, interference) for k in (2, 4, 8, 16)
        }
        for count, at in seconds.items():
            predicted = at if count == 2 else row["gpus_2"] * at / seconds[2]
            keys = {"model": row["model"], "gpus": count}
            rows.append(entry(name, keys, "seconds", row[f"gpus_{count}"], predicted, count == 2))
    words = f"{bandwidth / 1e9:.3g} GB/s per GPU, {interference:.0%} of a GPU taken by a collective; at 1 and 2 GPUs"
    return Table(name, rows, words)


def nccl_in_one_host() -> Table:
    """NCCL on 2 to 8 GPUs of a host, from how they are wired."""
    name, rows = "nccl_all_reduce_in_one_host", []
    known = {(row["gpu"], row["K"], row["message_mib"]): row["microseconds"] for row in facts.rows(name)}
    for gpu in one_host.GPUS:
        numbers = one_host.fit_host(gpu)
        for count, mib in product(range(2, 9), sorted({mib for *_, mib in known})):
            measured = known.get((gpu, count, mib))
            predicted = one_host.all_reduce_us(gpu, numbers, count, mib)
            keys = {"gpu": gpu, "K": count, "message_mib": mib}
            rows.append(entry(name, keys, "microseconds", measured, predicted))
    return Table(name, rows, "per machine: start, latency, rate of a wire, rate of the memory; at K = 2, 3 and 4")


def nccl_sizes() -> Table:
    """NCCL's ring on 8 A100s, every power of two from the smallest published size to twice the largest."""
    name = "nccl_ring_a100x8_sizes"
    known = {row["KiB"]: row["time_us"] for row in facts.rows(name)}
    numbers = published.fit_protocols(list(known.items()))
    sizes = [2**power for power in range(5, 25)]
    rows = [entry(name, {"KiB": k}, "time_us", known.get(k), published.protocol_us(k, numbers)) for k in sizes]
    words = ", ".join(
        f"{protocol} {us:.0f} µs and {1.024 / rate:.3g} GB/s"
        for protocol, us, rate in zip(published.PROTOCOLS, numbers[:3], numbers[3:], strict=True)
    )
    return Table(name, rows, f"per protocol latency and bytes per time: {words}", _sizes_left_out())


def _sizes_left_out() -> float:
    """The median error between sizes, where all were published: 4 A100s of another host."""
    table = [row for row in facts.rows("nccl_all_reduce_in_one_host") if row["gpu"] == "A100" and row["K"] == 4]
    pairs = [(1024 * row["message_mib"], row["microseconds"]) for row in table]
    return left_out(
        halves(pairs), published.fit_protocols, lambda pair, numbers: published.protocol_us(pair[0], numbers) / pair[1]
    )


def schedules() -> Table:
    """Pipeline schedules; of the two larger models one row each is known."""
    name = "pipeline_schedules_a100"
    table = facts.rows(name)
    known = {(r["model"], r["micro_batches"], r["schedule"]): r["samples_per_gpu_per_s"] for r in table}
    rates, numbers = published.fit_schedules(table)
    batches = {"1.5B": (24, 32, 64), "6.2B": (24, 32, 64), "14.6B": (48, 64, 128), "28.3B": (96, 128, 256)}
    settings = [(model, *pair) for model in batches for pair in product(batches[model], published.ORDERS)]
    rows = []
    for model, count, order in settings:
        stages = {"14.6B": 16, "28.3B": 32}.get(model, 8)
        keys = {"model": model, "stages": stages, "micro_batches": count, "schedule": order}
        measured = known.get((model, count, order))
        predicted = published.samples_per_s(keys, rates[model], *numbers)
        rows.append(entry(name, keys, "samples_per_gpu_per_s", measured, predicted))
    other, left_over, interleaving, postponing = numbers
    words = (
        f"a rate per model; {other:.0f} operations per token and unit of width that are no products with weights; "
        f"{left_over:.2f} of what ZB-2p's formula idles; interleaving keeps {interleaving:.2f} of the speed, "
        f"postponing {postponing:.2f}"
    )
    assumed = (
        "layers and widths (the parameters that follow are those of the name within 1.3 %), 1,024 tokens, and for "
        "1F1B-I (layers + 2) / stages chunks per stage"
    )
    return Table(name, rows, words, _schedules_left_out(table), assumed)


def _schedules_left_out(table: list[Row]) -> float:
    """The median error on a model of which the fit saw one row, 1F1B with the most micro-batches."""

    def seen(row, model):
        return row["model"] != model or (row["schedule"] == "1F1B" and row["micro_batches"] == 64)

    splits = [([r for r in table if seen(r, m)], [r for r in table if not seen(r, m)]) for m in ("1.5B", "6.2B")]

    def ratio(row, fitted):
        return published.samples_per_s(row, fitted[0][row["model"]], *fitted[1]) / row["samples_per_gpu_per_s"]

    return left_out(splits, published.fit_schedules, ratio)


def zero3_and_3d() -> Table:
    """ZeRO-3 against tensor, pipeline and data parallelism."""
    name, rows = "zero3_and_3d_parallel_a100", []
    known = {(row["plan"], row["gpus"]): row["tflops_per_gpu"] for row in facts.rows(name)}
    slower, sharding = published.megatron()
    for plan, first in (("ZeRO-3", 640), ("PTD", 560)):
        for parameters, counts in (("174.6B", (384, 768, 1536)), ("529.6B", (first, 1120, 2240))):
            for gpus in counts:
                keys = {"plan": plan, "parameters": parameters, "gpus": gpus}
                measured = known.get((plan, gpus)) if parameters == "174.6B" else None
                predicted = published.megatron_tflops(keys, slower, sharding)
                rows.append(entry(name, keys, "tflops_per_gpu", measured, predicted))
    words = (
        f"{slower:.3f} times the seconds of the GPT steps' machine with twice its links; ZeRO-3's ring "
        f"{sharding.ring / 1e9:.3g} GB/s, and {sharding.shows:.0%} of the shorter of computing and sending shows"
    )
    assumed = (
        "layers and widths (the parameters that follow are those of the name within 0.1 %), 8 x 12 and 8 x 35 tensor "
        "and pipeline ways, 2,240 sequences (2,560 on 640 GPUs) for 529.6B; 4 NICs per host for the GPT steps, 8 here"
    )
    return Table(name, rows, words, assumed=assumed)


def fsdp() -> Table:
    """Llama 3.1 8B on H100s: the speed by what A100s reach of their datasheet, the loss from 8 to 128 GPUs fitted."""
    name, sharding = published.FSDP, published.sharding_of_today()
    rows = []
    for row in facts.rows(name):
        predicted = published.fsdp_tokens_per_s(int(row["gpus"]), sharding)
        measured = row["tokens_per_gpu_per_s"]
        rows.append(entry(name, {"gpus": row["gpus"]}, "tokens_per_gpu_per_s", measured, predicted, row["gpus"] > 8))
    words = f"{sharding.shows:.0%} of the shorter of computing and sending shows, from 128 over 8 GPUs"
    assumed = "32 layers of width 4,096 with plain attention: 7.0 billion parameters, where the model has 8.0"
    return Table(name, rows, words, assumed=assumed)


def gpt_steps() -> Table:
    """GPT steps by tensor, data and pipeline parallelism."""
    name, table = published.GPT, facts.rows(published.GPT)
    numbers = published.machine()
    rows = []
    for row in table:
        keys = {key: value for key, value in row.items() if key != published.GPT_MS}
        rows.append(entry(name, keys, published.GPT_MS, row[published.GPT_MS], published.gpt_ms(row, numbers)))
    words = (
        f"{numbers.matmul:.0%} of the A100's flops in products, {numbers.touched:.0f} bytes per value of an "
        f"activation, {1e3 * numbers.launch_s:.2f} ms per layer and micro-batch, "
        f"{numbers.inside / 1e9:.0f} GB/s between GPUs of a host, {numbers.host_link / 1e9:.0f} GB/s between hosts"
    )
    error = left_out(
        halves(table), published.fit_machine, lambda row, fitted: published.gpt_ms(row, fitted) / row[published.GPT_MS]
    )
    return Table(name, rows, words, error)


def bus_bandwidth() -> Table:
    """All-reduces on H200 and B200 hosts by latency and rate alone, from two sizes: what a plain model misses."""
    name, rows = "nccl_bus_bandwidth_h200_b200", []
    table = facts.rows(name)
    for machine, gpus in (("H200x8", 8), ("B200 1 host", 8), ("B200 4 hosts", 32)):
        sizes = {row["KiB"]: row["busbw_GBps"] for row in table if row["machine"] == machine}
        moved = {kib: 2 * (gpus - 1) / gpus * kib * 1024 / 1e9 for kib in sizes}
        small, large = 1024, max(sizes)
        rate = (moved[large] - moved[small]) / (moved[large] / sizes[large] - moved[small] / sizes[small])
        latency_s = moved[small] / sizes[small] - moved[small] / rate
        for kib, measured in sizes.items():
            predicted = moved[kib] / (latency_s + moved[kib] / rate)
            keys = {"machine": machine, "KiB": kib}
            rows.append(entry(name, keys, "busbw_GBps", measured, predicted, kib in (small, large)))
    return Table(name, rows, "per machine latency and rate, from 1 MiB and 16 GiB")


TABLES: tuple[Callable[[], Table], ...] = (
    shaped_links, v100_steps, nccl_in_one_host, nccl_sizes, bus_bandwidth, schedules, zero3_and_3d, fsdp,
    gpt_steps,
)  # fmt: skip


def entry(
    table: str, keys: Row, quantity: str, measured: float | None, predicted: float, calibrated: bool | None = None
) -> Row:
    """One row of the scoreboard; unless told otherwise, what was measured was used to calibrate."""
    calibrated = measured is not None if calibrated is None else calibrated
    keys = {
        key: int(value) if isinstance(value, float) and value == int(value) else value for key, value in keys.items()
    }
    error = None if measured is None else round(predicted / measured - 1, 4)
    numbers = {"measured": measured, "predicted": float(f"{predicted:.5g}"), "error": error}
    return {"table": table, **keys, "quantity": quantity, **numbers, "calibrated": calibrated}


def halves(rows: Sequence[Any]) -> list[tuple[Sequence[Any], Sequence[Any]]]:
    """(rows to fit, rows to predict), twice: every other one, and the others."""
    return [(rows[::2], rows[1::2]), (rows[1::2], rows[::2])]


def left_out(splits: Iterable[tuple[Any, Any]], fit: Callable, ratio: Callable) -> float:
    """The median error of `ratio(row, fit(known))`, predicted over measured, on the rows that a fit did not see."""
    errors = []
    for known, others in splits:
        fitted = fit(known)
        errors += [abs(ratio(row, fitted) - 1) for row in others]
    return median(errors)


def summary(table: Table) -> Row:
    """Errors of a table: (median, worst) of "calibrated" and "predicted" rows, median "left out"; rows "held back"."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in table.rows:
        if row["error"] is not None:
            errors[row["calibrated"]].append(abs(row["error"]))
    fitted, new = ((median(errors[seen]), max(errors[seen])) if errors[seen] else None for seen in (True, False))
    unknown = sum(row["measured"] is None for row in table.rows)
    return {"calibrated": fitted, "predicted": new, "left out": table.left_out, "held back": unknown}


def overview(tables: Sequence[Table]) -> str:
    """The errors of all tables, as text that is a table in Markdown too."""
    titles = ["table", "rows", "calibrated", "predicted", "left out", "held back"]
    rows = []
    for table in tables:
        errors = summary(table)
        cells = [percents(errors["calibrated"]), percents(errors["predicted"]), percents([table.left_out])]
        rows.append([table.name, len(table.rows), *cells, errors["held back"]])
    return tabulate(rows, titles, "pipe", colalign=["left"] + ["right"] * 5, disable_numparse=True)


def page(tables: Sequence[Table]) -> str:
    """The scoreboard in Markdown: errors by table, what was fitted, and the rows that were held back."""
    parts = [PAGE.format(overview(tables))]
    for table in tables:
        parts += [f"## {table.name}", facts.SOURCES[table.name], f"Fitted: {table.fitted}."]
        parts += [f"Assumed: {table.assumed}."] * bool(table.assumed)
    return "\n\n".join(parts) + "\n"


def percents(errors: Any) -> str:
    """Errors as text, "1.2% / 3.4%"; a dash where there are none."""
    return " / ".join(f"{error:.1%}" for error in errors) if errors and errors[0] is not None else "–"
