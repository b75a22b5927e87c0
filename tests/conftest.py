"""Every test session ends as it began: no process, no temporary file, no open launch."""

import os
import tempfile
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def descendants():
    """Command lines of all processes that this one started, by pid, zombies aside."""
    alive = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                alive[process.pid] = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return alive


@pytest.fixture(autouse=True, scope="module")
def no_leftovers():
    """After each test file nothing runs but the launcher's preloaded server, and no file of ours is left behind."""
    before = {path.name for path in Path(tempfile.gettempdir()).glob("ddp_course*")}
    yield
    leftovers = {pid: line for pid, line in descendants().items() if "server.py" not in line}
    for pid in leftovers:
        try:
            psutil.Process(pid).wait(5)  # a process that is on its way out may finish
        except (psutil.NoSuchProcess, psutil.TimeoutExpired):
            continue
    leftovers = {pid: line for pid, line in descendants().items() if pid in leftovers}
    assert not leftovers, f"processes left behind: {leftovers}"
    after = {path.name for path in Path(tempfile.gettempdir()).glob("ddp_course*")}
    assert not after - before, f"files left behind: {after - before}"
