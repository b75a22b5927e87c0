"""`ddp-course grade PATH…` grades exercises: a table, CSV, JSON, HTML, or a gradebook's file."""

import argparse
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from ddp_course.base.files import writable_folder
from ddp_course.base.options import positive_number, whole_number
from ddp_exercises.errors import GradingError
from manyranks.linux import usable_cores

from ..grading import gradebooks, landlock, report
from ..grading.answers import Exercises, load_exercises
from ..grading.comments import read_comments, with_comments
from ..grading.grader import Judge, grade
from ..grading.people import Roster, read_roster
from ..grading.prove import question_about
from ..grading.results import Result, clean, merged, read_results
from ..grading.submissions import Submission, find_submissions, without_exercises_not_begun

# These options name a file.
FILES = {
    "csv": "write one line per task",
    "json": "write everything, and keep what is in it",
    "canvas": "write the CSV that Canvas imports",
    "moodle": "write the worksheets that Moodle imports",
    "roster": "who is in the class: a list, or Canvas' or Moodle's export",
    "comments": "points and comments by hand, applied last in every run",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to its parser."""
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="notebooks, zips, or folders of submissions"
    )
    parser.add_argument(
        "--html",
        metavar="DIR",
        help="write index.html, and hand_back/ with a page for each learner",
    )
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=text)
    parser.add_argument(
        "--resume", action="store_true", help="grade only what is new or changed since --json"
    )
    parser.add_argument(
        "--prove",
        action="store_true",
        help="ask each learner a question about a right answer of theirs, on the page to hand back",
    )
    parser.add_argument(
        "--jobs",
        type=whole_number,
        default=usable_cores(),
        help="submissions at a time (default: one a core)",
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=120.0,
        help="seconds a submission may take (default 120)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="draw the inputs of an earlier grading again: the same messages too",
    )


def main(args: argparse.Namespace) -> int:
    """Grade submissions; return 0 if all pass, 1 if some do not, 2 if some could not be graded.

    Raises GradingError for a --resume without --json.
    """
    if args.resume and not args.json:
        raise GradingError("--resume needs --json FILE, the file in which the earlier results are")
    if not landlock.version():
        print(
            "this machine has no Landlock, so a submission can harm others: grade in a container"
            " (deploy/grading.sh)",
            file=sys.stderr,
        )
    roster = read_roster(args.roster) if args.roster else {}
    exercises = load_exercises()
    submissions, skipped = find_submissions(args.paths, roster)
    submissions = without_exercises_not_begun(submissions, exercises)
    for name in skipped:
        print(f"no notebook, so skipped: {clean(name)}", file=sys.stderr)
    earlier = read_results(args.json) if args.json else []
    # A file that cannot be written must fail now, and not after an hour of grading.
    report.write_files(earlier, args)
    for file in (args.canvas, args.moodle):
        if file:
            writable_folder(Path(file).parent)
    waiting = not_graded_yet(submissions, earlier) if args.resume else submissions
    print(who_is_who(submissions, roster), file=sys.stderr)
    results = grade_and_write(waiting, earlier, exercises, roster, args)
    if not all(result.has_grade or result.excused for result in results):
        return 2
    return 0 if all(result.passed or result.excused for result in results) else 1


def who_is_who(submissions: list[Submission], roster: Roster) -> str:
    """Return in words how many learners there are, are late, and have handed in nothing."""
    learners = set(roster) | {work.learner for work in submissions}
    handed_in = {work.learner for work in submissions if work.file}
    late = {work.learner for work in submissions if work.late}
    without = len(learners) - len(handed_in)
    return f"{len(learners)} learners, {len(late)} late, {without} without a notebook"


def not_graded_yet(submissions: list[Submission], earlier: list[Result]) -> list[Submission]:
    """Return the submissions that are new, have changed, or could not be graded.

    All others of the same learner and exercise come with them.
    """
    digests = {(work.learner, work.file): work.digest for work in submissions}
    done: set[tuple] = set()
    for result in earlier:
        # A learner who handed in nothing has a submission without a file.
        files = result.files or {"": ""}
        graded = {(result.learner, name): digest for name, digest in files.items()}
        same = all(digests.get(file, digest) == digest for file, digest in graded.items())
        if result.has_grade and same:
            done.update(graded)
    return [work for work in submissions if (work.learner, work.file) not in done]


def grade_and_write(
    submissions: list[Submission],
    earlier: list[Result],
    exercises: Exercises,
    roster: Roster,
    args: argparse.Namespace,
) -> list[Result]:
    """Grade submissions, and write the reports after each.

    Return the best result of each learner's exercises, with those of earlier gradings. Raises
    GradingError after Ctrl-C.
    """
    comments = read_comments(args.comments) if args.comments else []
    seed = secrets.randbelow(100_000) if args.seed is None else args.seed
    judge = Judge(seed)  # This judge is for questions only.
    done: list[Result] = []
    print(f"grading {len(submissions)} submissions with inputs of seed {seed}", file=sys.stderr)
    with suppress(KeyboardInterrupt):
        for result in grade(submissions, exercises, seed, args.jobs, args.timeout):
            done.append(result)
            if args.prove and (asked := question_about(result, judge, args.timeout)):
                result.question = asked._asdict()
            name = f"exercise {result.exercise or '?'}"
            print(f"{result.learner}: {name}, {result.in_words}", file=sys.stderr)
            report.write_files(merged(earlier, done), args)
    best = with_comments(merged(earlier, done), comments)
    handed_in = {result.learner for result in best}
    missing = [learner for learner in roster if learner not in handed_in]
    report.write_files(best, args, missing, gradebooks.grade_files(args, best, roster))
    print(report.table(best, missing))
    if len(done) < len(submissions):
        raise GradingError(
            f"interrupted after {len(done)} of {len(submissions)} submissions; with --json FILE,"
            " --resume goes on"
        )
    return best
