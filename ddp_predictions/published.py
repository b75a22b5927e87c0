"""The models, each fitted to a table that others have published: few numbers, each with a meaning.

A model is a function of a row of its table and the fitted numbers; it returns what the row's
`quantity` should be.

gloo and NCCL are different algorithms on the same links, and the message-level programs say why
gloo suffers more from a delay: a segment is not sent before its receiver has said that it is ready,
and only two segments are under way.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from ddp_course.measuring import facts
from ddp_course.measuring.simulate import resnets
from ddp_course.measuring.simulate.algorithms import gloo_ring, nccl_ring
from ddp_course.measuring.simulate.network import Network
from ddp_course.measuring.simulate.step import play, simulate
from ddp_course.measuring.theory import Costs

from .transformers import Machine, Shape, Sharding, Split, fully_sharded_s, idle_stages, step_s

MIB = 2**20
PER_HOST, HOST_LINK, GPU_LATENCY = (
    8,
    8 / 400e9,
    1e-5,
)  # Hosts have 4 x 100 Gbit/s; 10 us per message are assumed.
Row = dict[str, Any]
Model = Callable[[Row, Any], float]


def fit(
    model: Model, rows: Sequence[Row], quantity: str, start: Sequence[float]
) -> tuple[Any, ...]:
    """The positive numbers near `start` with which `model` comes nearest to all rows; outliers
    count less.
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
    """The numbers within `bounds` with the least squares of relative errors; `step` is that of its
    derivatives.
    """

    def errors(numbers):
        return [model(row, numbers) / row[quantity] - 1 for row in rows]

    return tuple(least_squares(errors, start, bounds=bounds, diff_step=step).x.tolist())


def shaped_link_ms(row: Row, numbers: Sequence[float]) -> float:
    """Milliseconds of an all-reduce by the row's library ("gloo" or "nccl") on its link, played
    message by message.

    Both libraries: `numbers[0]` is the share of the link's bandwidth that TCP reaches. gloo:
    `numbers[1]` is the processor's time for a segment of 1 MiB, in milliseconds. NCCL: it is the
    delays (one way) that pass before the stream is up to speed.
    """
    share, extra = numbers
    delay = row["link_delay_ms"] / 1e3
    link = Costs(delay, 8 / (row["link_gbit_s"] * 1e9 * share))
    ranks, nbytes = int(row["K"]), row["message_mib"] * MIB
    if row["library"] == "gloo":
        return 1e3 * play(
            gloo_ring, nbytes, ranks, Network(link, handshake=True), segment_s=extra / 1e3
        )
    return 1e3 * (play(nccl_ring, nbytes, ranks, Network(link)) + extra * delay)


def fit_shaped_links(rows: Sequence[Row]) -> tuple[float, ...]:
    """The two numbers of `shaped_link_ms` for rows of one library."""
    return fit_within(shaped_link_ms, rows, "ms", (0.95, 1.0), ((0.1, 0.0), (1.0, 100.0)), 1e-3)


def v100_step_s(
    model: str, one_gpu_s: float, ranks: int, bandwidth: float, interference: float
) -> float:
    """Seconds of a DDP step of `model` on `ranks` V100s; bandwidth of a GPU's link in bytes per
    second.
    """
    link = Costs(2 * GPU_LATENCY, max(HOST_LINK, 1 / bandwidth))
    network = Network(link, Costs(GPU_LATENCY, 1 / bandwidth), PER_HOST)
    return simulate(
        resnets.profile(model, one_gpu_s), ranks, network, interference=interference
    ).step_s


def calibrate_v100(rows: Sequence[Row]) -> tuple[float, float]:
    """(bytes per second, interference) that explain best how 2 GPUs are slower than 1, over all
    networks.
    """

    def on_two(row, numbers):
        return v100_step_s(row["model"], row["gpus_1"], 2, 10 ** numbers[0], numbers[1])

    exponent, interference = fit_within(
        on_two, rows, "gpus_2", (10.3, 0.5), ((8, 0), (12, 10)), 1e-2
    )
    return 10**exponent, interference


