"""A torch of which private parts are gone: stages 1 and 3 to 5 train, and what cannot says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_course.base import torch_private
from manyranks import ManyranksError

ROOT = Path(__file__).parents[1]
PROGRAM = """
from importlib import import_module
from ddp_course import ladder, launch, problems

def trained(name):
    import torch.distributed as dist
    problem = problems.make("synthetic", parameters=2000, width=8)
    batches = problem.batches(8, 2, rank=dist.get_rank(), world_size=2)
    return len(import_module("ddp_course." + name).train(problem.model(), batches, 0.1))

stages = [name for name in ladder.MODULES if name[5] in "1345"]
print([launch(trained, name, world_size=2) for name in stages])
"""


def test_stages_go_on(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = [str(ROOT / "tests" / "support" / "without_private_parts"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "[[2, 2], [2, 2], [2, 2], [2, 2]]" in done.stdout, done.stdout + done.stderr


def test_a_function_whose_part_is_gone_names_it(monkeypatch):
    monkeypatch.delattr("torch.autograd._unsafe_preserve_version_counter")
    words = r"broadcast of buffers.*_unsafe_preserve_version_counter"
    with pytest.raises(ManyranksError, match=words):
        torch_private.unnoticed_by_autograd([])
