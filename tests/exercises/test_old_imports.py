"""Submissions that were begun with an older version of the course, and import from its places."""

import ast

import nbformat
import pytest
from answers import edited, hand_in, submission_of

from ddp_exercises.grading import grader
from ddp_exercises.grading.answers import load_exercises
from ddp_exercises.grading.old_imports import WithoutOldImports

OLD = """import torch
import torch.distributed as dist

from ddp_course.checking import check, hint
from ddp_course.running import wire
from ddp_course import show
"""
# What a learner may have added below an import, beside the name, and in an answer.
OWN = "from ddp_course.running import wire as cables\nimport operator"
ANSWERS = {
    "4.1": edited("4.1", ("(rank - step) % world_size", "operator.mod(rank - step, world_size)")),
    "4.2": edited("4.2", ("wire.neighbours(group)", "cables.neighbours(group)")),
    "4.3": edited(
        "4.3",
        ("    rank, world", "    from ddp_course.running import wire\n\n    rank, world"),
    ),
}


def test_a_submission_with_old_imports_has_all_its_points(tmp_path):
    path = hand_in(tmp_path, ANSWERS)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].source = OLD + OWN
    assert notebook.cells[1].id == "imports"
    nbformat.write(notebook, path)
    judge = grader.Judge(3)
    result = grader.grade_one(submission_of(path), load_exercises(), judge, 300.0, lambda _: None)
    assert [task.message for task in result.tasks if task.points < task.possible] == []


@pytest.mark.parametrize(
    "old, new",
    [
        ("from ddp_course.checking import check, hint", "pass"),
        ("from ddp_course import show, Link", "from ddp_course import Link"),
        ("from ddp_course.running import wire as w", "pass\nw = wire"),
        ("from ddp_course import wire, nothing as n", "from ddp_course import wire\nn = nothing"),
        ("from ddp_course import Link, wire as w", "from ddp_course import Link, wire as w"),
        ("from torch import nothing", "from torch import nothing"),
        ("from .running import wire", "from .running import wire"),
    ],
)
def test_what_is_left_out(old, new):
    tree = ast.fix_missing_locations(WithoutOldImports().visit(ast.parse(old)))
    assert ast.unparse(tree) == new
