"""Where the course is published: nowhere, or at one address.

Badges, links and the cell that installs the course elsewhere are made of it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import build
import elsewhere
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
OPENED = sorted([*ROOT.glob("notebooks/[0-9]*.ipynb"), *ROOT.glob("exercises/[0-9]*.ipynb")])
HOME = "https://github.com/somebody/their-course"


@pytest.fixture
def published(monkeypatch, tmp_path):
    """A function that says where the course is published, in a file of this test's own."""
    place = tmp_path / "published.txt"
    monkeypatch.setattr(elsewhere, "PUBLISHED", place)
    return lambda address: place.write_text(f"{address}\n")


def cells(path):
    return {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}


@pytest.mark.parametrize("path", OPENED, ids=lambda path: f"{path.parent.name}-{path.stem[:2]}")
def test_a_notebook_has_badges_and_the_cell_where_the_course_is_published_and_else_none(path):
    here = cells(path)
    badges = re.findall(r"\[!\[Open in (\w+)\]", here.get(elsewhere.BADGES, ""))
    if elsewhere.repository():
        assert badges == ["Colab", "Kaggle", "Binder", "Codespaces"]
    else:
        assert badges == []
        assert elsewhere.INSTALL not in here


@pytest.mark.parametrize("path", OPENED[::8], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_badge_has_the_form_of_its_place_and_leads_to_this_notebook(path, published):
    published(HOME)
    folder = path.parent.name
    row, _ = elsewhere.cells(folder, path.stem, None)
    links = dict(re.findall(r"\[!\[Open in (\w+)\]\([^)]+\)\]\(([^)]+)\)", row.source))
    file = f"{folder}/{path.name}"
    assert links == {
        "Colab": f"https://colab.research.google.com/github/somebody/their-course/blob/main/{file}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src={HOME}/blob/main/{file}",
        "Binder": f"https://mybinder.org/v2/gh/somebody/their-course/main?urlpath=lab/tree/{file}",
        "Codespaces": "https://codespaces.new/somebody/their-course",
    }
    # Each place reads these files of the repository.
    assert (ROOT / file).exists()
    assert (ROOT / "binder" / "requirements.txt").exists()
    assert (ROOT / ".devcontainer" / "devcontainer.json").exists()
    for picture in re.findall(r"\]\((\.\./[^)]+)\)", row.source):
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


def test_a_course_that_is_published_nowhere_has_no_badge_and_no_cell(published):
    published("nowhere")
    [row] = elsewhere.cells("notebooks", "04_ring_all_reduce", "exercises")
    assert "http" not in row.source
    assert row.source.startswith("[Exercise 4](../exercises/")
    assert elsewhere.cells("notebooks", elsewhere.FIRST, None) == []
    assert elsewhere.first_words() == "In this folder:"


def test_publishing_writes_the_address_everywhere_and_takes_it_out_again(published, tmp_path):
    pages = ("pyproject.toml", "CITATION.cff", "README.md", "docs/figures/compare.json")
    for name in pages:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    elsewhere.publish("nowhere", tmp_path)
    before = [(tmp_path / name).read_text() for name in pages]
    assert not any(HOME in text for text in before)
    for _ in range(2):
        elsewhere.publish(HOME, tmp_path)
        project, citation, *_ = [(tmp_path / name).read_text() for name in pages]
        assert project.count(f'[project.urls]\nRepository = "{HOME}"\n') == 1
        assert citation.count(f"repository-code: {HOME}\n") == 1
        assert f"git clone {HOME} && cd their-course`" in build.readme(tmp_path)
    elsewhere.publish("nowhere", tmp_path)
    assert [(tmp_path / name).read_text() for name in pages] == before


@pytest.mark.parametrize(
    "address", ["", "github.com/a/b", "https://github.com/a", f"{HOME}.git/", "https://x.org/a/b"]
)
def test_an_address_that_makes_no_badges_is_refused(address, published, tmp_path):
    published("nowhere")
    with pytest.raises(ValueError, match=r"of the form https://github.com/owner/name"):
        elsewhere.publish(address, tmp_path)
    assert elsewhere.repository() == ""


@pytest.fixture
def install(monkeypatch, published):
    """A function that returns the commands that the install cell runs.

    `environ` is set there, the course is `installed` or not, and pip ends with a `code`.
    """
    published(HOME)

    def run(environ, installed, code=0):
        """Run the cell as if it were there."""
        commands = []
        for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
            monkeypatch.delenv(name, raising=False)
        for name in environ:
            monkeypatch.setenv(name, "1")
        found = object() if installed else None
        monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
        monkeypatch.setattr(subprocess, "call", lambda command: commands.append(command) or code)
        *_, cell = elsewhere.cells("notebooks", "04_ring_all_reduce", None)
        exec(cell.source, {})
        return commands

    return run


def test_a_wheel_beside_the_notebook_comes_first(monkeypatch, tmp_path, install):
    (tmp_path / "ddp_course-0.1.0-py3-none-any.whl").write_text("")
    monkeypatch.chdir(tmp_path)
    [command] = install(["COLAB_RELEASE_TAG"], installed=False)
    assert "ddp_course-0.1.0-py3-none-any.whl" in command


def test_the_install_cell_does_nothing_at_home_or_twice(install):
    assert install([], installed=False) == []
    assert install(["COLAB_RELEASE_TAG"], installed=True) == []


def test_without_the_internet_the_install_cell_says_what_to_do(install):
    with pytest.raises(RuntimeError, match=r"switch the internet on .* wheel beside this notebook"):
        install(["KAGGLE_KERNEL_RUN_TYPE"], installed=False, code=1)


@pytest.mark.parametrize("place", ["COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"])
def test_the_install_cell_leaves_torch_alone(install, place):
    [command] = install([place], installed=False)
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert "--no-deps" in command
    assert f"ddp-course @ git+{HOME}" in command
    assert not any("torch" in word or word in ("-U", "--upgrade") for word in command)
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{name}>=' in declared for name in elsewhere.NEEDED), (
        "a package the course does not ask for"
    )
