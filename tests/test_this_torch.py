"""A torch that nobody tried is met with a sentence, and a part of it that is gone with its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_course import torch_private
from manyranks import this_torch
from manyranks.errors import ManyranksError
from manyranks.torch_inside import part

ROOT = Path(__file__).parents[1]


@pytest.fixture
def with_torch(monkeypatch):
    """A function that makes this process believe in another version of torch."""

    def believe(version):
        monkeypatch.setattr(this_torch, "version", lambda package: version)
        this_torch.say_once.cache_clear()

    yield believe
    this_torch.say_once.cache_clear()


@pytest.mark.parametrize("version", ["99.0.1", "2.15.0.dev20270101", "2.15.0a0+git12"])
def test_a_torch_that_nobody_tried_is_told_once(version, with_torch, capsys):
    with_torch(version)
    this_torch.say_once()
    this_torch.say_once()
    said = capsys.readouterr().err
    assert said.startswith(f"torch {version} has not been tried; ") and said.count("\n") == 1
    for known in ("2.10.0", "2.15.0", "docs/VERSIONS.md", "checked all the same"):
        assert known in said


@pytest.mark.parametrize("version", ["2.15.0", "2.15.7+cpu", "2.13.0+cu130"])
def test_of_one_that_was_tried_nothing_is_said(version, with_torch, capsys):
    with_torch(version)
    this_torch.say_once()
    assert capsys.readouterr().err == ""


def test_what_is_gone_can_be_imported_and_each_use_names_it_and_what_needs_it():
    gone = part("torch.optim:_Nowhere", "the moon")

    class Derived(gone):
        pass

    uses = [
        gone,
        Derived,
        lambda: gone.name,
        lambda: isinstance(1, gone),
        lambda: issubclass(int, gone),
    ]
    for use in uses:
        with pytest.raises(ManyranksError, match=r"^the moon needs .*torch\.optim\._Nowhere"):
            use()
    assert part("torch.nowhere:thing", "the moon") is not None


def test_a_function_whose_part_is_gone_names_it(monkeypatch):
    monkeypatch.delattr("torch.autograd._unsafe_preserve_version_counter")
    with pytest.raises(
        ManyranksError, match=r"broadcast of buffers.*_unsafe_preserve_version_counter"
    ):
        torch_private.unnoticed_by_autograd([])


# Every process of this program, the server and the ranks too, finds no private part of torch but
# those that a message of stages 3 to 5 needs.
WITHOUT = """
import pkgutil
found = pkgutil.resolve_name
needed = ("DisableTorchFunctionSubclass", "_get_default_store", "tree_leaves")
def resolve_name(path):
    if path.startswith("torch") and not path.endswith(needed):
        raise AttributeError(path)
    return found(path)
pkgutil.resolve_name = resolve_name
"""
PROGRAM = """
from importlib import import_module
from ddp_course import ladder, problems
from manyranks import Link, launch

def trained(name):
    import torch.distributed as dist
    problem = problems.make("synthetic", parameters=2000, width=8)
    batches = problem.batches(8, 2, rank=dist.get_rank(), world_size=2)
    return len(import_module("ddp_course." + name).train(problem.model(), batches, 0.1))

stages = [name for name in ladder.MODULES if name[5] in "1345"]
print([launch(trained, name, world_size=2) for name in stages])
try:
    launch(trained, stages[0], world_size=2, link=Link("1Gbit"))
except Exception as error:
    print(error)
"""


def test_without_private_parts_plain_launches_and_stages_go_on(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "[[2, 2], [2, 2], [2, 2], [2, 2]]" in done.stdout, done.stdout + done.stderr
    assert "virtual time needs a private part of torch" in done.stdout, done.stdout + done.stderr
    assert "torch.distributed.ProcessGroupGloo" in done.stdout
