"""`python -m benchmarks links`: do measured times over emulated links lie on the textbook formulas?

For each mode, bandwidth and world size the link is calibrated by a ping-pong between two ranks (b,
headers and all); then the parameter server, the whole-gradient ring and the ring average messages
of several sizes, and each time is divided by its formula without latency, 2(K-1)p/b, (K-1)p/b and
2(K-1)/K p/b. Over virtual hosts gloo's own all-reduce takes turns with them.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import product
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm.auto import tqdm

from ddp_course import stage3_paramserver, stage4_ring, wire
from ddp_course.base.files import replace_file
from ddp_course.lab.measuring import theory
from manyranks import links
from manyranks.launching.launch import launch

from .harness import Benchmark, Part, Promise, Row, earlier_parts, slowest, take_turns, timed
from .link_figure import LARGE, link_figure

ALGORITHMS = {
    "parameter_server": lambda tensor: stage3_paramserver.average_on_server([tensor]),
    "whole_gradient_ring": stage4_ring.whole_gradient_ring,
    "ring": stage4_ring.ring_all_reduce,
    "gloo": dist.all_reduce,
}
FORMULA = {"gloo": "ring"}  # gloo's all-reduce is a ring, too; the others have their own formulas.
WORLD_SIZES = {"hosts": "2,3,4", "virtual": "2,3,4,8"}
COLUMNS = ("mode", "algorithm", "world_size", "bytes", "bandwidth_bits_s")
CALIBRATION_SECONDS = 0.1  # A calibration's longest message takes this long.
ROUNDS = 10  # A calibration's messages are sent this often.
PAUSE_SECONDS = 0.01  # The links rest this long before each message.
# A time may be so many times its formula's, and the ring's so many times gloo's.
LOWEST = 0.97
HIGHEST = 1.12
SLOWER_THAN_GLOO = 1.05


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--modes", default="hosts,virtual", help="default %(default)s; hosts only where possible"
    )
    parser.add_argument("--bandwidths", default="100Mbit,200Mbit", help="default %(default)s")
    parser.add_argument("--world-sizes", metavar="K", help="default 2,3,4, and for virtual 8 too")
    parser.add_argument("--sizes", default="1,4,16", help="MiB to average (default %(default)s)")
    parser.add_argument(
        "--add", action="store_true", help="keep the rows of earlier runs that this one leaves out"
    )


def compare(args: argparse.Namespace) -> Part:
    """Return the measured and textbook seconds, one row for each setting and algorithm."""
    settings = []
    for mode in usable_modes(args.modes.split(",")):
        world_sizes = args.world_sizes or WORLD_SIZES[mode]
        for bandwidth, world_size in product(args.bandwidths.split(","), world_sizes.split(",")):
            settings.append((links.Link(bandwidth, mode=mode), int(world_size)))
    sizes = [int(size) << 20 for size in args.sizes.split(",")]
    rows = []
    for link, world_size in tqdm(settings, unit="setting", disable=None):
        rows += measure(link, world_size, sizes, args.repeats)
    if args.add:
        parts = earlier_parts(Path(args.out) / "bench_links.json")
        if "links" in parts:
            rows = merge(parts["links"]["rows"], rows)
    return Part(rows, promised(rows), table(rows))


def usable_modes(modes: list[str]) -> Iterator[str]:
    """Yield the modes that this machine allows, and print why it does not allow the others."""
    possible = links.available()
    for mode in modes:
        reason = possible.get(mode)
        if reason:
            print(f"{links.MODES[mode].title} left out: {reason}")
        else:
            yield mode


def measure(link: links.Link, world_size: int, sizes: list[int], repeats: int) -> list[Row]:
    """Launch `world_size` ranks that time all algorithms at all sizes; return a row for each."""
    bandwidth = calibrated(link)
    names = list(ALGORITHMS)
    turns_of_sizes, *_ = launch(
        time_all,
        names,
        sizes,
        repeats,
        link=link,
        world_size=world_size,
        device="cpu",
        timeout=1800.0,
    )
    costs = theory.Costs.of_link(bandwidth)
    rows = []
    for size, turns in zip(sizes, turns_of_sizes, strict=True):
        for name, seconds in turns.items():
            expected = theory.seconds(FORMULA.get(name, name), size, world_size, costs)
            measured = statistics.median(seconds)
            values = (link.mode, name, world_size, size, link.bandwidth)
            row = dict(zip(COLUMNS, values, strict=True))
            row |= {"measured_s": measured, "theory_s": expected, "ratio": measured / expected}
            rows.append({**row, "calibrated_bits_s": bandwidth, "runs_s": seconds})
    return rows


def calibrated(link: links.Link) -> float:
    """Return the bits per second that the link really carries, headers and all.

    They follow from messages of four sizes to and fro.
    """
    longest = CALIBRATION_SECONDS * link.bandwidth / 8  # bytes
    sizes = [int(part * longest) // 8 * 8 for part in (0.25, 0.5, 0.75, 1.0)]
    seconds, _ = launch(ping_pong, sizes, world_size=2, device="cpu", link=link)
    # The weights make it a fit of relative errors.
    seconds_per_byte, _ = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    return float(8 / seconds_per_byte)


def ping_pong(sizes: list[int]) -> list[float]:
    """Send messages of these sizes (bytes) to and fro; return the fewest seconds one way."""
    rank = dist.get_rank()
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes * ROUNDS:
        message = torch.zeros(size, dtype=torch.uint8)
        time.sleep(PAUSE_SECONDS)
        start = time.perf_counter()
        for turn in (0, 1):
            if rank == turn:
                wire.send(message, 1 - rank)
            else:
                wire.recv(message, 1 - rank)
        times[size].append((time.perf_counter() - start) / 2)
    return [min(seconds) for seconds in times.values()]


def time_all(names: list[str], sizes: list[int], repeats: int) -> list[dict[str, list[float]]]:
    """On each rank, return for each size the seconds of every turn of each algorithm."""
    turns = []
    for size in sizes:
        tensor = torch.zeros(size // 4)  # Zeros stay zeros, however often they are summed.
        ways = {name: timed(ALGORITHMS[name], tensor) for name in names}
        turns.append(take_turns(ways, repeats, agree=slowest))
    return turns


def merge(earlier: list[Row], rows: list[Row]) -> list[Row]:
    """Return the `earlier` rows and the new `rows`, which replace those of one setting, sorted."""
    setting_of = itemgetter(*COLUMNS)
    merged = {setting_of(row): row for row in [*earlier, *rows]}
    in_order = itemgetter("mode", "bandwidth_bits_s", "world_size", "bytes", "algorithm")
    return sorted(merged.values(), key=in_order)


def promised(rows: list[Row]) -> list[Promise]:
    """Return what is promised of LARGE messages: close to the formulas, as fast as gloo's ring."""
    judged = [row for row in rows if row["bytes"] >= LARGE]
    ratios = {describe(row): row["ratio"] for row in judged if row["algorithm"] != "gloo"}
    gloo = {setting(row): row["measured_s"] for row in judged if row["algorithm"] == "gloo"}
    rings = [row for row in judged if row["algorithm"] == "ring" and setting(row) in gloo]
    over_gloo = {describe(row): row["measured_s"] / gloo[setting(row)] for row in rings}
    promises = []
    if ratios:
        low = min(ratios, key=ratios.__getitem__)
        high = max(ratios, key=ratios.__getitem__)
        promises += [
            Promise(f"least time over its formula ({low})", ratios[low], at_least=LOWEST),
            Promise(f"most time over its formula ({high})", ratios[high], at_most=HIGHEST),
        ]
    if over_gloo:
        worst = max(over_gloo, key=over_gloo.__getitem__)
        promises.append(
            Promise(f"ring, times gloo's ({worst})", over_gloo[worst], at_most=SLOWER_THAN_GLOO)
        )
    return promises


