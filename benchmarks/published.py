"""Models of the other published tables: few numbers, each with a meaning, frozen in numbers.json.

A model is a function of a row of its table and its numbers; it returns what the row's `quantity`
should be. `make bench predictions` fits the numbers anew.

gloo and NCCL are different algorithms on the same links, and the message-level programs say why
gloo suffers more from a delay: a segment is not sent before its receiver has said that it is ready,
and only two segments are under way.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddp_course.lab.measuring.simulate import Network, resnets, simulate
from ddp_course.lab.measuring.theory import Costs
from ddp_predictions.frozen import constants, numbers
from ddp_predictions.runs import read_run
from ddp_predictions.transformers import step

from .libraries import Simulation, gloo_ring, nccl_ring

MIB = 2**20
PER_HOST = 8
HOST_LINK = 8 / 400e9  # Seconds per byte: hosts have 4 x 100 Gbit/s.
GPU_LATENCY = 1e-5  # Seconds per message; this is assumed.
Row = dict[str, Any]
Model = Callable[[Row, Any], float]


def shaped_link_ms(row: Row, numbers: Sequence[float]) -> float:
    """Return the milliseconds of an all-reduce on the row's link, played message by message.

    The row's library is "gloo" or "nccl". Both libraries: `numbers[0]` is the share of the link's
    bandwidth that TCP reaches. gloo: `numbers[1]` is the processor's time for a segment of 1 MiB,
    in milliseconds. NCCL: it is the delays (one way) that pass before the stream is up to speed.
    """
    share, extra = numbers
    delay = row["link_delay_ms"] / 1e3
    link = Costs(delay, 8 / (row["link_gbit_s"] * 1e9 * share))
    ranks = int(row["K"])
    nbytes = row["message_mib"] * MIB
    if row["library"] == "gloo":
        simulation = Simulation(Network(link), handshake=True)
        programs = [
            gloo_ring(rank, ranks, nbytes, simulation, extra / 1e3) for rank in range(ranks)
        ]
        return 1e3 * simulation.play(programs)
    simulation = Simulation(Network(link))
    programs = [nccl_ring(rank, ranks, nbytes, simulation) for rank in range(ranks)]
    return 1e3 * (simulation.play(programs) + extra * delay)


def v100_step_s(
    model: str, one_gpu_s: float, ranks: int, bandwidth: float, interference: float
) -> float:
    """Return the seconds of a DDP step of `model` on `ranks` V100s.

    The bandwidth of a GPU's link is in bytes per second.
    """
    link = Costs(2 * GPU_LATENCY, max(HOST_LINK, 1 / bandwidth))
    network = Network(link, Costs(GPU_LATENCY, 1 / bandwidth), PER_HOST)
    profile = resnets.profile(model, one_gpu_s)
    return simulate(profile, ranks, network, interference=interference).step_s


GPT = "gpt_step_ms_a100_3d"
GPT_MS = "iteration time (ms)"
ZERO3 = "zero3_and_3d_parallel_a100"
FSDP = "fsdp_llama3_8b_h100"


class Gpt(NamedTuple):
    """A transformer, and the stages of the pipeline in which it was trained."""

    layers: int
    width: int
    heads: int
    stages: int


# These are of Narayanan et al., by the number of parameters; sequences have 2,048 tokens.
MEGATRON = {"174.6B": Gpt(96, 12_288, 96, 12), "529.6B": Gpt(105, 20_480, 128, 35)}


def gpt_ms(row: Row, changed: Any = None) -> float:
    """Return the milliseconds of a GPT's step; the constants are those of 2021 by default."""
    return 1000 * step(read_run(row)[0], None, changed).seconds


def global_batch(row: Row) -> int:
    """Return the sequences of a step: 1,536 or 2,240, or 2,560 where 640 GPUs have 4 each.

    Source: Narayanan et al., Table 2.
    """
    if row["parameters"] == "174.6B":
        return 1536
    return 2560 if row["gpus"] == 640 else 2240


