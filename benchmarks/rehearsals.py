"""Published runs, foretold by programs: torch's own `fully_shard`, rehearsed with sizes only.

Each row of a table of facts becomes a command of `notebooks/13_fsdp.py`, on an emulated GPU whose
kernels reach what the predictions' constants say, by a fit that did not see the row's model. The
seconds per layer that no rate explains are spread evenly over the layer's kernels, which are
counted. Nothing is fitted to a rehearsal.
"""

import csv
import io
import time
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from ddp_course.base.files import replace_file
from ddp_course.lab.folders import course_folder
from ddp_course.lab.measuring import facts
from ddp_predictions import frozen
from ddp_predictions.runs import read_run
from ddp_predictions.transformers import A100, Run, step, tokens_per_s
from manyranks.devices import Device
from manyranks.devices.device import Reach
from manyranks.rehearsal import Report, Request, rehearse

from .harness import Benchmark, Part, Promise, Row
from .predictions import TODAY, fit_transformer, today
from .published import FSDP

PROGRAM = str(course_folder("notebooks") / "13_fsdp.py")
MOST_PASSES = 128  # A step with more passes of layers takes minutes to rehearse.
ONCE_A_STEP = ("zero1", "zero1 in host")  # These gather and average once a step.
ONE_KERNEL_S = 1.0  # On a device without limits, whose kernels take so long, seconds count kernels.


def arguments(run: Run, layers: int, accumulate: int) -> list[str]:
    """The options of the program for a run, with so many layers and micro-batches."""
    numbers = {
        "layers": layers,
        "hidden": run.hidden,
        "heads": run.heads,
        "kv-heads": run.kv_heads,
        "ff": run.ff,
        "vocab": run.vocab,
        "seq": run.seq,
        "micro-batch": run.micro_batch,
        "accumulate": accumulate,
    }
    if run.recompute:  # Half of the forward pass is recomputed where every other block is.
        numbers["recompute-every"] = round(1 / run.recompute)
    words = [f"--{name}={number}" for name, number in numbers.items()]
    # Where a table says that all is recomputed, it was: it is older than torch 2.1, which stops
    # before a block's last product (pytorch's pull request 96866; llm-foundry's sweep.sh names its
    # torch).
    if run.recompute == 1:
        words.append("--whole")
    if run.gated:
        words.append("--gated")
    if run.pure:
        words.append("--pure")
    if run.way in ONCE_A_STEP:
        words.append("--zero1")
    return words


@cache
def kernels_per_layer(gated: bool, pure: bool, recompute: float) -> int:
    """The kernels of a layer in a micro-batch, counted on two depths of a small model."""
    fields: Row = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 4, "ff": 128, "vocab": 128}
    fields |= {"seq": 64, "gpu": "A100", "gpus": 2, "gated": gated, "pure": pure}
    if gated:
        fields["kv_heads"] = 2
    run = Run(**fields, recompute=recompute)
    device = Device("1e9TFLOP/s", "1e9GB/s", streams=True, reach=Reach(launch=ONE_KERNEL_S))
    seconds = []
    for layers in (2, 4):
        request = Request(2, device, sizes_only=True, fold=True)
        report = rehearse(PROGRAM, arguments(run, layers, accumulate=1), request)
        seconds.append(report.summary()["computing_s"])
    return round((seconds[1] - seconds[0]) / 2 / ONE_KERNEL_S)


def request_of(run: Run, numbers: Any, kernels: int) -> Request:
    """The machines of a run, as the constants say what of them is reached."""
    machine = run.machine
    attention = 2 * numbers["attend"] * A100.rate * machine.clock / A100.cycles / machine.peak
    reach = Reach(numbers["matmul"], attention, launch=numbers["launch"] / kernels)
    device = Device(f"{machine.peak:.0f}FLOP/s", f"{machine.memory:.0f}B/s", True, reach)
    link = f"{8 * numbers['inside'] * machine.nvlink:.0f}bit"
    latency = f"{1e6 * numbers['hop']:g}us"
    if run.in_one_host:
        return Request(run.gpus, device, link, None, None, latency, sizes_only=True, fold=True)
    between = f"{8 * numbers['outside'] * machine.nics:.0f}bit"
    hosts = run.gpus // run.gpus_per_host
    return Request(run.gpus, device, link, hosts, between, latency, sizes_only=True, fold=True)


