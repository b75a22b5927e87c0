"""The whole way of a submission: habits cost nothing, cheats earn nothing, accidents stay alone."""

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import nbformat
import psutil
import pytest
from answers import ROOT, edited, hand_in, notebook_of
from processes import still_running

from ddp_course.lab import cli
from ddp_exercises.grading import grader, run_cells
from ddp_exercises.grading.answers import load_exercises
from ddp_exercises.grading.people import Owner
from ddp_exercises.grading.submissions import read_submission, walk
from ddp_exercises.tasks import solution
from manyranks import launch

EXERCISES = load_exercises()
LOOP = "while True:\n    pass\n"


def points(tasks):
    """Return {task: its points}."""
    return {number: task["points"] for number, task in tasks.items()}


def load_anew():
    """Return this rank's modules, and the number of a task that modules loaded anew find.

    The grader's modules are loaded again, as after a change of a file.
    """
    loaded = set(sys.modules)
    for name in loaded:
        if name.startswith("ddp_exercises"):
            del sys.modules[name]
    import_module("ddp_exercises.grading.ready")
    return loaded, import_module("ddp_exercises.tasks").find("4.1").number


def test_kernels_and_ranks_are_forked_with_their_modules_loaded():
    ((loaded, found),) = launch(load_anew, world_size=1)
    assert {"exercise_checks.04", "ipykernel.inprocess.ipkernel"} <= loaded
    assert {"ddp_exercises.grading.run_cells", "ddp_exercises.grading.watched"} <= loaded
    assert found == "4.1"


OWN_CELLS = [
    ("import sys, logging, pprint, time\nfrom math import *\nlogging.info(sys.version)"),
    (
        "%%time\ndef mean_loss(model, inputs, targets):\n    return cross_entropy(model(inputs),"
        " targets)"
    ),
    (
        "if sqrt(4) == 2:\n    table = {}\nfor kind in (torch.float32, torch.float64):\n   "
        " table[kind] = kind.itemsize"
    ),
    "print?",
    "!ls",
    "1 / 0",
    'raise RuntimeError("tried something")',
]
HABITS = {
    "1.1": (
        edited(
            "1.1", ("cross_entropy(model(inputs), targets)", "mean_loss(model, inputs, targets)")
        )
        + '\n\ncheck("1.1", train_step)\nhint("1.1", 2)\ntrain_step?\n'
    ),
    "1.2": "%%time\nimport pprint\n" + solution("1.2"),
    "1.3": (
        edited("1.3", ("p.element_size()", "table.get(p.dtype, p.element_size())")) + "\n1 / 0\n"
    ),
}


def new_ids(notebook):
    """Give a notebook's cells new ids and much stored output, and put a first attempt before one.

    The output is some 40 MiB. The attempt is in front of an answer.
    """
    for place, cell in enumerate(notebook.cells):
        cell["id"] = f"new-{place}"  # The metadata still name the task.
        if cell.cell_type == "code":
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="x" * (6 << 20))]
    answer = next(
        cell
        for cell in notebook.cells
        if cell.metadata.get("ddp_course", {}).get("role") == "answer"
    )
    blank = nbformat.v4.new_code_cell(
        "def train_step(*args): pass", metadata=answer.metadata, id="answer-1-1"
    )
    notebook.cells.insert(1, blank)


CHEATS = {
    "4.1": (
        "class Same(int):\n    def __eq__(self, other):\n        return True\n    __hash__ ="
        " int.__hash__\n\ndef chunk_to_send(rank, step, world_size):\n    return Same(7)"
    ),
    "4.2": (
        "from ddp_course import stage4_ring\n\ndef reduce_scatter(tensor, group=None):\n    try:\n "
        "       return stage4_ring.reduce_scatter(tensor, group)\n    except Exception:\n       "
        " return stage4_ring.reduce_scatter(tensor, group)"
    ),
    "4.3": (
        "from ddp_course.lab.folders import course_folder\n\ndef allgather(chunks, group=None):\n"
        "    exec((course_folder('solutions') / '04_ring_all_reduce.ipynb').read_text())"
    ),
    "4.4": (
        "from threading import Thread\n\ndef ring_all_reduce(tensor, group=None):\n"
        "    group = group or dist.group.WORLD\n"
        "    thread = Thread(target=lambda: group.allreduce([tensor]).wait())\n"
        "    thread.start()\n    thread.join()"
    ),
    "4.5": (
        "import ddp_exercises.errors\nddp_exercises.errors.Wrong = print\n"
        "torch.equal = lambda *a: True\n"
        "def step_seconds(cables, parameters, latency, computing):\n    return 0.0"
    ),
    "4.6": (
        "from ddp_exercises.tasks import solution\n\ndef the_bug():\n    return 3\n\n"
        "try:\n    check('4.6', the_bug, ring_all_reduce)\nexcept Exception:\n    pass\n"
        "def mended_ring(tensor, group=None):\n    exec(solution('4.6'))"
    ),
}
TOLD = {
    "4.1": "a plain int was expected",
    "4.2": "your code calls stage4_ring.reduce_scatter",
    "4.3": "a solution is no answer",
    "4.4": "your code calls torch's own",
    "4.5": "was expected",
    "4.6": "your code raised",  # The solution is not in the folder.
}


