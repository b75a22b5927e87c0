"""What is refused before it runs: ways to answers that lie about, and ways out of the answer. And nothing else."""

import ast
import copy
import csv

import nbformat
import pytest
from answers import collection, solution
from test_relay import CHEATS as TRAFFIC
from test_relay import OTHERS as TRAFFIC_ELSEWHERE
from test_relay import ring
from test_sealed import LIES, SEARCHES, WASTE, search

from ddp_course.grading import submission
from ddp_course.grading.first_sight import at_first_sight
from ddp_course.grading.grade import Grader, exercises_folder, grade
from ddp_course.grading.report import as_csv
from ddp_course.grading.submission import Submission, load_exercises
from ddp_course.grading.tasks import find

PRISTINE = load_exercises(exercises_folder())
TASKS = [task for exercise in PRISTINE.values() for task in exercise.checks]

CHEATS = {
    "the course's own ring": "from ddp_course.collectives import pipelined_ring_all_reduce as ring_all_reduce",
    "the course's own bubble": "from ddp_course.stage8_pipeline import bubble",
    "the course as a module": "import ddp_course.stage8_pipeline as s\nbubble = s.bubble",
    "all of a stage": "from ddp_course.stage8_pipeline import *",
    "the judge's reference": "from ddp_course.grading.tasks.exercise08 import gpipe_order as gpipe",
    "the judge as an oracle": "from ddp_course.grading.tasks import find\njudge = find('3.4').judge",
    "the shared list of tasks": "from ddp_course.grading.tasks import find\nfind('4.4').forbidden = ()",
    "a relative import": "from .stage8_pipeline import bubble",
    "a longer name that begins well": "from ddp_course.running.wire import sys",
    "loaded again from its file": "import importlib.util\nspec = importlib.util.spec_from_file_location('a', 'b')",
    "modules that are there": "import sys\nbubble = sys.modules['ddp_course'].stage8_pipeline.bubble",
    "modules through another": "import torch\nmodules = torch.serialization.sys",
    "modules under another name": "import collections\nmodules = collections._sys",
    "modules imported from another": "from torch.serialization import os",
    "builtins under another name": "import enum\neval_ = enum.bltns",
    "an import in disguise": "m = __import__('ddp_course')",
    "an import by name": "from importlib import import_module",
    "a function's surroundings": "tasks = check.__globals__",
    "a module's names": "names = wire.__dict__",
    "a module's names by vars": "names = vars(wire)",
    "a frame from an error": "try:\n    1 / 0\nexcept Exception as e:\n    f = e.__traceback__.tb_frame",
    "a frame with a joined name": "frame = getattr(frame, 'f_' + 'back')",
    "a frame by name": "frame = getattr(frame, 'f_back')",
    "a frame from a generator": "frame = (x for x in ()).gi_frame",
    "a frame by a pattern": "match f:\n    case object(__globals__=g):\n        pass",
    "getattr under another name": "get = getattr\nframe = get(f, '__glob' + 'als__')",
    "getattr handed on": "import functools\nframe = functools.reduce(getattr, ['f_back'], f)",
    "attrgetter": "from operator import attrgetter",
    "all objects": "import gc\nfound = gc.get_objects()",
    "subclasses": "found = ().__class__.__base__.__subclasses__()",
    "text as a program": "exec('import ddp_' + 'course')",
    "text as an expression": "found = eval('1')",
    "text as an annotation": "import typing\ntyping.get_type_hints(f)",
    "text as TorchScript": "import torch\ntorch.jit.CompilationUnit('def f(): pass')",
    "names by globals": "globals()['check'] = None",
    "the solution read from disk": "text = open('solutions/08_pipeline.ipynb').read()",
    "the solution read with pathlib": "from pathlib import Path\ntext = Path('solutions').read_text()",
    "the solution read with numpy": "import numpy\ntext = numpy.fromfile('solutions/08_pipeline.ipynb', dtype='uint8')",
    "a pickle with a program": "import torch, io\ntorch.load(io.BytesIO(b'cos\\nsystem\\n'), weights_only=False)",
    "a pickle by another name": "import torch\ntorch.serialization.pickle.loads(b'')",
    "a C function": "import ctypes\nctypes.CDLL(None)",
    "a C function through numpy": "import numpy\nnumpy.ctypeslib.load_library('c', '.')",
    "a program of its own": "import subprocess\nsubprocess.run(['true'])",
    "a process of its own": "import multiprocessing",
    "the network": "import socket",
    "a debugger": "import threading\nthreading.settrace(print)",
    "the builtin's module": "module = print.__self__",
    "the end of the process": "import os\nos._exit(0)",
}  # fmt: skip


