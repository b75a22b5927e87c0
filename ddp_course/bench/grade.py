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
from .launch import machine

WANTED_A_MINUTE_A_CORE = 12.0
MOST_GROWTH = 1.1  # the second half's peak of memory, by the first half's
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
    parser.add_argument("--out", default="results", metavar="DIR", help="where the results go (default results)")
    parser.set_defaults(run=run)


def run(args):
    """Measure, print, write bench_grade.json; 1 if the rate is below what is wanted or memory grows, else 0."""
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
    first, second = peak(memory[:half]), peak(memory[half:])
    misjudged = [result for result in results if result.passed != is_right(int(result.learner.removeprefix("learner")))]
    for result in misjudged:
        print(f"misjudged: {result}")
    verdicts = judge(rate, first, second, len(misjudged))
    report = {
        "machine": machine(),
        "exercise": args.exercise,
        "submissions": len(results),
        "passed": sum(result.passed for result in results),
        "jobs": args.jobs,
        "seconds": round(seconds, 1),
        "a_minute_a_core": round(rate, 1),
        "memory_mib_first_half": first,
        "memory_mib_second_half": second,
    }
    print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in report.items() if name != "machine"))
    print("\n".join(f"{'kept' if kept else 'NOT KEPT'}: {claim}" for claim, kept in verdicts.items()))
    replace_file(folder / "bench_grade.json", json.dumps({**report, "verdicts": verdicts}, indent=1).encode())
    print(f"wrote {folder / 'bench_grade.json'}")
    return 0 if all(verdicts.values()) else 1


def judge(rate, first, second, misjudged):
    """{claim: whether it is kept}, for submissions a minute and a core, peaks of memory in both halves, and errors."""
    return {
        "right answers pass, and no others": misjudged == 0,
        f"at least {WANTED_A_MINUTE_A_CORE:g} submissions a minute and a core": rate >= WANTED_A_MINUTE_A_CORE,
        f"memory grows by at most {MOST_GROWTH - 1:.0%} from the first half to the second": second
        <= MOST_GROWTH * first,
    }


def peak(samples):
    """The largest of the samples, in MiB."""
    return round(max(samples, default=0) / 2**20)


def is_right(number):
    """Whether a submission of this number is the solution."""
    return number % 5 in (3, 4)


def make_submissions(folder, exercise, count):
    """`count` learners: of each five one has handed in nothing, two something wrong, two the solution."""
    (path,) = (exercises_folder().parent / "solutions").glob(f"{exercise:02d}_*.ipynb")
    for number in range(count):
        kind = number % 5
        source = exercises_folder() / path.name if kind == 0 else path
        notebook = nbformat.read(source, as_version=4)
        if kind and not is_right(number):
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
