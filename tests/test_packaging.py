"""pyproject, the lock and environment.yml say the same, and docs/MAP.md names what is there."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import modules
import pytest
import versions
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def locked_in(name):
    """Return {package: version} of a lock."""
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


LEARNERS = locked_in("requirements.lock")
TOOLS = locked_in("requirements-dev.lock")


def project():
    return distribution("ddp-course").metadata


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements():
    return [Requirement(text) for text in project().get_all("Requires-Dist")]


def test_torch_is_pinned_and_everything_required_is_locked_in_range():
    learners = {normal(name): version for name, version in LEARNERS.items()}
    everyone = learners | {normal(name): version for name, version in TOOLS.items()}
    assert learners["torch"] == "2.13.0"
    for requirement in requirements():
        name = normal(requirement.name)
        if name == "ddp-course":
            continue
        for extra, locked in {"": learners, "clinic": learners, "dev": everyone}.items():
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                assert requirement.specifier.contains(locked[name]), requirement


def test_learners_install_no_linters_browsers_and_site_tools():
    tools = {"ruff", "mypy", "playwright", "mkdocs", "pytest", "jupytext", "hypothesis"}
    assert tools <= TOOLS.keys()
    assert not TOOLS.keys() & LEARNERS.keys()
    assert (ROOT / "requirements-dev.lock").read_text().startswith("-r requirements.lock\n")


def environment():
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def test_environment_installs_this_package_against_the_lock():
    [pip] = [entry["pip"] for entry in environment()["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-r requirements.lock", "-e ."]
    plain = [entry for entry in environment()["dependencies"] if isinstance(entry, str)]
    assert [re.match(r"\w+", entry).group() for entry in plain] == ["python", "pip"]
    assert environment()["channels"] == ["conda-forge", "nodefaults"]
    assert environment()["name"] == project()["Name"]


def test_environment_takes_each_python_for_which_all_of_the_lock_is_made():
    [python] = [entry for entry in environment()["dependencies"] if str(entry).startswith("python")]
    declared = Requirement("python" + project()["Requires-Python"]).specifier
    assert declared.contains("3.10"), "whose users install from the ranges, as the Makefile says"
    for version in ("3.9", "3.10", "3.11", "3.13", "3.14"):
        in_lock = declared.contains(version) and version != "3.10"
        assert Requirement(python).specifier.contains(version) == in_lock


def test_an_upper_bound_has_its_reason_above_it():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    bounded = [n for n, line in enumerate(lines) if re.match(r'\s+"[\w-]+[^"]*<[^"]*",', line)]
    assert len(bounded) == 2, "torch and jsonschema"
    for number in bounded:
        assert lines[number - 1].strip().startswith("# "), lines[number]


def test_the_page_of_versions_is_the_table_and_its_last_torch_is_the_newest_allowed():
    rows = versions.read()
    assert versions.page(rows) == (ROOT / "docs" / "VERSIONS.md").read_text(encoding="utf-8")
    tried = {row["torch"] for row in rows}
    assert LEARNERS["torch"] in tried
    [allowed] = [each.specifier for each in requirements() if each.name == "torch"]
    assert all(allowed.contains(release) for release in tried)
    assert not allowed.contains("2.16.0")


def test_the_trips_of_the_map_name_modules_that_exist():
    trips = (ROOT / "docs" / "MAP.md").read_text()
    listed = "\n".join(line for package in modules.PACKAGES for line in modules.rows_of(package))
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", trips)
    assert len(named) > 20
    beside = [name for name in named if not re.search(rf"\b{re.escape(name)} ", listed)]
    missing = [name for name in beside if not (ROOT / name).is_file()]
    assert missing == ["checks/NN.py"]  # The checks stand beside the exercises.
    assert re.search(r"^ddp_course/wire.py +Send and receive between ranks", listed, re.MULTILINE)


def wait_for_text(path, seconds=300):
    """Return what somebody writes into a file."""
    deadline = time.monotonic() + seconds
    while not path.is_file() or not path.read_text():
        assert time.monotonic() < deadline, f"nothing came into {path.name}"
        time.sleep(0.1)
    return path.read_text()


def wheel_of(project, folder):
    """Build the wheel of a folder with a pyproject, outside the checkout; its path."""
    source = folder / "source" / project.name
    ignored = shutil.ignore_patterns(".*", "work", "build", "site", "*.egg-info", "results")
    shutil.copytree(project, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    subprocess.run(
        [*pip, "wheel", *options, str(source)], check=True, timeout=300, env=without_checkout()
    )
    shutil.rmtree(folder / "source")
    [wheel] = folder.glob("*.whl")
    return wheel


DATA = ("*.py", "py.typed", "*.csv", "*.json", "*.json.gz", "*.mplstyle", "hints.md")


def files_of(*packages):
    """Return all modules and data of these packages, which a wheel must have."""
    paths = [path for name in packages for kind in DATA for path in (ROOT / name).rglob(kind)]
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_the_library_is_a_wheel_of_its_own(tmp_path):
    with zipfile.ZipFile(wheel_of(ROOT / "manyranks", tmp_path)) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        [about] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = archive.read(about).decode()
    assert {"manyranks/accelerators.csv", "manyranks/py.typed"} <= names
    assert names == files_of("manyranks")
    assert "Name: manyranks\n" in metadata
    assert "\n# manyranks\n" in metadata, "the README is what an index shows"


def test_both_projects_have_one_version():
    text = (ROOT / "manyranks" / "pyproject.toml").read_text(encoding="utf-8")
    [version] = re.findall(r'^version = "(.*)"', text, re.MULTILINE)
    assert version == project()["Version"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment outside the checkout with the course from its wheel.

    It has the libraries, too.
    """
    folder = tmp_path_factory.mktemp("installed")
    wheel = wheel_of(ROOT, folder)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")],
        check=True,
        timeout=600,
    )
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
        missing = files_of(*modules.PACKAGES) - set(archive.namelist())
    assert missing == set()
    outside = [path for path in sys.path if path.endswith("site-packages")]
    # torch and the rest can be imported, but their .pth files are not read.
    (packages / "libraries.pth").write_text("\n".join(outside) + "\n")
    return folder / "venv" / "bin" / "python"


