"""What all benchmarks do alike: ways take turns, the slowest rank counts, promises are judged.

results/bench_NAME.json (for GPUs: gpu.json) is {"benchmark", "machine", "parts": {part: {"repeats",
"rows": […], "promises": [{"promise", "value", "at_least", "at_most", "kept"}]}}}. Times are in
seconds, and all times of one row were measured in turns.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.base.files import replace_file, writable_folder

Row = dict[str, Any]


@dataclass(frozen=True)
class Promise:
    """What is promised of a measured `value`: that it is from `at_least` to `at_most`."""

    what: str
    value: float
    at_most: float = math.inf
    at_least: float = -math.inf

    def record(self) -> Row:
        """Return the promise as an entry of the report, with None for a bound that is missing."""
        bounds: dict[str, float | None] = {"at_least": None, "at_most": None}
        for name in bounds:
            if math.isfinite(getattr(self, name)):
                bounds[name] = getattr(self, name)
        kept = self.at_least <= self.value <= self.at_most
        return {"promise": self.what, "value": self.value, **bounds, "kept": kept}


def promises_of_ratios(what: str, ratios: list[float], mean: float, each: float) -> list[Promise]:
    """Return two promises: the mean of `ratios` is at most `mean`, and the largest at most `each`.

    The mean is the geometric one.
    """
    geometric = Promise(f"{what}, geometric mean", statistics.geometric_mean(ratios), mean)
    return [geometric, Promise(f"{what}, slowest", max(ratios), each)]


@dataclass(frozen=True)
class Part:
    """What one part of a benchmark measured: `rows` for the report, and what is promised of them.

    `table` are other rows to print, if not these; `also` are more entries of the report.
    """

    rows: list[Row]
    promises: list[Promise] = field(default_factory=list)
    table: list[Row] | None = None
    also: Row = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """A name, one line about it, and its parts: functions of the command's options that measure.

    `file` is its report, `on_request` are parts that only `--only` runs, and `finish(report,
    folder)` writes more files and returns their paths. Without `repeats` it has no such option.
    """

    name: str
    help: str
    parts: Mapping[str, Callable[[argparse.Namespace], Part]]
    repeats: int | None = None
    file: str = ""
    on_request: tuple[str, ...] = ()
    add_options: Callable[[argparse.ArgumentParser], None] | None = None
    finish: Callable[[Row, Path], Iterable[Path]] | None = None

    def parser(self) -> argparse.ArgumentParser:
        """Return the options of this benchmark on the command line."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {self.name}", description=self.help
        )
        if self.repeats:
            parser.add_argument(
                "--repeats",
                type=int,
                default=self.repeats,
                help="turns of each (default %(default)s)",
            )
        if len(self.parts) > 1:
            parser.add_argument(
                "--only",
                choices=self.parts,
                help="measure this alone, and keep the rest of a report",
            )
        parser.add_argument(
            "--out", default="results", metavar="DIR", help="where the results go (default results)"
        )
        if self.add_options:
            self.add_options(parser)
        return parser

    def run(self, args: argparse.Namespace) -> int:
        """Measure, print tables and verdicts, write the report; return 1 for a broken promise.

        The report is written part by part. Without a broken promise 0 is returned.
        """
        folder = writable_folder(args.out)
        only = getattr(args, "only", None)  # A benchmark of one part has no such option.
        file = folder / (self.file or f"bench_{self.name}.json")
        if getattr(args, "repeats", 1) < 1:
            raise ValueError(f"{args.repeats} repeats measure nothing; give at least 1")
        names = [name for name in self.parts if name not in self.on_request]
        if only:
            names = [only]
        parts = earlier_parts(file, names)
        report = {"benchmark": self.name, "machine": machine(), "parts": parts}
        for name in names:
            part = self.parts[name](args)
            promises = [promise.record() for promise in part.promises]
            repeats = {"repeats": args.repeats} if self.repeats else {}
            parts[name] = {**repeats, "rows": part.rows, "promises": promises, **part.also}
            print(f"{name}\n{table(part.table or part.rows)}\n", flush=True)
            print("\n".join(map(verdict, promises)), flush=True)
            replace_file(file, (json.dumps(report, indent=1) + "\n").encode())
        written = [file]
        if self.finish:
            written += self.finish(report, folder)
        for path in written:
            print(f"wrote {path}")
        promises = [promise for part in parts.values() for promise in part["promises"]]
        return 0 if all(promise["kept"] for promise in promises) else 1


