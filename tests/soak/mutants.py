"""All known answers through the whole grader: `python tests/soak/mutants.py [--exercise N]`.

The suite puts them through the checks only. Here each is a notebook that is handed in: right answers must earn all
points of their task, wrong ones none or some, with their words in the report.
"""

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "support")]

from answers import hand_in  # noqa: E402

from ddp_course.grading.checks import known_answers  # noqa: E402
from ddp_course.grading.grader import exercises_folder, grade  # noqa: E402
from ddp_course.grading.submissions import find_submissions, load_exercises  # noqa: E402
from ddp_course.running.linux import usable_cores  # noqa: E402


def main():
    """Grade the whole collection; exit code 1 if any verdict is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--exercise", type=int, action="append", help="only this one; repeatable")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    args = parser.parse_args()
    exercises, wrong, count = load_exercises(exercises_folder()), [], 0
    for number in args.exercise or sorted(exercises):
        with tempfile.TemporaryDirectory(prefix="ddp_course_mutants_") as made:
            answers = {f"{index:03d}": answer for index, answer in enumerate(known_answers(number))}
            for name, answer in answers.items():
                hand_in(Path(made) / name, {answer.task: answer.source})
            for result in grade(find_submissions([made]), exercises, 21, args.jobs, hidden=True):
                answer = answers[result.learner]
                task = next(task for task in result.tasks if task.id == answer.task)
                right = answer.kind == "right"
                good = (task.points == task.possible) == right and (right or answer.message in task.message)
                count += 1
                if not good:
                    wrong.append(f"{answer.task} {answer.name}: {task.points:g} points, {task.message!r}")
        print(f"exercise {number}: {count} answers so far, {len(wrong)} not as they should be", flush=True)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
