"""Ranks that are started anew, for systems where forking is unsafe; here they are asked for."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from processes import still_running
from rings import ring_all_reduce

from manyranks import Link, launch
from manyranks.errors import EmulationError, LaunchError
from manyranks.launching import server_handle, setting


@pytest.fixture(autouse=True)
def spawn(monkeypatch):
    """Spawn instead of forking, and see that no rank is left."""
    monkeypatch.setenv("MANYRANKS_START", "spawn")
    before = children()
    yield
    assert children() - before <= {server.process.pid for server in server_handle.servers}


@pytest.fixture(autouse=True, scope="module")
def own_server():
    """A server that has no torch: its ranks cannot have any from there."""
    server_handle.use_server(None)
    yield
    server_handle.use_server(None)


def children():
    """Return the processes below this one."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_virtual_time_between_new_processes():
    """Bookings are those between forked ranks: a ring of 2 sends each half once, twice over."""

    def ring():
        tensor = torch.ones(250_000)
        ring_all_reduce(tensor)
        return time.perf_counter(), tensor[0].item()

    results = launch(ring, world_size=2, link=Link("20Mbit"))
    assert results == [(2 * 500_000 * 8 / 20e6, 2.0)] * 2


def test_virtual_hosts_cannot_be_entered_by_a_new_process():
    assert Link("20Mbit").mode == "virtual"
    with pytest.raises(EmulationError, match=r"ranks are not forked here.*use mode="):
        Link("20Mbit", mode="hosts")


def test_no_process_that_has_torch_is_forked():
    first, second = (launch(os.getpid, world_size=2) for _ in range(2))
    assert len({*first, *second}) == 4
    server = psutil.Process(server_handle.servers[0].process.pid)
    assert not [region for region in server.memory_maps() if "libtorch" in region.path]


def test_an_environment_that_no_new_program_can_have_reaches_the_ranks(monkeypatch):
    server_handle.use_server(None)
    monkeypatch.setenv("LONG", "x" * 200_000)
    assert launch(lambda: len(os.environ["LONG"]), world_size=2) == [200_000] * 2


def test_ranks_end_with_a_caller_that_was_killed():
    """Server, agent and ranks end, and what a rank has started goes with them."""
    source = (
        "import os, signal, subprocess, time\nimport torch.distributed as dist\nfrom manyranks"
        " import launch\ndef rank(caller):\n    print(os.getpid(), subprocess.Popen(['sleep',"
        " '300'], start_new_session=True).pid, flush=True)\n    dist.barrier()\n    time.sleep(1)\n"
        "    os.kill(caller, signal.SIGKILL)\n    time.sleep(300)\nlaunch(rank, os.getpid(),"
        " world_size=2)"
    )
    ended = subprocess.run(
        [sys.executable, "-u", "-c", source],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    pids = [int(pid) for line in ended.stdout.splitlines() for pid in line.split()[2:]]
    assert ended.returncode == -signal.SIGKILL
    assert len(pids) == 4
    assert not still_running(pids)


def test_a_python_that_cannot_start_is_told(monkeypatch, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\necho this Python is broken >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    server_handle.use_server(None)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "python"))
        with pytest.raises(
            LaunchError, match=r"(?s)the launch server exited with code 1.*this Python is broken"
        ):
            launch(os.getpid, world_size=2)
    server_handle.use_server(None)


@pytest.mark.parametrize("platform, chosen", [("darwin", "spawn"), ("linux", "fork")])
def test_which_systems_fork(monkeypatch, platform, chosen):
    monkeypatch.delenv("MANYRANKS_START")
    monkeypatch.setattr(sys, "platform", platform)
    assert setting.start_method() == chosen


def test_windows_is_sent_to_wsl():
    as_windows = "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None"
    program = f"{as_windows}; from manyranks import launch"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "LaunchError: ranks need Linux or macOS: on Windows start" in ended.stderr


def test_an_unknown_way_to_start_is_refused(monkeypatch):
    monkeypatch.setenv("MANYRANKS_START", "forkserver")
    with pytest.raises(ValueError, match='MANYRANKS_START is "forkserver"; choose fork or spawn'):
        launch(os.getpid, world_size=1)
