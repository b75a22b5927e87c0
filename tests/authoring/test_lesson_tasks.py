"""A task in a lesson is that of the exercise, and a half-written function can be completed.

A task is that of the exercise word for word, and runs unsolved. A function is right with the line
that is shown.
"""

import html
import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

import ddp_exercises as checking
from ddp_exercises.errors import Wrong

ROOT = Path(__file__).parents[2]
LESSONS = sorted((ROOT / "notebooks").glob("[01]*.ipynb"))


def tasks_in(path):
    """Return {task: source of its cell} of a lesson."""
    cells = {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}
    return {name[5:]: source for name, source in cells.items() if name.startswith("task-")}


@pytest.mark.parametrize("path", LESSONS[1:15], ids=lambda path: path.stem)
def test_a_task_in_a_lesson_is_that_of_the_exercise(path):
    exercise = nbformat.read(ROOT / "exercises" / path.name, as_version=4)
    answers = {cell.id: cell.source for cell in exercise.cells}
    tasks = tasks_in(path)
    assert tasks
    for name, source in tasks.items():
        stub, call = source.rsplit("\n\n\n", 1)
        assert stub == answers[f"answer-{name}"]
        number = name.replace("-", ".")
        assert call.startswith(f'show.source(task("{number}", ')


STORED = [*LESSONS, *sorted((ROOT / "solutions").glob("*.ipynb"))]


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_is_stored_of_a_right_answer_and_an_open_task_is_what_is_said_today(path, capsys):
    checking.task("4.1", open_task)
    still_open = capsys.readouterr().out.replace("4.1", "")
    right = (f"Exercise : {checking.CORRECT}\n", "Exercise : correct.\n")
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            for line in output.get("text", "").splitlines(keepends=True):
                said = re.sub(r"\d+\.\d+", "", line, count=1)
                assert said in right or not said.startswith("Exercise : correct"), cell.id
                assert said == still_open or not said.startswith("Task "), cell.id


def open_task(rank, step, world_size):
    raise NotImplementedError("Exercise 4.1")


def right(rank, step, world_size):
    return (rank - step) % world_size


def wrong(rank, step, world_size):
    return (rank + step) % world_size


def test_an_open_task_says_so_a_right_one_too_and_a_wrong_one_raises(capsys):
    assert "def chunk_to_send" in checking.task("4.1", open_task)
    assert "open" in capsys.readouterr().out
    assert "def chunk_to_send" in checking.task("4.1", right)
    assert "correct" in capsys.readouterr().out
    with pytest.raises(Wrong):
        checking.task("4.1", wrong)


THE_LINE = re.compile(r"<summary>The line</summary><code>(.+?)</code>")


@pytest.mark.parametrize("path", LESSONS[4:15], ids=lambda path: path.stem)
def test_a_half_written_function_is_right_with_its_line(path, capsys):
    completed = 0
    for cell, after in pairwise(nbformat.read(path, as_version=4).cells):
        if not cell.id.startswith("faded-"):
            continue
        exec(cell.source, {"fill_in": checking.fill_in})
        assert "is half written" in capsys.readouterr().out, cell.id
        [line] = THE_LINE.findall(after.source)
        [dots] = re.findall(r"^ +(.* \.\.\.)$", cell.source, re.MULTILINE)
        exec(cell.source.replace(dots, html.unescape(line)), {"fill_in": checking.fill_in})
        assert "is right in all" in capsys.readouterr().out, cell.id
        completed += 1
    assert completed >= 2


def half_written(number):
    return number + ...


def one_too_many(number):
    return number + 1


def test_a_half_written_function_says_so_and_a_wrong_one_raises(capsys):
    checking.fill_in(half_written, {(1,): 1})
    assert "half_written is half written" in capsys.readouterr().out
    with pytest.raises(Wrong, match=re.escape("one_too_many(2)")):
        checking.fill_in(one_too_many, {(0,): 1, (2,): 2})
