"""`ddp-course bench links`: do measured times over emulated links lie on the textbook formulas?

For each mode, bandwidth and world size the link is calibrated by a ping-pong between two ranks (b, headers and
all); then the parameter server, the whole-gradient ring and the ring average messages of several sizes, and each
time is divided by its formula without latency, 2(K-1)p/b, (K-1)p/b and 2(K-1)/K p/b. Over virtual hosts gloo's own
all-reduce runs beside them, in the same launch, with the order alternating.
"""

import json
import statistics
import time

import torch
import torch.distributed as dist
from tqdm.auto import tqdm

from .. import stage3_paramserver, stage4_ring
from ..errors import CourseError
from ..measuring import theory
from ..running import links, units
from ..running.files import replace_file, writable_folder
from ..running.launch import launch
from ..showing.link_plots import link_figure

ALGORITHMS = {
    "parameter_server": lambda tensor: stage3_paramserver.average_on_server([tensor]),
    "whole_gradient_ring": stage4_ring.whole_gradient_ring,
    "ring": stage4_ring.ring_all_reduce,
    "gloo": dist.all_reduce,
}
FORMULA = {"gloo": "ring"}
WORLD_SIZES = {"hosts": "2,3,4", "wire": "2,3,4,8"}
COLUMNS = ("mode", "algorithm", "world_size", "bytes", "bandwidth_bits_s")
JUDGED_BYTES, LOWEST, HIGHEST, SLOWER_THAN_GLOO = 4 << 20, 0.97, 1.12, 1.05


def add_parser(subparsers):
    """Add `links` to `ddp-course bench`."""
    parser = subparsers.add_parser("links", help="measured time over theory, on emulated links")
    parser.add_argument("--modes", default="hosts,wire", help="default %(default)s; hosts only where possible")
    parser.add_argument("--bandwidths", default="100Mbit,200Mbit", help="default %(default)s")
    parser.add_argument("--world-sizes", metavar="K", help="default 2,3,4, and for wire 8 too")
    parser.add_argument("--sizes", default="1MiB,4MiB,16MiB", help="bytes to average (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts (default %(default)s)")
    parser.add_argument("--out", default="results", metavar="DIR", help="where the results go (default results)")
    parser.add_argument("--add", action="store_true", help="keep the rows of earlier runs that this one leaves out")
    parser.set_defaults(run=main)


def main(args) -> int:
    """Measure, print the table, write bench_links.json and .png; 1 if a time is off its formula, else 0."""
    folder = writable_folder(args.out)
    settings = [
        (links.Link(bandwidth, mode=mode), world_size)
        for mode in usable_modes(args.modes.split(","))
        for bandwidth in args.bandwidths.split(",")
        for world_size in map(int, (args.world_sizes or WORLD_SIZES[mode]).split(","))
    ]
    sizes = [units.nbytes(size) for size in args.sizes.split(",")]
    rows = []
    for link, world_size in tqdm(settings, unit="setting", disable=None):
        try:
            rows += measure(link, world_size, sizes, args.repeats)
        except CourseError as error:
            print(f"{link}, K={world_size}: {error}")
            return 1
    rows = merge(folder / "bench_links.json", rows) if args.add else rows
    print(table(rows))
    replace_file(folder / "bench_links.json", json.dumps(rows, indent=1).encode())
    replace_file(folder / "bench_links.png", link_figure(rows).png(dpi=120))
    print(f"wrote {folder / 'bench_links.json'} and .png")
    wrong = judge(rows)
    print("\n".join(wrong) or "all ratios are within bounds")
    return 1 if wrong else 0


def usable_modes(modes):
    """Leave out what this machine does not allow, and say so."""
    possible = links.available()
    for mode in modes:
        reason = possible.get(mode)
        if reason:
            print(f"{links.MODES[mode]} left out: {reason}")
        else:
            yield mode


