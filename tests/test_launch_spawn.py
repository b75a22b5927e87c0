"""The fallback for systems that cannot fork, tried here by asking for it."""

import os
import re
import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_course import launch, ring_all_reduce
from ddp_course.errors import LaunchTimeout, RankError


@pytest.fixture(autouse=True)
def spawn(monkeypatch):
    """Spawn instead of forking, and see that no process is left."""
    monkeypatch.setenv("DDP_COURSE_START", "spawn")
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_results_and_prints(capsys):
    offset = 10

    def summed():
        tensor = torch.full((3,), float(dist.get_rank() + offset))
        ring_all_reduce(tensor)
        print("sum is ready")
        return tensor.tolist()

    assert launch(summed, world_size=2) == [[21.0] * 3] * 2
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] sum is ready", "[rank 1] sum is ready"]


def test_errors_name_the_culprit():
    def fails():
        if dist.get_rank() == 1:
            raise KeyError("nowhere")
        dist.barrier()

    with pytest.raises(RankError, match=r"(?s)rank 1: KeyError: 'nowhere'.*raise KeyError") as caught:
        launch(fails, world_size=2)
    assert "spawned.py" not in str(caught.value)


def test_a_killed_rank_is_named():
    def dies():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match="rank 1: killed: by SIGKILL"):
        launch(dies, world_size=2)


def test_timeouts_show_where_each_rank_was():
    def waits():
        if dist.get_rank() == 1:
            time.sleep(100)
        ring_all_reduce(torch.ones(8))

    with pytest.raises(LaunchTimeout) as caught:
        launch(waits, world_size=2, timeout=2)
    assert re.search(r"(?s)rank 0: .*ring_all_reduce of float32 \[8\].*time\.sleep\(100\)", str(caught.value))
