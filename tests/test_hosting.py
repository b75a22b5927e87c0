"""What whoever hosts the course relies on: workflows, containers, and what lies around.

That is Binder, the citation, the changelog and commit hooks.
"""

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def steps(name):
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def test_workflows_run_what_is_there():
    makefile = (ROOT / "Makefile").read_text()
    for name in ("tests", "nightly", "site"):
        for command in (step["run"] for step in steps(name) if "run" in step):
            for target in re.findall(r"^make ([\w-]+)", command, re.MULTILINE):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
            for script in re.findall(r"bash (\S+)", command):
                assert (ROOT / script).is_file()
    quick = [step["run"] for step in workflow("tests")["jobs"]["quick"]["steps"] if "run" in step]
    assert any(command.startswith("make test-quick") for command in quick)


LOCKED = ["-r requirements.lock", "--no-deps --editable ."]


@pytest.mark.parametrize(
    ("minor", "system", "learners", "tools"),
    [
        (10, "Linux", ["--editable .[clinic]"], ["--editable .[dev]"]),
        (11, "Linux", [*LOCKED], ["-r requirements-dev.lock", LOCKED[1]]),
        (11, "Windows_NT", [*LOCKED], ["-r requirements-dev.lock", LOCKED[1]]),
    ],
)
def test_setup_takes_the_lock_where_it_can(tmp_path, minor, system, learners, tools):
    """`make setup` and `make tools` run with a Python that only writes down what it installs."""
    programs = "Scripts" if system == "Windows_NT" else "bin"
    python = tmp_path / "venv" / programs / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/bin/sh
case "$*" in
*"(3, 11)"*) exit {int(minor < 11)};;
*pip*) echo "${{*##*--quiet }}" >>{tmp_path}/asked;;
esac
""")
    python.chmod(0o755)
    settings = [f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", f"OS={system}"]
    options = {"cwd": ROOT, "check": True, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(["make", "--no-print-directory", "setup", *settings], **options)
    assert (tmp_path / "asked").read_text().splitlines() == learners
    packages = (ROOT / "requirements.lock").read_text().count("==")
    [sentence] = done.stdout.splitlines()  # No recipe is shown.
    assert sentence.startswith(f"Installing {packages} packages")
    assert "GB of disk" in sentence
    subprocess.run(["make", "tools", *settings], **options)
    assert (tmp_path / "asked").read_text().splitlines() == learners + tools


def test_on_a_terminal_pip_shows_its_progress(tmp_path):
    """`make setup` runs, first on a terminal, with a Python that writes down what it is asked."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n')
    python.chmod(0o755)
    command = ["make", "setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", "OS=Linux"]
    ours, terminal = pty.openpty()
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=terminal, stderr=terminal)
    assert b"Installing" in os.read(ours, 1000)
    assert "install" in (tmp_path / "asked").read_text()
    assert "--quiet" not in (tmp_path / "asked").read_text()
    (tmp_path / "venv" / "installed").unlink()
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, capture_output=True)
    assert "--quiet" in (tmp_path / "asked").read_text()
    os.close(ours)
    os.close(terminal)


def test_citation_and_changelog_know_the_version_and_the_address():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = re.search(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)[1]
    assert citation["version"] == version
    assert citation["license"] == "MIT"
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1].split(" ")[0] == version
