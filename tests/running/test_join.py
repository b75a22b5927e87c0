"""Ranks that joined a job of torchrun's end with it."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

RANK = """
import os, time
from ddp_course.running.join import join
rank, _ = join("cpu")
print("pid", os.getpid(), flush=True)
time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system kills them on Linux; a thread does elsewhere")
def test_ranks_end_when_their_torchrun_is_killed(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed torchrun cannot tidy up
    torchrun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ)
    ranks = []
    while len(ranks) < 2:
        line = torchrun.stdout.readline()
        assert line, "torchrun ended"
        ranks += [psutil.Process(int(line.split()[1]))] if line.startswith("pid ") else []
    os.kill(torchrun.pid, signal.SIGKILL)
    torchrun.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    torchrun.stdout.close()
    for rank in alive:
        rank.kill()
    assert not alive
