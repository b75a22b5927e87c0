"""`ddp-course bench ring`: our rings beside gloo's own all_reduce, on this machine's loopback.

The three take turns on the same tensor, in changing order, in one run. A turn's time is the slowest rank's, and
medians are compared. The verdict is on the pipelined ring of `collectives.py`, on plain TCP streams; stage 4's, which
is there to be read and sends through gloo, is measured beside it.
"""

import json
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist

from ..collectives import pipelined_ring_all_reduce
from ..running.files import replace_file, writable_folder
from ..running.launch import launch
from ..stage4_ring import ring_all_reduce
from .launch import machine

MIB = 2**20
WORLD_SIZES, SIZES_MIB = (2, 4), (16, 64)
EACH, GEOMETRIC_MEAN = 1.10, 1.00
WAYS = {"gloo": dist.all_reduce, "stage 4": ring_all_reduce, "pipelined": pipelined_ring_all_reduce}


def add_parser(subparsers):
    """Add `ring` to `ddp-course bench`."""
    parser = subparsers.add_parser("ring", help="our ring over gloo's all_reduce")
    parser.add_argument("--repeats", type=int, default=20, help="the median counts (default %(default)s)")
    parser.add_argument("--out", default="results", metavar="DIR", help="where the results go (default results)")
    parser.set_defaults(run=main)


def main(args) -> int:
    """Measure, print the table, write bench_ring.json; 1 if a bound is not kept, else 0."""
    folder, rows = writable_folder(args.out), []
    for world_size in WORLD_SIZES:
        ranks = launch(compare, args.repeats, world_size=world_size, device="cpu")
        rows += [{"world_size": world_size, **row} for row in ranks[0]]
    for row in rows:
        print(
            f"K={row['world_size']} {row['mib']:3d} MiB  gloo {row['gloo'] * 1e3:7.1f} ms  "
            f"stage 4 {row['stage 4'] / row['gloo']:.2f}  pipelined {row['pipelined'] / row['gloo']:.2f} times that"
        )
    verdicts = judge(rows)
    for promise, kept in verdicts.items():
        print(f"{'ok  ' if kept else 'MISS'} {promise}")
    report = {"machine": machine(), "repeats": args.repeats, "seconds": rows, "verdicts": verdicts}
    replace_file(folder / "bench_ring.json", json.dumps(report, indent=2).encode())
    return 0 if all(verdicts.values()) else 1


def judge(rows) -> dict:
    """What is promised of the pipelined ring, each with whether it was kept."""
    ratios = [row["pipelined"] / row["gloo"] for row in rows]
    mean = statistics.geometric_mean(ratios)
    return {
        f"geometric mean {mean:.2f} times gloo's time (at most {GEOMETRIC_MEAN:.2f})": mean <= GEOMETRIC_MEAN,
        f"slowest {max(ratios):.2f} times gloo's time (at most {EACH:.2f})": max(ratios) <= EACH,
    }


def compare(repeats):
    """On each rank: median seconds of every way for every size."""
    rows = []
    for mib in SIZES_MIB:
        tensor = torch.empty(mib * MIB // 4)
        ways = {name: partial(on_ones, all_reduce, tensor) for name, all_reduce in WAYS.items()}
        rows.append({"mib": mib, **medians(ways, repeats)})
    return rows


def on_ones(all_reduce, tensor):
    """Sum ones, so that the result can be checked; only the collective is timed."""
    tensor.fill_(1)
    dist.barrier()
    began = time.perf_counter()
    all_reduce(tensor)
    ended = time.perf_counter()
    if tensor[0] != dist.get_world_size() or tensor[-1] != dist.get_world_size():
        raise ArithmeticError("the all-reduce returned a wrong sum")
    return ended - began


def medians(ways, repeats, warm_up=2):
    """Median seconds of each way, the slowest rank's time counting.

    The order rotates, and every second turn goes backwards: nobody always follows the same other one.
    """
    names, seconds = list(ways), {name: [] for name in ways}
    for turn in range(repeats + warm_up):
        shift = turn // 2 % len(names)
        order = names[shift:] + names[:shift]
        for name in reversed(order) if turn % 2 else order:
            slowest = torch.tensor([ways[name]()], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn >= warm_up:
                seconds[name].append(slowest.item())
    return {name: statistics.median(values) for name, values in seconds.items()}
