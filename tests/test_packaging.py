"""pyproject, the lock and environment.yml say the same, and the README's map is the tree."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCKED = dict(
    line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"
)


def project():
    return distribution("ddp-course").metadata


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements():
    return [Requirement(text) for text in project().get_all("Requires-Dist")]


def test_torch_is_pinned_and_everything_required_is_locked_in_range():
    locked = {normal(name): version for name, version in LOCKED.items()}
    assert locked["torch"] == "2.13.0"
    for requirement in requirements():
        if requirement.marker is None or requirement.marker.evaluate({"extra": "dev"}):
            assert requirement.specifier.contains(locked[normal(requirement.name)]), requirement


def test_every_line_of_the_lock_is_one_version():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    assert len({normal(line.split("==")[0]) for line in lines}) == len(lines) > 50


def environment():
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def test_environment_installs_this_package_against_the_lock():
    [pip] = [entry["pip"] for entry in environment()["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-r requirements.lock", "-e ."]
    plain = [entry for entry in environment()["dependencies"] if isinstance(entry, str)]
    assert [re.match(r"\w+", entry).group() for entry in plain] == ["python", "pip"]
    assert environment()["channels"] == ["conda-forge", "nodefaults"]
    assert environment()["name"] == project()["Name"]


def test_environment_and_pyproject_want_the_same_python():
    [python] = [entry for entry in environment()["dependencies"] if str(entry).startswith("python")]
    wanted = Requirement(python).specifier
    for version in ("3.9", "3.10", "3.11", "3.12", "3.13"):
        declared = Requirement("python" + project()["Requires-Python"]).specifier
        assert wanted.contains(version) == declared.contains(version)
    assert wanted.contains(".".join(map(str, sys.version_info[:2])))


def test_the_pip_section_installs(tmp_path):
    """pip itself resolves the section, from here, without installing anything again."""
    [pip] = [entry["pip"] for entry in environment()["dependencies"] if isinstance(entry, dict)]
    section = ROOT / ".environment-pip-section.txt"  # pip reads -e . from where the file is, as conda writes it
    section.write_text("\n".join(pip) + "\n")
    try:
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
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    finally:
        section.unlink()
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout.replace("Would install ddp-course", "")


def test_the_map_in_the_readme_is_the_tree():
    block = (ROOT / "README.md").read_text().split("<!-- map -->")[1]
    package = ROOT / "ddp_course"
    rooms = [package, *(package / room for room in ("running", "measuring", "showing", "grading", "bench"))]
    there = {path.name for room in rooms for path in room.iterdir() if not re.match(r"__(init|pycache)__", path.name)}
    named = set(re.findall(r"[\w.]+(?:\.py)|[\w]+(?=/)", block))
    assert not there - named, f"not on the README's map: {sorted(there - named)}"
    everywhere = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts} | set(os.listdir(ROOT))
    invented = {name for name in named - there - everywhere if name.endswith(".py")}
    assert not invented, f"on the README's map only: {sorted(invented)}"


@pytest.mark.parametrize("target", ["setup", "compare", "test", "lab"])
def test_make_targets_set_up_first(target):
    makefile = (ROOT / "Makefile").read_text()
    rule = re.search(rf"^{target}:(.*)$", makefile, re.M).group(1)
    assert "setup" in rule or "$(VENV)/installed" in rule


def wait_for_text(path, seconds=60):
    """What somebody writes into a file."""
    deadline = time.monotonic() + seconds
    while not path.is_file() or not path.read_text():
        assert time.monotonic() < deadline, f"nothing came into {path.name}"
        time.sleep(0.1)
    return path.read_text()


def test_the_lab_opens_the_first_notebook_and_shows_the_whole_course(tmp_path):
    browser = tmp_path / "browser"  # JupyterLab shows it a page that leads on to the notebook
    browser.write_text(f'#!/bin/sh\ncat "${{1#file://}}" >{tmp_path}/page\n')
    browser.chmod(0o755)
    recipe = re.search(r"^lab: setup\n\t(.*)$", (ROOT / "Makefile").read_text(), re.M).group(1)
    words = recipe.replace("$(BIN)/jupyter", f"{sys.executable} -m jupyter").replace("$(AS_ROOT)", "--allow-root")
    command = words.replace("$(ARGS)", "--ServerApp.port=0").split()
    environ = {**os.environ, "BROWSER": f"{browser} %s", "HOME": str(tmp_path)}
    lab = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = re.search(r'href="([^"]*)"', wait_for_text(tmp_path / "page")).group(1)
        before, _, token = address.partition("?token=")
        server, _, opened = before.partition("/lab/tree/")
        assert opened == "notebooks/00_start_here.ipynb"
        with urllib.request.urlopen(f"{server}/api/contents/?token={token}", timeout=30) as reply:
            shown = {entry["name"] for entry in json.load(reply)["content"]}
        assert {"notebooks", "exercises", "solutions", "docs"} <= shown
    finally:
        lab.terminate()
        lab.wait(30)
