"""`launch` itself: results, arguments, limits, what ranks see, and what happens when its processes are killed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.errors import LaunchError, RankError
from ddp_course.running import launch as launching
from ddp_course.running import limits, rank, run

pytestmark = pytest.mark.alone

SOAK = Path(__file__).with_name("soak")


def pid_and_rank():
    return os.getpid(), dist.get_rank()


def reduced(tensor):
    dist.all_reduce(tensor)
    return tensor


def launch_processes():
    """The agents and the ranks of this process's launch server; none if some end while we look."""
    with suppress(psutil.NoSuchProcess):
        agents = psutil.Process(launching._server.process.pid).children()
        return agents, [rank for agent in agents for rank in agent.children()]
    return [], []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_results_come_in_rank_order(world_size):
    offset = 10
    results = launch(
        lambda a, b: (dist.get_rank() + offset, a * b, reduced(torch.tensor(2.0 ** dist.get_rank()))),
        3,
        b="x",
        world_size=world_size,
    )
    assert results == [(rank + 10, "xxx", torch.tensor(2.0**world_size - 1)) for rank in range(world_size)]


def test_half_a_gigabyte_in_and_out():
    bytes_500 = torch.arange(500 * 1000 * 1000 // 8)
    last = launch(lambda tensor: tensor if dist.get_rank() == 1 else tensor.sum().item(), bytes_500, world_size=2)
    assert last[0] == bytes_500.sum().item()
    assert torch.equal(last[1], bytes_500)


def test_threads_follow_cores_and_world_size():
    cores = limits.usable_cores()
    for world_size in (1, 4):
        expected = max(1, cores // world_size)
        assert launch(torch.get_num_threads, world_size=world_size) == [expected] * world_size


def test_nothing_of_cuda_and_no_thread_in_the_server():
    launch(pid_and_rank, world_size=2)
    server = psutil.Process(launching._server.process.pid)
    assert server.num_threads() == 1, "a lock that another thread holds at a fork would stay locked in the rank"
    assert not [region.path for region in server.memory_maps() if "libcuda.so" in region.path]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launch_from_a_parent_that_has_initialised_cuda():
    torch.ones(1, device="cuda")
    assert launch(lambda: torch.ones(2, device=torch.device("cuda:0")).sum().item(), world_size=1) == [2.0]


def blocked_endings(process):
    """Which of the signals that end a process are blocked in it."""
    status = Path(f"/proc/{process}/status").read_text()
    mask = int(re.search(r"SigBlk:\s*(\w+)", status).group(1), 16)
    return {number for number in rank.ENDINGS if mask >> (number - 1) & 1}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_is_born_with_its_endings_blocked_and_unblocks_them():
    """One that came before the rank could obey would be lost, and the other ranks' end would take half a minute."""
    before = blocked_endings("self")
    for own, agents in launch(lambda: (blocked_endings("self"), blocked_endings(os.getppid())), world_size=2):
        assert own == set() and agents == set(rank.ENDINGS)
    assert blocked_endings("self") == before


def test_an_ending_that_came_early_is_obeyed():
    source = (
        "import os, signal, time\nfrom ddp_course.running import rank\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, rank.ENDINGS)\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "rank.die_with(os.getppid())\ntime.sleep(30)"
    )
    assert subprocess.run([sys.executable, "-c", source], timeout=25, check=False).returncode == -signal.SIGTERM


def test_libraries_keep_quiet(capfd):
    launch(lambda: dist.barrier(dist.new_group([0, 1])), world_size=2)
    assert capfd.readouterr() == ("", "")


def test_the_greeting_of_older_gloo_is_left_out():
    shown = []
    lines = run.Lines(None, shown.append)
    lines.feed(b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\nhel")
    lines.feed(b"lo\n[Gloo] is what I say\n")
    assert shown == ["hello", "[Gloo] is what I say"]


def test_launches_from_two_threads_at_once():
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: launch(lambda: n, world_size=2)})) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [n, n] for n in range(3)}


def test_a_launch_inside_a_rank():
    inner = launch(lambda: launch(dist.get_rank, world_size=2) if dist.get_rank() == 0 else None, world_size=2)
    assert inner == [[0, 1], None]


@pytest.mark.parametrize("bad", [{"world_size": 0}, {"world_size": -1}, {"timeout": 0}, {"device": "tpu"}])
def test_bad_input_is_refused_before_anything_starts(bad):
    with pytest.raises(ValueError, match=r"world size|timeout|device"):
        launch(pid_and_rank, **bad)


def test_what_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match="cannot be sent"):
        launch(lambda lock: None, threading.Lock())


