"""`ddp-course bench launch`: what it costs to bring K ranks to life.

Every way calls an empty function with the process group up (gloo, CPU). The ways take turns, in alternating order,
and the medians are compared: `launch` warm and cold, `torch.multiprocessing.spawn`, fork, and accelerate's
`notebook_launcher` where it is installed.
"""

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from tqdm.auto import tqdm

from ..running.files import replace_file, writable_folder
from ..running.launch import launch

WARM_WORLD_SIZES = (1, 2, 4, 8)
COMPARED_WORLD_SIZE = 4
WARM_SECONDS, TIMES_FASTER_THAN_SPAWN, TIMES_IMPORT = 0.35, 10, 1.3
WARM_UP_SECONDS = 3.0  # for the server to load, in the background, what it loads after the first launch

IMPORT = "import time; begin = time.perf_counter(); import torch; print(time.perf_counter() - begin)"
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


def add_parser(subparsers):
    """Add `launch` to `ddp-course bench`."""
    parser = subparsers.add_parser("launch", help="seconds to start K ranks, beside spawn and fork")
    parser.add_argument("--repeats", type=int, default=5, help="the median counts (default %(default)s)")
    parser.add_argument("--out", default="results", metavar="DIR", help="where the results go (default results)")
    parser.set_defaults(run=main)


def main(args) -> int:
    """Measure, print the table, write bench_launch.json; 1 if a bound is not kept, else 0."""
    folder = writable_folder(args.out)
    ways = ways_to_start()
    launch(lambda: None, world_size=1)
    time.sleep(WARM_UP_SECONDS)
    seconds = {name: [] for name in ways}
    for turn in tqdm(range(args.repeats), unit="turn", disable=None):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(ways[name]())
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    verdicts = judge(medians)
    print("\n".join(f"{name:44} {median:8.3f} s" for name, median in medians.items()))
    print("\n".join(f"{'kept' if kept else 'NOT KEPT'}: {claim}" for claim, kept in verdicts.items()))
    result = {"machine": machine(), "seconds": medians, "all_seconds": seconds, "verdicts": verdicts}
    replace_file(folder / "bench_launch.json", json.dumps(result, indent=1).encode())
    print(f"wrote {folder / 'bench_launch.json'}")
    return 0 if all(verdicts.values()) else 1


def ways_to_start() -> dict:
    """Each way by name: a function that starts the ranks once and returns the seconds it took."""
    ways = {"import torch": lambda: in_new_process(IMPORT), "first launch, K=4": lambda: in_new_process(FIRST_LAUNCH)}
    for world_size in WARM_WORLD_SIZES:
        ways[f"warm launch, K={world_size}"] = lambda k=world_size: timed(start_warm, k)
    ways["torch.multiprocessing.spawn, K=4"] = lambda: timed(start, "spawn")
    if sys.platform == "linux":
        ways["fork, K=4"] = lambda: timed(start, "fork")
    if importlib.util.find_spec("accelerate"):
        ways["accelerate notebook_launcher, K=4"] = lambda: in_new_process(NOTEBOOK_LAUNCHER)
    return ways


def judge(medians) -> dict:
    """What is promised of `launch`, each with whether it was kept."""
    warm, first = medians["warm launch, K=4"], medians["first launch, K=4"]
    faster, slower = medians["torch.multiprocessing.spawn, K=4"] / warm, first / medians["import torch"]
    return {
        f"warm launch at K=4 takes {warm:.2f} s (at most {WARM_SECONDS})": warm <= WARM_SECONDS,
        f"{faster:.1f} times faster than spawn (at least {TIMES_FASTER_THAN_SPAWN})": faster >= TIMES_FASTER_THAN_SPAWN,
        f"first launch: {slower:.2f} times importing torch (at most {TIMES_IMPORT})": slower <= TIMES_IMPORT,
    }


def start_warm(world_size):
    """Start ranks by `launch`; the lambda is sent as it is, while a named function's module would have to load."""
    launch(lambda: None, world_size=world_size, device="cpu")


def timed(function, *args, **kwargs) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    function(*args, **kwargs)
    return time.perf_counter() - begin


def in_new_process(source) -> float:
    """Run `source` in a fresh interpreter, which prints the seconds that count."""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return float(ended.stdout.split()[-1])


def start(method):
    """Start the compared number of ranks by torch's own launcher, with the process group up."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "store").as_uri()
        multiprocessing.start_processes(
            join_group, (COMPARED_WORLD_SIZE, meeting), COMPARED_WORLD_SIZE, start_method=method
        )


def join_group(rank, world_size, meeting):
    """One rank of `start`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    dist.destroy_process_group()


def machine() -> dict:
    """Where the numbers come from."""
    processor = platform.processor()
    if Path("/proc/cpuinfo").is_file():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(": ")[2] if names else processor
    return {
        "processor": processor or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
