"""Ranks that joined a job of torchrun's end with it, and their store is for this machine."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch.distributed as dist
from processes import still_running

from manyranks.errors import LaunchError
from manyranks.joining import join

JOINS_LATE = """
import time
time.sleep(3)  # as if torch were imported from a cold disk
from manyranks.joining.join import join
join("cpu")
open("joined", "w").close()
time.sleep(300)
"""
TRAINS = """
from manyranks.joining.parent import end_with_torchrun
end_with_torchrun()
open("begun", "a").close()
import torch, torch.distributed as dist
from manyranks import join
join("cpu")
gradient = torch.ones(1000)
while True:
    dist.all_reduce(gradient)
    open("trained", "a").close()
"""
LISTENS = """
import psutil
from manyranks.joining.join import join
join("cpu")
connections = psutil.Process().net_connections()
print("LISTENS", *{c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN})
"""


def torchrun(folder, *program):
    """Return the process of a torchrun with two ranks on this machine, and its environment."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        *program,
    ]
    environ = {**os.environ, "TMPDIR": str(folder)}  # A killed torchrun cannot tidy up.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, cwd=folder
    )


@pytest.mark.skipif(
    sys.platform != "linux", reason="the system kills them on Linux; a thread does elsewhere"
)
@pytest.mark.parametrize(
    "program, seen",
    [(TRAINS, "begun"), (TRAINS, "trained"), (JOINS_LATE, "")],
    ids=["while they import", "in training", "before they ask for it"],
)
def test_ranks_end_when_their_torchrun_is_killed(tmp_path, program, seen):
    (tmp_path / "program.py").write_text(program)
    job = torchrun(tmp_path, "program.py")
    ranks = []
    while len(ranks) < 2 or not (tmp_path / seen).exists():
        assert job.poll() is None, "torchrun ended"
        ranks = psutil.Process(job.pid).children()
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    alive = still_running([rank.pid for rank in ranks])
    job.stdout.close()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive
    assert not (tmp_path / "joined").exists(), "it joined a job that had ended"


def test_the_store_of_a_single_machine_is_not_reached_from_others(tmp_path):
    (tmp_path / "listens.py").write_text(LISTENS)
    printed, _ = torchrun(tmp_path, "listens.py").communicate(timeout=600)
    # Two ranks print into one pipe, and their words may be mixed.
    assert printed.count(b"LISTENS") == 2
    assert re.findall(rb"\d+(?:\.\d+){3}|::", printed) == [b"127.0.0.1"] * 2, printed


def test_two_steps_of_a_slurm_job_have_two_ports_and_do_not_join_each_other(monkeypatch):
    task = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "123"}
    ports = set()
    for step in ("0", "1", "2"):
        for restart in ("0", "1"):
            place = {**task, "SLURM_STEP_ID": step, "SLURM_RESTART_COUNT": restart}
            ports.add(join.from_slurm(place)["MASTER_PORT"])
    assert len(ports) == 6
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_PORT", "20123")
    for name, value in {**task, "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    join.check_step(store, 0)
    join.check_step(store, 1)
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    with pytest.raises(LaunchError, match=r"20123 belongs to step 123\.0\.0 of Slurm"):
        join.check_step(store, 1)