def allowed(task):
    """What an answer to a task may import and name."""
    return PRISTINE[int(task.split(".")[0])].imports | set(find(task).imports)


@pytest.mark.parametrize("name", CHEATS)
def test_ways_out_are_refused(name):
    for task in ("8.3", "4.4"):
        said = at_first_sight(CHEATS[name], allowed(task))
        assert "which no answer" in said or "may import" in said


@pytest.mark.parametrize("task", TASKS)
def test_no_right_answer_is_refused(task):
    right = [solution(task)] + [a.source for a in collection(int(task.split(".")[0])) if a.task == task and a.right]
    assert len(right) > 1
    assert [said for source in right if (said := at_first_sight(source, allowed(task)))] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\nfrom ddp_course.running import wire\nwire.send",
        "from functools import lru_cache\nfrom fractions import Fraction\nimport numpy as np",
        "import gc\ngc.collect()",
        "for module in model.modules():\n    pass",
        "kind = getattr(torch, 'float32')",
        "load = [0] * world_size\nload[0] += 1",
        "def f(input, dir):\n    return input",
    ],
)
def test_what_only_computes_is_not_refused(source):
    assert at_first_sight(source, allowed("4.4")) == ""


def test_files_are_for_the_tasks_that_need_them():
    source = "import os, tempfile\nos.replace('a', 'b')\nopen('a')"
    assert at_first_sight(source, allowed("11.1")) == ""
    assert "may import" in at_first_sight(source, allowed("11.3"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f():\n    return 1", ""),
        ("%%bash\nls", "no magics"),
        ("!ls", "no magics"),
        ("x = = 1", "line 1 is not Python"),
        ("def f()\n    pass", "expected ':'"),
        ("x = 1\n" * 100_000, "characters"),
    ],
)
def test_answers_are_looked_at_before_they_run(source, words):
    found = at_first_sight(source)
    assert words in found and bool(found) == bool(words)


def handed_in(folder, text, solved=True):
    """Exercise 8, the rest of it solved or untouched, with another answer to 8.3, as a submission."""
    notebook = copy.deepcopy(PRISTINE[8].notebook)
    for cell in notebook.cells:
        if cell.id == "answer-8-3":
            cell.source = text
        elif cell.id.startswith("answer") and solved:
            cell.source = solution(cell.id[7:].replace("-", "."))
    path = folder / "08_pipeline.ipynb"
    path.write_text(nbformat.writes(notebook))
    return Submission("cheat", path)


def test_each_way_out_gets_no_points_and_two_lines_in_the_report(tmp_path):
    with Grader(PRISTINE, seed=1) as grader:
        for name, source in CHEATS.items():
            result = grader.grade(handed_in(tmp_path, source, solved=False))
            (task,) = [task for task in result.tasks if task.id == "8.3"]
            assert task.points == 0 and task.message.startswith("line ") and task.suspicious, name
            (row,) = [row for row in csv.reader(as_csv([result]).splitlines()) if row[2] == "8.3"]
            assert task.message in row and task.suspicious[0] in row[7], name


def test_a_hundred_and_fifteen_cheats_are_kept():
    kept = [*CHEATS.values(), *map(search, SEARCHES.values()), *LIES.values()]
    kept += [*(source for source, _ in WASTE.values()), *map(ring, TRAFFIC.values())]
    kept += [*(source for _, source in TRAFFIC_ELSEWHERE.values())]
    assert len({ast.dump(ast.parse(source)) for source in kept}) == len(kept) >= 115


def test_a_cheat_gets_no_points_and_a_line(tmp_path, monkeypatch):
    (result,) = grade([handed_in(tmp_path, CHEATS["the course's own bubble"])], PRISTINE, seed=1)
    assert [task.id for task in result.tasks if task.points < task.possible] == ["8.3"]
    assert "ddp_course.stage8_pipeline.bubble" in next(task.message for task in result.tasks if task.id == "8.3")
    monkeypatch.setattr(submission, "at_first_sight", lambda source, allowed: "")
    (unseen,) = grade([handed_in(tmp_path, CHEATS["the course's own bubble"])], PRISTINE, seed=1)
    assert [task.id for task in unseen.tasks if task.points < task.possible] == ["8.3"]
    assert "not for this task" in next(task.message for task in unseen.tasks if task.id == "8.3")
