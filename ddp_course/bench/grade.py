"""`ddp-course bench grade`: how many submissions a minute the grader gets through, and whether its memory stays.

The submissions are copies of one exercise's solution, of which some are unsolved and some wrong, in a folder of their
own. The rate is for each core that is used, with as many submissions at a time as there are cores.
"""

import json
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import psutil

from ..grading.grade import exercises_folder, grade, usable_cores
from ..grading.submission import find_submissions, load_exercises
from ..running.files import replace_file, writable_folder

WANTED_A_MINUTE_A_CORE = 12.0
WRONG = (
    ("(rank - step)", "(rank + step)"),
    ("target += incoming", "target.copy_(incoming)"),
    ("flat.view(", "flat.vie("),
)


def add_parser(subparsers):
    """Add `grade` to the benchmarks."""
    parser = subparsers.add_parser("grade", help="submissions graded a minute and a core")
    parser.add_argument("--count", type=int, default=60, help="submissions (default 60)")
    parser.add_argument("--exercise", type=int, default=4, help="which exercise (default 4)")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="at a time (default: one a core)")
    parser.add_argument("--out", default="results", help="folder for grade.json (default results)")
    parser.set_defaults(run=run)


def run(args):
    """Measure, print, write grade.json; exit code 1 if the rate is below what is wanted."""
    folder = writable_folder(args.out)
    exercises = load_exercises(exercises_folder())
    with tempfile.TemporaryDirectory(prefix="ddp_course_bench_") as made:
        make_submissions(Path(made), args.exercise, args.count)
        submissions = find_submissions([made])
        with watching_memory() as memory:
            start = time.perf_counter()
            results = grade(submissions, exercises, 1, args.jobs)
            seconds = time.perf_counter() - start
    rate = 60 * len(results) / seconds / min(args.jobs, usable_cores())
    half = len(memory) // 2
    report = {
        "submissions": len(results),
        "passed": sum(result.passed for result in results),
        "jobs": args.jobs,
        "seconds": round(seconds, 1),
        "a_minute_a_core": round(rate, 1),
        "memory_mib_first_half": peak(memory[:half]),
        "memory_mib_second_half": peak(memory[half:]),
    }
    replace_file(folder / "grade.json", json.dumps(report, indent=1).encode())
    print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in report.items()))
    return 0 if rate >= WANTED_A_MINUTE_A_CORE else 1


def peak(samples):
    """The largest of the samples, in MiB."""
    return round(max(samples, default=0) / 2**20)


def make_submissions(folder, exercise, count):
    """`count` learners: of each five one has handed in nothing, two something wrong, two the solution."""
    (path,) = (exercises_folder().parent / "solutions").glob(f"{exercise:02d}_*.ipynb")
    for number in range(count):
        kind = number % 5
        source = exercises_folder() / path.name if kind == 0 else path
        notebook = nbformat.read(source, as_version=4)
        if kind in (1, 2):
            old, new = WRONG[number % len(WRONG)]
            for cell in notebook.cells:
                cell.source = cell.source.replace(old, new)
        learner = folder / f"learner{number:03d}"
        learner.mkdir()
        nbformat.write(notebook, learner / path.name)


class watching_memory:
    """While the block runs, note what this process and all its descendants hold, once a second."""

    def __enter__(self):
        self.samples, self.stop = [], threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self.samples

    def __exit__(self, *error):
        self.stop.set()
        self.thread.join()

    def watch(self):
        """Sum the memory that each process has for itself."""
        while not self.stop.wait(1.0):
            everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
            self.samples.append(sum(map(own_bytes, everyone)))


def own_bytes(process):
    """Bytes that a process does not share; 0 if it has gone."""
    try:
        memory = process.memory_full_info()
        return getattr(memory, "uss", memory.rss)
    except psutil.Error:
        return 0
