"""Several machines from one call: a head and three hosts, started by ssh and by srun, with cables
of 1 Gbit/s.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_course.errors import LaunchError
from ddp_course.running.launching import hosts as hosts_of
from ddp_course.running.links import available

pytest.importorskip("ipyparallel")
zmq = pytest.importorskip("zmq")
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        bool(available()["hosts"]) or os.geteuid() != 0, reason="needs virtual hosts, as root"
    ),
    pytest.mark.skipif(not shutil.which("sshd", path="/usr/sbin"), reason="needs openssh-server"),
]

HEAD = """
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from ddp_course import launch, ring_all_reduce
from ddp_course.running import wire
from ddp_course.running.launching import engine, hosts

FOLDER, found = Path(__file__).parent, {}
# Whoever starts tests in the background has this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def ask(what):
    (FOLDER / f"ask-{what}").touch()
    while not (answer := FOLDER / f"done-ask-{what}").exists():
        time.sleep(0.01)
    text = answer.read_text()
    answer.unlink()
    return text

def tell(name, value):
    found[name] = value
    (FOLDER / "found").write_text(json.dumps(found))

def attempt(name, fn, *args, **settings):
    begin = time.monotonic()
    try:
        outcome = ["none", str(launch(fn, *args, **{"hosts": "all", "world_size": 6, **settings}))]
    except BaseException as error:
        outcome = [type(error).__name__, str(error)]
    tell(name, [*outcome, time.monotonic() - begin])

def ring():
    import socket
    with wire.counting() as traffic:
        tensor = torch.arange(60.0) * (dist.get_rank() + 1)
        ring_all_reduce(tensor)
    print("summed")
    return tensor.tolist(), traffic.bytes_sent, socket.gethostname()

def name():
    import socket
    return socket.gethostname()

def fails():
    if dist.get_rank() == 3:
        raise KeyError("nowhere")
    dist.barrier()

def sleeps():
    if dist.get_rank() == 5:
        time.sleep(100)
    ring_all_reduce(torch.ones(8))

def rings(folder):
    if dist.get_rank() == 0:
        (Path(folder) / "ringing").touch()
    while True:
        ring_all_reduce(torch.ones(100_000))

def accident(what):
    while not (FOLDER / "ringing").exists():
        time.sleep(0.01)
    (FOLDER / "ringing").unlink()
    time.sleep(0.3)
    if what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        ask(what)
    tell(f"{what} at", time.monotonic())

def in_an_accident(what):
    thread = threading.Thread(target=accident, args=(what,))
    thread.start()
    attempt(what, rings, str(FOLDER))
    tell(f"{what} after", time.monotonic() - found[f"{what} at"])
    time.sleep(3.5)
    tell(f"{what} left", int(ask("count")))
    thread.join()

def many_rings():
    for turn in range(50):
        tensor = torch.full((1000,), float(turn + dist.get_rank()))
        ring_all_reduce(tensor)
        assert tensor.unique().tolist() == [6.0 * turn + 15]
    return dist.get_rank()

def magic():
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "ddp_course")
    shell.run_cell_magic("ranks", "3 --hosts host1,host3 --pull total", "total = rank * 2\\nrank")
    return shell.user_ns["total"]

while not (FOLDER / "hosts" / "ipcontroller-client.json").exists():
    time.sleep(0.1)
def wait_for_three():
    with hosts.connect() as client:
        while len(client.ids) < 3:
            time.sleep(0.1)

def start_by(method):
    import os
    from ddp_course.running.launching import local
    os.environ["DDP_COURSE_START"] = method
    local.use_server(None)

def start_all_by(method):
    with hosts.connect() as client:
        client[:].apply_sync(start_by, method)

wait_for_three()
attempt("first", name)
here = launch(ring, world_size=6)
there = launch(ring, world_size=6, hosts="all")
tell("ring", [[row[:2] for row in here] == [row[:2] for row in there], [row[2] for row in there]])
attempt("some", name, hosts=["host3", "host1"], world_size=3)
attempt("fails", fails)
attempt("sleeps", sleeps, timeout=3)
attempt("unknown", name, hosts=["host9"])
start_all_by("spawn")
spares = launch(ring, world_size=6, hosts="all")
attempt("spares fail", fails)
same = [row[:2] for row in spares] == [row[:2] for row in here]
tell("spares", [same, [row[2] for row in spares]])
start_all_by("fork")
tell("cell", magic())
command = [sys.executable, FOLDER / "second_head.py"]
other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
other.stdout.readline()
attempt("head 0", many_rings)
tell("head 1", eval(other.communicate()[0]))
in_an_accident("interrupt")
true = engine.versions
engine.versions = lambda: {**true(), "torch": "1.0"}
attempt("other torch", name)
engine.versions = true
in_an_accident("kill-2")
attempt("two are left", name, hosts=["host1", "host3"])
ask("join-2")
wait_for_three()
attempt("joined late", name, hosts=["host1", "host2", "host3"], world_size=3)
in_an_accident("unplug-3")
attempt("all without 3", name)
ask("plug-3")
wait_for_three()
attempt("all again", name)
tell("end", True)
"""


SECOND_HEAD = """
import torch, torch.distributed as dist
from ddp_course import launch, ring_all_reduce

def other_rings():
    for turn in range(50):
        tensor = torch.full((77,), 1000.0 * turn)
        ring_all_reduce(tensor)
        assert tensor.unique().tolist() == [3000.0 * turn]
    return -dist.get_rank()