GPT = "gpt_step_ms_a100_3d"
GPT_COLUMNS = (
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    "micro batch",
    "# layers",
    "hidden size",
    "sequence length",
    "global batch",
    "# GPUs",
)
GPT_MS, A100_GB = "iteration time (ms)", 80


def gpt_ms(row: Row, machine: Machine) -> float:
    """Milliseconds of the step in a `row` with the columns of the published table; ValueError for
    what cannot be.
    """
    tensor, data, pipeline, micro_batch, layers, width, context, batch, gpus = (
        whole(row, name) for name in GPT_COLUMNS
    )
    shape, split = Shape(layers, width, context), Split(tensor, data, pipeline, micro_batch)
    if split.gpus != gpus:
        raise ValueError(f"{tensor} x {data} x {pipeline} ways are {split.gpus} GPUs, not {gpus}")
    part = shape.parameters / tensor / pipeline
    kept_gb = (4 + 12 / data) * part / 1e9  # The optimizer is sharded, as with ZeRO-1.
    if kept_gb > A100_GB:
        raise ValueError(
            f"a GPU would keep {kept_gb:,.0f} GB and has {A100_GB}; take more tensor or pipeline"
            " ways"
        )
    return 1e3 * step_s(shape, split, machine, batch)


def whole(row: Row, column: str) -> int:
    """The whole number in a column of `row`; ValueError if there is none."""
    number = str(row.get(column, "missing"))
    if not re.fullmatch(r"[1-9]\d*(\.0)?", number):
        raise ValueError(f'column "{column}" is {number}; it must be a whole number, 1 or more')
    return int(float(number))


def fit_machine(rows: Sequence[Row]) -> Machine:
    """The five numbers of a `Machine` that explain the steps of `rows` best."""
    start = (0.7, 1000.0, 2e-3, 150e9, 100e9)
    return Machine(*fit(lambda row, numbers: gpt_ms(row, Machine(*numbers)), rows, GPT_MS, start))


@cache
def machine() -> Machine:
    """The machine of all published GPT steps: A100s, 8 per host, 4 x 200 Gbit/s."""
    return fit_machine(facts.rows(GPT))


ZERO3 = "zero3_and_3d_parallel_a100"
MEGATRON = {
    "174.6B": (Shape(96, 12_288), 12),
    "529.6B": (Shape(105, 20_480), 35),
}  # Each model has a shape and stages.
# A NIC of 200 Gbit/s, in bytes per second: these hosts have 8, where those of the GPT steps have 4.
NIC = 25e9
LINKS = 2.0


def global_batch(row: Row) -> int:
    """Sequences of a step: 1,536 or 2,240, and 2,560 where 640 GPUs have 4 each (Narayanan et al.,
    Table 2).
    """
    return {"174.6B": 1536, "529.6B": 2560 if row["gpus"] == 640 else 2240}[row["parameters"]]


