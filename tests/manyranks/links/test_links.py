"""Emulated links: what they accept and refuse, how long a message takes, and both ways."""

import re
import socket
import sys
import time
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from rings import exchange, ring_all_reduce

from manyranks import launch, links, now
from manyranks.errors import EmulationError
from manyranks.hosts import virtual_hosts
from manyranks.links import Link

MODES = [
    pytest.param(
        "hosts",
        marks=pytest.mark.skipif(bool(links.available()["hosts"]), reason="no virtual hosts here"),
    ),
    "virtual",
]
BANDWIDTH = "80Mbit"
BYTES = 1 << 20
MESSAGE_SECONDS = BYTES * 8 / 80e6  # 0.105
FASTER = 0.95  # A token bucket lets the first few kB of a message pass at once.


# What is accepted and what is refused


@pytest.mark.parametrize(
    "option, values, words",
    [
        ("bandwidth", ["fast", "0Mbit", "900kbit", None], "bandwidth"),
        ("latency", ["soon", "-1ms", None], "time|latency"),
        ("hosts", [0, 1.5], "hosts"),
        ("mode", ["x"], "unknown mode 'x'"),
    ],
)
def test_what_is_refused(option, values, words):
    for value in values:
        with pytest.raises(EmulationError, match=words):
            Link(**{"mode": "virtual", option: value})


def test_a_link_may_have_a_name():
    assert Link("NVLink A100").bandwidth == 8 * 300e9
    assert Link("NVLink").bandwidth == Link("NVLink H100").bandwidth == 8 * 450e9
    assert Link("100Gbit Ethernet").bandwidth == Link("100Gbit").bandwidth
    with pytest.raises(EmulationError, match=r'bandwidth "NVLonk".*200Mbit.*NVLink V100'):
        Link("NVLonk")


def test_more_hosts_than_ranks_and_nccl_are_refused():
    with pytest.raises(EmulationError, match="5 hosts for 3 ranks"):
        launch(dist.get_rank, world_size=3, device="cpu", link=Link(hosts=5))
    with pytest.raises(EmulationError, match=r"NCCL has wires of its own: .*--device cpu"):
        Link().check(2, "nccl")


def test_time_is_virtual_unless_hosts_are_asked_for(monkeypatch):
    monkeypatch.setattr(virtual_hosts, "forbidden_by", lambda: "AppArmor says no")
    assert Link().mode == "virtual"
    assert "virtual time" in str(Link())
    assert links.available() == {"virtual": None, "hosts": "AppArmor says no"}
    with pytest.raises(EmulationError, match=r"AppArmor says no.*virtual"):
        Link(mode="hosts")


@pytest.mark.parametrize("program, why", [("exec sleep 99", "timed"), (None, "No such file")])
def test_an_attempt_that_fails_says_why(program, why, monkeypatch, tmp_path):
    if program:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(virtual_hosts, "ATTEMPT_SECONDS", 3)
    assert re.search(
        rf"the attempt to build them failed \(.*{why}", virtual_hosts.forbidden_by.__wrapped__()
    )


def test_hosts_have_no_latency(monkeypatch):
    monkeypatch.setattr(virtual_hosts, "forbidden_by", lambda: None)
    with pytest.raises(EmulationError, match="they have no latency; virtual time has"):
        Link(latency="5ms", mode="hosts")


# Between real ranks


