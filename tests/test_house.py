"""The promises about the packages as a whole: imports point one way, and functions are short."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("manyranks", "ddp_course", "ddp_exercises", "ddp_predictions")
MODULES = [path for name in PACKAGES for path in ROOT.glob(f"{name}/**/*.py")]


def lint_imports(folder):
    """Return what import-linter says of `folder`, by the contracts in its pyproject.toml."""
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
        "--no-cache",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the packages' modules and of the contracts."""
    folder = tmp_path_factory.mktemp("house")
    for package in PACKAGES:
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_imports_point_one_way():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "module, line, shown",
    [
        (
            "ddp_course/wire.py",
            "from .lab.measuring import theory",
            "ddp_course.wire -> ddp_course.lab.measuring.theory",
        ),
        (
            "ddp_course/stage4_ring.py",
            "from .stage5_bucketed import BucketedDDP",
            "ddp_course.stage4_ring -> ddp_course.stage5",
        ),
        (
            "ddp_course/lab/measuring/timing.py",
            "def late():\n    from ..commands import doctor",
            "-> ddp_course.lab.commands.doctor",
        ),
        (
            "ddp_exercises/plain.py",
            "from ddp_course.lab.showing import source",
            "ddp_exercises.plain -> ddp_course.lab.showing.source",
        ),
        ("manyranks/launching/rank.py", "from ..links import modes", "-> manyranks.links.modes"),
        ("manyranks/units.py", "from ddp_course import errors", "manyranks.units -> ddp_course"),
        ("ddp_course/leftovers.py", "", "leftovers"),
        ("manyranks/leftovers.py", "", "leftovers"),
    ],
)
def test_an_import_back_and_a_module_without_a_place_are_refused(house, module, line, shown):
    path = house / module
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        done = lint_imports(house)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)
    assert done.returncode == 1, done.stdout
    assert shown in done.stdout, done.stdout


MOST_LINES = 40  # A function has at most so many, without its arguments and its docstring.
AROUND = ("benchmarks", "authoring", "tests")


def long_functions(source):
    """Return the names of the functions whose code has more than MOST_LINES lines."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            statements = node.body[1:] if has_docstring else node.body
            if statements and node.end_lineno - statements[0].lineno >= MOST_LINES:
                names.append(node.name)
    return names


def test_a_function_that_is_too_long_is_found():
    code = "\n".join(["    pass"] * MOST_LINES)
    head = 'def f(\n    x,\n):\n    """It is long.\n\n    Very.\n    """'
    assert long_functions(f"{head}\n{code}") == []
    assert long_functions(f"def f():\n{code}\n    pass") == ["f"]


def test_no_function_is_longer_than_a_screen():
    around = [path for name in AROUND for path in ROOT.glob(f"{name}/**/*.py")]
    too_long = {}
    for path in [*MODULES, *around]:
        if names := long_functions(path.read_text(encoding="utf-8")):
            too_long[path.relative_to(ROOT).as_posix()] = names
    assert not too_long
