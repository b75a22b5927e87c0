"""What makes forks cheap is right all the same: who descends from whom, what has been loaded, and where memory lies."""

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import ddp_course
from ddp_course.grading import family
from ddp_course.grading.probing import modules_below

LARGE = """
import re
from pathlib import Path
from ddp_course.grading.zygote import take_large_pages
content = bytes(range(256)) * (1 << 17)
def large():
    return int(re.search(r"AnonHugePages: *([0-9]+)", Path("/proc/self/smaps_rollup").read_text())[1]) >> 10
before = large()
take_large_pages()
assert content == bytes(range(256)) * (1 << 17)
print(large() - before)
"""


@pytest.fixture
def household():
    """A shell and its two children, which outlive it."""
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & wait"])
    while len(found := psutil.Process(shell.pid).children()) < 2:
        time.sleep(0.01)
    yield shell, {one.pid for one in found}
    for pid in (one.pid for one in found if one.is_running()):
        os.kill(pid, signal.SIGKILL)
    shell.kill()
    shell.wait()


def test_a_family_is_all_who_descend_from_a_process_and_each_is_asked_once(household, monkeypatch):
    shell, sleepers = household
    ours, asked = family.Family(), []
    monkeypatch.setattr(family, "parent_of", lambda pid, of=family.parent_of: asked.append(pid) or of(pid))
    everyone = {one.pid for one in psutil.Process().children(recursive=True)}
    assert {shell.pid, *sleepers} <= ours.look() == everyone
    asked.clear()
    assert ours.look() == everyone and not everyone & set(asked)
    with subprocess.Popen(["sleep", "60"]) as late:
        assert ours.look() == {late.pid, *everyone} and late.pid in asked
        late.kill()
    assert ours.look() == everyone


def test_orphans_stay_in_the_family(household):
    shell, sleepers = household
    ours = family.Family()
    ours.look()
    shell.kill()
    shell.wait()
    assert ours.look() >= sleepers and shell.pid not in ours.look()
    assert shell.pid not in family.children()


def test_all_that_is_loaded_of_the_course_is_found():
    from ddp_course import stage4_ring, stage6_ddp  # noqa: F401 (loaded, for this)
    from ddp_course.running.devices import placement  # noqa: F401 (a function of its package has its name)

    names = {module.__name__ for module in modules_below(ddp_course)}
    assert names == {name for name, one in sys.modules.items() if name.split(".")[0] == "ddp_course" and one}


@pytest.mark.skipif(
    sys.platform != "linux"
    or tuple(map(int, platform.release().split(".")[:2])) < (6, 1)
    or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="large pages on demand are Linux 6.1's",
)
def test_memory_moves_to_large_pages_as_it_is():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 16, "MiB of the 32"