def megatron_tflops(row: Row, slower: float, sharding: Any = None) -> float:
    """TFLOP/s per GPU, by the authors' count of operations, of a row of their table; `sharding` is
    for ZeRO-3.
    """
    shape, stages = MEGATRON[row["parameters"]]
    gpus, batch, here = int(row["gpus"]), global_batch(row), machine().slower(slower, LINKS)
    if row["plan"] == "ZeRO-3":
        seconds = fully_sharded_s(shape, gpus, here, sharding, batch)
    else:
        seconds = step_s(shape, Split(8, gpus // (8 * stages), stages), here, batch)
    return shape.flops(batch) / seconds / gpus / 1e12


@cache
def megatron() -> tuple[float, Sharding]:
    """(how much slower than the machine of the GPT steps, what ZeRO-3 reaches there), fitted to the
    published rows.
    """
    rows = facts.rows(ZERO3)
    split, sharded = ([row for row in rows if row["plan"] == plan] for plan in ("PTD", "ZeRO-3"))
    (slower,) = fit(
        lambda row, numbers: megatron_tflops(row, *numbers), split, "tflops_per_gpu", (1.0,)
    )
    numbers = fit(
        lambda row, numbers: megatron_tflops(row, slower, Sharding(*numbers)),
        sharded,
        "tflops_per_gpu",
        (2e10, 0.2),
    )
    return slower, Sharding(*numbers)


FSDP = "fsdp_llama3_8b_h100"
LLAMA = Shape(32, 4096, 8192, 128_256)


def fsdp_tokens_per_s(row: Row, sharding: Sharding) -> float:
    """Tokens per GPU and second of Llama 3.1 8B, fully sharded over H100s, by the A100s' share of
    their datasheet.
    """
    gpus, here = int(row["gpus"]), machine().slower(megatron()[0]).on("H100")
    return 2 * LLAMA.context / fully_sharded_s(LLAMA, gpus, here, sharding, 2 * gpus)


@cache
def sharding_of_today() -> Sharding:
    """What FSDP reaches on H100s: ZeRO-3's share of a NIC of 400 Gbit/s, and the part that shows,
    of one efficiency.
    """
    ring = 2 * megatron()[1].ring
    few, many = facts.rows(FSDP)

    def kept(row, numbers):
        return fsdp_tokens_per_s(many, Sharding(ring, *numbers)) / fsdp_tokens_per_s(
            few, Sharding(ring, *numbers)
        )

    efficiency = many["tokens_per_gpu_per_s"] / few["tokens_per_gpu_per_s"]
    return Sharding(ring, *fit(kept, [{"kept": efficiency}], "kept", (0.1,)))


ORDERS = ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p")
QI = {
    "1.5B": Shape(22, 2304, 1024),
    "6.2B": Shape(30, 4096, 1024),
    "14.6B": Shape(46, 5120, 1024),
    "28.3B": Shape(62, 6144, 1024),
}  # These are the models of Qi et al. 2024, Table 3.


def samples_per_s(row: Row, numbers: Sequence[float]) -> float:
    """Samples per GPU and second of a row: a rate per model without idling, less what the schedule
    idles and costs.

    `numbers` are what a layer computes besides products with weights, in operations per token and
    unit of width; the share of ZB-2p's formula that idles; the speeds that 1F1B-I and the
    zero-bubble schedules keep; the rates.
    """
    other, left_over, interleaving, postponing, *rates = numbers
    shape, schedule, batches = QI[row["model"]], row["schedule"], row["micro_batches"]
    products = 24 * shape.width
    weights = products / (3 * products + 12 * shape.context + other)
    stages = int(row["stages"])
    idle = idle_stages(schedule, stages, (shape.layers + 2) / stages, weights, left_over)
    kept = {"1F1B": 1.0, "1F1B-I": interleaving}.get(schedule, postponing)
    return rates[list(QI).index(row["model"])] * kept * batches / (batches + idle)


def fit_schedules(rows: Sequence[Row]) -> tuple[float, ...]:
    """The numbers of `samples_per_s`, from rows with all models."""
    highest = [
        max(row["samples_per_gpu_per_s"] for row in rows if row["model"] == model) for model in QI
    ]
    return fit(samples_per_s, rows, "samples_per_gpu_per_s", (8e4, 0.4, 0.95, 0.99, *highest))


PROTOCOLS = ("LL", "LL128", "Simple")


def protocol_us(row: Row, numbers: Sequence[float]) -> float:
    """Microseconds of an all-reduce by the fastest protocol; `numbers`: three latencies (µs), three
    rates (µs/KiB).
    """
    return min(
        latency + rate * row["KiB"] for latency, rate in zip(numbers[:3], numbers[3:], strict=True)
    )


def fit_protocols(rows: Sequence[Row]) -> tuple[float, ...]:
    """Latencies and rates of the three protocols from rows by size, the largest last.

    LL sends a flag with every 4 bytes, LL128 with every 120, Simple none; so the lines are steep,
    flatter, flattest.
    """
    latency, rate = min(row["time_us"] for row in rows), rows[-1]["time_us"] / rows[-1]["KiB"]
    start = (0.9 * latency, 1.7 * latency, 5 * latency, 10 * rate, 1.2 * rate, rate)
    return fit(protocol_us, rows, "time_us", start)
