"""The promises about the code itself: how little changes from stage to stage, and what may import what."""

import ast
import difflib
import inspect
import re
from itertools import pairwise
from pathlib import Path

import pytest

import ddp_course
from ddp_course import stage1_single, stage2_dataparallel, stage3_paramserver, stage4_ring, stage5_bucketed

PACKAGE = Path(ddp_course.__file__).parent
STAGES = [stage1_single, stage2_dataparallel, stage3_paramserver, stage4_ring, stage5_bucketed]


def train_lines(module):
    """The code of `train`, without its docstring."""
    lines = inspect.getsource(module.train).splitlines()
    return [line for line in lines if not line.strip().startswith('"""')]


def changed(before, after):
    """Lines that a diff of the two shows as removed or added, whichever is more."""
    marks = [line[0] for line in difflib.ndiff(before, after)]
    return max(marks.count("-"), marks.count("+"))


@pytest.mark.parametrize("before, after", list(pairwise(STAGES)))
def test_neighbours_differ_in_at_most_8_lines(before, after):
    assert 0 < changed(train_lines(before), train_lines(after)) <= 8


def test_from_3_to_4_only_the_sum_changes():
    server = "\n".join(train_lines(stage3_paramserver))
    assert server.replace("average_on_server", "average_on_ring") == "\n".join(train_lines(stage4_ring))
    assert server.count("average_on_server") == 1


def test_the_measure_of_difference_can_fail():
    assert changed(train_lines(stage1_single), ["nothing", "alike"] * 5) > 8


def test_the_whole_idea_is_read_in_half_an_hour():
    lines = sum(len(Path(stage.__file__).read_text().splitlines()) for stage in STAGES)
    assert lines <= 450


def imports(path):
    """Dotted names of the package's own modules that a file imports, as seen from the package."""
    found = set()
    here = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("ddp_course")):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            module = [part for part in (node.module or "").split(".") if part and part != "ddp_course"]
            found |= {".".join([*base, *module, alias.name]) for alias in node.names}
    return found


ROOMS = "measuring|showing|grading|bench|compare|cli"
LAYERS = {
    r"running/.*": rf"({ROOMS}|stage)",
    r"(stage\d|collectives).*": rf"({ROOMS})",
    r"measuring/(theory|timeline)\.py": r"(showing|grading|bench|compare|cli)",
}


@pytest.mark.parametrize("files, forbidden", LAYERS.items())
def test_dependencies_point_one_way(files, forbidden):
    paths = [path for path in PACKAGE.rglob("*.py") if re.fullmatch(files, path.relative_to(PACKAGE).as_posix())]
    wrong = {path.name: name for path in paths for name in imports(path) if re.match(forbidden, name)}
    assert paths and not wrong


def test_imports_are_seen():
    assert "running.wire" in imports(PACKAGE / "stage4_ring.py")
    assert "stage3_paramserver.broadcast_parameters" in imports(PACKAGE / "stage4_ring.py")


def test_all_public_functions_of_the_stages_have_docstrings():
    for stage in STAGES:
        for name, member in vars(stage).items():
            if inspect.isfunction(member) and member.__module__ == stage.__name__ and not name.startswith("_"):
                assert member.__doc__, f"{stage.__name__}.{name}"