def row_of(run: Run, measured: float, numbers: Any) -> Row:
    """Formula, rehearsal and measurement of a run, in tokens per second and GPU."""
    formula = tokens_per_s(run, step(run, None, numbers).seconds)
    kernels = kernels_per_layer(run.gated, run.pure, run.recompute)
    began = time.perf_counter()
    request = request_of(run, numbers, kernels)
    report: Report = rehearse(PROGRAM, arguments(run, run.layers, run.accumulate), request)
    took_s = time.perf_counter() - began
    found = report.summary()
    rehearsed = tokens_per_s(run, found["step_s"])
    row = {
        "model": run.model,
        "gpu": run.gpu,
        "gpus": run.gpus,
        "seq": run.seq,
        "kernels of a layer": kernels,
        "formula": round(formula, 1),
        "rehearsal": round(rehearsed, 1),
        "measured": measured,
        "formula's error": round(formula / measured - 1, 4),
        "rehearsal's error": round(rehearsed / measured - 1, 4),
        "hidden": round(found["hidden"], 3),
        "peak_gb": round(found["peak_bytes"] / 1e9, 2),
        "rehearsing_s": round(took_s, 1),
        "device": "virtual",
    }
    print(row, flush=True)
    return row


def can_be_rehearsed(run: Run) -> bool:
    """Return whether all ranks of a run do the same, in few enough passes of layers."""
    in_one_group = run.shards == run.gpus and run.tensor == run.pipeline == 1
    return in_one_group and run.layers * run.accumulate <= MOST_PASSES


def rows_of(family: str) -> Part:
    """Rehearse all rows of a family that can be, by a fit that did not see the row's model."""
    rows = []
    for run, measured in today():
        if run.model.startswith(family) and can_be_rehearsed(run):
            seen = [pair for pair in today() if not pair[0].model.startswith(first_word(run.model))]
            rows.append(row_of(run, measured, fit_transformer(seen, TODAY)))
    return Part(rows, promises_of(rows))


def first_word(model: str) -> str:
    """Return a model's name without what is said of its batches, as in "InternLM-7B packed"."""
    return model.partition(" ")[0]


def mpt(args: Any) -> Part:
    """Return rows of llm-foundry's MPT under FSDP."""
    return rows_of("MPT")


def internlm(args: Any) -> Part:
    """Return rows of InternEvo's InternLM under ZeRO-1."""
    return rows_of("InternLM")


def llama(args: Any) -> Part:
    """Return the rows of torchtitan's Llama, which no fit sees."""
    rows = []
    shape = {"model": "llama-3.1-8b", "gpu": "H100 HBM2e", "micro_batch": 2}
    for row in facts.rows(FSDP):
        if row["kernels"] == "eager":
            fields = shape | {"gpus": row["gpus"], "kernels": "eager", "recompute": "selective"}
            run, _ = read_run(fields)
            rows.append(row_of(run, row["tokens_per_gpu_per_s"], frozen.constants()))
    return Part(rows, promises_of(rows))


def promises_of(rows: list[Row]) -> list[Promise]:
    """Return the promises that half of the rows are met within a tenth."""
    promises = []
    for name in ("formula", "rehearsal"):
        errors = [abs(row[f"{name}'s error"]) for row in rows]
        promises.append(Promise(f"{name}, median error", median(errors), 0.1))
    return promises


def write_rows(report: Row, folder: Path) -> list[Path]:
    """Write what lesson 13 shows into the package."""
    rows = [row for part in report["parts"].values() for row in part["rows"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, SHOWN, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = Path(frozen.__file__).with_name("rehearsals.csv")
    replace_file(path, text.getvalue().encode())
    return [path]


SHOWN = ("model", "gpu", "gpus", "seq", "formula", "rehearsal", "measured", "device")
BENCHMARK = Benchmark(
    "rehearsals",
    "rehearse published runs, beside formula and measurement",
    {"mpt": mpt, "internlm": internlm, "llama": llama},
    finish=write_rows,
)
