"""A task is right only when its judge has said so; and nobody's odd notebook costs another one's points."""

import shutil
from pathlib import Path

import nbformat
import pytest
from answers import ROOT, collection, full_verdicts, solution, tasks_of, verdicts
from nbclient import NotebookClient

from ddp_course import cli
from ddp_course.commands import check
from ddp_course.errors import GradingError
from ddp_course.grading.grade import exercises_folder, grade
from ddp_course.grading.results import MOST_MESSAGE, cut, result_of
from ddp_course.grading.submission import Submission, load_exercises
from ddp_course.grading.tasks import find, of_exercise

EXERCISES = sorted(int(path.name[:2]) for path in (ROOT / "exercises").glob("[0-9]*.ipynb"))
FIRST = [f"{exercise}.1" for exercise in EXERCISES if exercise < 12]
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


# {task: {wrong answer: the properties that it keeps}}
PARTIAL = {
    "1.3": {"four bytes": ["trained only"], "frozen too": ["dtypes"], "buffers too": ["dtypes"], "numbers": []},
    "2.3": {"no batch": ["the model"], "no model": ["the batch"], "model once": ["the batch"], "to itself too": []},
    "7.1": {"highest of equals": ["fewest so far"], "largest first": [], "in turn": []},
    "7.3": {"nothing sharded": ["unsharded"], "no state": [], "levels from 0": []},
    "8.1": {"in turn": ["complete"], "backward in reverse": ["forward first"], "no backward": []},
    "8.4": {"before the first backward": ["GPipe and 1F1B"], "peak minus one": []},
    "11.3": {"first in the file": ["no consequence"], "consequences count": ["by the time"], "lowest rank": []},
}


def test_partial_answers_earn_partial_points():
    kept = {(task, name): holds for task, answers in PARTIAL.items() for name, holds in answers.items()}
    sources = {(one.task, one.name): one.source for task in PARTIAL for one in collection(int(task.split(".")[0]))}
    found = full_verdicts([(task, sources[task, name]) for task, name in kept], seed=4)
    assert {
        key: [part.name for part in said.parts if not part.message] for key, said in zip(kept, found, strict=True)
    } == kept
    assert {key[0] for key, holds in kept.items() if len(holds) == 1} == PARTIAL.keys()


def test_a_log_with_all_of_it_must_be_read_for_all_points():
    both_but_not_together = (
        "def culprit(log):\n    log = [line for line in log if not line.endswith('done')]\n"
        "    causes = [line for line in log if not any(w in line for w in ('Connection', 'Broken'))]\n"
        "    in_order = log == sorted(log, key=lambda line: float(line.split()[0]))\n"
        "    chosen = causes if in_order else log\n"
        "    first = min(chosen, key=lambda line: float(line.split()[0]))\n"
        "    return int(first.split()[2].rstrip(':'))"
    )
    (said,) = full_verdicts([("11.3", both_but_not_together)], seed=4)
    assert [part.name for part in said.parts if part.message] == ["by the time"]


def half_right(folder):
    """Exercise 8 with two answers that earn half of their points: the path."""
    notebook = nbformat.read(ROOT / "solutions" / "08_pipeline.ipynb", as_version=4)
    half = {("8.1", "in turn"), ("8.4", "before the first backward")}
    sources = {
        f"answer-{one.task.replace('.', '-')}": one.source for one in collection(8) if (one.task, one.name) in half
    }
    for cell in notebook.cells:
        cell.source = sources.get(cell.id, cell.source)
    nbformat.write(notebook, folder / "08_mine.ipynb")
    return folder / "08_mine.ipynb"


def test_check_cell_command_and_report_say_the_same_of_half_an_answer(tmp_path, capsys):
    path = half_right(tmp_path)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, allow_errors=True, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    said = {
        cell.metadata.ddp_course.task: cell.outputs[-1].get("evalue") or cell.outputs[-1].text
        for cell in notebook.cells
        if cell.metadata.get("ddp_course", {}).get("role") == "check"
    }
    (result,) = grade([Submission("anna", path)], load_exercises(exercises_folder()), seed=3)
    assert cli.main(["check", "8", "--notebook", str(path)]) == 1
    *lines, total = capsys.readouterr().out.splitlines()
    assert total == "12 of 14 points" == f"{result.points} of {result.possible} points"
    for task, line in zip(result.tasks, lines, strict=True):
        holds = ", ".join(part["name"] for part in task.parts if not part["message"])
        if task.points == task.possible:
            assert "correct" in said[task.id] and line == f"{task.id}  correct"
        else:
            assert task.points == 1 and line == f"{task.id}  {task.message} (right so far: {holds})"
            assert f"{task.message} (right so far: {holds}; inputs of seed=" in said[task.id]
    assert [task.id for task in result.tasks if task.message] == ["8.1", "8.4"]


def test_each_task_has_two_parts_or_more_and_their_weights_add_up_to_the_points():
    for exercise, pristine in load_exercises(exercises_folder()).items():
        for task in of_exercise(exercise):
            weights = [weight for weight, _ in task.parts.values()]
            assert len(weights) >= 2 and sum(weights) == pristine.checks[task.number][1], task.number


@pytest.mark.parametrize("number", ["3.4", "4.1", "4.5", "8.3"])
def test_each_part_of_a_closed_form_can_be_all_that_is_wrong(number):
    wrong = [one for one in collection(find(number).exercise) if one.task == number and one.kind == "wrong"]
    said = full_verdicts([(number, one.source) for one in wrong], seed=5)
    lost = [[part.name for part in one.parts if part.message] for one in said]
    assert all(lost)
    for name in find(number).parts:
        assert [name] in lost, f"{name} is never lost alone: {lost}"


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
    assert "14 of 14 points" in capsys.readouterr().out
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