def table(rows: list[Row]) -> str:
    """Return the `rows` in lines and columns, under their keys."""
    try:
        from tabulate import tabulate
    except ImportError:  # Some machines have torch and numpy only.
        return "\n".join(map(line_of, rows))
    return tabulate(rows, headers="keys", floatfmt=".4g")


def line_of(row: Row) -> str:
    """Return a row in one line, its floating-point numbers with four digits."""
    words = []
    for key, value in row.items():
        written = f"{value:.4g}" if isinstance(value, float) else str(value)
        words.append(f"{key}: {written}")
    return ", ".join(words)


def verdict(promise: Row) -> str:
    """Return a line that says whether a promise of the report is kept."""
    bounds = {"at least": promise["at_least"], "at most": promise["at_most"]}
    limits = ", ".join(
        f"{words} {bound:.3g}" for words, bound in bounds.items() if bound is not None
    )
    kept = "kept" if promise["kept"] else "NOT KEPT"
    return f"{kept}: {promise['promise']}: {promise['value']:.3g} ({limits})"


def earlier_parts(file: Path, measured_now: Iterable[str] = ()) -> dict[str, Row]:
    """Return the parts of an earlier report of this machine that are not measured now."""
    report = json.loads(file.read_text()) if file.exists() else {}
    if not isinstance(report, dict) or report.get("machine") != machine():
        return {}
    parts = dict(report["parts"])
    for name in measured_now:
        parts.pop(name, None)
    return parts


def machine() -> Row:
    """Return the machine and the versions that the numbers come from."""
    processor = platform.processor()
    description = Path("/proc/cpuinfo")
    if description.is_file():
        for line in description.read_text().splitlines():
            if line.startswith("model name"):
                _, _, processor = line.partition(": ")
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return {
        "processor": processor or platform.machine(),
        "cores": cores,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def take_turns(
    ways: Mapping[str, Callable[[], Any]],
    repeats: int,
    warm_up: int = 0,
    agree: Callable[[Any], Any] | None = None,
) -> dict[str, list]:
    """Call each way `repeats` times after `warm_up` calls; return what each returned.

    The ranks must `agree` on it. The order rotates, and every second turn goes backwards: no way
    always follows the same other way.
    """
    names = list(ways)
    returned: dict[str, list] = {name: [] for name in ways}
    for turn in turns(repeats + warm_up):
        shift = turn // 2 % len(names)
        order = names[shift:] + names[:shift]
        if turn % 2:
            order.reverse()
        for name in order:
            value = ways[name]()
            if agree:
                value = agree(value)
            if turn >= warm_up:
                returned[name].append(value)
    return returned


def turns(count: int) -> Iterable[int]:
    """Return 0, 1, 2 …, with a progress bar in a terminal."""
    if not sys.stderr.isatty():
        return range(count)
    from tqdm.auto import tqdm  # Ranks show no bar and do not need tqdm.

    return tqdm(range(count), unit="turn", leave=False)


def medians(
    ways: Mapping[str, Callable[[], float]], repeats: int, warm_up: int = 2
) -> dict[str, float]:
    """On each rank, return the median seconds of each way; the slowest rank's time counts.

    A way is a function that returns seconds.
    """
    seconds_of_ways = take_turns(ways, repeats, warm_up, agree=slowest)
    return {name: statistics.median(seconds) for name, seconds in seconds_of_ways.items()}


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' `seconds`."""
    largest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def timed(function: Callable[..., Any], *args: Any) -> Callable[[], float]:
    """Return a function that calls `function(*args)` and returns its seconds.

    If there are ranks, all of them call it at once.
    """

    def call() -> float:
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        function(*args)
        return time.perf_counter() - began

    return call
