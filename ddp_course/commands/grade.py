"""`ddp-course grade PATH…`: grade exercises, as table, CSV, JSON and HTML."""

import argparse
import secrets
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import GradingError
from ..grading import report
from ..grading.grade import exercises_folder, grade, usable_cores
from ..grading.results import Result, best_of
from ..grading.sandbox import landlock_version, namespaces_allowed
from ..grading.submission import Pristine, Submission, find_submissions, load_exercises


def add_parser(subparsers: Any) -> None:
    """Add `grade` to the command line."""
    parser = subparsers.add_parser("grade", help="grade exercises", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a notebook, or a folder of submissions")
    parser.add_argument("--csv", metavar="FILE", help="write one line a task")
    parser.add_argument("--html", metavar="DIR", help="write a page a learner")
    parser.add_argument("--json", metavar="FILE", help="write everything")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="submissions at a time (default: one a core)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a submission may take (default 120)")
    parser.add_argument("--hidden", action="store_true", help="draw more and harder inputs than the learner's checks")
    parser.add_argument("--seed", type=int, help="draw the inputs of an earlier grading again")
    parser.add_argument("--exercises", type=Path, default=exercises_folder(), help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command itself: 0 if all pass, 1 if some do not, 2 if the grader could not do its work."""
    try:
        if args.jobs < 1 or not args.timeout > 0:
            raise GradingError("--jobs and --timeout must be positive")
        skipped: list[Path] = []
        exercises, submissions = load_exercises(args.exercises), find_submissions(args.paths, skipped)
        seed = secrets.randbelow(100_000) if args.seed is None else args.seed
        report.check_writable(args)
        warn_of_weak_sandbox()
        if skipped:
            names = ", ".join(report.clean(path.name) for path in skipped)
            print(f"no notebooks, so skipped: {names}", file=sys.stderr)
        print(f"grading {len(submissions)} submissions with inputs of seed {seed}", file=sys.stderr)
        results = grade_and_write(submissions, exercises, seed, args)
    except (GradingError, OSError) as error:
        print(f"ddp-course: {error}", file=sys.stderr)
        return 2
    if len(results) < len(submissions):
        print(f"ddp-course: interrupted after {len(results)} of {len(submissions)} submissions", file=sys.stderr)
        return 2
    return 0 if all(result.passed for result in best_of(results)) else 1


def grade_and_write(
    submissions: Sequence[Submission], exercises: dict[int, Pristine], seed: int, args: argparse.Namespace
) -> list[Result]:
    """Grade all, writing the reports after each; return the results, after Ctrl-C those that there are."""
    places, done, lock = {id(one): place for place, one in enumerate(submissions)}, {}, threading.Lock()

    def note(submission: Submission, result: Result) -> None:
        show_progress(result)
        with lock:
            done[places[id(submission)]] = result
            report.write_files(best_of([done[place] for place in sorted(done)]), args, seed)

    with suppress(KeyboardInterrupt):
        grade(submissions, exercises, seed, args.jobs, args.timeout, args.hidden, progress=note)
    results = [done[place] for place in sorted(done)]
    print(report.table(best_of(results)))
    return results


def warn_of_weak_sandbox() -> None:
    """Say on standard error what does not hold on this machine."""
    if not namespaces_allowed():
        guard = "Landlock" if landlock_version() else "the rights of your account alone"
        weaker = "it is weaker (docs/GRADING.md says how); for strangers' code use a container"
        print(f"no user namespaces here: the sandbox guards files by {guard}, and {weaker}", file=sys.stderr)


def show_progress(result: Result) -> None:
    """One line a submission on standard error, as it is done."""
    exercise = "?" if result.exercise is None else result.exercise
    line = f"{report.clean(result.learner)}: exercise {exercise}, {result.points:g} of {result.possible:g}"
    print(line, file=sys.stderr)