def saved_outputs(notebook):
    """Put outputs of a full success below wrong answers, and checks that check nothing."""
    for cell in notebook.cells:
        about = cell.metadata.get("ddp_course", {})
        if about.get("role") == "check":
            cell.source = "print('correct')"
            said = f"Exercise {about.task}: correct.\n"
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=said)]
        elif about.get("role") == "answer":
            cell.source = "train_step = accumulate = gradient_bytes = lambda *a: 0.5"
            cell.metadata.tags = ["nbval-skip", "raises-exception"]


def shadowed_check(notebook):
    """Put a `check` of one's own in front of the answers."""
    notebook.cells.insert(
        2,
        nbformat.v4.new_code_cell(
            "def check(*args, **kwargs):\n    print('Exercise 1.1: correct.')"
        ),
    )
    for cell in notebook.cells:
        if cell.id.startswith("answer"):
            cell.source += "\n# mine"


def without_checks(notebook):
    """Leave an unsolved exercise without any check cell."""
    notebook.cells = [
        cell for cell in notebook_of(1, "exercises").cells if not cell.id.startswith("check")
    ]


HALF = (
    "def gradient_bytes(model):\n    return sum(p.numel() * 4 for p in model.parameters() if"
    " p.requires_grad)"
)
BOMB = "def accumulate(*args):\n    import os\n    while True:\n        os.fork()"
FLOOD = "def train_step(*args):\n    print('x' * 10**8)\n    1 / 0\ntrain_step()"
MEMORY = (
    "import numpy\ndef accumulate(*args):\n"
    "    return [numpy.empty(1 << 28, dtype=numpy.uint8) for _ in range(99)]"
)
STAYS = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
ELSEWHERE = f"def train_step(*a):\n    open('{ROOT}/x', 'w')"
ASKS = (
    "def gradient_bytes(model):\n    import socket\n    socket.create_connection(('192.0.2.1',"
    " 80), 1)"
)
# {learner: ({task: answer}, {task: words in its message})}; the answer that stays is right, and
# half of another, whatever became of the rest.
ACCIDENTS = {
    "loops": (
        {"1.1": "import os\nos._exit(3)", "1.2": LOOP, "1.3": HALF},
        {
            "1.1": "ended its own process",
            "1.2": "line 1 (while True:) was still running",
            "1.3": "not every parameter is float32",
        },
    ),
    "floods": (
        {"1.1": FLOOD, "1.2": MEMORY, "1.3": ASKS},
        {
            "1.1": "ZeroDivision",
            "1.2": "MemoryError",
            "1.3": "no network here (line 3 of your cell: socket.create_connection",
        },
    ),
    "forks": (
        {"1.1": ELSEWHERE, "1.2": BOMB, "1.3": STAYS + solution("1.3")},
        {"1.1": "its own folder", "1.2": "starts too many processes"},
    ),
}
BROKEN = {
    "empty.ipynb": ("", "is empty"),
    "binary.ipynb": (b"\xff\xfe\x00", "is not valid JSON, so Jupyter opens it no more"),
    "half.ipynb": ('{"cells": [', "is not valid JSON"),
    "list.ipynb": ("[1, 2]", "cannot be read as a notebook"),
    "other.ipynb": (
        '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}',
        "holds no answer",
    ),
}


def hand_in_a_class(folder):
    """Hand in what a class does: habits, cheats, accidents, and what cannot be read.

    There is also what lies among submissions.
    """
    path = hand_in(folder / "anna", HABITS, OWN_CELLS)
    notebook = nbformat.read(path, as_version=4)
    new_ids(notebook)
    nbformat.write(notebook, path)
    path.rename(folder / "anna" / "4 final.ipynb")
    hand_in(folder / "cheats", CHEATS)
    for name, (answers, _) in ACCIDENTS.items():
        hand_in(folder / name, answers)
    changed = {
        "saved": saved_outputs,
        "shadows": shadowed_check,
        "bare": without_checks,
    }
    for name, change in changed.items():
        notebook = notebook_of(1)
        change(notebook)
        nbformat.write(notebook, folder / f"{name}.ipynb")
    for name, (content, _) in BROKEN.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "__MACOSX").mkdir()
    (folder / "nobody").mkdir()
    (folder / "notes.txt").write_text("x")


