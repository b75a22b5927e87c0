"""The whole way of a submission: habits cost nothing, lazy cheats earn nothing, accidents cost nobody else."""

import json
from pathlib import Path

import nbformat
import psutil
import pytest
from answers import ROOT, edited, hand_in, notebook_of

from ddp_course import cli
from ddp_course.errors import GradingError
from ddp_course.grading.checks import solution
from ddp_course.grading.grader import exercises_folder, grade
from ddp_course.grading.guard import FOLDER
from ddp_course.grading.submissions import Submission, find_submissions, load_exercises

EXERCISES = load_exercises(exercises_folder())
LOOP = "while True:\n    pass\n"


def graded(path, timeout=60.0, **settings):
    """{task: its result} of a notebook."""
    (result,) = grade([Submission("anna", path)], EXERCISES, 7, timeout=timeout, **settings)
    assert not result.message, result.message
    return {task.id: task for task in result.tasks}


def points(tasks):
    """{task: points}."""
    return {number: task.points for number, task in tasks.items()}


OWN_CELLS = [
    "import sys, logging, pprint, time\nimport matplotlib.pyplot as plt\nfrom math import *\nlogging.info(sys.version)",
    "%%time\ndef mean_loss(model, inputs, targets):\n    return cross_entropy(model(inputs), targets)",
    "if sqrt(4) == 2:\n    table = {}\nfor kind in (torch.float32, torch.float64):\n    table[kind] = kind.itemsize",
    "print?",
    "!ls",
    "1 / 0",
    'raise RuntimeError("tried something")',
]
HABITS = {
    "1.1": edited("1.1", ("cross_entropy(model(inputs), targets)", "mean_loss(model, inputs, targets)"))
    + '\n\ncheck("1.1", train_step)\nhint("1.1", 2)\ntrain_step?\n',
    "1.2": "%%time\nimport pprint\n" + solution("1.2"),
    "1.3": edited("1.3", ("p.element_size()", "table.get(p.dtype, p.element_size())")) + "\n1 / 0\n",
}


def test_habits_cost_nothing(tmp_path):
    tasks = graded(hand_in(tmp_path, HABITS, OWN_CELLS))
    assert points(tasks) == {"1.1": 2, "1.2": 2, "1.3": 2}, tasks
    assert tasks["1.1"].hints == 2


def test_odd_notebooks_are_graded_by_what_their_cells_say(tmp_path):
    notebook = notebook_of(1)
    for place, cell in enumerate(notebook.cells):
        cell["id"] = f"new-{place}"  # the metadata still name the task
        if cell.cell_type == "code":
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="x" * (3 << 20))]
    answer = next(cell for cell in notebook.cells if cell.metadata.get("ddp_course", {}).get("role") == "answer")
    blank = nbformat.v4.new_code_cell("def train_step(*args): pass", metadata=answer.metadata, id="answer-1-1")
    notebook.cells.insert(1, blank)
    path = tmp_path / "2026-11-02_ring.ipynb"
    nbformat.write(notebook, path)
    assert points(graded(path)) == {"1.1": 2, "1.2": 2, "1.3": 2}


CHEATS = {
    "4.1": "class Same(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\n\n"
    "def chunk_to_send(rank, step, world_size):\n    return Same(7)",
    "4.2": "from ddp_course import stage4_ring\nreduce_scatter = stage4_ring.reduce_scatter",
    "4.3": "from ddp_course.running.files import course_folder\n\ndef allgather(chunks, group=None):\n"
    "    exec(next(course_folder('solutions').glob('04*')).read_text())",
    "4.4": "def ring_all_reduce(tensor, group=None):\n    (group or dist.group.WORLD).allreduce([tensor]).wait()",
    "4.5": "import ddp_course.errors\nddp_course.errors.Wrong = print\ntorch.equal = lambda *a: True\n"
    "def step_seconds(cables, parameters, latency, computing):\n    return 0.0",
    "4.6": "from ddp_course.grading.checks import solution\n\ndef the_bug():\n    return 3\n\n"
    "try:\n    check('4.6', the_bug, ring_all_reduce)\nexcept Exception:\n    pass\n"
    "def mended_ring(tensor, group=None):\n    exec(solution('4.6'))",
}
TOLD = {
    "4.1": "a plain int was expected",
    "4.2": "your code calls stage4_ring.reduce_scatter",
    "4.3": "a solution is no answer",
    "4.4": "your code calls torch's own",
    "4.5": "s; that is",
    "4.6": "a solution is no answer",
}


