"""Launches from a plain script: faults, results, prints, interrupts, and nothing left behind."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch_faults import FAULTS, HEADER

SCRIPT_END = """
def attempt(name, source):
    try:
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), globals())
        error = ("none", "")
    except BaseException as raised:
        error = (type(raised).__name__, str(raised))
    print(json.dumps([name, *error]), flush=True)
"""


def run_script(source, folder):
    """Run `source` as a script of its own; returns the finished process."""
    script = Path(folder) / "script.py"
    script.write_text(source)
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def faults_in_a_script(folder, world_size, start):
    """Return what a script got for every fault, by the fault's name: an error and its message."""
    lines = [
        "import json, linecache",
        HEADER,
        f"os.environ['MANYRANKS_START'] = {start!r}",
        SCRIPT_END,
    ]
    lines += [f"attempt({fault.name!r}, {fault.cell(world_size)!r})" for fault in FAULTS]
    ended = run_script("\n".join(lines), folder)
    assert ended.returncode == 0, ended.stderr
    parsed = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('["')]
    return {name: outcome for name, *outcome in parsed}


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """All faults with ranks that the server forks."""
    return faults_in_a_script(tmp_path_factory.mktemp("faults"), 3, "fork")


@pytest.fixture(scope="module")
def spawned(tmp_path_factory):
    """All faults with ranks that are started anew."""
    return faults_in_a_script(tmp_path_factory.mktemp("faults"), 2, "spawn")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_in_a_script(forked, fault):
    assert_told(forked, fault, 3)


@pytest.mark.weekly
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_without_forks(spawned, fault):
    assert_told(spawned, fault, 2)
    assert "launching/server.py" not in spawned[fault.name][1], "our own frames bury the learner's"


def assert_told(outcomes, fault, world_size):
    """Assert that a fault led to the right error, with the right words."""
    error, message = outcomes[fault.name]
    assert error == fault.error, message
    assert re.search(fault.pattern.replace("{culprit}", str(world_size - 1)), message), message
