"""`ddp-course compare`, and `compare.run`, `read`, `table` and `save` for notebooks and scripts."""

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .. import ladder
from ..measuring.comparison import DEFAULT_STAGES, read, run
from ..running.files import replace_file, writable_folder
from ..running.links import MODES
from ..showing.plots import BUSY, compare_figure, stage_label

__all__ = ["add_options", "read", "run", "save", "table"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("--problem", default="digits", help="digits, bytes or synthetic (default digits)")
    parser.add_argument("--world-size", type=int, default=4, metavar="K", help="number of ranks (default 4)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: the problem's)")
    known = ", ".join(ladder.STAGES)
    parser.add_argument("--stages", default=",".join(DEFAULT_STAGES), help=f"default %(default)s; there are {known}")
    parser.add_argument("--device", default="auto", help="auto (the default), cpu, cuda, or one GPU such as cuda:0")
    parser.add_argument(
        "--device-speed",
        default="auto",
        metavar="RATE",
        help="of emulated devices, which ranks have where there are no GPUs, such as 2GFLOP/s; with none they share "
        "the processor as it is: on few cores four ranks are then slower than one (default: by the problem)",
    )
    parser.add_argument("--dtype", default="float32", help="float32 (the default) or float64")
    parser.add_argument("--global-batch", type=int, metavar="B", help="samples per step over all ranks together")
    parser.add_argument("--parameters", type=int, metavar="P", help="size of the model of bytes and synthetic")
    parser.add_argument("--bucket-cap-mb", type=float, default=0.25, metavar="M", help="MiB per bucket (default 0.25)")
    parser.add_argument("--lr", type=float, help="learning rate (default: the problem's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default 0)")
    parser.add_argument("--link", default="auto", help="bandwidth such as 100Mbit, or none (default: by the problem)")
    parser.add_argument("--latency", default="0ms", help="one-way delay of the link, such as 2ms (default 0ms)")
    parser.add_argument(
        "--link-mode", choices=["auto", *MODES], default="auto", help="how to emulate links (default auto)"
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds for a stage (default 300)")
    parser.add_argument(
        "--read", metavar="DIR", help="compare what ddp_course.train --results DIR wrote, on any cluster"
    )
    parser.add_argument("--out", default="results", metavar="DIR", help="where the results go (default results)")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> None:
    """Run or read the comparison, write the results and print the table."""
    writable_folder(args.out)
    options = {name: value for name, value in vars(args).items() if name not in ("run", "read", "out")}
    results = read(args.read) if args.read else run(**options, progress=True)
    written = save(results, args.out)  # This comes first: whoever reads the table may stop listening.
    print(table(results))
    for path in written:
        print(f"wrote {path}")


class Table(str):
    """A table as text; notebooks show its `html`, which fits any width."""

    html = ""

    def _repr_html_(self) -> str:
        return self.html


TITLES = [
    "stage", "step\nms", "predicted\nms", "speed-up", "comm.\nms", "bytes sent\nby busiest", "messages", "last\nloss",
    "max diff\nto 1",
]  # fmt: skip


def table(results: dict) -> Table:
    """The results as text, a line per stage."""
    rows = []
    for stage in results["stages"]:
        sent, waiting, ideal, messages = (
            stage.get(key) for key in ("bytes_sent_max", "communication_ms", "ideal_ms", "messages_max")
        )
        rows.append(
            [
                stage_label(stage["stage"], stage["name"]),
                f"{stage['step_ms']:.1f}" + "*" * bool(stage.get("busy")),
                "–" if ideal is None else f"{ideal:.1f}",
                f"{stage['speed_up']:.2f}" if stage.get("speed_up") else "–",
                "–" if waiting is None else f"{waiting:.1f}",
                "–" if sent is None else f"{sent:,}",
                "–" if messages is None else str(messages),
                f"{stage['loss'][-1]:.4f}",
                f"{stage['max_abs_diff_vs_single']:.1e}",
            ]
        )
    note = f"\n* {BUSY}" if any(stage.get("busy") for stage in results["stages"]) else ""
    layout: Any = {"colalign": ["left"] + ["right"] * 8, "disable_numparse": True}
    text = Table(tabulate([TITLES, *rows], tablefmt="plain", **layout) + note)
    unbroken = [[row[0].replace(" ", "\N{NO-BREAK SPACE}"), *row[1:]] for row in rows]
    text.html = tabulate(unbroken, [title.replace("\n", " ") for title in TITLES], "html", **layout) + note
    return text


def save(results: dict, folder: str | Path) -> list[Path]:
    """Write compare.json, .csv and .png into `folder`, each replaced in one go; return their paths."""
    written = writable_folder(folder)
    picture = io.BytesIO()
    figure = compare_figure(results)
    figure.savefig(picture, format="png", dpi=120, metadata={"Description": figure.message})
    contents = {
        "compare.json": json.dumps(results, indent=1, allow_nan=False).encode(),
        "compare.csv": _csv(results).encode(),
        "compare.png": picture.getvalue(),
    }
    return [replace_file(written / name, content) for name, content in contents.items()]


def _csv(results):
    columns = ["stage", "name", "step_ms", "ideal_ms", "speed_up", "communication_ms"]
    columns += ["bytes_sent_max", "bytes_received_max", "messages_max"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*columns, "last_loss", "max_abs_diff_vs_single"])
    for stage in results["stages"]:
        writer.writerow([*(stage.get(key) for key in columns), stage["loss"][-1], stage["max_abs_diff_vs_single"]])
    return text.getvalue()
