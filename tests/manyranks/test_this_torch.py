"""A torch that nobody tried is met with a sentence, and a part of it that is gone with its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import manyranks
from manyranks import ManyranksError, this_torch, torch_inside
from manyranks.torch_inside import part

PRIVATE_PARTS_GONE = Path(__file__).parents[1] / "support" / "without_private_parts"


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
    assert said.startswith(f"torch {version} has not been tried; ")
    assert said.count("\n") == 1
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
    monkeypatch.delattr("torch.distributed.distributed_c10d._world")
    with pytest.raises(ManyranksError, match=r"^counting messages needs .*_world"):
        torch_inside.messages()


PROGRAM = """
import torch
import torch.distributed as dist
from manyranks import Link, launch

def total():
    number = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(number)
    return number.item()

print(launch(total, world_size=2))
try:
    launch(total, world_size=2, link=Link("1Gbit"))
except Exception as error:
    print(error)
"""


def test_without_private_parts_plain_launches_go_on(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = [str(PRIVATE_PARTS_GONE), str(Path(manyranks.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "[3.0, 3.0]" in done.stdout, done.stdout + done.stderr
    assert "virtual time needs a private part of torch" in done.stdout, done.stdout + done.stderr
    assert "torch.distributed.ProcessGroupGloo" in done.stdout
