"""`ddp-course compare`, and `compare.run`, `table` and `save` for notebooks and scripts."""

import argparse
import os
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

from manyranks.devices.placement import placement, usable_gpus
from manyranks.joining.join import join
from manyranks.joining.parent import JOB
from manyranks.links import MODES

from ... import ladder
from ...base.files import replace_file, writable_folder
from ...base.options import positive_number, whole_number
from ..measuring import emulated
from ..measuring.comparison import DEFAULT_STAGES, run, run_on_sockets_too
from ..measuring.on_your_gpus import large_problem, name_devices
from ..measuring.results import Comparison
from ..showing.plots import compare_figure
from ..showing.source import Shown
from ..waiting import say_while
from . import as_typed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to its parser."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add_training_options(parser)
    gpus = usable_gpus()
    ranks = 4
    # The largest power of two divides the batch; two ranks may share one GPU.
    if gpus:
        ranks = max(2, 2 ** (gpus.bit_length() - 1))
    parser.add_argument(
        "--world-size", type=whole_number, default=ranks, metavar="K", help="number of ranks"
    )
    parser.add_argument(
        "--stages", default=DEFAULT_STAGES, help=f"there are {', '.join(ladder.STAGES)}"
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, or one GPU such as cuda:0"
    )
    parser.add_argument(
        "--device-speed", default="auto", help="such as 2GFLOP/s, or none: the processor as it is"
    )
    parser.add_argument(
        "--link", default="auto", help="bandwidth such as 100Mbit, or none; auto: by the problem"
    )
    parser.add_argument(
        "--link-mode", choices=list(MODES), default="virtual", help="how to emulate links"
    )
    parser.add_argument(
        "--real-sockets",
        action="store_true",
        help="what virtual time is worth: stages 3 to 6 with messages of 2 MB on real sockets, too"
        " (Linux, two minutes)",
    )
    parser.add_argument(
        "--timeout", type=positive_number, default=300.0, metavar="S", help="seconds for a stage"
    )
    parser.add_argument("--out", default="results", metavar="DIR", help="where the results go")


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is trained."""
    parser.add_argument(
        "--problem",
        help="digits, bytes or synthetic; None: digits, or on GPUs bytes of a size and a batch for"
        " which one GPU needs at least 50 ms",
    )
    parser.add_argument(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="a model of your own, with its data, loss and optimizer (docs/YOUR_MODEL.md)",
    )
    parser.add_argument(
        "--parameters",
        type=whole_number,
        metavar="P",
        help="size of the model; None: the problem's",
    )
    parser.add_argument(
        "--global-batch",
        type=whole_number,
        metavar="B",
        help="samples per step; None: the problem's",
    )
    parser.add_argument(
        "--steps", type=whole_number, metavar="N", help="training steps; None: the problem's"
    )
    parser.add_argument("--lr", type=positive_number, help="learning rate; None: the problem's")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="float32 or float64; in bfloat16 all stages would end with other weights",
    )
    parser.add_argument(
        "--bucket-cap-mb",
        type=positive_number,
        metavar="M",
        help="MiB per bucket; None: 0.25, or eight buckets in the problem for GPUs",
    )


def main(args: argparse.Namespace) -> None:
    """Run the comparison; write the results and print the table.

    If torchrun has started this process, the comparison runs on its ranks. Raises ValueError for
    options that exclude each other.
    """
    writable_folder(args.out)
    options = {name: value for name, value in vars(args).items() if value is not None}
    del options["out"]
    measure: Callable[..., Comparison] = run
    if options.pop("real_sockets"):
        del options["link_mode"]
        options |= AGAINST_SOCKETS
        measure = run_on_sockets_too
    if args.model and args.problem:
        raise ValueError("--model has data of its own: leave --problem out")
    under_torchrun = JOB in os.environ
    rank = 0
    if under_torchrun:
        rank, options["world_size"] = join(args.device)
        # The devices and links of torchrun's ranks are real.
        options |= {"device_speed": "none", "link": None}
    if not args.model and "problem" not in options and emulated.on_gpus(args.device):
        # An option that was given counts more than the large problem's.
        options = large_problem(args.device, options["world_size"]) | options
    results = measure(**options, progress=rank == 0)
    if results.device == "cuda" and not under_torchrun:
        _, devices = placement(args.device, args.world_size)
        names = [torch.cuda.get_device_name(gpu) for gpu in dict.fromkeys(devices)]
        results.measured_on = name_devices(names, args.world_size)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank:
        return
    # Files come first: the program that reads the table may close the pipe.
    with say_while("drawing, some seconds"):
        written = save(results, args.out)
    print(table(results))
    for path in written:
        print(f"wrote {path}")
    print(
        "\nHow to read it: the loss is everywhere the same, the time of a step is not;"
        f" {written[-1]} shows where it goes."
    )
    print(f"Next: {as_typed('lab')} opens lesson 00, which explains this figure.")


# Each field of `StageResult` has what the table says below of its column, if it has that.
NOTES = {
    "ideal_ms": """predicted: by formulas that assume what virtual time assumes, so both agree.
