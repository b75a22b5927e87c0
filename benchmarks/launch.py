"""`python -m benchmarks launch`: how long it takes to start K ranks.

Every way calls an empty function on the CPU: `launch` warm and cold, `torch.multiprocessing.spawn`
and fork with a process group of gloo, and accelerate's `notebook_launcher`, which makes none, where
it is installed. Beside them stands the import of torch alone.
"""

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from manyranks.launching.launch import launch

from .harness import Benchmark, Part, Promise, take_turns, timed

WARM_WORLD_SIZES = (1, 2, 4, 8, 10, 12, 16)
COMPARED_WORLD_SIZE = 4
# These are promised: a warm launch of 4 and of 16 ranks, and what it is beside spawn and an import.
WARM_SECONDS = 0.35
LARGE_WORLD_SECONDS = 0.6
TIMES_FASTER_THAN_SPAWN = 10
TIMES_IMPORT = 1.3
WARM_UP_SECONDS = 3.0  # The server loads more in the background for so long after its first launch.
IMPORT = (
    "import time; begin = time.perf_counter(); import torch; print(time.perf_counter() - begin)"
)
FIRST_LAUNCH = """
import time
from ddp_course import launch
begin = time.perf_counter()
launch(lambda: None, world_size=4)
print(time.perf_counter() - begin)
"""
NOTEBOOK_LAUNCHER = """
import time
from accelerate import notebook_launcher
import torch.distributed as dist
begin = time.perf_counter()
notebook_launcher(lambda: None, num_processes=4, use_port="0")
print(time.perf_counter() - begin)
"""


def compare(args: argparse.Namespace) -> Part:
    """Return the median seconds of every way to start, in one row.

    The report has the seconds of each turn, too.
    """
    ways = ways_to_start()
    launch(lambda: None, world_size=1)
    time.sleep(WARM_UP_SECONDS)
    turns = take_turns(ways, args.repeats)
    medians = {name: statistics.median(seconds) for name, seconds in turns.items()}
    table = [{"way": name, "seconds": seconds} for name, seconds in medians.items()]
    return Part([medians], promised(medians), table, {"all_seconds": turns})


def ways_to_start() -> dict[str, Callable[[], float]]:
    """Return {name: function that starts the ranks once and returns the seconds it took}."""
    ways: dict[str, Callable[[], float]] = {
        "import torch": partial(in_new_process, IMPORT),
        "first launch, K=4": partial(in_new_process, FIRST_LAUNCH),
    }
    for world_size in WARM_WORLD_SIZES:
        ways[f"warm launch, K={world_size}"] = timed(start_warm, world_size)
    ways["torch.multiprocessing.spawn, K=4"] = timed(start, "spawn")
    if sys.platform == "linux":
        ways["fork, K=4"] = timed(start, "fork")
    if importlib.util.find_spec("accelerate"):
        ways["accelerate notebook_launcher, K=4"] = partial(in_new_process, NOTEBOOK_LAUNCHER)
    return ways


def promised(medians: dict[str, float]) -> list[Promise]:
    """Return what is promised of `launch`."""
    warm = medians["warm launch, K=4"]
    first = medians["first launch, K=4"]
    spawn = medians["torch.multiprocessing.spawn, K=4"]
    importing = medians["import torch"]
    return [
        Promise("warm launch at K=4, seconds", warm, at_most=WARM_SECONDS),
        Promise(
            "warm launch at K=16, seconds",
            medians["warm launch, K=16"],
            at_most=LARGE_WORLD_SECONDS,
        ),
        Promise(
            "warm launch at K=4, times faster than spawn",
            spawn / warm,
            at_least=TIMES_FASTER_THAN_SPAWN,
        ),
        Promise(
            "first launch at K=4, times importing torch", first / importing, at_most=TIMES_IMPORT
        ),
    ]


def start_warm(world_size: int) -> None:
    """Start ranks by `launch`.

    The lambda is sent as it is, while a named function's module would have to load.
    """
    launch(lambda: None, world_size=world_size, device="cpu")


def in_new_process(source: str) -> float:
    """Run `source` in a fresh interpreter, which prints the seconds that count."""
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    return float(ended.stdout.split()[-1])


def start(method: str) -> None:
    """Start the compared number of ranks by torch's own launcher, with the process group up."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "store").as_uri()
        multiprocessing.start_processes(
            join_group, (COMPARED_WORLD_SIZE, meeting), COMPARED_WORLD_SIZE, start_method=method
        )


def join_group(rank: int, world_size: int, meeting: str) -> None:
    """Be one rank of `start`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    dist.destroy_process_group()


BENCHMARK = Benchmark(
    "launch",
    "seconds to start K ranks, beside spawn and fork",
    {"starts": compare},
    repeats=5,
)
