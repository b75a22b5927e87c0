"""The simulator held against two tables that others have published: calibrated on the small, asked for the large.

All-reduce over shaped links: gloo and NCCL are different algorithms on the same links, and the message-level
programs say why gloo suffers more from a delay: a segment is not sent before its receiver has said that it is
ready, and only two segments are under way. Two numbers per library are fitted to K = 4 and kept for all other K.

DDP step times on V100: what the links and the interference of collectives with computing cost is fitted to 1 and
2 GPUs of all four networks; growth from 2 to 16 GPUs is predicted. A predictor that never changes its answer is
shown beside it: the published times grow so little that it is hard to beat, which is what overlap is for.
"""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from scipy.optimize import least_squares

from .. import facts
from ..theory import Costs
from . import resnets
from .algorithms import gloo_ring, nccl_ring
from .network import Network
from .step import play, simulate

MIB = 2**20
PER_HOST, HOST_LINK, GPU_LATENCY = 8, 8 / 400e9, 1e-5  # 4 x 100 Gbit/s; 10 us a message are assumed, not fitted
MORE_RANKS = (8, 16, 32)


def shaped_link_ms(library: str, parameters: Sequence[float], row: dict[str, Any], ranks: int | None = None) -> float:
    """Milliseconds of an all-reduce by "gloo" or "nccl" on the link of `row`, played message by message.

    Both libraries: `parameters[0]` is the share of the link's bandwidth that TCP reaches. gloo: `parameters[1]` is
    the processor's time for a segment of 1 MiB, in milliseconds. NCCL: it is the delays (one way) that pass before
    the stream is up to speed.
    """
    share, extra = parameters
    delay = row["link_delay_ms"] / 1e3
    link = Costs(delay, 8 / (row["link_gbit_s"] * 1e9 * share))
    ranks, nbytes = int(ranks or row["K"]), row["message_mib"] * MIB
    if library == "gloo":
        return 1e3 * play(gloo_ring, nbytes, ranks, Network(link, handshake=True), segment_s=extra / 1e3)
    if library == "nccl":
        return 1e3 * (play(nccl_ring, nbytes, ranks, Network(link)) + extra * delay)
    raise ValueError(f'unknown library "{library}"; choose gloo or nccl')


def calibrate_shaped_links(library: str, rows: list[dict[str, Any]]) -> tuple[float, ...]:
    """The two parameters of `shaped_link_ms` that fit `rows` best, by least squares of the relative errors."""

    def errors(parameters):
        return [shaped_link_ms(library, parameters, row) / row[f"{library}_ms"] - 1 for row in rows]

    return tuple(least_squares(errors, (0.95, 1.0), bounds=((0.1, 0.0), (1.0, 100.0)), diff_step=1e-3).x.tolist())


def shaped_links(calibrate_at: int = 4, ranks: Sequence[int] = MORE_RANKS) -> dict[str, Any]:
    """Hold both libraries against the table: calibrated at one K, compared at all others, predicted for `ranks`.

    Returns a dict: "parameters" by library; "compared" (rows with measured_ms, predicted_ms, error, held_out, and
    by_formula_ms: the K = 4 timing scaled by (K-1)/K); "predictions" as in results/simulator.json.
    """
    table = facts.rows("allreduce_on_shaped_links")
    known = [row for row in table if row["K"] == calibrate_at]
    parameters = {library: calibrate_shaped_links(library, known) for library in ("gloo", "nccl")}
    compared = [_compared(lib, parameters[lib], row, known) for lib in parameters for row in table]
    predictions = [
        {
            "library": library,
            "K": count,
            **{key: _short(row[key]) for key in ("link_gbit_s", "link_delay_ms", "message_mib")},
            "predicted_ms": round(shaped_link_ms(library, parameters[library], row, count), 1),
        }
        for library in parameters
        for row in known
        for count in ranks
    ]
    return {"parameters": parameters, "compared": compared, "predictions": predictions}


def _compared(library, parameters, row, known):
    measured, predicted = row[f"{library}_ms"], shaped_link_ms(library, parameters, row)
    same_link = next(other for other in known if other["link_gbit_s"] == row["link_gbit_s"])
    moved = [(r["K"] - 1) / r["K"] for r in (row, same_link)]
    return {
        "library": library,
        "K": int(row["K"]),
        **{key: _short(row[key]) for key in ("link_gbit_s", "link_delay_ms", "message_mib")},
        "measured_ms": measured,
        "predicted_ms": round(predicted, 1),
        "error": round(predicted / measured - 1, 4),
        "by_formula_ms": round(same_link[f"{library}_ms"] * moved[0] / moved[1], 1),
        "held_out": row not in known,
    }


def v100_step_s(model: str, one_gpu_s: float, ranks: int, bandwidth: float, interference: float) -> float:
    """Seconds of a DDP step of `model` on `ranks` V100s; bandwidth of a GPU's link in bytes a second."""
    link = Costs(2 * GPU_LATENCY, max(HOST_LINK, 1 / bandwidth))
    network = Network(link, Costs(GPU_LATENCY, 1 / bandwidth), PER_HOST)
    return simulate(resnets.profile(model, one_gpu_s), ranks, network, interference=interference).step_s


def calibrate_v100(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """(bytes a second, interference) that explain best how 2 GPUs are slower than 1, over all networks."""

    def errors(unknowns):
        return [_v100(row, 2, 10 ** unknowns[0], unknowns[1]) / row["gpus_2"] - 1 for row in rows]

    found = least_squares(errors, (10.3, 0.5), bounds=((8, 0), (12, 10)), diff_step=1e-2).x
    return 10 ** found[0].item(), found[1].item()


def v100_steps(ranks: Sequence[int] = (4, 8, 16)) -> dict[str, Any]:
    """Hold the step against the table: calibrated at 1 and 2 GPUs, compared at 4, 8 and 16.

    A network's own time at 2 GPUs times the simulated growth from 2 to K is the prediction; the constant predictor
    says that growth is none. Returns a dict: "parameters", "compared" (one row a network and K), and the mean
    and largest absolute error of both predictors.
    """
    table = facts.rows("ddp_step_seconds_v100")
    bandwidth, interference = calibrate_v100(table)
    compared = []
    for row in table:
        at_two = _v100(row, 2, bandwidth, interference)
        for count in ranks:
            growth = _v100(row, count, bandwidth, interference) / at_two
            measured = row[f"gpus_{count}"]
            predicted = row["gpus_2"] * growth
            compared.append(
                {
                    "model": row["model"],
                    "K": count,
                    "measured_s": measured,
                    "predicted_s": round(predicted, 4),
                    "error": round(predicted / measured - 1, 4),
                    "constant_error": round(row["gpus_2"] / measured - 1, 4),
                }
            )
    summary = {}
    for name in ("error", "constant_error"):
        sizes = [abs(row[name]) for row in compared]
        summary[name] = {"mean": round(mean(sizes), 4), "largest": round(max(sizes), 4)}
    parameters = {"bandwidth_bytes_s": bandwidth, "interference": interference, "latency_s": GPU_LATENCY}
    return {"parameters": parameters, "compared": compared, **summary}


def _v100(row, ranks, bandwidth, interference):
    return v100_step_s(row["model"], row["gpus_1"], ranks, bandwidth, interference)


def _short(number):
    return int(number) if number == int(number) else number
