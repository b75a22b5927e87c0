"""Who reaches the ranks of a launch: nobody else, with namespaces and without."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from manyranks import Link, launch, linux
from manyranks.links import available

SUPPORT = Path(__file__).parents[2] / "support"
DENIED = [sys.executable, str(SUPPORT / "denied.py")]
needs_namespaces = pytest.mark.skipif(
    available()["hosts"] is not None, reason="namespaces are forbidden here"
)


def total_and_network():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item(), os.readlink("/proc/self/ns/net"), linux.alone_in_network()


@needs_namespaces
@pytest.mark.parametrize(
    "network, link, start",
    [
        (None, None, "fork"),
        ("auto", Link("200Mbit"), "fork"),
        ("private", None, "fork"),
        ("private", Link("200Mbit"), "spawn"),
    ],
)
def test_ranks_are_alone_in_a_network_of_their_own(monkeypatch, network, link, start):
    monkeypatch.setenv("MANYRANKS_START", start)
    if network:
        monkeypatch.setenv("MANYRANKS_NETWORK", network)
    first, second = launch(total_and_network, world_size=2, link=link)
    assert first == second == (2.0, first[1], True)
    assert first[1] != os.readlink("/proc/self/ns/net")


def test_an_open_launch_stays_in_the_callers_network(monkeypatch):
    monkeypatch.setenv("MANYRANKS_NETWORK", "open")
    for total, network, _ in launch(total_and_network, world_size=2):
        assert total == 2.0
        assert network == os.readlink("/proc/self/ns/net")


def test_a_misspelt_network_is_refused(monkeypatch):
    monkeypatch.setenv("MANYRANKS_NETWORK", "privat")
    with pytest.raises(ValueError, match='"privat"; choose auto or private or open'):
        launch(total_and_network, world_size=2)


@needs_namespaces
def test_a_rank_that_wants_to_download_is_told_why_it_cannot():
    with pytest.raises(Exception, match=r"(?s)download before the launch, or set MANYRANKS_NETW"):
        launch(lambda: socket.create_connection(("192.0.2.1", 80)), world_size=1)


def run_where_namespaces_are_forbidden(source, folder, **environment):
    script = folder / "script.py"
    script.write_text(source)
    return subprocess.run(
        [*DENIED, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )


@needs_namespaces
def test_where_namespaces_are_forbidden_private_is_refused_and_auto_works(tmp_path):
    source = (
        "import torch, torch.distributed as dist\nfrom manyranks import launch\n"
        "def groups():\n"
        "    pair = dist.new_group([1, 2])\n"
        "    total = torch.ones(1)\n"
        "    if dist.get_rank(): dist.all_reduce(total, group=pair)\n"
        "    dist.all_reduce(total)\n"
        "    return total.item()\n"
        "print(launch(groups, world_size=3))"
    )
    for start in ("fork", "spawn"):
        auto = run_where_namespaces_are_forbidden(source, tmp_path, MANYRANKS_START=start)
        assert auto.stdout == "[5.0, 5.0, 5.0]\n", auto.stderr
    private = run_where_namespaces_are_forbidden(source, tmp_path, MANYRANKS_NETWORK="private")
    assert "LaunchError: MANYRANKS_NETWORK is private, which this system forbids" in private.stderr


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize(
    "way, reached, outcome",
    [
        ("allowed", False, "[3.0, 3.0]"),
        ("forbidden", True, "user 65534 of this machine has connected to this launch's ranks"),
        ("open", True, ""),
    ],
)
def test_another_user_of_the_machine_does_not_get_in(tmp_path, way, reached, outcome):
    """The other user connects to whatever listens, as an open launch shows.

    On a busy machine he may come too late for a launch, so there are many.
    """
    ended = subprocess.run(
        [sys.executable, str(SUPPORT / "stranger.py"), way, "12"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    printed, _, found = ended.stdout.rpartition("found: ")
    assert (int(found) > 0) == reached, ended.stdout + ended.stderr
    assert outcome in printed


# Where the own network is the machine's, a machine that has IPv6 only is one without 127.0.0.1.
IPV6_ONLY = """
import os
from pyroute2 import IPRoute
from manyranks import join, launch, linux

linux.enter_own_network()
with IPRoute() as routes:
    (loopback,) = routes.link_lookup(ifname="lo")
    routes.addr("del", index=loopback, address="127.0.0.1", mask=8)

def total():
    import torch
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    return ones.item()

if __name__ == "__main__":
    print(launch(total, world_size=2, device="cpu"), join(device="cpu"))
"""


@needs_namespaces
def test_a_machine_with_ipv6_only_launches_in_its_open_network(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IPV6_ONLY)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "MANYRANKS_NETWORK": "open"},
    )
    assert done.stdout == "[2.0, 2.0] (0, 1)\n", done.stderr