def megatron_tflops(row: Row, zero3: Sequence[float] | None = None, values: Any = None) -> float:
    """Return the TFLOP/s per GPU of a row of the authors' table, by their count of operations.

    The constants are those of 2021 unless other `values` are given. ZeRO-3 of 2021 reaches another
    share of the cards, and hides another part: `zero3`.
    """
    gpt = MEGATRON[row["parameters"]]
    gpus = int(row["gpus"])
    batch = global_batch(row)
    run: Row = {"layers": gpt.layers, "hidden": gpt.width, "heads": gpt.heads, "seq": 2048}
    run |= {"# GPUs": gpus, "network": 1600, "batch": batch}
    changed = values or constants("of_2021")
    if row["plan"] == "ZeRO-3":
        run |= {"way": "fsdp", "micro_batch": max(1, batch // gpus)}
        outside, shows = numbers("ZeRO-3 of 2021") if zero3 is None else zero3
        changed = changed | {"outside": outside, "shows": shows}
    else:
        run |= {"tensor": 8, "pipeline": gpt.stages}
    seconds = step(read_run(run)[0], None, changed).seconds
    operations = 1 + 2048 / (6 * gpt.width) + 51_200 / (16 * gpt.layers * gpt.width)
    flops = 96 * batch * 2048 * gpt.layers * gpt.width**2 * operations
    return flops / seconds / gpus / 1e12


ORDERS = ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p")


class Shape(NamedTuple):
    """The layers of a transformer, and their width."""

    layers: int
    width: int


# These are of Qi et al. 2024, Table 3, whose sequences have CONTEXT tokens.
QI = {
    "1.5B": Shape(22, 2304),
    "6.2B": Shape(30, 4096),
    "14.6B": Shape(46, 5120),
    "28.3B": Shape(62, 6144),
}
CONTEXT = 1024


def samples_per_s(row: Row, numbers: Sequence[float]) -> float:
    """Return the samples per GPU and second of a row.

    They are a rate per model without idling, less what the schedule idles and costs. `numbers` are
    what a layer computes besides products with weights, in operations per token and unit of width;
    the share of ZB-2p's formula that idles; the speeds that 1F1B-I and the zero-bubble schedules
    keep; the rates.
    """
    other, left_over, interleaving, postponing, *rates = numbers
    shape = QI[row["model"]]
    schedule = row["schedule"]
    batches = row["micro_batches"]
    products = 24 * shape.width
    weights = products / (3 * products + 12 * CONTEXT + other)
    stages = int(row["stages"])
    idle = idle_stages(schedule, stages, (shape.layers + 2) / stages, weights, left_over)
    kept_speed = {"1F1B": 1.0, "1F1B-I": interleaving}.get(schedule, postponing)
    rate = rates[list(QI).index(row["model"])]
    return rate * kept_speed * batches / (batches + idle)


def idle_stages(
    schedule: str, stages: int, chunks: float, weights: float, left_over: float
) -> float:
    """Return how many micro-batches' time a stage idles in a step, by schedule.

    Source: Qi et al. 2024, section 2. `chunks` per stage of the interleaved schedule; `weights` is
    the share of a micro-batch's time that gradients of weights take, which zero-bubble schedules
    may postpone; `left_over` is the fitted share of ZB-2p's formula that its search for a better
    order leaves. The first three are what `stage8_pipeline.timetable` plays.
    """
    share = {
        "1F1B": 1.0,
        "1F1B-I": 1 / chunks,
        "ZB-1p": 1 - 2 * weights,
        "ZB-2p": left_over * (1 - 3 * weights),
    }
    return share[schedule] * (stages - 1)


PROTOCOLS = ("LL", "LL128", "Simple")


def protocol_us(row: Row, numbers: Sequence[float]) -> float:
    """Return the microseconds of an all-reduce by the fastest protocol.

    `numbers` are three latencies (µs) and three rates (µs/KiB).
    """
    return min(
        latency + rate * row["KiB"] for latency, rate in zip(numbers[:3], numbers[3:], strict=True)
    )
