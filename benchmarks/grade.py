"""`python -m benchmarks grade`: how many submissions a minute, and whether memory grows.

The submissions are copies of one exercise's solution, of which some are unsolved and some wrong, in
a folder of their own. The rate is for each core that is used, with as many submissions at a time as
there are cores.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil

from ddp_exercises.grading.answers import load_exercises
from ddp_exercises.grading.grader import grade
from ddp_exercises.grading.results import Result
from ddp_exercises.grading.submissions import find_submissions
from manyranks.linux import usable_cores

from .harness import Benchmark, Part, Promise

WANTED_PER_MINUTE_AND_CORE = 10.0  # This is sixty submissions in three minutes on two cores.
MOST_PROCESSOR_SECONDS = 6.0  # A submission that takes no more leaves room for other programs.
MOST_GROWTH = 1.1  # The second half's peak of memory may be this many times the first half's.
WRONG = (  # Pieces of the solution of exercise 4, and what stands in a wrong answer instead.
    ("(rank - step)", "(rank + step)"),
    ("target += incoming", "target.copy_(incoming)"),
    ("flat.view(", "flat.vie("),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--count", type=int, default=60, help="submissions (default 60)")
    parser.add_argument("--exercise", type=int, default=4, help="which exercise (default 4)")
    parser.add_argument(
        "--jobs", type=int, default=usable_cores(), help="at a time (default: one a core)"
    )


def throughput(args: argparse.Namespace) -> Part:
    """Grade a class of made-up submissions; return how many a minute and core takes.

    The peaks of memory in both halves of the time are returned, too.
    """
    exercises = load_exercises()
    memory: list[int] = []
    with tempfile.TemporaryDirectory(prefix="ddp_course_bench_") as made:
        make_submissions(Path(made), args.exercise, args.count)
        submissions, _ = find_submissions([made])
        with watching(memory):
            start = time.perf_counter()
            before = processor_seconds()
            results = list(grade(submissions, exercises, 1, args.jobs))
            seconds = time.perf_counter() - start
            processor = processor_seconds() - before
    wrong = misjudged(results)
    for result in wrong:
        print(f"misjudged: {result}")
    half = len(memory) // 2
    minutes_of_cores = seconds / 60 * min(args.jobs, usable_cores())
    row = {
        "exercise": args.exercise,
        "submissions": len(results),
        "passed": sum(result.passed for result in results),
        "misjudged": len(wrong),
        "jobs": args.jobs,
        "seconds": round(seconds, 1),
        "per_minute_and_core": round(len(results) / minutes_of_cores, 1),
        "processor_seconds_per_submission": round(processor / len(results), 2),
        "memory_mib_first_half": peak(memory[:half]),
        "memory_mib_second_half": peak(memory[half:]),
    }
    table = [{"what": name.replace("_", " "), "measured": value} for name, value in row.items()]
    return Part([row], promised(row), table)


def promised(row: dict[str, Any]) -> list[Promise]:
    """Return what is promised of the grader's rate, memory and judgement."""
    growth = row["memory_mib_second_half"] / max(1, row["memory_mib_first_half"])
    return [
        Promise("right answers that fail and wrong ones that pass", row["misjudged"], at_most=0),
        Promise(
            "submissions per minute and core",
            row["per_minute_and_core"],
            at_least=WANTED_PER_MINUTE_AND_CORE,
        ),
        Promise(
            "processor seconds per submission",
            row["processor_seconds_per_submission"],
            at_most=MOST_PROCESSOR_SECONDS,
        ),
        Promise("memory of the second half, times the first half's", growth, at_most=MOST_GROWTH),
    ]


def peak(samples: list[int]) -> int:
    """Return the largest of the samples, in MiB."""
    return round(max(samples, default=0) / 2**20)


def misjudged(results: list[Result]) -> list[Result]:
    """Return the right submissions that fail, and the wrong ones that pass."""
    return [each for each in results if each.passed != is_right(int(each.learner[-3:]))]


def is_right(number: int) -> bool:
    """Return whether a submission of this number is the solution."""
    return number % 5 in (3, 4)


def make_submissions(folder: Path, exercise: int, count: int) -> None:
    """Make a folder for each of `count` learners.

    Of each five, one has handed in an untouched exercise, two something wrong, and two the
    solution.
    """
    root = Path(__file__).resolve().parents[1]
    (path,) = (root / "solutions").glob(f"{exercise:02d}_*.ipynb")
    for number in range(count):
        unsolved = number % 5 == 0
        source = root / "exercises" / path.name if unsolved else path
        notebook = nbformat.read(source, as_version=4)
        if not unsolved and not is_right(number):
            old, new = WRONG[number % len(WRONG)]
            for cell in notebook.cells:
                cell.source = cell.source.replace(old, new)
        learner = folder / f"learner{number:03d}"
        learner.mkdir()
        nbformat.write(notebook, learner / path.name)


@contextmanager
def watching(memory: list[int]) -> Iterator[None]:
    """Add once a second, while the block runs, what this process and its descendants take.

    These are the bytes that the processes do not share.
    """
    ended = threading.Event()

    def watch():
        while not ended.wait(1.0):
            this = psutil.Process()
            processes = [this, *this.children(recursive=True)]
            memory.append(sum(map(own_bytes, processes)))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def processor_seconds() -> float:
    """Return the processor seconds so far of this process, its children, and ended children."""
    own = psutil.Process().cpu_times()
    seconds = own.user + own.system
    for child in psutil.Process().children():
        times = child.cpu_times()
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def own_bytes(process: psutil.Process) -> int:
    """Return the bytes that a process does not share; 0 if it has gone."""
    try:
        memory = process.memory_full_info()
        return getattr(memory, "uss", memory.rss)
    except psutil.Error:
        return 0


BENCHMARK = Benchmark(
    "grade",
    "submissions graded a minute and a core",
    {"throughput": throughput},
    add_options=add_options,
)