What this is worth: real sockets took 1.04 to 1.06 times as long with messages of 2 MB, 0.97 to
1.22 times with small ones. On Linux, ddp-course compare --real-sockets measures it on your machine,
which should do nothing else meanwhile.""",
    "on_sockets": "on real sockets: a step in real time, on virtual hosts, as a multiple of step",
    "difference": "weights differ by: the largest difference of a weight from the single device's",
    "messages_max": "–: nothing is sent, or torch sends it and counts nothing",
}
# Messages of 2 MB, between which even a busy machine is quick enough.
AGAINST_SOCKETS = {
    "problem": "synthetic",
    "parameters": 2_000_000,
    "stages": "3,4,5,6",
    "steps": 5,
    "lr": 0.001,
    "bucket_cap_mb": 2.0,
    "device_speed": "90MFLOP/s",
    "link": "100Mbit",
}
# Each title has a field of `StageResult`, and its format.
COLUMNS = {
    "step\nms": ("step_ms", ".1f"),
    "predicted\nms": ("ideal_ms", ".1f"),
    "on real\nsockets": ("on_sockets", ".2f"),  # as a multiple of the step
    "speed-up": ("speed_up", ".2f"),
    "comm.\nms": ("communication_ms", ".1f"),
    "bytes sent\nby busiest": ("bytes_sent_max", ","),
    "messages\nin and out": ("messages_max", "d"),
    "last\nloss": ("last_loss", ".4f"),
    "weights\ndiffer by": ("difference", ""),
}


def table(results: Comparison) -> Shown:
    """Return the results as a table, a line per stage, with what its columns mean.

    Columns of which no stage has a value are left out.
    """
    columns = {}
    for title, (name, form) in COLUMNS.items():
        if any(getattr(stage, name) is not None for stage in results.stages):
            columns[title] = name, form
    rows = []
    for stage in results.stages:
        row = [stage.label]
        for name, form in columns.values():
            value = getattr(stage, name)
            row.append("–" if value is None else format(value, form))
        rows.append(row)
    titles = ["stage", *columns]
    # The values are formatted already: tabulate must not read them as numbers.
    layout: Any = {"colalign": ["left"] + ["right"] * len(columns), "disable_numparse": True}
    text = tabulate([titles, *rows], tablefmt="plain", **layout)
    shown = [name for name, _ in columns.values()]
    notes = [note for name, note in NOTES.items() if name in shown]
    # A browser would break the names of stages.
    for row in rows:
        row[0] = row[0].replace(" ", "\N{NO-BREAK SPACE}")
    html = tabulate(rows, titles, "html", **layout)
    below = "".join(f"<br>{escape(note)}" for note in notes)
    return Shown("\n".join([text, *notes]), f"{html}<small>{below}</small>")


def save(results: Comparison, folder: str | Path) -> list[Path]:
    """Write compare.json and .png into `folder`, each replaced in one go; return their paths."""
    target = writable_folder(folder)
    contents = {
        "compare.json": results.to_json().encode(),
        "compare.png": compare_figure(results).png(dpi=120),
    }
    return [replace_file(target / name, content) for name, content in contents.items()]
