"""A task is right only when its judge has said so; and nobody's odd notebook costs another one's points."""

import shutil
from pathlib import Path

import nbformat
import pytest
from answers import ROOT, full_verdicts, solution, tasks_of, verdicts

from ddp_course import cli
from ddp_course.commands import check
from ddp_course.errors import GradingError
from ddp_course.grading.grade import exercises_folder, grade
from ddp_course.grading.results import MOST_MESSAGE, cut, result_of
from ddp_course.grading.submission import Submission, load_exercises
from ddp_course.grading.tasks import find, of_exercise

EXERCISES = range(1, len(list((ROOT / "exercises").glob("[0-9]*.ipynb"))) + 1)
FIRST = [f"{exercise}.1" for exercise in range(1, 11)]
TWO_LINES = "class Wrong(Exception): pass\ndef {name}(*args, **kwargs): raise Wrong"


def test_an_exception_without_a_message_is_no_right_answer():
    said = verdicts([(task, TWO_LINES.format(name=find(task).names[0])) for task in FIRST], seed=1)
    assert all(message and "raised Wrong" in message for message in said), said


def test_an_answer_that_does_nothing_holds_no_property():
    tasks = [task for exercise in EXERCISES for task in tasks_of(exercise)]
    nothing = [(task, "\n".join(f"def {name}(*a, **k): pass" for name in find(task).names)) for task in tasks]
    for task, said in zip(tasks, full_verdicts(nothing, seed=1), strict=True):
        assert not said.right and all(part.message for part in said.parts), (task, said)


def test_half_an_answer_earns_its_half():
    whole = solution("4.2").replace(
        "wire.exchange(",
        "wire.exchange(chunks[0].clone(), right, chunks[0].clone(), left, group)\n        wire.exchange(",
    )
    (said,) = full_verdicts([("4.2", whole)], seed=1)
    assert [(part.name, part.weight, bool(part.message)) for part in said.parts] == [
        ("sums", 2, False),
        ("bytes", 1, True),
    ]
    half = result_of("4.2", 3, said)
    assert half.points == 2 and [part["points"] for part in half.parts] == [2, 0] and "bytes" in half.message
    assert result_of("4.2", 3, None, "the kernel died").points == 0


def test_weights_add_up_to_the_points():
    for exercise, pristine in load_exercises(exercises_folder()).items():
        for task in of_exercise(exercise):
            weights = [weight for weight, _ in task.parts.values()]
            assert len(weights) == 1 or sum(weights) == pristine.checks[task.number][1], task.number


def test_a_loss_that_is_no_number_is_wrong():
    (name,) = find("1.1").names
    spoilt = f"{solution('1.1')}\nright = {name}\ndef {name}(*args, **kwargs):\n    right(*args, **kwargs)\n"
    right, wrong = verdicts([("1.1", solution("1.1")), ("1.1", spoilt + "    return float('nan')\n")], seed=1)
    assert right is None and "the loss is another one" in wrong


def solved_in_place(folder):
    """A course folder whose exercise 8 has been solved where it lies."""
    (folder / "exercises").mkdir()
    shutil.copy(ROOT / "solutions" / "08_pipeline.ipynb", folder / "exercises" / "08_pipeline.ipynb")
    return folder / "exercises"


def test_an_exercise_may_be_solved_where_it_lies(tmp_path, monkeypatch, capsys):
    exercises = solved_in_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "course_folder", lambda name: exercises)
    assert cli.main(["check", "8"]) == 0
    assert "12 of 12 points" in capsys.readouterr().out
    assert cli.main(["grade", str(exercises / "08_pipeline.ipynb")]) == 0
    assert not set(exercises_folder().parents) & {ROOT / "exercises", exercises}


def test_a_solved_notebook_is_not_taken_for_a_pristine_one(tmp_path):
    with pytest.raises(GradingError, match="is not pristine: answer-8-1 has been answered"):
        load_exercises(solved_in_place(tmp_path))
    assert len(load_exercises(exercises_folder())) >= 10


def odd(source: Path, name: str, target: Path):
    """The notebook `source` with one more cell, called `name`."""
    notebook = nbformat.read(source, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("1"))
    notebook.cells[-1]["id"] = name
    target.write_text(nbformat.writes(notebook))
    return Submission(target.stem, target)


def test_an_odd_notebook_costs_nobody_elses_points(tmp_path):
    solved = ROOT / "solutions" / "08_pipeline.ipynb"
    submissions = [
        odd(solved, f"answer-{'9' * 5000}-1", tmp_path / "08_odd.ipynb"),
        Submission("good", solved),
    ]
    first, second = grade(submissions, load_exercises(exercises_folder()), seed=3)
    assert second.passed
    assert not first.passed and "could not be graded" in first.message


def test_messages_fit_into_a_report():
    assert cut("short") == "short"
    assert len(cut("x" * 10**6)) == MOST_MESSAGE
