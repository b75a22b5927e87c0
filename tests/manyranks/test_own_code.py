"""Packages that are built on the library: ranks have them loaded, and messages know them.

They name the line of the program that called them.
"""

import sys

import pytest
import torch

from manyranks import Link, launch, own_code
from manyranks.errors import DeadlockError
from manyranks.launching import server_handle

PART = """
import torch.distributed as dist

VALUE = {}

def receive(tensor, source):
    dist.recv(tensor, source)
"""


@pytest.fixture
def part(tmp_path, monkeypatch):
    """The file of a module, in a package that is registered while a server runs already."""
    launch(len, "", world_size=1)
    folder = tmp_path / "built_on_it"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "part.py").write_text(PART.format(1))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_code, "packages", dict(own_code.packages))
    own_code.register("built_on_it", str(folder), ["part"])
    return folder / "part.py"


def value_loaded_before():
    return sys.modules["built_on_it.part"].VALUE


def test_a_package_that_registers_late_is_loaded_for_the_ranks_and_read_again(part):
    assert launch(value_loaded_before, world_size=2) == [1, 1]
    part.write_text(PART.format(22))
    assert launch(value_loaded_before, world_size=2) == [22, 22]


def both_receive_first():
    from built_on_it import part

    part.receive(torch.zeros(1), 1 - torch.distributed.get_rank())


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_deadlock_in_a_registered_package_names_the_line_that_called_it(part, start, monkeypatch):
    monkeypatch.setenv("MANYRANKS_START", start)
    server_handle.use_server(None)
    try:
        with pytest.raises(
            DeadlockError, match=r"test_own_code\.py line \d+: part\.receive"
        ) as caught:
            launch(both_receive_first, world_size=2, link=Link("100Mbit"))
    finally:
        server_handle.use_server(None)
    assert all(wait.file == "test_own_code.py" for wait in caught.value.waits)


def test_a_folder_with_a_longer_name_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(own_code, "packages", {})
    own_code.register("a.b", "/x/a/b")
    assert own_code.packages["a.b"].found_in == "/x"
    assert "/x/a/b/c.py".startswith(own_code.folders())
    assert not "/x/a/bc.py".startswith(own_code.folders())
