"""`ddp-course check N`: grade your own notebook, as the course's grader would.

From a cell: `!ddp-course check 4`. Save the notebook first: what counts is the file.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import GradingError
from ..grading import report
from ..grading.grade import exercises_folder, grade
from ..grading.results import Result, TaskResult
from ..grading.submission import Submission, load_exercises
from ..grading.tasks import SO_FAR
from ..running.files import course_folder


def add_parser(subparsers: Any) -> None:
    """Add `check` to the command line."""
    parser = subparsers.add_parser("check", help="check your own exercise", description=__doc__.split("\n")[0])
    parser.add_argument("exercise", type=int, metavar="N", help="the number of the exercise")
    parser.add_argument("--notebook", type=Path, help="your notebook, if it is not exercises/NN_….ipynb")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds it may take (default 120)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command itself: 0 if all points were earned, 1 if not, 2 if it could not be checked."""
    try:
        exercises = load_exercises(exercises_folder())
        path = args.notebook or own_notebook(args.exercise)
        if args.exercise not in exercises:
            raise GradingError(f"there is no exercise {args.exercise}; there are {min(exercises)} to {max(exercises)}")
        result = grade([Submission("you", path)], exercises, seed=None, timeout=args.timeout)[0]
        if result.exercise not in (None, args.exercise):
            raise GradingError(f'"{path}" is exercise {result.exercise}, not {args.exercise}')
    except (GradingError, OSError) as error:
        print(f"ddp-course: {error}", file=sys.stderr)
        return 2
    print(summary(result))
    return 0 if result.passed else 1


def own_notebook(exercise: int) -> Path:
    """The learner's notebook of an exercise: in this folder, in exercises/ below it, or in the course's own."""
    for folder in (Path.cwd(), Path.cwd() / "exercises", course_folder("exercises")):
        found = sorted(folder.glob(f"{exercise:02d}_*.ipynb"))
        if found and folder.name != "notebooks":
            return found[0]
    raise GradingError(f"no notebook of exercise {exercise} here; name yours with --notebook FILE")


def in_words(task: TaskResult) -> str:
    """What became of a task, in a line, with the properties that are right if only some are."""
    if task.points == task.possible:
        return "correct"
    holds = [part["name"] for part in task.parts if part["points"]]
    return report.first_line(task.message) + (f" ({SO_FAR}{', '.join(holds)})" if holds else "")


def summary(result: Result) -> str:
    """A line for each task, and the sum."""
    lines = [f"{task.id}  {in_words(task)}" for task in result.tasks]
    lines += [report.clean(result.message)] if result.message else []
    return "\n".join([*lines, f"{result.points:g} of {result.possible:g} points"])
