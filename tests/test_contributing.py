"""The recipes of docs/CONTRIBUTING.md, followed to the letter.

Only their files are made, and all is there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from modules import PACKAGES

ROOT = Path(__file__).parents[1]
RECIPES = (ROOT / "docs" / "CONTRIBUTING.md").read_text().split("<!-- recipes -->")[1]

STAGE = '''"""Stage 16: no communication at all."""

from . import stage1_single

train = stage1_single.train
'''
TASK = '''"""Exercise 16: twice."""

from ddp_exercises.tasks import task


@task("16.1", "twice", {"small": 0.5, "large": 0.5})
class Twice:
    """Twice a number."""

    def draw(random):
        """A small and a large number."""
        number = random.randrange(10)
        yield "small", str(number), (number,)
        yield "large", str(number + 100), (number + 100,)
'''
ANSWERS = """# %% 16.1 wrong: four times | that is four times the number
#- 2 * number
#+ 4 * number
"""
EXERCISE = '''# %% [markdown]
r"""
# Exercise 16: topic

Write `twice(number)`.
"""

# %% imports
from ddp_exercises import check

# %% answer-16-1
def twice(number):
    """Twice a number."""
    ### BEGIN SOLUTION
    return 2 * number
    ### END SOLUTION

# %% check-16-1 points=1
# NBVAL_CHECK_OUTPUT
check("16.1", twice)
'''
ALL_REDUCE = '''"""Each rank sends its tensor to all others, and adds up what comes."""

import torch
import torch.distributed as dist

from .. import wire
from .strides import copy_back, flat_memory


@wire.collective
@torch.no_grad()
def topic_all_reduce(tensor, group=None):
    """Sum `tensor` over the ranks of `group` in place; every rank adds in rank order."""
    flat = flat_memory(tensor)
    rank = dist.get_rank(group)
    peers = wire.others(rank, group)
    arriving = [(torch.empty_like(flat), peer) for peer in peers]
    wire.exchange_all([(flat, peer) for peer in peers], arriving, group)
    parts = [part for part, _ in arriving]
    parts.insert(rank, flat.clone())
    flat.zero_()
    for part in parts:
        flat.add_(part)
    return copy_back(flat, tensor)
'''
FORMULA = '''def topic(nbytes: float, world_size: int, costs: Costs) -> float:
    """Seconds until each rank has sent its tensor to all others."""
    return (world_size - 1) * costs.message(nbytes)


'''
TRIED = """
import torch
import torch.distributed as dist
from ddp_course import launch
from ddp_course.lab import show
from ddp_course.collectives import topic_all_reduce
from ddp_course.lab.measuring import theory
from ddp_course.lab.measuring.simulate import Network, resnets, simulate

def summed():
    return topic_all_reduce(torch.full((5,), 1.0 + dist.get_rank())).tolist()

print(launch(summed, world_size=3))
costs = theory.Costs(1e-6, 1e-9)
print(theory.seconds("topic", 1e3, 3, costs))
profile = resnets.profile("resnet50", 0.1)
steps = [simulate(profile, devices, Network(costs), "topic") for devices in (2, 4)]
print(show.scaling_figure({"topic": steps}).message)
print(show.widgets.alpha_beta_explorer("10Gbit", "1us", 3).picture().message)
"""
HINTS = "## 16.1\n1. What is one more than one?\n2. Add it to itself.\n3. Double it.\n"


def files_of(recipe):
    """Return the files that a recipe names, in order."""
    text = RECIPES.split(f"**Add a{recipe}.**")[1].split("\n**Add")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.M)


@pytest.fixture
def house(tmp_path):
    """A copy of the project, as far as a recipe needs it."""
    for folder in (*PACKAGES, "authoring", "notebooks", "exercises", "solutions"):
        # What was compiled is copied too, and is as old as its source.
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    for file in ("pyproject.toml", "README.md", "docs/figures/compare.json"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def run(house, *command):
    """Return what a Python command prints in the copy, standard error after it.

    It must end well.
    """
    done = subprocess.run(
        [sys.executable, *command],
        cwd=house,
        env={**os.environ, "PYTHONPATH": str(house)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def insert(path, before, text):
    """Put `text` before the first `before` of a file."""
    source = path.read_text()
    assert before in source
    path.write_text(source.replace(before, text + before, 1))


def follow(house, recipe, contents):
    """Write the files of a recipe, each with its content.

    Files that only the project's own tests need may lack one.
    """
    named = files_of(recipe)
    assert 1 <= len(named) <= 4
    assert set(contents) <= set(named)
    assert all(
        name in contents or name.startswith(("tests/", "authoring/lessons/0")) for name in named
    )
    for name, content in contents.items():
        if callable(content):
            content(house / name)
        else:
            assert not (house / name).exists()
            (house / name).write_text(content)


LAST_STAGE = '    "stage9_tensor",'  # The layers of the stages begin here.


def test_add_a_stage(house):
    entry = """        Stage(
            "16", "nobody", "no communication at all", "stage16_topic",
            colour="#000001", time="0",
        ),