def setting(row: Row) -> tuple:
    """Return what two algorithms must have in common to be compared."""
    return row["mode"], row["world_size"], row["bytes"], row["bandwidth_bits_s"]


def describe(row: Row) -> str:
    """Return a row's setting in words."""
    where = f"{row['mode']}, {row['bandwidth_bits_s'] / 1e6:g} Mbit/s, K={row['world_size']}"
    return f"{where}, {row['bytes'] / 2**20:g} MiB, {row['algorithm']}"


def table(rows: list[Row]) -> list[Row]:
    """Return a line for each setting, for each algorithm milliseconds (times its formula)."""
    lines = []
    for each in dict.fromkeys(map(setting, rows)):
        mode, world_size, size, bandwidth = each
        line = {"link": f"{mode}, {bandwidth / 1e6:g} Mbit/s", "K": world_size, "MiB": size / 2**20}
        for row in rows:
            if setting(row) == each:
                line[row["algorithm"]] = f"{1e3 * row['measured_s']:.1f} ms ({row['ratio']:.3f})"
        lines.append(line)
    return lines


def draw(report: Row, folder: Path) -> Iterator[Path]:
    """Write bench_links.png."""
    picture = link_figure(report["parts"]["links"]["rows"])
    yield replace_file(folder / "bench_links.png", picture.png(dpi=120))


BENCHMARK = Benchmark(
    "links",
    "measured time over theory, on emulated links",
    {"links": compare},
    repeats=3,
    add_options=add_options,
    finish=draw,
)