print("ready", flush=True)
print(launch(other_rings, world_size=3, hosts="all"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the head's program found out."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "head.py").write_text(HEAD)
    (folder / "second_head.py").write_text(SECOND_HEAD)
    for name in ("key", "hostkey"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    support = Path(__file__).parents[2] / "support" / "hosts_on_hosts.py"
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(hosts_of.__file__).parents[3]),
        "TMPDIR": str(folder),
    }
    command = [sys.executable, str(support), str(folder)]
    ended = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stderr + (folder / "log").read_text()
    return {**json.loads((folder / "found").read_text()), "printed": ended.stdout}


def test_results_bytes_and_places_are_those_of_one_machine(found):
    assert found["first"][0] == "none", found["first"]
    same, places = found["ring"]
    assert same and places == ["host1", "host1", "host2", "host2", "host3", "host3"]
    assert "[rank 4 host3] summed\n" in found["printed"]


def test_hosts_without_fork_give_the_same(found):
    same, places = found["spares"]
    assert same and places == found["ring"][1]
    error, message, _ = found["spares fail"]
    assert error == "RankError" and message.startswith(
        "rank 3 on host2: KeyError: 'nowhere' (of 6 ranks)"
    )


def test_hosts_can_be_named(found):
    assert found["some"][:2] == ["none", "['host1', 'host1', 'host3']"]
    error, message, _ = found["unknown"]
    assert error == "LaunchError" and "missing: host9; here are host1, host2, host3" in message


def test_errors_have_rank_and_host(found):
    error, message, _ = found["fails"]
    assert error == "RankError" and message.startswith(
        "rank 3 on host2: KeyError: 'nowhere' (of 6 ranks)"
    )
    error, message, _ = found["sleeps"]
    assert error == "LaunchTimeout"
    assert (
        "rank 5 has not entered ring_all_reduce of float32 [8], call 1, in which ranks 0, 1, 2, 3"
        " and 4 w" in message
    )
    assert "where they were:\n\nrank 5 on host3: " in message and "time.sleep(100)" in message


def test_a_cell_on_the_ranks_of_several_hosts(found):
    assert found["cell"] == 0
    lines = [
        line
        for line in found["printed"].splitlines()
        if line in ("[rank 0 host1] 0", "[rank 2 host3] 2")
    ]
    assert lines == ["[rank 0 host1] 0", "[rank 2 host3] 2"]


def test_two_heads_at_once_do_not_mix(found):
    """Two programs, with collectives of their own on the same three hosts, at the same time."""
    assert found["head 0"][:2] == ["none", "[0, 1, 2, 3, 4, 5]"], found["head 0"]
    assert found["head 1"] == [0, -1, -2]


def test_another_torch_is_refused(found):
    error, message, _ = found["other torch"]
    assert (
        error == "LaunchError"
        and message.startswith("host1 has torch 2.")
        and "this machine 1.0" in message
    )


@pytest.mark.parametrize(
    "accident, error, words",
    [
        ("interrupt", "KeyboardInterrupt", ""),
        ("kill-2", "LaunchError", "lost host2 in mid-launch"),
        ("unplug-3", "LaunchError", "lost host3 in mid-launch"),
    ],
)
def test_an_accident_is_told_and_leaves_nothing(found, accident, error, words):
    told, message, _ = found[accident]
    assert told == error and words in message, message
    assert found[f"{accident} after"] < 10, "a generous bound: it does not hang"
    assert found[f"{accident} left"] == 0, "ranks are left"


def test_the_others_go_on_and_a_host_may_join_late(found):
    assert found["two are left"][0] == "none", found["two are left"]
    assert found["joined late"][:2] == ["none", "['host1', 'host2', 'host3']"]


def test_a_host_that_was_cut_off_is_named_and_comes_back(found):
    """Its cable was out for as long as the accident and the launch after it: more than 10 s."""
    error, message, _ = found["all without 3"]
    assert (
        error == "LaunchError" and "missing: host3; here are host1, host2. On each host:" in message
    )
    assert "or launch without: hosts=['host1', 'host2']" in message
    assert found["all again"][:2] == [
        "none",
        str(["host1", "host1", "host2", "host2", "host3", "host3"]),
    ]
    assert found["end"]


def test_without_a_controller_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("DDP_COURSE_HOSTS", str(tmp_path))
    with pytest.raises(
        LaunchError, match=r"no hosts have been brought together .* run: ddp-course hosts start"
    ):
        hosts_of.connect()


def test_a_machine_with_the_key_of_another_controller_is_not_let_in(tmp_path):
    """One line, and exit code 1."""
    environ = {**os.environ, "DDP_COURSE_HOSTS": str(tmp_path / "hosts"), "TMPDIR": str(tmp_path)}
    course = [sys.executable, "-m", "ddp_course.cli", "hosts"]
    file = tmp_path / "hosts" / "ipcontroller-engine.json"
    start = [*course, "start", "--ip", "127.0.0.1", "--engines", str(tmp_path / "engines.json")]
    controller = subprocess.Popen(start, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        while "hosts join" not in controller.stdout.readline():
            assert controller.poll() is None
        for kept in (file, tmp_path / "engines.json", file.with_name("ipcontroller-client.json")):
            assert kept.stat().st_mode & 0o077 == 0, "for the owner only"
        settings = json.loads(file.read_text())
        settings["curve_serverkey"], settings["curve_secretkey"] = (
            key.decode() for key in zmq.curve_keypair()
        )
        (tmp_path / "wrong.json").write_text(json.dumps(settings))
        ended = subprocess.run(
            [*course, "join", str(tmp_path / "wrong.json")],
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
        )
    finally:
        controller.terminate()
        controller.communicate(timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1 and "did not let this machine in" in ended.stderr
    assert not list((tmp_path / "hosts").glob("*.json")), "no key is left behind"
