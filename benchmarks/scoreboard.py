"""The scoreboard's tables, predicted anew: one function per published table."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from ddp_course.lab.measuring import facts
from ddp_predictions import one_host
from ddp_predictions.answers import Answer, predict
from ddp_predictions.frozen import constants, numbers
from ddp_predictions.scoreboard import Table

from . import published
from .published import Row

# The constants that are fitted to the transformers of today, and to the GPTs of 2021.
TODAY = ("matmul", "attend", "touched", "launch", "shard")
OF_2021 = ("matmul", "launch", "inside", "outside", "score")
# A row of today's transformers has these keys.
SHOWN = ("model", "seq", "micro_batch", "accumulate", "gpus", "gpu", "tp", "sharding", "recompute")
STRANGE = (
    "three rows disagree with their neighbours, and no smooth model can have them: MPT-70b on 64 "
    "GPUs (276 tokens/s; 376 on 128), MPT-1b on 32 (15,555; 19,085 on 16 and 19,001 on 64), and "
    "MPT-13b on 8 (1,668; 1,993 on 16)"
)


def scoreboard() -> list[Table]:
    """Return all tables, predicted anew."""
    return [table() for table in TABLES]


def shaped_links() -> Table:
    """Return all-reduces over shaped links: fitted at 4 ranks, predicted for 8, 16 and 32.

    Those of 16 and 32 ranks are not published.
    """
    name = "allreduce_on_shaped_links"
    rows = []
    for library in ("gloo", "nccl"):
        table = [
            {"library": library, "ms": row[f"{library}_ms"], **row} for row in facts.rows(name)
        ]
        for row, ranks in product([row for row in table if row["K"] == 4], (16, 32)):
            table.append(row | {"K": ranks, "ms": None})
        values = numbers(f"shaped links, {library}")
        for row in table:
            keys = {
                key: row[key]
                for key in ("library", "K", "link_gbit_s", "link_delay_ms", "message_mib")
            }
            predicted = published.shaped_link_ms(row, values)
            rows.append(entry(name, keys, "ms", row["ms"], predicted, calibrated=row["K"] == 4))
    words = "per library: the share of the link that TCP reaches, and one delay; at K = 4"
    return Table(name, rows, words)


def v100_steps() -> Table:
    """Return the steps of torch's DDP: a network's time at 2 GPUs times the simulated growth."""
    name = "ddp_step_seconds_v100"
    rows = []
    table = facts.rows(name)
    bandwidth, interference = numbers("steps of V100s")
    step_s = partial(published.v100_step_s, bandwidth=bandwidth, interference=interference)
    for row in table:
        seconds = {count: step_s(row["model"], row["gpus_1"], count) for count in (2, 4, 8, 16)}
        for count, simulated in seconds.items():
            # The fit is to 2 GPUs; from there on the network's measured time grows as simulated.
            predicted = simulated
            if count > 2:
                predicted = row["gpus_2"] * simulated / seconds[2]
            keys = {"model": row["model"], "gpus": count}
            rows.append(entry(name, keys, "seconds", row[f"gpus_{count}"], predicted, count == 2))
    words = (
        f"{bandwidth / 1e9:.3g} GB/s per GPU, {interference:.0%} of a GPU taken by a collective; at"
        " 1 and 2 GPUs"
    )
    return Table(name, rows, words)


def nccl_in_one_host() -> Table:
    """Return NCCL on 2 to 8 GPUs of a host, from how they are wired."""
    name = "nccl_all_reduce_in_one_host"
    rows = []
    sizes = sorted({row["message_mib"] for row in facts.rows(name)})
    for gpu in one_host.GPUS:
        settings = [
            {"gpu": gpu, "K": count, "message_mib": mib}
            for count, mib in product(range(2, 9), sizes)
        ]
        model = partial(one_host.all_reduce_us, values=one_host.fitted(gpu))
        rows += entries(name, "microseconds", settings, model)
    return Table(
        name,
        rows,
        "per machine: start, latency, rate of a wire, rate of the memory; at K = 2, 3 and 4",
    )


def nccl_sizes() -> Table:
    """Return NCCL's ring on 8 A100s, for every power of two up to twice the largest published size.

    The first is the smallest published size. The error of rows left out is that on 4 A100s of
    another host, for which all sizes are published.
    """
    name = "nccl_ring_a100x8_sizes"
    values = numbers("protocols")
    settings = [{"KiB": 2**power} for power in range(5, 25)]
    words = ", ".join(
        f"{protocol} {us:.0f} µs and {1.024 / rate:.3g} GB/s"
        for protocol, us, rate in zip(published.PROTOCOLS, values[:3], values[3:], strict=True)
    )
    rows = entries(name, "time_us", settings, partial(published.protocol_us, numbers=values))
    return Table(name, rows, f"per protocol latency and bytes per time: {words}")


def schedules() -> Table:
    """Return pipeline schedules; one row is known of each of the two larger models.

    The second fit sees one row of a model, 1F1B with the most micro-batches, and predicts the
    model's other rows.
    """
    name = "pipeline_schedules_a100"
    quantity = "samples_per_gpu_per_s"
    values = numbers("schedules")
    counts = {
        "1.5B": (24, 32, 64),
        "6.2B": (24, 32, 64),
        "14.6B": (48, 64, 128),
        "28.3B": (96, 128, 256),
    }
    stages = {"1.5B": 8, "6.2B": 8, "14.6B": 16, "28.3B": 32}
    settings = []
    for model in counts:
        for count, order in product(counts[model], published.ORDERS):
            setting = {"model": model, "stages": stages[model]}
            settings.append(setting | {"micro_batches": count, "schedule": order})
    other, left_over, interleaving, postponing, *_ = values
    words = (
        f"a rate per model; {other:.0f} operations per token and unit of width that are no products"
        f" with weights; {left_over:.2f} of what ZB-2p's formula idles; interleaving keeps"
        f" {interleaving:.2f} of the speed, postponing {postponing:.2f}"
    )
    rows = entries(name, quantity, settings, partial(published.samples_per_s, numbers=values))
    return Table(name, rows, words)


def zero3_and_3d() -> Table:
    """Return ZeRO-3 against tensor, pipeline and data parallelism."""
    settings = [
        {"plan": plan, "parameters": parameters, "gpus": gpus}
        for plan, first in (("ZeRO-3", 640), ("PTD", 560))
        for parameters, counts in (("174.6B", (384, 768, 1536)), ("529.6B", (first, 1120, 2240)))
        for gpus in counts
    ]
    outside, shows = numbers("ZeRO-3 of 2021")
    words = (
        f"for ZeRO-3 {outside:.2f} of the cards, and {shows:.0%} of the shorter of computing and "
        "sending shows, at 384 and 768 GPUs; for PTD nothing: the constants are those of the GPTs"
    )

    def fitted(setting):
        return setting["plan"] == "ZeRO-3" and setting["gpus"] < 1536

    quantity = "tflops_per_gpu"
    rows = entries(published.ZERO3, quantity, settings, published.megatron_tflops, fitted)
    return Table(published.ZERO3, rows, words)


def fsdp() -> Table:
    """Return Llama 3.1 8B on H100s with slower memory, which no fit saw: half is recomputed."""
    rows = []
    for row in facts.rows(published.FSDP):
        setting = {"gpus": row["gpus"], "kernels": row["kernels"]}
        keys = {"model": "llama-3.1-8b", "gpu": "H100 HBM2e", "micro_batch": 2}
        result = predict(**keys, **setting, recompute="selective")
        measured = row["tokens_per_gpu_per_s"]
        predicted = result.tokens_per_s_per_gpu
        line = entry(published.FSDP, setting, "tokens_per_gpu_per_s", measured, predicted, False)
        rows.append(line | sizes(result, "step_s", "memory_gb"))
    return Table(published.FSDP, rows, "nothing; the constants are those of today's transformers")


def gpt_steps() -> Table:
    """Return GPT steps of 2021 by tensor, data and pipeline parallelism."""
    name = published.GPT
    quantity = published.GPT_MS
    settings = facts.rows(name)
    for setting in settings:
        del setting[quantity]
    values = constants("of_2021")
    words = ", ".join(f"{key} {values[key]:.3g}" for key in OF_2021)
    words = f"{words} (constants.csv says what they are)"
    rows = []
    for line in entries(name, quantity, settings, published.gpt_ms):
        result = predict(**{key: value for key, value in line.items() if key in settings[0]})
        rows.append(line | sizes(result, "tokens_per_s_per_gpu", "memory_gb"))
    return Table(name, rows, words)


def transformers_of_today() -> Table:
    """Return the training runs of today, with what each takes in seconds and memory."""
    name = "transformer_throughput"
    rows = []
    for row in facts.rows(name):
        result = predict(**row)
        keys = {key: value for key, value in row.items() if key in SHOWN}
        measured = row["tokens_per_s_per_gpu"]
        predicted = result.tokens_per_s_per_gpu
        line = entry(name, keys, "tokens_per_s_per_gpu", measured, predicted, True)
        rows.append(line | sizes(result, "step_s", "memory_gb"))
    values = constants()
    words = ", ".join(f"{key} {values[key]:.3g}" for key in TODAY)
    return Table(name, rows, f"{words} (constants.csv says what they are); {STRANGE}")


def nccl_two_hosts() -> Table:
    """Return all-reduces over two hosts by a latency and a rate, from the extreme sizes."""
    name = "nccl_efa_two_hosts_a100"
    known = {row["bytes"]: row["all_reduce_us"] for row in facts.rows(name)}
    small = min(known)
    large = max(known)
    per_byte = (known[large] - known[small]) / (large - small)
    rows = []
    for nbytes, measured in known.items():
        predicted = known[small] + per_byte * (nbytes - small)
        keys = {"bytes": nbytes}
        seen = nbytes in (small, large)
        rows.append(entry(name, keys, "all_reduce_us", measured, predicted, seen))
    share = 1e6 / per_byte / (400e9 / 8)
    words = f"{known[small]:.0f} µs, and {share:.2f} of the 400 Gbit/s, from 8 bytes and 2 GiB"
    return Table(name, rows, words)


def bus_bandwidth() -> Table:
    """Return all-reduces on H200 and B200 hosts by a latency and a rate from two sizes.

    They show what a plain model misses.
    """
    name = "nccl_bus_bandwidth_h200_b200"
    quantity = "busbw_GBps"
    rows = []
    for machine, gpus in (("H200x8", 8), ("B200 1 host", 8), ("B200 4 hosts", 32)):
        sizes = {row["KiB"]: row[quantity] for row in facts.rows(name) if row["machine"] == machine}
        moved_gb = {kib: 2 * (gpus - 1) / gpus * kib * 1024 / 1e9 for kib in sizes}
        small = 1024
        large = max(sizes)
        small_s = moved_gb[small] / sizes[small]
        large_s = moved_gb[large] / sizes[large]
        rate = (moved_gb[large] - moved_gb[small]) / (large_s - small_s)
        latency_s = small_s - moved_gb[small] / rate
        for kib, measured in sizes.items():
            predicted = moved_gb[kib] / (latency_s + moved_gb[kib] / rate)
            keys = {"machine": machine, "KiB": kib}
            seen = kib in (small, large)
            rows.append(entry(name, keys, quantity, measured, predicted, seen))
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
    transformers_of_today,
    nccl_two_hosts,
)


def sizes(result: Answer, *fields: str) -> Row:
    """Return more predictions of a run, to four digits: fields of its answer."""
    return {field: float(f"{getattr(result, field):.4g}") for field in fields}


def entries(
    table: str,
    quantity: str,
    settings: Sequence[Row],
    model: Callable[[Row], float],
    calibrated: Callable[[Row], bool] = bool,
) -> list[Row]:
    """Return the scoreboard's rows of a table: what `model` predicts, beside what was published.

    Unless `calibrated` says otherwise, every measured row counts as seen by the fit.
    """
    known = facts.rows(table)
    rows = []
    for setting in settings:
        measured = None
        for row in known:
            if setting.items() <= row.items():  # The row has all that the setting has.
                measured = row[quantity]
                break
        seen = measured is not None and calibrated(setting)
        rows.append(entry(table, setting, quantity, measured, model(setting), seen))
    return rows


def entry(
    table: str, keys: Row, quantity: str, measured: float | None, predicted: float, calibrated: bool
) -> Row:
    """Return one row of the scoreboard, with 8 instead of 8.0 among its keys."""
    keys = dict(keys)
    for key, value in keys.items():
        if isinstance(value, float) and value == int(value):
            keys[key] = int(value)
    error = None if measured is None else round(predicted / measured - 1, 4)
    numbers = {"measured": measured, "predicted": float(f"{predicted:.5g}"), "error": error}
    return {"table": table, **keys, "quantity": quantity, **numbers, "calibrated": calibrated}