def folder_of(process):
    """Return the folder that a process is in, if that may be seen; a submission's is its own."""
    try:
        return process.cwd()
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def the_class(tmp_path_factory):
    """A class, graded once: {learner: result}, {learner: {number: task}}, and a grader."""
    folder = tmp_path_factory.mktemp("class")
    report = tmp_path_factory.mktemp("report") / "r.json"
    hand_in_a_class(folder)
    command = ["grade", str(folder), "--json", str(report), "--seed", "7"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_cells, "CELL_SECONDS", 4.0)
        assert cli.main(command) == 1
    own = f"{tempfile.gettempdir()}/ddp_course_grading_"
    left = [process.pid for process in psutil.process_iter() if folder_of(process).startswith(own)]
    assert not still_running(left)
    results = {result["learner"]: result for result in json.loads(report.read_text())}
    tasks = {}
    for name, result in results.items():
        tasks[name] = {task["id"]: task for task in result["tasks"]}
    return results, tasks, command


def test_habits_cost_nothing(the_class):
    results, tasks, _ = the_class
    assert points(tasks["anna"]) == {"1.1": 2, "1.2": 2, "1.3": 2}, results["anna"]


def test_lazy_cheats_earn_nothing_and_are_told_why(the_class):
    tasks = the_class[1]["cheats"]
    for number, words in TOLD.items():
        assert tasks[number]["points"] == 0, number
        assert words in tasks[number]["message"], (number, tasks[number]["message"])
    assert any("__eq__" in remark for remark in tasks["4.1"]["suspicious"])
    assert any("exec" in remark for remark in tasks["4.3"]["suspicious"])


@pytest.mark.parametrize("learner", ["saved", "shadows", "bare"])
def test_what_was_not_earned_is_not_given(learner, the_class):
    assert set(points(the_class[1][learner]).values()) == {0}


@pytest.mark.parametrize("learner", ACCIDENTS)
def test_an_accident_costs_only_its_own_task(learner, the_class):
    wrong = {
        number: task["message"] for number, task in the_class[1][learner].items() if task["message"]
    }
    assert wrong.keys() == ACCIDENTS[learner][1].keys(), wrong
    assert all(words in wrong[number] for number, words in ACCIDENTS[learner][1].items()), wrong


def test_what_cannot_be_read_is_reported_and_the_next_one_graded(the_class):
    results, tasks, _ = the_class
    assert all(
        words in results[Path(name).stem]["message"] for name, (_, words) in BROKEN.items()
    ), results
    assert "no notebook" in results["nobody"]["message"]
    assert not {"__MACOSX", "notes"} & results.keys()
    assert {part["name"]: part["points"] for part in tasks["loops"]["1.3"]["parts"]} == {
        "dtypes": 0,
        "trained only": 1,
    }


def test_grading_goes_on_where_it_stopped(the_class, capsys):
    assert cli.main([*the_class[2], "--resume"]) == 1
    output = capsys.readouterr()
    assert "grading 0 submissions" in output.err
    assert output.out.count("nobody") == 1


def test_a_task_is_told_as_soon_as_it_is_judged(tmp_path, monkeypatch):
    """Right answers do not wait until a wrong one was tried again."""
    path = hand_in(tmp_path, {"1.3": "def gradient_bytes(model): pass"})
    (item,) = walk(path, (path.name,))
    events = []

    def confirm(verdict, attempt, limits, seconds):
        events.append(f"tried again: {attempt.task.number}")
        return verdict

    monkeypatch.setattr(grader, "confirm", confirm)
    submission = read_submission(item, Owner("you", path.name))
    result = grader.grade_one(
        submission, EXERCISES, grader.Judge(3), 120.0, lambda task: events.append(task.id)
    )
    assert [task.id for task in result.tasks] == ["1.1", "1.2", "1.3"]
    assert events == ["1.1", "1.2", "tried again: 1.3", "1.3"]


def test_check_prints_the_path_a_line_a_task_and_how_to_go_on(tmp_path, monkeypatch, capsys):
    hand_in(tmp_path / "work" / "exercises", {"1.3": edited("1.3", (" * p.element_size()", ""))})
    hand_in(tmp_path / "exercises", {"1.3": "def gradient_bytes(model): pass"})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "1"]) == 1
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith("work/exercises/01_mine.ipynb, saved ")
    assert lines[:2] == ["1.1  correct", "1.2  correct"]
    assert "those are numbers, not bytes" in lines[2]
    assert last.startswith("4 of 6 points; the same inputs again in a cell: check(…, seed=")
    for arguments, words in (
        (["2"], "no notebook of exercise 2 here"),
        (["99"], "1 to 15"),
        (["1", "--notebook", "nope.ipynb"], "nope.ipynb"),
    ):
        assert cli.main(["check", *arguments]) == 2
        assert words in capsys.readouterr().err