def measure(link, world_size, sizes, repeats) -> list:
    """One launch: all algorithms at all sizes on `world_size` ranks. Returns a row each, as in the JSON file."""
    bandwidth = links.calibrate(link)["bandwidth_bits_s"]
    names = [name for name in ALGORITHMS if name != "gloo" or link.carries_torch]
    spans = launch(time_all, names, sizes, repeats, link=link, world_size=world_size, device="cpu", timeout=1800.0)
    costs = theory.Costs.of_link(bandwidth)
    rows = []
    for position, (name, size) in enumerate((name, size) for size in sizes for name in names):
        runs = zip(*(rank[position] for rank in spans), strict=True)
        seconds = [max(end for _, end in run) - max(start for start, _ in run) for run in runs]
        expected = theory.seconds(FORMULA.get(name, name), size, world_size, costs)
        key = dict(zip(COLUMNS, (link.mode, name, world_size, size, link.bandwidth), strict=True))
        measured = statistics.median(seconds)
        rows.append(
            {**key, "measured_s": measured, "theory_s": expected, "ratio": measured / expected}
            | {"calibrated_bits_s": bandwidth, "runs_s": seconds}
        )
    return rows


def time_all(names, sizes, repeats) -> list:
    """What every rank runs; returns for each size and algorithm its (start, end) in monotonic seconds, per repeat."""
    results = []
    for size in sizes:
        tensor = torch.full((size // 4,), float(dist.get_rank()))
        spans = {name: [] for name in names}
        for repeat in range(repeats):
            for name in names if repeat % 2 == 0 else reversed(names):
                tensor.fill_(float(dist.get_rank()))
                dist.barrier()
                start = time.monotonic()
                ALGORITHMS[name](tensor)
                spans[name].append((start, time.monotonic()))
        results += [spans[name] for name in names]
    return results


def merge(path, rows) -> list:
    """The rows of the file at `path`, those measured again replaced, sorted."""
    earlier = json.loads(path.read_text()) if path.exists() else []
    known = {tuple(row[column] for column in COLUMNS): row for row in [*earlier, *rows]}
    return [known[key] for key in sorted(known, key=lambda key: (key[0], key[4], key[2], key[3], key[1]))]


def judge(rows) -> list:
    """A line for every row of 4 MiB and more that is out of bounds; empty when all is well."""
    judged = [row for row in rows if row["bytes"] >= JUDGED_BYTES]
    wrong = [
        f"{describe(row)}: {row['ratio']:.3f} of the formula, not {LOWEST} to {HIGHEST}"
        for row in judged
        if row["algorithm"] != "gloo" and not LOWEST <= row["ratio"] <= HIGHEST
    ]
    gloo = {key(row): row["measured_s"] for row in judged if row["algorithm"] == "gloo"}
    for row in judged:
        if row["algorithm"] == "ring" and row["measured_s"] > SLOWER_THAN_GLOO * gloo.get(key(row), float("inf")):
            wrong.append(f"{describe(row)}: {row['measured_s'] / gloo[key(row)]:.3f} of gloo's time")
    return wrong


def key(row):
    """What two algorithms must have in common to be compared."""
    return row["mode"], row["world_size"], row["bytes"], row["bandwidth_bits_s"]


def describe(row) -> str:
    """A row's setting in words."""
    where = f"{row['mode']}, {row['bandwidth_bits_s'] / 1e6:g} Mbit/s, K={row['world_size']}"
    return f"{where}, {row['bytes'] / 2**20:g} MiB, {row['algorithm']}"


def table(rows) -> str:
    """The rows as text, a line for each setting and a column for each algorithm: milliseconds (over theory)."""
    lines = [f"{'':34}" + "".join(f"{name:>22}" for name in ALGORITHMS) + f"{'ring / gloo':>13}"]
    for setting in dict.fromkeys(key(row) for row in rows):
        found = {row["algorithm"]: row for row in rows if key(row) == setting}
        mode, world_size, size, bandwidth = setting
        line = f"{mode:6}{bandwidth / 1e6:>5g} Mbit/s  K={world_size}  {size / 2**20:>5g} MiB  "
        for name in ALGORITHMS:
            row = found.get(name)
            line += f"{row['measured_s'] * 1e3:12.1f} ms ({row['ratio']:.3f})"[-22:] if row else f"{'–':>22}"
        both = {"ring", "gloo"} <= found.keys()
        lines.append(line + (f"{found['ring']['measured_s'] / found['gloo']['measured_s']:13.3f}" if both else ""))
    return "\n".join(lines)
