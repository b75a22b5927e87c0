"""All answers of tests/wrong_answers through the whole grader: `python tests/soak/mutants.py [--exercise N]`.

The suite puts them through the checks only. Here each is a notebook that is handed in: right answers must earn all
points of their task, wrong ones none, with their words in the report.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import nbformat

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS.parent / "authoring")]

from answers import collection, solutions  # noqa: E402

from ddp_course.grading.grade import exercises_folder, grade, usable_cores  # noqa: E402
from ddp_course.grading.submission import find_submissions, load_exercises  # noqa: E402

REFUSED = "an answer to this task may import"


def hand_in(answer, number, folder):
    """Write the solution notebook with this answer in it."""
    notebook = nbformat.from_dict(solutions(number))
    text = nbformat.writes(notebook)
    notebook = nbformat.reads(text, as_version=4)
    for cell in notebook.cells:
        if cell.id == f"answer-{answer.task.replace('.', '-')}":
            cell.source = answer.source
    nbformat.write(notebook, folder / f"{number:02d}_exercise.ipynb")


def main():
    """Grade the whole collection; exit code 1 if any verdict is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--exercise", type=int, action="append", help="only this one; repeatable")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    args = parser.parse_args()
    exercises, wrong, count = load_exercises(exercises_folder()), [], 0
    for number in args.exercise or sorted(exercises):
        with tempfile.TemporaryDirectory(prefix="ddp_course_mutants_") as made:
            answers = {f"{index:03d}": answer for index, answer in enumerate(collection(number))}
            for name, answer in answers.items():
                (Path(made) / name).mkdir()
                hand_in(answer, number, Path(made) / name)
            for result in grade(find_submissions([made]), exercises, 21, args.jobs, hidden=True):
                answer = answers[result.learner]
                task = next(task for task in result.tasks if task.id == answer.task)
                said = answer.words in task.message or REFUSED in task.message  # the grader looks at imports first
                good = (task.points == task.possible) == answer.right and (answer.right or said)
                count += 1
                if not good:
                    wrong.append(f"{answer.task} {answer.name}: {task.points:g} points, {task.message!r}")
        print(f"exercise {number}: {count} answers so far, {len(wrong)} not as they should be", flush=True)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
