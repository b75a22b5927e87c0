"""Warm spares, for systems where forking is unsafe or unknown, tried here by asking for them."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_course import Link, launch, ring_all_reduce
from ddp_course.commands import doctor
from ddp_course.errors import LaunchError, LinkError, RankError
from ddp_course.running.launching import launch as launching
from ddp_course.running.launching import processes, setting


@pytest.fixture(autouse=True)
def spawn(monkeypatch):
    """Spawn instead of forking, and see that no process is left but the spares that wait for the next test."""
    monkeypatch.setenv("DDP_COURSE_START", "spawn")
    before = children()
    yield
    assert children() <= before


@pytest.fixture(autouse=True, scope="module")
def spares_end():
    """After the last test no spare waits, and none is left."""
    before = children()
    yield
    processes.stop()
    assert children() <= before


def children():
    """The processes below this one, the spares that wait aside."""
    return {process.pid for process in psutil.Process().children(recursive=True)} - set(processes.waiting_spares())


def test_a_throttled_wire_between_spares():
    """The same bookings as between forked ranks: a ring of 2 sends each half once, twice over."""

    def ring():
        tensor = torch.ones(250_000)
        dist.barrier()
        begin = time.monotonic()
        ring_all_reduce(tensor)
        return time.monotonic() - begin, tensor[0].item()

    results = launch(ring, world_size=2, link=Link("20Mbit", mode="wire"))
    assert [value for _, value in results] == [2.0, 2.0]
    floor = 2 * 500_000 * 8 / 20e6
    assert all(seconds >= 0.95 * floor for seconds, _ in results), "the wire was not throttled"


def test_links_say_what_they_are():
    """Virtual hosts cannot be entered by a process that runs already: they are refused, and "auto" is the wire."""
    assert Link("20Mbit").mode == "wire" and not Link("20Mbit").carries_torch
    with pytest.raises(LinkError, match=r"ranks are not forked here.*use mode="):
        Link("20Mbit", mode="hosts")


def test_the_pool_refills_within_its_bounds_and_takes_what_it_has(monkeypatch):
    launch(os.getpid, world_size=2)
    waiting = set(processes.waiting_spares())
    assert len(waiting) == 2
    assert set(launch(os.getpid, world_size=2)) == waiting, "the second launch took the spares that were waiting"
    monkeypatch.setattr(processes, "free_memory", lambda: 2 * processes.SPARE_MEMORY)
    launch(os.getpid, world_size=2)
    assert len(processes.waiting_spares()) == 1, "at most half of the free memory"


def test_doctor_shows_the_spares(monkeypatch):
    launch(os.getpid, world_size=2)
    assert re.match(r"warm spares, \d+ at most, 0\.3 GiB each", doctor.how_ranks_start())
    assert re.search(r"; [1-9]\d* run now with \d\.\d GiB$", doctor.how_ranks_start())
    monkeypatch.setenv("DDP_COURSE_START", "fork")
    assert doctor.how_ranks_start().startswith("forked from a server")


def test_a_process_in_a_session_of_its_own_ends_with_its_launch():
    def leaves_something(ends):
        left = subprocess.Popen(["sleep", "300"], start_new_session=True).pid
        print(left)
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        return left

    (left,) = launch(leaves_something, False, world_size=1)
    assert not runs(left)
    printed = []
    with pytest.raises(RankError):
        payload = launching.pack_call(leaves_something, (True,), {})
        launching.run_ranks(payload, 1, "cpu", 60, None, False, lambda *line: printed.append(line[-1]))
    deadline = time.monotonic() + 10
    while runs(int(printed[0])):  # its rank was gone before
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid):
    """Whether a process is there, and not only waiting to be reaped."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_spares_end_with_a_caller_that_was_killed():
    source = (
        "from ddp_course import launch; import os, signal\n"
        "pids = launch(os.getpid, world_size=2)\n"
        "from ddp_course.running.launching import processes\n"
        "print(*processes.waiting_spares(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert ended.returncode == -signal.SIGKILL and len(pids) == 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not alive


def test_spares_that_cannot_start_are_told(monkeypatch, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\necho this Python is broken >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    processes.stop()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "python"))
        with pytest.raises(LaunchError, match=r"(?s)could not be started.*this Python is broken"):
            launch(os.getpid, world_size=2)
    processes.stop()


@pytest.mark.parametrize("platform, chosen", [("darwin", "spawn"), ("linux", "fork")])
def test_which_systems_fork(monkeypatch, platform, chosen):
    monkeypatch.delenv("DDP_COURSE_START")
    monkeypatch.setattr(sys, "platform", platform)
    assert setting.start_method() == chosen


def test_windows_is_sent_to_wsl(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(LaunchError, match="WSL 2"):
        launch(os.getpid, world_size=1)


def test_an_unknown_way_to_start_is_refused(monkeypatch):
    monkeypatch.setenv("DDP_COURSE_START", "forkserver")
    with pytest.raises(ValueError, match='DDP_COURSE_START is "forkserver"; choose fork or spawn'):
        launch(os.getpid, world_size=1)