def test_lazy_cheats_earn_nothing_and_are_told_why(tmp_path):
    tasks = graded(hand_in(tmp_path, CHEATS))
    assert set(points(tasks).values()) == {0}, points(tasks)
    for number, words in TOLD.items():
        assert number == "4.5" or words in tasks[number].message, (number, tasks[number].message)
    assert any("says by __eq__" in remark for remark in tasks["4.1"].suspicious)
    assert any("exec" in remark for remark in tasks["4.3"].suspicious)


def saved_outputs(notebook):
    """Outputs of a full success below wrong answers, and checks that check nothing."""
    for cell in notebook.cells:
        about = cell.metadata.get("ddp_course", {})
        if about.get("role") == "check":
            cell.source = "print('correct')"
            said = f"Exercise {about.task}: correct.\n"
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=said)]
        elif about.get("role") == "answer":
            cell.source = "# NBVAL_SKIP\ntrain_step = accumulate = gradient_bytes = lambda *a: 0.5"
            cell.metadata.tags = ["nbval-skip", "raises-exception"]


def shadowed_check(notebook):
    """A `check` of one's own in front of the answers."""
    notebook.cells.insert(
        2, nbformat.v4.new_code_cell("def check(*args, **kwargs):\n    print('Exercise 1.1: correct.')")
    )
    for cell in notebook.cells:
        if cell.id.startswith("answer"):
            cell.source += "\n# mine"


def without_checks(notebook):
    """Unsolved, and no check cell left."""
    notebook.cells = [cell for cell in notebook_of(1, "exercises").cells if not cell.id.startswith("check")]


@pytest.mark.parametrize("change", [saved_outputs, shadowed_check, without_checks])
def test_what_was_not_earned_is_not_given(change, tmp_path):
    notebook = notebook_of(1)
    change(notebook)
    nbformat.write(notebook, tmp_path / "01_mine.ipynb")
    assert set(points(graded(tmp_path / "01_mine.ipynb")).values()) == {0}


BOMB = "def accumulate(*args):\n    import os\n    while True:\n        os.fork()"
FLOOD = "def accumulate(*args):\n    print('x' * 10**9)\n    1 / 0\naccumulate()"
MEMORY = "def accumulate(*args):\n    return [bytearray(1 << 28) for _ in range(99)]"
STAYS = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
ACCIDENTS = {
    "a loop at the top": ({"1.1": LOOP}, "1.1", "Timeout"),
    "a kernel that ends": ({"1.2": "import os\nos._exit(3)"}, "1.2", "ended its own process"),
    "a flood": ({"1.2": FLOOD}, "1.2", "ZeroDivision"),
    "memory": ({"1.2": MEMORY}, "1.2", "MemoryError"),
    "a fork bomb": ({"1.2": BOMB}, "1.2", "starts too many processes"),
    "a write elsewhere": ({"1.2": f"def accumulate(*a):\n    open('{ROOT}/x', 'w')"}, "1.2", "into its own folder"),
    "a process that stays": ({"1.2": STAYS + solution("1.2")}, "", ""),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_an_accident_costs_only_its_own_task(name, tmp_path):
    answers, task, words = ACCIDENTS[name]
    tasks = graded(hand_in(tmp_path, answers), timeout=40.0)
    wrong = {number: one.message for number, one in tasks.items() if one.message}
    assert wrong.keys() == ({task} if task else set()), wrong
    assert not task or words in wrong[task], wrong
    assert not [one for one in psutil.process_iter() if FOLDER in environment_of(one)]


def environment_of(process):
    """What a process has in its environment, if that may be seen."""
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}


