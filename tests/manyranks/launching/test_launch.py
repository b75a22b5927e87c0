"""`launch` itself: results, arguments, limits, and what ranks see.

Also what happens when its processes are killed, and what is left of them.
"""

import functools
import importlib
import io
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from launch_faults import HEADER
from processes import still_running
from soak.launches import FROM_OUTSIDE, attempt

from manyranks import Device, Link, launch
from manyranks.errors import LaunchError
from manyranks.launching import bar, inbox, server_handle, setting

SOAK = Path(__file__).parents[2] / "soak"


def pid_and_rank():
    return os.getpid(), dist.get_rank()


def reduced(tensor):
    dist.all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_results_come_in_rank_order(world_size):
    offset = 10
    results = launch(
        lambda a, b: (
            dist.get_rank() + offset,
            a * b,
            reduced(torch.tensor(2.0 ** dist.get_rank())),
        ),
        3,
        b="x",
        world_size=world_size,
    )
    assert results == [
        (rank + 10, "xxx", torch.tensor(2.0**world_size - 1)) for rank in range(world_size)
    ]


def test_half_a_gigabyte_in_and_out():
    large = torch.arange(500 * 1000 * 1000 // 8)
    last = launch(
        lambda tensor: tensor if dist.get_rank() == 1 else tensor.sum().item(),
        large,
        world_size=2,
    )
    assert last[0] == large.sum().item()
    assert torch.equal(last[1], large)


def rank_with_dynamo():
    return "torch._dynamo" in sys.modules


@pytest.mark.parametrize(
    ("caller_has_it", "options"),
    [(False, {}), (True, {}), (False, {"device": Device("1GFLOP/s")})],
)
def test_what_optimizers_load_is_loaded_once_and_not_in_every_rank(
    monkeypatch, caller_has_it, options
):
    """The server loads such modules before the second launch.

    It does so before the first if the caller has made an optimizer; if the ranks are known to
    compute, the agent does.
    """
    server_handle.use_server(None)
    importlib.import_module("torch._dynamo")
    with monkeypatch.context() as patched:
        if not caller_has_it:
            patched.delitem(sys.modules, "torch._dynamo")
        found = [launch(rank_with_dynamo, world_size=1, **options) for _ in range(2)]
    assert found == [[caller_has_it or bool(options)], [True]]


def test_what_cannot_be_loaded_ahead_is_no_reason_to_refuse_a_launch(monkeypatch):
    """Dynamo cannot be loaded where the folder of its cache belongs to somebody else."""
    server_handle.use_server(None)
    with monkeypatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/nowhere")
        patched.delitem(sys.modules, "torch._dynamo", raising=False)
        results = [
            (launch(rank_with_dynamo, world_size=1), server_handle.servers[0].process.pid)
            for _ in range(4)
        ]
    server_handle.use_server(None)
    assert results == [([False], results[0][1])] * 4, "one server, which lived on"


def test_nothing_of_cuda_and_no_thread_in_the_server():
    launch(pid_and_rank, world_size=2)
    server = psutil.Process(server_handle.servers[0].process.pid)
    assert server.num_threads() == 1, (
        "a lock that another thread holds at a fork would stay locked in the rank"
    )
    assert not [region.path for region in server.memory_maps() if "libcuda.so" in region.path]


def test_ranks_are_never_forked_from_the_caller(monkeypatch):
    """The caller's CUDA may be initialised, as in a notebook on Colab; no fork could use it."""
    server_handle.use_server(None)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("the caller forks"))
    assert len(set(launch(pid_and_rank, world_size=2))) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launch_from_a_parent_that_has_initialised_cuda():
    torch.ones(1, device="cuda")
    assert launch(
        lambda: torch.ones(2, device=torch.device("cuda:0")).sum().item(), world_size=1
    ) == [2.0]


def test_libraries_keep_quiet(capfd):
    launch(lambda: dist.barrier(dist.new_group([0, 1])), world_size=2)
    assert capfd.readouterr() == ("", "")


def test_the_greeting_of_older_gloo_is_left_out():
    shown = []
    lines = inbox.Lines(shown.append)
    lines.show_lines(
        b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is :"
        b" 1\nhel"
    )
    lines.show_lines(b"lo\n[Gloo] is what I say\n")
    assert shown == ["hello", "[Gloo] is what I say"]


def test_launches_from_two_threads_at_once():
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: launch(lambda: n, world_size=2)}))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [n, n] for n in range(3)}