def without_checkout(**more):
    """Return the environment without the variable that leads to this checkout."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **more}


def ran(python, *words, cwd):
    return subprocess.run(
        [python, *words],
        cwd=cwd,
        env=without_checkout(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_an_installed_course_is_complete(installed, tmp_path):
    where = ran(
        installed, "-c", "import ddp_course; print(ddp_course.__file__)", cwd=tmp_path
    ).stdout
    assert str(installed.parents[1]) in where
    assert str(ROOT) not in where
    done = ran(installed, "-m", "ddp_course.lab.cli", "lab", "mine", "--no-open", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for folder in ("notebooks", "exercises", "docs"):
        wanted = {path.name for path in (ROOT / folder).glob("*.*")}
        assert wanted
        assert wanted == {path.name for path in (tmp_path / "mine" / folder).glob("*.*")}
    shutil.copy(ROOT / "solutions" / "01_single_device.ipynb", tmp_path / "mine" / "exercises")
    done = ran(installed, "-m", "ddp_course.lab.cli", "check", "1", cwd=tmp_path / "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "correct" in done.stdout, done.stdout + done.stderr
    done = ran(installed, "-m", "ddp_course.lab.cli", "claims", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no_sync" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_lab_opens_the_first_notebook_and_shows_the_whole_course(installed, tmp_path):
    browser = tmp_path / "browser"  # JupyterLab shows it a page that leads on to the notebook
    browser.write_text(f'#!/bin/sh\ncat "${{1#file://}}" >{tmp_path}/page\n')
    browser.chmod(0o755)
    command = [installed, "-m", "ddp_course.lab.cli", "lab", "mine", "--", "--ServerApp.port=0"]
    environ = without_checkout(BROWSER=f"{browser} %s", HOME=str(tmp_path))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    lab = subprocess.Popen(command, cwd=tmp_path, env=environ, **quiet)
    try:
        address = re.search(r'href="([^"]*)"', wait_for_text(tmp_path / "page")).group(1)
        before, _, token = address.partition("?token=")
        server, _, opened = before.partition("/lab/tree/")
        assert opened == "notebooks/00_start_here.ipynb"
        with urllib.request.urlopen(f"{server}/api/contents/?token={token}", timeout=300) as reply:
            shown = {entry["name"] for entry in json.load(reply)["content"]}
        assert {"notebooks", "exercises", "docs"} <= shown
        with urllib.request.urlopen(f"{server}/lab?token={token}", timeout=300) as reply:
            assert '"news": {"disabled": true}' in reply.read().decode(), (
                "JupyterLab would ask about its news"
            )
    finally:
        lab.terminate()
        lab.wait(300)


@pytest.mark.slow
def test_the_pip_section_installs():
    """pip itself resolves the section, from here, without installing anything again."""
    [pip] = [entry["pip"] for entry in environment()["dependencies"] if isinstance(entry, dict)]
    # pip reads -e . from where the file is, as conda writes it.
    section = ROOT / ".environment-pip-section.txt"
    section.write_text("\n".join(pip) + "\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-build-isolation",
        "-q",
        "-r",
        section.name,
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    finally:
        section.unlink()
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout.replace("Would install ddp-course", "")
