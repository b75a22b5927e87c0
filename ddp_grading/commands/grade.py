"""`ddp-course grade PATH…`: grade exercises, as table, CSV, JSON, HTML, and for a gradebook."""

import argparse
import json
import secrets
import sys
import threading
from contextlib import suppress
from pathlib import Path

from ddp_course.errors import GradingError
from ddp_course.running.linux import usable_cores

from .. import gradebooks, report
from ..grader import grade
from ..remarks import note_likeness
from ..results import Result, best_of, clean, from_dict
from ..submissions import PRISTINE, Submission, find_submissions, load_exercises


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="a notebook, or a folder of submissions"
    )
    parser.add_argument("--csv", metavar="FILE", help="write one line per task")
    parser.add_argument(
        "--html", metavar="DIR", help="write a page for each learner, and index.html"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything")
    parser.add_argument(
        "--format", choices=gradebooks.FORMATS, help="write --grades for this gradebook"
    )
    parser.add_argument(
        "--grades", metavar="PATH", help="a CSV file for canvas or moodle, a folder for gradescope"
    )
    parser.add_argument(
        "--roster", metavar="FILE", help="who is in the class: shows who is missing"
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip what is in the file of --json already"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=usable_cores(),
        help="submissions at a time (default: one a core)",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds a submission may take (default 120)"
    )
    parser.add_argument(
        "--hidden",
        action="store_true",
        help="draw more and harder inputs than the learner's checks",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="draw the inputs of an earlier grading again: the same messages too",
    )
    parser.add_argument("--exercises", type=Path, default=PRISTINE, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """The command itself: 0 if all pass, 1 if some do not."""
    check_options(args)
    submissions, skipped = find_submissions(args.paths)
    for path in filter(None, (args.csv, args.json, args.html, args.grades)):
        Path(path).parent.mkdir(
            parents=True, exist_ok=True
        )  # A missing folder must not cost an hour of grading.
    earlier = earlier_results(args.json) if args.resume else []
    done = {(result.learner, file) for result in earlier for file in result.files or [""]}
    waiting = [work for work in submissions if (work.learner, work.file) not in done]
    for path in skipped:
        print(f"no notebook, so skipped: {clean(path.name)}", file=sys.stderr)
    return 0 if all(result.passed for result in grade_and_write(waiting, earlier, args)) else 1


def check_options(args: argparse.Namespace) -> None:
    """GradingError for options that do not go together."""
    if args.jobs < 1 or not args.timeout > 0:
        raise GradingError("--jobs and --timeout must be positive")
    if bool(args.format) != bool(args.grades):
        raise GradingError(
            "--format and --grades go together: a gradebook, and where to write its file"
        )
    if args.resume and not args.json:
        raise GradingError("--resume needs --json FILE, the file in which the earlier results are")


def earlier_results(file: str) -> list[Result]:
    """The results that a report holds; none if it is not there yet."""
    if not Path(file).exists():
        return []
    try:
        return [from_dict(record) for record in json.loads(Path(file).read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError) as error:
        raise GradingError(
            f'"{file}" is no report to resume from ({type(error).__name__}: {error})'
        ) from error


def grade_and_write(
    submissions: list[Submission], earlier: list[Result], args: argparse.Namespace
) -> list[Result]:
    """Grade all submissions, writing the reports after each; return each learner's best.
    GradingError after Ctrl-C.
    """
    roster = gradebooks.read_roster(args.roster) if args.roster else {}
    seed = secrets.randbelow(100_000) if args.seed is None else args.seed
    done, lock = {}, threading.Lock()
    print(f"grading {len(submissions)} submissions with inputs of seed {seed}", file=sys.stderr)

    def so_far() -> list[Result]:
        return [*earlier, *(done[id(work)] for work in submissions if id(work) in done)]

    def note(submission: Submission, result: Result) -> None:
        points = f"{result.points:g} of {result.possible:g}"
        print(f"{result.learner}: exercise {result.exercise or '?'}, {points}", file=sys.stderr)
        with lock:
            done[id(submission)] = result
            report.write_files(best_of(so_far()), args, seed)

    with suppress(KeyboardInterrupt):
        grade(
            submissions,
            load_exercises(args.exercises),
            seed,
            args.jobs,
            args.timeout,
            args.hidden,
            progress=note,
        )
    best = best_of(so_far())
    note_likeness(best)
    missing = [learner for learner in roster if learner not in {result.learner for result in best}]
    grades = gradebooks.grade_files(args.format, args.grades, best, roster) if args.format else {}
    report.write_files(best, args, seed, missing, grades)
    print(report.table(best, missing))
    if len(done) < len(submissions):
        again = "; --resume goes on" if args.json else ""
        count, whole = len(so_far()), len(earlier) + len(submissions)
        raise GradingError(f"interrupted after {count} of {whole} submissions{again}")
    return best