def test_a_launch_inside_a_rank():
    inner = launch(
        lambda: launch(dist.get_rank, world_size=2) if dist.get_rank() == 0 else None, world_size=2
    )
    assert inner == [[0, 1], None]


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"world_size": 0}, "world size is 0; it must be 1 or more"),
        ({"world_size": -1}, "world size is -1; it must be 1 or more"),
        ({"world_size": "2"}, "world size is '2'; it must be a whole number"),
        ({"world_size": 2.0}, "world size is 2.0; it must be a whole number"),
        # No memory has room for a list of so many ranks.
        ({"world_size": 10**15}, "world size 10{15} does not fit: .*the largest that fits is"),
        ({"timeout": 0}, "timeout is 0; it must be a positive number of seconds"),
        ({"timeout": None}, "timeout is None; it must be a positive number of seconds"),
        ({"timeout": math.inf}, "timeout is inf; it must be a positive number of seconds, at most"),
        ({"timeout": math.nan}, "timeout is nan"),
        ({"device": "tpu"}, 'unknown device "tpu"; choose'),
        ({"device": 3}, 'unknown device "3"; choose'),
        ({"device": "cpu:"}, 'unknown device "cpu:"; choose'),
        ({"link": Link}, r"link is the class Link; it must be one made of it: Link\(…\)"),
        ({"device": Device}, r"device is the class Device; it must be one made of it: Device\(…\)"),
        (
            {"link": "50Mbit"},
            r"link is '50Mbit'; it must be a Link, such as Link\(bandwidth='50Mbit'\)",
        ),
    ],
)
def test_bad_input_is_refused_at_once_and_without_our_own_frames(bad, words):
    with pytest.raises(ValueError, match=words) as raised:
        launch(pid_and_rank, **bad)
    assert [frame.name for frame in raised.traceback][1:] == ["launch"]


LOCK = threading.Lock()


def uses_a_lock():
    return LOCK


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: launch(lambda guard: None, threading.Lock()), "^guard cannot be sent"),
        (
            lambda: launch(uses_a_lock.__class__(uses_a_lock.__code__, {"LOCK": LOCK})),
            "^LOCK cannot be sent",
        ),
        (
            lambda: launch(pid_and_rank()),
            r"launch takes the function itself.*not what it returned: \(",
        ),
        (
            lambda: launch(pid_and_rank, 4),
            "pid_and_rank does not take .*; for 4 ranks write world_size=4",
        ),
        (
            lambda: launch(pid_and_rank, world_size=2, lnik=None),
            "pid_and_rank does not take .*'lnik'; did you mean link, an option of launch\\?",
        ),
        (lambda: launch(train_alone, 0.1, False, 3), "train_alone does not take .*too many"),
    ],
)
def test_a_call_that_cannot_work_is_refused_before_anything_starts(call, words, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(TypeError, match=words):
        call()


def with_its_rank(function):
    """Return the function without its argument, which is the rank."""

    @functools.wraps(function)
    def call():
        return function(dist.get_rank())

    return call


def test_a_decorator_may_add_an_argument():
    assert launch(with_its_rank(lambda rank: rank**2), world_size=3) == [0, 1, 4]


def train_alone(lr=0.1, together=False):
    """Train one step of a model that differs from rank to rank."""
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr)
    model(torch.ones(2, 3)).sum().backward()
    if together:
        dist.all_reduce(model.weight.grad)
    optimizer.step()


@pytest.mark.parametrize(
    "args, size, words",
    [
        ((), {"world_size": 2}, "launch: no collective ran, so these are 2 models"),
        ((0.1, True), {"world_size": 2}, None),
        ((), {"world_size": 1}, None),
        ((1,), {}, "launch: 1 is the lr of train_alone; for 1 ranks write world_size=1"),
    ],
)
def test_what_looks_like_success_and_is_none_is_told(args, size, words, capfd):
    launch(train_alone, *args, **size)
    out, err = capfd.readouterr()
    if words:
        assert words in err
    else:
        assert out == err == ""


class Narrow(io.StringIO):
    """A stream that shows ASCII only, as an old terminal."""

    encoding = "ascii"

    def write(self, text):
        return super().write(text.encode("ascii").decode())


class Closed(io.StringIO):
    """A stream to which nobody listens any more."""

    def write(self, text):
        raise BrokenPipeError("closed")


