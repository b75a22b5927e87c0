"""What makes forks cheap is right all the same: who descends from whom, and what has been loaded."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import ddp_course
from ddp_course.grading import family
from ddp_course.grading.probing import modules_below


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