BROKEN = {
    "empty.ipynb": ("", "is empty"),
    "binary.ipynb": (b"\xff\xfe\x00", "is not UTF-8"),
    "half.ipynb": ('{"cells": [', "is not valid JSON"),
    "list.ipynb": ("[1, 2]", "is not a notebook"),
    "other.ipynb": ('{"nbformat": 4, "cells": []}', "holds no answer cell"),
}


def test_what_cannot_be_read_is_reported_and_the_next_one_graded(tmp_path):
    for name, (content, _) in BROKEN.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "nobody").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    hand_in(tmp_path / "zoe", {"1.1": solution("1.1")})
    skipped = []
    results = grade(find_submissions([tmp_path], skipped), EXERCISES, 3)
    said = {result.learner: result.message for result in results}
    assert all(words in said[Path(name).stem] for name, (_, words) in BROKEN.items()), said
    assert "no notebook" in said["nobody"] and said["zoe"] == "" and "__MACOSX" not in said
    assert results[-1].passed and [path.name for path in skipped] == ["notes.txt"]


def test_a_solved_notebook_is_not_taken_for_a_pristine_one():
    with pytest.raises(GradingError, match="is not pristine: answer-1-1 has been answered"):
        load_exercises(ROOT / "solutions")
    assert len(EXERCISES) >= 10


def test_a_class_is_reported_and_goes_on_where_it_stopped(tmp_path, capsys):
    half = "def gradient_bytes(model):\n    return sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)"
    hand_in(tmp_path / "class" / "anna", {"1.1": solution("1.1")})
    hand_in(tmp_path / "class" / "ben", {"1.3": half})
    (tmp_path / "class" / "carl").mkdir()
    report = tmp_path / "r.json"
    command = ["grade", str(tmp_path / "class"), "--json", str(report), "--seed", "7"]
    assert cli.main(command) == 1
    by_learner = {one["learner"]: one for one in json.loads(report.read_text())}
    assert [by_learner[name]["points"] for name in ("anna", "ben", "carl")] == [6, 5, 0]
    parts = {part["name"]: part["points"] for part in by_learner["ben"]["tasks"][2]["parts"]}
    assert parts == {"dtypes": 0, "trained only": 1}
    capsys.readouterr()
    assert cli.main([*command, "--resume"]) == 1
    told = capsys.readouterr()
    assert "grading 0 submissions" in told.err and told.out.count("carl") == 1


def test_check_prints_the_path_a_line_a_task_and_how_to_go_on(tmp_path, monkeypatch, capsys):
    hand_in(tmp_path / "work" / "exercises", {"1.3": edited("1.3", (" * p.element_size()", ""))})
    hand_in(tmp_path / "exercises", {"1.3": "def gradient_bytes(model): pass"})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "1"]) == 1
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith("work/exercises/01_mine.ipynb, saved ")
    assert lines[:2] == ["1.1  correct", "1.2  correct"] and "those are numbers, not bytes" in lines[2]
    assert last.startswith("4 of 6 points; the same inputs again in a cell: check(…, seed=")
    assert cli.main(["check", "2"]) == 2 and "no notebook of exercise 2 here" in capsys.readouterr().err
    assert cli.main(["check", "99"]) == 2 and "there are 1, 2, 3" in capsys.readouterr().err
    assert cli.main(["check", "1", "--notebook", "nope.ipynb"]) == 1 and "is not there" in capsys.readouterr().out


def test_hidden_inputs_find_what_the_checks_do_not(tmp_path):
    tied = "def gradient_bytes(model):\n"
    tied += "    layers = [p for layer in model.modules() for p in layer.parameters(recurse=False)]\n"
    tied += "    return sum(p.nbytes for p in layers if p.requires_grad)"
    path = hand_in(tmp_path, {"1.3": tied})
    assert graded(path)["1.3"].points == 2 and graded(path, hidden=True)["1.3"].points == 1