"""
    follow(
        house,
        " stage",
        {
            "ddp_course/stage16_topic.py": STAGE,
            "ddp_course/ladder.py": lambda path: insert(
                path, '        Stage(\n            "torch"', entry
            ),
            "pyproject.toml": lambda path: insert(path, LAST_STAGE, '    "stage16_topic",\n'),
        },
    )
    options = (
        "--stages 1,16 --world-size 2 --steps 2 --link none --problem synthetic --parameters 5000"
        " --out results"
    )
    table = run(house, "-m", "ddp_course.lab.cli", "compare", *options.split())
    assert re.search(r"^16 +nobody", table, re.M)
    assert "compare.png" in table
    run(
        house,
        "-c",
        "from importlinter.cli import lint_imports_command as lint; lint()",
        "--no-cache",
    )
    run(house, "authoring/build.py")
    assert (
        "| 16 | `stage16_topic` | no communication at all | 0 |"
        in (house / "README.md").read_text()
    )


def test_add_an_exercise(house):
    lesson = "authoring/lessons/16_topic_exercise.py"
    task = "exercises/checks/16.py"
    hints = {"ddp_exercises/hints.md": lambda path: path.write_text(path.read_text() + HINTS)}
    answers = {"exercises/answers/16.py": ANSWERS}
    follow(house, "n exercise", {lesson: EXERCISE, task: TASK, **answers, **hints})
    run(house, "authoring/build.py", "--only", "16")
    assert "NotImplementedError" in (house / "exercises" / "16_topic.ipynb").read_text()
    tried = (
        "from ddp_exercises import check, hint; hint('16.1', 3); check('16.1', lambda number:"
        " {} * number)"
    )
    said = run(house, "-c", tried.format(2))
    assert "Double it." in said
    assert "Exercise 16.1: correct." in said
    with pytest.raises(AssertionError, match="that is four times the number"):
        run(house, "-c", tried.format(4))


def test_add_a_column(house):
    """The column has the number of ranks that were counted.

    The single device's row does not have it.
    """

    def add_field(path):
        insert(path, "    bytes_formula: int | None", "    ranks_counted: int | None = None\n")
        insert(path, "        loss=[statistics", "        ranks_counted=len(counted) or None,\n")

    def add_title(path):
        insert(path, '    "last\\nloss"', '    "ranks\\ncounted": ("ranks_counted", "d"),\n')

    follow(
        house,
        " column to `compare`",
        {
            "ddp_course/lab/measuring/results.py": add_field,
            "ddp_course/lab/commands/compare.py": add_title,
        },
    )
    options = (
        "--stages 1,4 --world-size 2 --steps 2 --link none --problem synthetic --parameters 5000"
        " --out results"
    )
    table = run(house, "-m", "ddp_course.lab.cli", "compare", *options.split())
    assert re.search(r"counted", table)
    stages = json.loads((house / "results" / "compare.json").read_text())["stages"]
    assert [stage["ranks_counted"] for stage in stages] == [None, 2]


def test_add_an_all_reduce(house):
    """The new all-reduce is the fastest where messages are small.

    It costs one latency, not two per round.
    """

    def export(path):
        insert(path, "from .tree import", "from .topic import topic_all_reduce\n")
        insert(path, '    "tree_all_reduce",', '    "topic_all_reduce",\n')

    def foretell(path):
        insert(path, "ALL_REDUCE: dict", FORMULA)
        insert(path, "        hierarchical,\n", "        topic,\n")

    def colour(path):
        insert(path, '    "hierarchical": "#', '    "topic": "#000001",\n')
        insert(path, '"parameter_server", "ring"', '"topic", ')

    follow(
        house,
        "n all-reduce",
        {
            "ddp_course/collectives/topic.py": ALL_REDUCE,
            "ddp_course/collectives/__init__.py": export,
            "ddp_course/lab/measuring/theory.py": foretell,
            "ddp_course/lab/showing/simulator_plots.py": colour,
        },
    )
    (house / "tried.py").write_text(TRIED)
    sums, seconds, scaling, fastest = run(house, "tried.py").splitlines()
    assert sums == str([[6.0] * 5] * 3)
    assert float(seconds) == pytest.approx(2 * (1e-6 + 1e3 * 1e-9))
    assert "topic: " in scaling
    assert "small: topic;" in fastest