def timed(function):
    """Return the seconds from the moment all ranks are ready to the end on this rank."""
    dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def time_everything():
    """Return the seconds of several ways to move BYTES bytes, on every rank."""
    rank = dist.get_rank()
    tensor, incoming = torch.zeros(2, BYTES // 4)

    def to_all():
        if rank == 0:
            transfers = [dist.isend(tensor, peer) for peer in range(1, dist.get_world_size())]
        else:
            transfers = [dist.irecv(tensor, 0)]
        for transfer in transfers:
            transfer.wait()

    return {
        "to all": timed(to_all),
        "exchange": timed(lambda: exchange(tensor, incoming)),
        "ring": timed(lambda: ring_all_reduce(tensor)),
        "torch": timed(lambda: dist.all_reduce(tensor)),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_everything_takes_as_long_as_the_formula(mode, world_size):
    """The time is exact in virtual time; over real sockets it is at least as long."""
    steps = world_size - 1
    expected = {"to all": steps, "exchange": 1}
    expected |= {"ring": 2 * steps / world_size, "torch": 2 * steps / world_size}
    link = Link(BANDWIDTH, mode=mode)
    ranks = launch(time_everything, world_size=world_size, device="cpu", link=link)
    for name, least in expected.items():
        slowest = max(rank[name] for rank in ranks) / MESSAGE_SECONDS
        if mode == "hosts":
            assert slowest >= FASTER * least, name
        else:
            assert slowest == pytest.approx(least, rel=1e-5), name  # Thirds of a tensor differ.


def to_and_fro():
    """Return the seconds of a small message from rank 0 to rank 1 and back."""
    small = torch.zeros(1)
    first, second = [(dist.send, dist.recv), (dist.recv, dist.send)][dist.get_rank()]
    peer = 1 - dist.get_rank()
    return timed(lambda: (first(small, peer), second(small, peer)))


def test_latency_counts_once_each_way():
    seconds = launch(to_and_fro, world_size=2, device="cpu", link=Link("100Mbit", "50ms"))
    assert max(seconds) == pytest.approx(0.1 + 2 * 32 / 100e6, abs=1e-12)


def two_hosts():
    """Return the seconds from rank 0 to its neighbour on the same host, and to the other host."""
    rank = dist.get_rank()
    tensor = torch.zeros(BYTES // 4)
    between = []
    for sender, receiver in ((0, 1), (1, 2), (2, 3)):
        if rank == sender:
            between.append(timed(partial(dist.send, tensor, receiver)))
        elif rank == receiver:
            between.append(timed(partial(dist.recv, tensor, sender)))
        else:
            between.append(timed(lambda: None))
    return socket.gethostname(), between


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_one_host_reach_each_other_fast(mode):
    ranks = launch(two_hosts, world_size=4, device="cpu", link=Link("16Mbit", hosts=2, mode=mode))
    of_ranks = [seconds for _, seconds in ranks]
    inside, across, inside_too = map(max, zip(*of_ranks, strict=True))
    assert across >= FASTER * BYTES * 8 / 16e6
    assert max(inside, inside_too) < 0.5 * across
    names = [name for name, _ in ranks]
    described = Link("16Mbit", mode=mode).describe()
    assert (described["mode"], described["bandwidth_bits_s"]) == (mode, 16e6)
    expected = [socket.gethostname()] * 4
    if mode == "hosts":
        expected = ["host0", "host0", "host1", "host1"]
    assert names == expected


def moments_of_messages_and_collectives():
    """Return when each message and collective has ended, in seconds after the one before.

    A step has 1 MB.
    """
    dist.barrier()  # Ranks have imported this file, which takes them time.
    moments = [now()]
    tensor = torch.zeros(250_000)
    for other in (1, 2):
        if dist.get_rank() == 0:
            dist.send(tensor, other)
        elif dist.get_rank() == other:
            dist.recv(tensor, 0)
        dist.barrier()
        moments.append(now())
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.group.WORLD]
    for group in (groups[dist.get_rank() // 2], groups[2]):
        whole = torch.zeros(250_000 * dist.get_world_size(group))
        dist.all_gather_into_tensor(whole, tensor, group=group)
        dist.barrier()
        moments.append(now())
    return [round(after - before, 6) for before, after in pairwise(moments)]


def test_hosts_may_have_faster_links_inside():
    link = Link("100Mbit", hosts=2, inside="1Gbit")
    results = launch(moments_of_messages_and_collectives, world_size=4, device="cpu", link=link)
    # Inside a host 1 MB takes 8 ms, between hosts 80; the last gather has three steps of them.
    assert results == [[0.008, 0.08, 0.008, 0.24]] * 4
    with pytest.raises(EmulationError, match="virtual time"):
        Link("100Mbit", hosts=2, inside="1Gbit", mode="hosts")
