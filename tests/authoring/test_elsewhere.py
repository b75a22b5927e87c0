"""Badges and the cell that installs the course elsewhere: there on all lessons and exercises, never
on solutions.
"""

import re
import subprocess
import sys
from pathlib import Path

import elsewhere
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
OPENED = sorted([*ROOT.glob("notebooks/[0-9]*.ipynb"), *ROOT.glob("exercises/[0-9]*.ipynb")])


def cells(path):
    return {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}


@pytest.mark.parametrize("path", OPENED, ids=lambda path: f"{path.parent.name}-{path.stem[:2]}")
def test_badges_open_this_notebook_and_no_solution(path):
    badges = cells(path)[elsewhere.BADGES]
    here = f"{path.parent.name}/{path.name}"
    home = elsewhere.repository()
    links = dict(re.findall(r"\[!\[Open in (\w+)\]\([^)]+\)\]\(([^)]+)\)", badges))
    assert list(links) == ["Colab", "Kaggle", "Binder", "Codespaces"]
    assert all(link.endswith(here) for place, link in links.items() if place != "Codespaces")
    assert all(home.removeprefix("https://github.com/") in link for link in links.values())
    assert "solutions" not in badges
    for picture in re.findall(r"\]\((\.\./[^)]+)\)", badges):
        assert (path.parent / picture).exists(), picture


def test_every_lesson_with_an_exercise_leads_to_it_and_back():
    for path in ROOT.glob("exercises/[0-9]*.ipynb"):
        assert (
            f"(../exercises/{path.name})" in cells(ROOT / "notebooks" / path.name)[elsewhere.BADGES]
        )
        assert f"(../notebooks/{path.name})" in cells(path)[elsewhere.BADGES]


def test_solutions_are_not_offered():
    for path in ROOT.glob("solutions/*.ipynb"):
        assert not {elsewhere.BADGES, elsewhere.INSTALL} & cells(path).keys()
    with pytest.raises(ValueError, match="lessons and exercises"):
        elsewhere.addresses("solutions/04_ring_all_reduce.ipynb")


def test_a_course_without_an_address_has_no_badge(monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(elsewhere, "ROOT", tmp_path)
    row, install_cell = elsewhere.cells("notebooks", "04_ring_all_reduce", "exercises")
    assert "http" not in row.source and row.source.startswith("[Exercise 4](../exercises/")
    assert "http" not in install_cell.source and "['ddp-course']" in install_cell.source


def test_a_wheel_beside_the_notebook_comes_first(monkeypatch, tmp_path):
    (tmp_path / "ddp_course-0.1.0-py3-none-any.whl").write_text("")
    monkeypatch.chdir(tmp_path)
    course, _ = install(monkeypatch, ["COLAB_RELEASE_TAG"], installed=False)
    assert course[-1] == "ddp_course-0.1.0-py3-none-any.whl"


def install(monkeypatch, environ, installed, code=0):
    """The commands that the install cell runs where `environ` is set and the course is `installed`,
    or not; pip ends with a `code`.
    """
    commands = []

    def call(command):
        commands.append(command)
        return code

    for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    for name in environ:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(subprocess, "call", call)
    exec(cells(OPENED[0])[elsewhere.INSTALL], {})
    return commands


def test_the_install_cell_does_nothing_at_home_or_twice(monkeypatch):
    assert install(monkeypatch, [], installed=False) == []
    assert install(monkeypatch, ["COLAB_RELEASE_TAG"], installed=True) == []


def test_without_the_internet_the_install_cell_says_what_to_do(monkeypatch):
    with pytest.raises(RuntimeError, match=r"switch the internet on .* wheel beside this notebook"):
        install(monkeypatch, ["KAGGLE_KERNEL_RUN_TYPE"], installed=False, code=1)


@pytest.mark.parametrize("place", ["COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"])
def test_the_install_cell_leaves_torch_alone(monkeypatch, place):
    course, rest = install(monkeypatch, [place], installed=False)
    assert course[:4] == rest[:4] == [sys.executable, "-m", "pip", "install"]
    assert "--no-deps" in course and course[-1] == f"ddp-course @ git+{elsewhere.repository()}"
    assert not any("torch" in word or word in ("-U", "--upgrade") for word in rest)
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{name}>=' in declared for name in elsewhere.NEEDED), (
        "a package the course does not ask for"
    )
