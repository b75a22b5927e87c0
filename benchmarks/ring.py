"""`python -m benchmarks ring`: our rings beside gloo's own all_reduce, on this machine's loopback.

The three take turns on the same tensor. The promises are about `pipelined_ring.py`, on plain
TCP streams; stage 4's, which is there to be read and sends through gloo, is measured
beside it.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ddp_course.stage4_ring import ring_all_reduce
from manyranks.launching.launch import launch

from .harness import Benchmark, Part, Promise, Row, medians, promises_of_ratios
from .pipelined_ring import pipelined_ring_all_reduce

MIB = 2**20
WORLD_SIZES = (2, 4)
SIZES_MIB = (16, 64)
# The pipelined ring may take so many times gloo's time: in each row, and on average.
EACH = 1.10
GEOMETRIC_MEAN = 1.00
WAYS = {"gloo": dist.all_reduce, "stage 4": ring_all_reduce, "pipelined": pipelined_ring_all_reduce}


def compare(args: argparse.Namespace) -> Part:
    """Time each way for every world size and message, as a part of the report."""
    rows = []
    for world_size in WORLD_SIZES:
        # All ranks have the same rows: the slowest one's times count.
        of_rank_0, *_ = launch(times, args.repeats, world_size=world_size, device="cpu")
        rows += [{"world_size": world_size, **row} for row in of_rank_0]
    table = []
    for row in rows:
        line = {"K": row["world_size"], "MiB": row["mib"], "gloo, ms": 1e3 * row["gloo"]}
        for name in ("stage 4", "pipelined"):
            line[f"{name}, times that"] = row[name] / row["gloo"]
        table.append(line)
    return Part(rows, promised(rows), table)


def promised(rows: list[Row]) -> list[Promise]:
    """Return what is promised of the pipelined ring."""
    ratios = [row["pipelined"] / row["gloo"] for row in rows]
    return promises_of_ratios(
        "pipelined ring, times gloo's all_reduce", ratios, GEOMETRIC_MEAN, EACH
    )


def times(repeats: int) -> list[Row]:
    """On each rank, return the median seconds of every way for every size."""
    rows = []
    for mib in SIZES_MIB:
        tensor = torch.empty(mib * MIB // 4)  # A number has 4 bytes.
        ways = {name: partial(on_ones, all_reduce, tensor) for name, all_reduce in WAYS.items()}
        rows.append({"mib": mib, **medians(ways, repeats)})
    return rows


def on_ones(all_reduce: Callable, tensor: torch.Tensor) -> float:
    """Return the seconds of a sum of ones, whose result can be checked.

    Only the collective is timed.
    """
    tensor.fill_(1)
    dist.barrier()
    began = time.perf_counter()
    all_reduce(tensor)
    seconds = time.perf_counter() - began
    if tensor[0] != dist.get_world_size() or tensor[-1] != dist.get_world_size():
        raise ArithmeticError("the all-reduce returned a wrong sum")
    return seconds


BENCHMARK = Benchmark("ring", "our ring over gloo's all_reduce", {"rings": compare}, repeats=20)
