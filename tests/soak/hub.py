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
CELLS = [
    (
        "%load_ext ddp_course\n"
        "import torch, torch.distributed as dist\n"
        "from ddp_course import launch, problems, stage5_bucketed"
    ),
    (
        "me = {me}\ndef summed():\n    tensor = torch.full((1000,), float(me + dist.get_rank()))\n "
        "   dist.all_reduce(tensor)\n    return tensor[0].item()\nassert launch(summed,"
        " world_size={ranks}) == [float(sum(me + rank for rank in range({ranks})))] * {ranks}"
    ),
    (
        "problem = problems.make('digits')\ndef train():\n    batches = problem.batches(128, 20,"
        " seed=me, rank=dist.get_rank(), world_size=dist.get_world_size())\n    return"
        " stage5_bucketed.train(problem.model(), batches, lr=0.1)\nlosses = launch(train,"
        " world_size={ranks}, progress=20)\nassert losses[0][-1] < losses[0][0]"
    ),
    "%%ranks {ranks} --pull total\ntotal = torch.tensor(me + rank)\ndist.all_reduce(total)\nNone",
    "assert int(total) == sum(me + rank for rank in range({ranks}))",
]


def main():
    """Run the workshop; return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--learners", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gib", type=float, default=2.0, help="memory that a learner may take")
    options = parser.parse_args()
    began = time.monotonic()
    stop = threading.Event()
    with ExitStack() as stack, ThreadPoolExecutor(options.learners + 1) as pool:
        kernels = list(
            pool.map(lambda _: stack.enter_context(running_kernel()), range(options.learners))
        )
        peaks = pool.submit(watch, kernels, stop)
        wrong = list(
            pool.map(work, kernels, range(options.learners), [options.ranks] * options.learners)
        )
        stop.set()
        memory = [peak / GIB for peak in peaks.result()]
        processes = [child for kernel in kernels for child in kernel.descendants()]
    wrong = [f"learner {me}: {text}" for me, text in enumerate(wrong) if text]
    wrong += [
        f"learner {me} took {peak:.2f} GiB" for me, peak in enumerate(memory) if peak > options.gib
    ]
    wrong += [f"left behind: {process}" for process in psutil.wait_procs(processes, timeout=20)[1]]
    wrong += [
        f"left behind: {name}"
        for name in os.listdir(tempfile.gettempdir())
        if not name.startswith("torchind")
    ]
    middle = sorted(memory)[len(memory) // 2]
    print(
        f"{options.learners} learners at once with {options.ranks} ranks each: {middle:.2f} GiB a"
        f" learner at the peak (median; most {max(memory):.2f}), {time.monotonic() - began:.0f} s"
    )
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def work(kernel, me, ranks):
    """All cells of one learner, one after the other; returns what went wrong, or nothing."""
    for cell in CELLS:
        output = kernel.run(
            cell.replace("{me}", str(me)).replace("{ranks}", str(ranks)), timeout=600
        )
        if output.error:
            return f"{output.error}: {output.message[-1500:]}"
    return ""


def watch(kernels, stop):
    """The most bytes that each kernel, with all processes below it, had at one time, until `stop`
    is set.
    """
    most = [0] * len(kernels)
    while not stop.wait(1.0):
        for place, kernel in enumerate(kernels):
            most[place] = max(most[place], memory_of(kernel.pid))
    return most


def memory_of(pid):
    """The bytes of a process and all processes below it: each of n processes that share a page
    counts an nth of it.
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
