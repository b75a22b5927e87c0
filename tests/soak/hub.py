"""A workshop on one hub: `python tests/soak/hub.py [--learners 12] [--gib 2]`.

Opens one kernel per learner, and runs in all of them, at the same time, cells like those of lesson
00: launches, a stage trained on four ranks, a cell on every rank. Prints the peak memory per
learner, which includes all processes below the kernel and counts shared pages once. Ends with exit
code 1 if a learner got an error, another learner's results or more memory than allowed, or if a
process or file was left.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from kernels import running_kernel

GIB = 2**30
# In each cell {me} stands for the learner's number, and {ranks} for the number of ranks.
LOAD = """
%load_ext ddp_course
import torch, torch.distributed as dist
from ddp_course import launch, problems, stage5_bucketed
"""
LAUNCH = """
me = {me}
def summed():
    tensor = torch.full((1000,), float(me + dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor[0].item()
expected = float(sum(me + rank for rank in range({ranks})))
assert launch(summed, world_size={ranks}) == [expected] * {ranks}
"""
TRAIN = """
problem = problems.make("digits")
def train():
    share = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    batches = problem.batches(128, 20, seed=me, **share)
    return stage5_bucketed.train(problem.model(), batches, lr=0.1)
losses = launch(train, world_size={ranks}, progress=20)
assert losses[0][-1] < losses[0][0]
"""
ON_EVERY_RANK = """%%ranks {ranks} --pull total
total = torch.tensor(me + rank)
dist.all_reduce(total)
None"""
PULLED = "assert int(total) == sum(me + rank for rank in range({ranks}))"
CELLS = [LOAD.strip(), LAUNCH.strip(), TRAIN.strip(), ON_EVERY_RANK, PULLED]
# torch makes a folder with such a name for each user, and leaves it.
TORCH_CACHE = "torchinductor_"


def main():
    """Run the workshop; return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--learners", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gib", type=float, default=2.0, help="memory that a learner may take")
    options = parser.parse_args()
    began = time.monotonic()
    with ExitStack() as kernels_end, ThreadPoolExecutor(options.learners + 1) as threads:
        opened = [
            threads.submit(kernels_end.enter_context, running_kernel())
            for _ in range(options.learners)
        ]
        kernels = [future.result() for future in opened]
        all_have_worked = threading.Event()
        watching = threads.submit(watch, kernels, all_have_worked)
        working = [
            threads.submit(work, kernel, me, options.ranks) for me, kernel in enumerate(kernels)
        ]
        errors = [future.result() for future in working]
        all_have_worked.set()
        peaks_gib = [peak / GIB for peak in watching.result()]
        processes = [child for kernel in kernels for child in kernel.descendants()]
    wrong = []
    for me, error in enumerate(errors):
        if error:
            wrong.append(f"learner {me}: {error}")
        if peaks_gib[me] > options.gib:
            wrong.append(f"learner {me} took {peaks_gib[me]:.2f} GiB")
    wrong += left_behind(processes)
    median_gib = sorted(peaks_gib)[len(peaks_gib) // 2]
    print(
        f"{options.learners} learners at once with {options.ranks} ranks each: {median_gib:.2f} GiB"
        f" a learner at the peak (median; most {max(peaks_gib):.2f}),"
        f" {time.monotonic() - began:.0f} s"
    )
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def left_behind(processes):
    """Return in words each process that has not ended, and each file that is left."""
    _, alive = psutil.wait_procs(processes, timeout=20)
    files = os.listdir(tempfile.gettempdir())
    left = [*alive, *(name for name in files if not name.startswith(TORCH_CACHE))]
    return [f"left behind: {each}" for each in left]


def work(kernel, me, ranks):
    """Run all cells of learner `me`, one after the other; return what went wrong, or ""."""
    for cell in CELLS:
        source = cell.replace("{me}", str(me)).replace("{ranks}", str(ranks))
        output = kernel.run(source, timeout=600)
        if output.error:
            return f"{output.error}: {output.message[-1500:]}"
    return ""


def watch(kernels, all_have_worked):
    """Look at the kernels every second until the event is set; return the peak of each in bytes."""
    most = [0] * len(kernels)
    while not all_have_worked.wait(1.0):
        for place, kernel in enumerate(kernels):
            most[place] = max(most[place], memory_of(kernel.pid))
    return most


def memory_of(pid):
    """Return the bytes of a process and of all processes below it.

    Of a page that n processes share, each counts an nth part.
    """
    total = 0
    with suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
    return total


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ddp_course_soak") as own_folder:
        # No other program leaves files in this folder.
        os.environ["TMPDIR"] = tempfile.tempdir = own_folder
        sys.exit(main())
