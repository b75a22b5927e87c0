"""However a launch over emulated links ends, nothing of it stays.

No process, no namespace, no interface and no file is left.
"""

import contextlib
import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from glob import glob
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import manyranks
from manyranks import launch, links
from manyranks.errors import LaunchError
from manyranks.links import Link

HOSTS = pytest.mark.skipif(bool(links.available()["hosts"]), reason="no virtual hosts here")


def me_and_mine():
    """Return this rank's process, those that it depends on, and their network namespaces."""
    me = psutil.Process()
    agent = psutil.Process(os.getppid())
    return {
        "rank": me.pid,
        "agent": agent.pid,
        "server": agent.ppid(),
        "network": os.stat("/proc/self/ns/net").st_ino,
        "agents_network": os.stat(f"/proc/{agent.pid}/ns/net").st_ino,
    }


def stay(folder):
    """Write down who and where this rank is, then wait to be killed, or for a file.

    The file says that it may end.
    """
    partial = Path(folder, f"{dist.get_rank()}.partial")
    partial.write_text(json.dumps(me_and_mine()))
    dist.barrier()
    partial.rename(Path(folder, f"{dist.get_rank()}.json"))
    while not Path(folder, "end").exists():
        time.sleep(0.02)


def wait_for(condition, seconds=300):
    """Wait until `condition()` holds; return False if it does not come true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def ranks_up(folder, world_size):
    """Return what the ranks wrote down."""
    files = [Path(folder, f"{rank}.json") for rank in range(world_size)]
    assert wait_for(lambda: all(file.exists() for file in files))
    return [json.loads(file.read_text()) for file in files]


def holders(networks):
    """Return everything in /proc that keeps one of these network namespaces alive.

    These are processes, threads and descriptors.
    """
    names = {f"net:[{network}]" for network in networks}
    holding = []
    for pattern in ("[0-9]*/task/*/ns/net", "[0-9]*/fd/*"):
        # This glob goes on where a process ends while its folder is read; that of Path raises.
        for link in glob(f"/proc/{pattern}"):
            with contextlib.suppress(OSError):
                if os.readlink(link) in names:
                    holding.append(link)
    return holding


def interfaces():
    """Return the interfaces and mounts of this process's own namespaces."""
    return sorted(psutil.net_if_addrs()), Path("/proc/self/mountinfo").read_text()


def check_gone(ranks, also=()):
    """Wait until every process of the launch and all its namespaces have gone."""
    pids = {pid for rank in ranks for pid in (rank["rank"], rank["agent"])} | set(also)
    networks = {rank[key] for rank in ranks for key in ("network", "agents_network")}
    networks.discard(os.stat("/proc/self/ns/net").st_ino)

    def running():
        left = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    left.append(pid)
        return left

    assert wait_for(lambda: not running()), f"processes left: {running()}"
    assert wait_for(lambda: not holders(networks)), f"namespaces held by {holders(networks)}"


@pytest.mark.parametrize(
    "mode, victim",
    [
        *(pytest.param("hosts", who, marks=HOSTS) for who in ("rank", "agent", "server", None)),
        ("virtual", "rank"),
    ],
)
def test_whatever_ends_takes_everything_along(mode, victim, tmp_path):
    before = interfaces()
    errors = []
    link = Link(mode=mode)

    def run():
        try:
            launch(stay, str(tmp_path), world_size=2, device="cpu", link=link)
        except LaunchError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    ranks = ranks_up(tmp_path, 2)
    if mode == "hosts":
        networks = {rank[key] for rank in ranks for key in ("network", "agents_network")}
        assert len(networks) == 3
        assert os.stat("/proc/self/ns/net").st_ino not in networks
        assert holders(networks), "the search must see what is there"
    if victim:
        os.kill(ranks[1][victim], signal.SIGKILL)
    else:
        (tmp_path / "end").touch()
    thread.join(300)
    assert not thread.is_alive(), "the caller must be told of a killed process"
    assert bool(errors) == bool(victim), "the caller must be told of a killed process"
    check_gone(ranks)
    assert interfaces() == before


CALLER = """
import sys
sys.path.insert(0, {tests!r})
from manyranks import launch
from manyranks.links import Link
from test_links_end import stay
launch(stay, sys.argv[1], world_size=2, device="cpu", link=Link(mode=sys.argv[2]))
"""


def start_caller(folder, mode, python=sys.executable, **options):
    """Return a process of its own that launches two ranks which stay."""
    script = Path(folder, "caller.py")
    script.write_text(CALLER.format(tests=str(Path(__file__).parent)))
    return subprocess.Popen([python, str(script), str(folder), mode], **options)


@HOSTS
def test_a_killed_caller_takes_everything_along(tmp_path):
    before = interfaces()
    # The caller's temporary folder, which is empty, stays.
    caller = start_caller(tmp_path, "hosts", env={**os.environ, "TMPDIR": str(tmp_path)})
    ranks = ranks_up(tmp_path, 2)
    caller.kill()
    caller.wait()
    check_gone(ranks, [ranks[0]["server"]])
    assert interfaces() == before


NOBODY = 65534


def python_of_nobody(options):
    """Return a Python that an ordinary user may run and that finds our packages, or None."""
    probe = f"open({str(Path(__file__))!r}); import torch, pyroute2, manyranks"
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            command = [python, "-c", probe]
            ended = subprocess.run(command, capture_output=True, check=False, **options)
            if ended.returncode == 0:
                return python
    return None


@HOSTS
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become someone else")
def test_an_ordinary_user_can_have_virtual_hosts():
    paths = [*site.getsitepackages(), str(Path(manyranks.__file__).parents[1])]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "HOME": folder,
            "TMPDIR": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # torch sets this folder for its children, and it belongs to another user.
        environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        options = {
            "user": NOBODY,
            "group": NOBODY,
            "extra_groups": [],
            "env": environ,
            "cwd": folder,
        }
        python = python_of_nobody(options)
        if python is None:
            pytest.skip("an ordinary user cannot read this installation")
        errors = Path(folder, "errors")
        with errors.open("wb") as sink:
            caller = start_caller(folder, "hosts", python, **options, stderr=sink)
        assert wait_for(
            lambda: len(list(Path(folder).glob("?.json"))) == 2 or caller.poll() is not None
        )
        assert caller.poll() is None, errors.read_text()
        ranks = ranks_up(folder, 2)
        assert psutil.Process(ranks[0]["rank"]).uids().effective == NOBODY
        assert len({rank["network"] for rank in ranks}) == 2
        os.kill(ranks[0]["agent"], signal.SIGKILL)
        assert caller.wait(300) == 1
        check_gone(ranks)


@HOSTS
def test_namespaces_that_are_forbidden_leave_the_wire():
    denied = Path(__file__).parents[2] / "support" / "denied.py"
    program = "from manyranks import links; print(links.Link()); print(links.available()['hosts'])"
    ended = subprocess.run(
        [sys.executable, denied, "-c", program], capture_output=True, text=True, timeout=600
    )
    if "max_net_namespaces" in ended.stderr:
        pytest.skip("this system does not let a user lower the limit")
    assert ended.returncode == 0, ended.stderr
    chosen, reason = ended.stdout.splitlines()
    assert "virtual time" in chosen
    assert "unshare" in reason
    assert "No space left" in reason
