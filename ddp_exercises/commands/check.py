"""`ddp-course check N` grades your own notebook; without N it says where you are.

In a cell it is `!ddp-course check 4`. Save the notebook first, as the file is what counts.
"""

import argparse
import random
import secrets
import time
from pathlib import Path

from tabulate import tabulate

from ddp_course.base.options import whole_number
from ddp_course.lab.learners_copy import find_copy, keep, progress_in
from ddp_course.lab.waiting import say_while

from .. import SO_FAR
from ..diagnosis import wrong_cases
from ..errors import GradingError
from ..grading import overview
from ..grading.answers import Exercises, load_exercises
from ..grading.grader import Judge, grade_one
from ..grading.people import Owner
from ..grading.prove import question_about
from ..grading.results import Result, TaskResult
from ..grading.submissions import Item, exercise_of, read_submission
from ..tasks import known_wrong, of_exercise

# The learner's notebook is looked for in these folders.
FOLDERS = (".", "work/exercises", "work", "exercises", "../exercises")

SEEDS = 4  # So many seeds are tried to revisit wrong answers.
QUESTIONS = 0  # This seed draws the inputs of questions, so that each is the same again.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to its parser."""
    parser.add_argument(
        "exercise",
        type=whole_number,
        nargs="?",
        metavar="N",
        help="the number of the exercise; without it: where you are in all of them",
    )
    parser.add_argument(
        "--prove",
        metavar="LETTER",
        nargs="?",
        const="",
        help="a question about a right answer of yours; with the letter of a choice: is it right?",
    )
    parser.add_argument(
        "--revisit",
        action="store_true",
        help="draw the inputs that show most of what you once got wrong",
    )
    parser.add_argument(
        "--notebook", type=Path, help="your notebook, if it is not exercises/NN_….ipynb"
    )


def main(args: argparse.Namespace) -> int:
    """Check an exercise, or say where the learner is; return 0 if all points were earned, else 1.

    Raises GradingError for an exercise or a notebook that is not there, and for a notebook of
    another exercise.
    """
    exercises = load_exercises()
    if args.exercise is None:
        return where_am_i(exercises)
    seed = revisiting_seed(args.exercise) if args.revisit else secrets.randbelow(100_000)
    if args.exercise not in exercises:
        raise GradingError(
            f"there is no exercise {args.exercise}; choose one of 1 to {max(exercises)}"
        )
    path = args.notebook or own_notebook(args.exercise)
    saved_at = time.strftime("%H:%M:%S on %d %B", time.localtime(path.stat().st_mtime))
    print(f"{path}, saved {saved_at}: its cells run first, then its answers", flush=True)
    submission = read_submission(Item((path.name,), path), Owner("you", path.name))
    number = exercise_of(submission, exercises)
    if number != args.exercise:
        raise GradingError(f'"{path}" is exercise {number}, not {args.exercise}')
    with say_while("some seconds"):
        result = grade_one(submission, exercises, Judge(seed), seconds=120.0, progress=show)
    if result.message:
        print(result.message)
    if args.prove is not None:
        prove(result, args.prove)
    if result.passed:
        print(f"{result.in_words} points")
        return 0
    print(f"{result.in_words} points; the same inputs again in a cell: check(…, seed={seed})")
    return 1


def revisiting_seed(exercise: int) -> int:
    """Return the seed whose inputs show most of the wrong answers that the learner once gave.

    It is the best of some random seeds. The wrong answers may have been given in any exercise.
    """
    copy = find_copy()
    names = progress_in(copy).get("misconceptions", {}).values() if copy else ()
    counts = {}
    for seed in random.sample(range(100_000), SEEDS):
        judge = Judge(seed)
        counts[seed] = 0
        for task in of_exercise(exercise):
            for place, known in enumerate(known_wrong(task.number), 1):
                if known.name in names:
                    # The first of the known answers does nothing.
                    evidence = judge.known(task)[place]
                    counts[seed] += len(wrong_cases(task, evidence, judge.right(task)))
    return max(counts, key=counts.__getitem__)


def prove(result: Result, letter: str) -> None:
    """Ask the question about a learner's own code, or say whether the letter is the right one."""
    question = question_about(result, Judge(QUESTIONS), seconds=120.0)
    if question is None:
        print("nothing to prove yet: there is no right answer in which a change would tell much")
    elif not letter:
        print(f"{question.text}\nAnswer by ddp-course check {result.exercise} --prove LETTER")
    elif letter.lower() == question.right:
        print(f"{letter}: right. Whoever can say this has understood the answer.")
    else:
        print(f"{letter}: no, it is {question.right}\n{question.text}")


def where_am_i(exercises: Exercises) -> int:
    """Print a line for each exercise that was begun, and how many guesses were right.

    Raises GradingError if there is no copy of the course.
    """
    copy = find_copy()
    if copy is None:
        raise GradingError("no copy of the course is here; ddp-course lab makes one, in work/")
    results = overview.results_so_far(copy, exercises)
    sentence = overview.sentence(copy)
    begun = overview.begun(copy, results)
    rows = [(each.exercise, each.in_words, each.next_task or "all solved") for each in begun]
    print(tabulate(rows, ["exercise", "points", "next task"], disable_numparse=True))
    if len(begun) < len(results):
        print(f"exercises still to begin: {len(results) - len(begun)}")
    print(sentence)
    for line in overview.asked_again(copy, results):
        print(line)
    return 0


def own_notebook(exercise: int) -> Path:
    """Return the learner's notebook of an exercise: here, in work/, or in exercises/.

    Raises GradingError if it is in none of these.
    """
    for folder in map(Path, FOLDERS):
        notebooks = sorted(folder.glob(f"{exercise:02d}_*.ipynb"))
        if notebooks and folder.resolve().name not in ("notebooks", "solutions"):
            return notebooks[0]
    raise GradingError(f"no notebook of exercise {exercise} here; name yours with --notebook FILE")


def show(task: TaskResult) -> None:
    """Keep and print the result of a task, with its right properties if only some are right."""
    solved = task.points == task.possible
    keep("tasks", task.id, solved)
    if task.misconception:
        keep("misconceptions", task.id, task.misconception)
    right_parts = [part.name for part in task.parts if part.points]
    message = task.message
    if solved:
        message = "correct"
    elif right_parts:
        message += f" ({SO_FAR}{', '.join(right_parts)})"
    print(f"{task.id}  {message}", flush=True)