def test_a_world_too_large_is_refused_with_the_largest_that_fits(monkeypatch):
    monkeypatch.setattr(limits, "free_memory", lambda: 1 << 30)
    with pytest.raises(ValueError, match=r"1000 does not fit: .* the largest that fits is 15$"):
        launch(pid_and_rank, world_size=1000)
    limits.check_world_size(16, 0, on_gpu=False)
    with pytest.raises(ValueError, match=r"the largest that fits is 3$"):
        limits.check_world_size(4, 256 << 20, on_gpu=False)
    monkeypatch.setattr(limits, "free_memory", lambda: 1 << 50)
    with pytest.raises(ValueError, match=r"open files.*the largest that fits is"):
        launch(pid_and_rank, world_size=1_000_000)


def killed_while_running(choose, number=signal.SIGKILL):
    """Launch something endless, send a signal to the process that `choose(agents, ranks)` names; what came of it."""
    found = []

    def attack():
        while not found:
            agents, ranks = launch_processes()
            victim = choose(agents, ranks)
            if victim:
                found.extend([*agents, *ranks])
                os.kill(victim.pid, number)
            time.sleep(0.001)

    launch(pid_and_rank, world_size=1)
    attacker = threading.Thread(target=attack)
    attacker.start()
    begin = time.monotonic()
    try:
        launch(time.sleep, 100, world_size=4)
    except Exception as error:
        return error, time.monotonic() - begin, found
    finally:
        found.append(None)
        attacker.join()
    raise AssertionError("the launch went on")


def test_a_rank_killed_at_start_up():
    error, seconds, _ = killed_while_running(lambda agents, ranks: ranks[0] if ranks else None)
    assert isinstance(error, RankError)
    assert "killed: by SIGKILL" in str(error) and error.rank in range(4)
    assert seconds < 10


@pytest.mark.parametrize("victim", ["agent", "server"])
def test_every_rank_goes_with_the_agent_and_with_the_server(victim):
    def choose(agents, ranks):
        processes = {"agent": agents[:1], "server": [psutil.Process(launching._server.process.pid)]}
        return processes[victim][0] if len(ranks) == 4 else None

    error, seconds, found = killed_while_running(choose)
    assert isinstance(error, LaunchError)
    _, alive = psutil.wait_procs(found[:-1], timeout=5)
    assert not alive
    assert seconds < 10


def test_the_server_is_started_anew_when_it_was_killed():
    launch(pid_and_rank, world_size=2)
    first = launching._server.process.pid
    os.kill(first, signal.SIGKILL)
    assert [rank for _, rank in launch(pid_and_rank, world_size=2)] == [0, 1]
    assert launching._server.process.pid != first


def test_edited_package_files_are_seen(tmp_path):
    shutil.copytree(Path(launching.__file__).parents[1], tmp_path / "ddp_course")
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom ddp_course import launch\n"
        "def read():\n    from ddp_course.running import rank\n    return rank.VALUE\n"
        "module = Path(__file__).with_name('ddp_course') / 'running' / 'rank.py'  # what every rank loads\n"
        "for value in (1, 22):\n"
        "    module.write_text(module.read_text() + f'\\nVALUE = {value}\\n')\n"
        "    print(launch(read, world_size=2))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [sys.executable, script], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.split("\n")[:2] == ["[1, 1]", "[22, 22]"]


def test_interrupted_script_leaves_nothing():
    source = "import sys, time\nfrom ddp_course import launch\nlaunch(lambda: (print('up'), time.sleep(99)))"
    script = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "up" in script.stdout.readline()
    below = psutil.Process(script.pid).children(recursive=True)
    assert len(below) >= 6
    script.send_signal(signal.SIGINT)
    _, errors = script.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not alive


CALLER_KILLED = """
import os, signal
from ddp_course import launch
from ddp_course.running import run

def killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

run.shutil.rmtree = killed  # what a caller does last, when the server holds the launch for ended
launch(lambda: None, world_size=2)
"""


def test_the_folder_of_a_launch_goes_when_its_caller_is_killed_at_the_end(tmp_path):
    """As when a notebook's kernel is restarted in the middle of a launch: interrupted first, killed a moment later."""
    (tmp_path / "temporary").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    ended = subprocess.run([sys.executable, "-c", CALLER_KILLED], env=environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not list((tmp_path / "temporary").glob("ddp_course_*"))


def test_progress_is_one_bar_fed_by_rank_0(capfd):
    def train(steps):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        for _ in range(steps):
            optimizer.step()
        print("trained")

    launch(train, 30, world_size=2, progress=30)
    printed = capfd.readouterr()
    assert "30/30" in printed.err and printed.err.count("\n") == 1
    assert sorted(printed.out.split("\n")) == ["", "[rank 0] trained", "[rank 1] trained"]


def test_random_faults_leave_nothing_behind():
    ended = subprocess.run(
        [sys.executable, SOAK / "launches.py", "--count", "40"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_several_courses_at_once():
    ended = subprocess.run(
        [sys.executable, SOAK / "courses.py", "--processes", "3", "--count", "3"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