@pytest.mark.parametrize(
    "stream, shown",
    [
        (Narrow(), "[rank 0] \\xe9\n"),
        (Closed(), ""),
        (None, None),
        (io.StringIO(), "[rank 0] é\n"),
    ],
)
def test_what_a_rank_prints_never_costs_the_result(monkeypatch, stream, shown):
    monkeypatch.setattr(sys, "stdout", stream)
    assert launch(lambda: print("é") or 7, world_size=1) == [7]
    assert stream is None or stream.getvalue() == shown


def test_output_without_line_ends_is_shown_in_pieces():
    shown = []
    piece = b"x" * (1 << 16)
    lines = inbox.Lines(shown.append)
    for _ in range(160):
        lines.show_lines(piece)
    lines.show_lines(b"end\n")
    assert sum(map(len, shown)) == 160 * len(piece) + 3
    assert len(shown) == 10


def test_a_network_card_set_for_other_machines_is_put_right(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    assert launch(lambda: reduced(torch.ones(1)).item(), world_size=2) == [2.0] * 2


def test_a_world_too_large_is_refused_with_the_largest_that_fits(monkeypatch):
    monkeypatch.setattr(setting, "free_memory", lambda: 1 << 30)
    with pytest.raises(ValueError, match=r"1000 does not fit: .* the largest that fits is 15$"):
        launch(pid_and_rank, world_size=1000)
    setting.check_world_size(16, 0)
    with pytest.raises(ValueError, match=r"the largest that fits is 3$"):
        setting.check_world_size(4, 256 << 20)
    with pytest.raises(ValueError, match=r"about 1,024 MiB .* the largest that fits is 1$"):
        setting.check_world_size(2, 0, on_gpus=True)
    monkeypatch.setattr(setting, "free_memory", lambda: 1 << 50)
    with pytest.raises(ValueError, match=r"open files.*the largest that fits is"):
        launch(pid_and_rank, world_size=1_000_000)


@pytest.mark.parametrize("name", FROM_OUTSIDE)
def test_what_ends_a_launch_from_outside_is_told_and_takes_every_rank_along(name):
    names = {"__name__": "__main__"}
    fault = FROM_OUTSIDE[name]
    exec(HEADER, names)
    launch(pid_and_rank, world_size=1)
    below = psutil.Process(server_handle.servers[0].process.pid)
    error, message = attempt(fault, 3, names, random.Random(0))
    assert error == fault.error, message
    assert re.search(fault.pattern, message), message
    assert not below.is_running() or not below.children(), "ranks are left"


def pid_of_server():
    """Return the process that has just served a launch."""
    assert [rank for _, rank in launch(pid_and_rank, world_size=2)] == [0, 1]
    return server_handle.servers[0].process.pid


def test_a_server_that_was_killed_or_left_idle_is_replaced(monkeypatch):
    killed = pid_of_server()
    os.kill(killed, signal.SIGKILL)
    assert not still_running([killed])
    monkeypatch.setenv("MANYRANKS_IDLE", "1")
    idle = pid_of_server()
    assert not still_running([idle])
    monkeypatch.setenv("MANYRANKS_IDLE", "900")
    assert len({killed, idle, pid_of_server()}) == 3


def leave_children():
    """Leave a child in the rank's process group, one in a session of its own, and a fork."""
    children = [
        subprocess.Popen(["sleep", "300"], start_new_session=own).pid for own in (False, True)
    ]
    child = os.fork()
    if child == 0:
        time.sleep(300)
        os._exit(0)
    print("children", *children, child, flush=True)
    time.sleep(300)


def test_children_of_ranks_go_with_the_server(capfd):
    launch(pid_and_rank, world_size=1)

    def attack():
        children = None
        printed = ""
        while children is None:
            time.sleep(0.05)
            printed += capfd.readouterr().out
            children = re.search(r"children (\d+) (\d+) (\d+)\n", printed)
        pids.extend(map(int, children.groups()))
        os.kill(server_handle.servers[0].process.pid, signal.SIGKILL)

    pids = []
    attacker = threading.Thread(target=attack)
    attacker.start()
    with pytest.raises(LaunchError, match=r"the launch server was killed by SIGKILL.*memory"):
        launch(leave_children, world_size=1)
    attacker.join()
    assert len(pids) == 3
    assert not still_running(pids)


EDITS_RANK = """
from pathlib import Path
from manyranks import launch

def read():
    from manyranks.launching import rank
    return rank.VALUE

module = Path(__file__).with_name("manyranks") / "launching" / "rank.py"
for value in (1, 22):
    module.write_text(module.read_text() + f"\\nVALUE = {value}\\n")
    print(launch(read, world_size=2))
"""


def test_edited_package_files_are_seen(tmp_path):
    shutil.copytree(Path(server_handle.__file__).parents[1], tmp_path / "manyranks")
    script = tmp_path / "script.py"
    script.write_text(EDITS_RANK)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [sys.executable, script],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert ended.stdout.split("\n")[:2] == ["[1, 1]", "[22, 22]"]


SLEEPS_ON_RANKS = """
import time
from manyranks import launch

def sleep():
    print("up")
    time.sleep(99)

launch(sleep)
"""


def test_interrupted_script_leaves_nothing():
    script = subprocess.Popen(
        [sys.executable, "-c", SLEEPS_ON_RANKS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "up" in script.stdout.readline()
    below = psutil.Process(script.pid).children(recursive=True)
    assert len(below) >= 6
    script.send_signal(signal.SIGINT)
    _, errors = script.communicate(timeout=600)
    assert "KeyboardInterrupt" in errors
    assert not still_running([process.pid for process in below])


def test_a_process_in_a_session_of_its_own_ends_with_its_launch():
    """The process ends after its rank has gone, with a child of its own; other launches go on."""
    source = (
        "import os, subprocess, sys; print(os.getpid(), subprocess.Popen(['sleep', '300']).pid,"
        " flush=True)"
    )

    def leaves_something():
        if dist.get_rank() == 1:
            command = [sys.executable, "-c", f"{source}; import time; time.sleep(300)"]
            left = subprocess.Popen(
                command, start_new_session=True, stdout=subprocess.PIPE, text=True
            )
            return [int(pid) for pid in left.stdout.readline().split()]

    beside = threading.Thread(target=launch, args=(time.sleep, 3), kwargs={"world_size": 2})
    beside.start()
    for _ in range(2):
        _, pids = launch(leaves_something, world_size=2)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
    beside.join()


def test_progress_is_one_bar_fed_by_rank_0(capfd):
    def train(steps):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        for _ in range(steps):
            optimizer.step()
        print("trained")

    launch(train, 30, world_size=2, progress=30)
    printed = capfd.readouterr()
    assert "30/30" in printed.err
    assert printed.err.count("\n") == 1
    assert sorted(printed.out.split("\n")) == ["", "[rank 0] trained", "[rank 1] trained"]


def test_a_bar_is_there_before_the_first_step_and_its_seconds_go_on(capfd, monkeypatch, tmp_path):
    seen = tmp_path / "seen"

    class Terminal(io.StringIO):
        def write(self, text):
            if re.search(r"0/1 \[00:(?!00)", text):
                seen.touch()
            return super().write(text)

    def train():
        while not seen.exists():
            time.sleep(0.05)
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()

    monkeypatch.setattr(bar, "DRAWING_SECONDS", 0.2)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Terminal())
        launch(train, world_size=1, progress=1)
        drawn = sys.stderr.getvalue()
    assert drawn.count("0/1") > 3
    assert "1/1" in drawn


@pytest.mark.parametrize(
    "late_seconds, looks, shown", [(60.0, True, ""), (0.3, False, ""), (0.3, True, "runs: 00:0")]
)
def test_a_long_launch_without_a_bar_shows_its_seconds_to_whoever_looks(
    late_seconds, looks, shown, capfd, monkeypatch
):
    monkeypatch.setattr(bar, "DRAWING_SECONDS", 0.2)
    monkeypatch.setattr(bar, "LATE_SECONDS", late_seconds)
    monkeypatch.setattr(bar, "somebody_looks", lambda: looks)
    launch(time.sleep, 1, world_size=1)
    drawn = capfd.readouterr().err
    assert shown in drawn
    assert bool(shown) == bool(drawn)


def test_random_faults_leave_nothing_behind():
    ended = subprocess.run(
        [sys.executable, SOAK / "launches.py", "--count", "40"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_function_of_a_cell_keeps_the_name_of_its_file(tmp_path):
    """Messages name lines by it, and some versions of cloudpickle leave it out."""
    path = tmp_path / "cell.py"
    names = {"__name__": "__main__"}
    text = "def outer():\n    def inner(): pass\n    return inner.__code__.co_filename\n"
    exec(compile(text, path, "exec"), names)
    assert launch(names["outer"], world_size=2) == [str(path)] * 2
