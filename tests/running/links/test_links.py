"""Emulated links: what they accept and refuse, how long a message takes, and that a link is a link
both ways.

A machine under load only ever makes things slower, so the bounds from below are tight and those
from above wide.
"""

import re
import socket
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddp_course import launch, stage3_paramserver, stage4_ring
from ddp_course.errors import EmulationError
from ddp_course.running import links, virtual_hosts, wire
from ddp_course.running.links import LINKS, Link, link, throttle

MODES = [
    pytest.param(
        "hosts",
        marks=pytest.mark.skipif(bool(links.available()["hosts"]), reason="no virtual hosts here"),
    ),
    "wire",
]
BANDWIDTH = "80Mbit"
BYTES = 1 << 20
MESSAGE_SECONDS = BYTES * 8 / 80e6  # 0.105
FASTER = 0.95  # a token bucket lets the first few kB of a message pass at once


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
            Link(**{"mode": "wire", option: value})


def test_more_hosts_than_ranks_and_nccl_are_refused():
    with pytest.raises(EmulationError, match="5 hosts for 3 ranks"):
        launch(dist.get_rank, world_size=3, device="cpu", link=Link(hosts=5, mode="wire"))
    with pytest.raises(EmulationError, match=r"NCCL has wires of its own: .*--device cpu"):
        Link(mode="wire").check(2, "nccl")


@pytest.mark.parametrize("mode", MODES)
def test_more_than_the_processor_carries_is_refused_with_the_highest_that_goes(mode):
    with pytest.raises(EmulationError, match=r"choose at most \d+\.?\d*Mbit") as refused:
        launch(dist.get_rank, world_size=2, device="cpu", link=Link("29Tbit", mode=mode))
    Link(str(refused.value).rsplit(" ", 1)[-1], mode=mode).rehearse(2)


def test_a_busy_moment_does_not_lead_to_a_refusal(monkeypatch):
    measured = iter([1e8, 1.5e8, 3e8, 0, 0, 0])
    monkeypatch.setattr(link, "carried", lambda *_: next(measured))
    monkeypatch.setattr(link, "_carried", {})
    Link("200Mbit", mode="wire").rehearse(4)
    with pytest.raises(EmulationError, match="at most 300Mbit"):
        Link("400Mbit", mode="wire").rehearse(4)
    Link("400Mbit", hosts=1, mode="wire").rehearse(4)  # a single host has no link to measure


def test_known_links_in_slow_motion():
    made = Link.like("NVLink A100", slowed=1000, scale=20, mode="wire")
    assert made.bandwidth == pytest.approx(2.4e12 / 20_000) and made.latency == pytest.approx(
        3.4e-3
    )
    assert all(known.source for known in LINKS.values())
    with pytest.raises(EmulationError, match=r"unknown link.*NVLink A100"):
        Link.like("string")
    with pytest.raises(EmulationError, match="slowed is 0"):
        Link.like("PCIe 4", slowed=0)
    with pytest.raises(EmulationError, match="scale is -2"):
        Link.like("PCIe 4", scale=-2)


def test_automatic_mode_takes_the_wire_where_hosts_are_forbidden(monkeypatch):
    monkeypatch.setattr(virtual_hosts, "forbidden_by", lambda: "AppArmor says no")
    assert Link().mode == "wire" and "throttled wire" in str(Link())
    assert links.available() == {"hosts": "AppArmor says no", "wire": None}
    with pytest.raises(EmulationError, match=r"AppArmor says no.*wire"):
        Link(mode="hosts")


@pytest.mark.parametrize("program, why", [("exec sleep 99", "timed"), (None, "No such file")])
def test_an_attempt_that_fails_takes_the_wire(program, why, monkeypatch, tmp_path):
    if program:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(virtual_hosts, "ATTEMPT_SECONDS", 3)
    assert re.search(
        rf"the attempt to build them failed \(.*{why}", virtual_hosts.forbidden_by.__wrapped__()
    )


def test_latency_takes_the_wire(monkeypatch):
    monkeypatch.setattr(virtual_hosts, "forbidden_by", lambda: None)
    assert Link().mode == "hosts" and Link(latency="5ms").mode == "wire"
    with pytest.raises(EmulationError, match="they have no latency; the wire has"):
        Link(latency="5ms", mode="hosts")


# The model of the throttled wire, without processes


@pytest.fixture
def switch(monkeypatch):
    """A switch between hosts 0, 0, 1 and 2 (ranks 0 to 3) with links of 1,000 bytes a second, at
    time 100.
    """
    clock = SimpleNamespace(now=100.0, slept=[])
    monkeypatch.setattr(throttle.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(throttle.time, "sleep", clock.slept.append)
    monkeypatch.setattr(wire, "card", wire.card)
    made = throttle.ThrottledWire([0, 0, 1, 2], 8000, 0.5)
    made.clock = clock
    return made


def ends(switch, *ranks):
    """The switch as several ranks have it, each in a process of its own."""
    copies = [object.__new__(throttle.ThrottledWire) for _ in ranks]
    for each, rank in zip(copies, ranks, strict=True):
        vars(each).update(vars(switch))
        each.enter(rank)
    return copies


def deliver(switch, sender, receiver, nbytes):
    """Post both sides; returns how long sender and receiver have to wait from now."""
    sending, receiving = ends(switch, sender, receiver)
    tickets = sending.post("send", nbytes, receiver), receiving.post("recv", nbytes, sender)
    switch.clock.slept.clear()
    for ticket in tickets:
        sending.finish(ticket)
    return switch.clock.slept[:]


@pytest.mark.parametrize(
    "before, message, waits",
    [
        (None, (0, 2, 2000), [2.0, 2.5]),  # its bytes, and the latency
        ((0, 2, 2000), (0, 3, 1000), [3.0, 3.5]),  # they queue on the sender's link
        ((0, 2, 2000), (3, 2, 1000), [1.0, 3.5]),  # they queue on the receiver's link
        ((0, 2, 2000), (2, 0, 2000), [2.0, 2.5]),  # both directions are free of each other
        (None, (0, 1, 5000), []),  # inside a host there is no link
        ((0, 2, 2000), (1, 3, 1000), [3.0, 3.5]),  # the ranks of a host share its link
    ],
)
def test_when_sender_and_receiver_go_on(switch, before, message, waits):
    if before:
        deliver(switch, *before)
    assert deliver(switch, *message) == waits


def test_time_counts_from_the_moment_when_both_are_ready(switch):
    sender, receiver = ends(switch, 0, 2)
    sent = sender.post("send", 1000, 2)
    switch.clock.now = 107.0
    received = receiver.post("recv", 1000, 0)
    for ticket, expected in ((sent, 1.0), (received, 1.5)):
        switch.clock.slept.clear()
        sender.finish(ticket)
        assert switch.clock.slept == [expected]


@pytest.mark.parametrize("pause, late", [(0.001, 0.0), (1.0, 0.003)])
def test_a_rank_that_was_woken_late_and_goes_on_at_once_makes_up_for_it(
    switch, monkeypatch, pause, late
):
    monkeypatch.setattr(
        throttle.time, "sleep", lambda seconds: setattr(switch.clock, "now", 101.503)
    )
    first, second = ends(switch, 0, 2)
    first.post("send", 1000, 2)
    answer, _, _ = first.post("recv", 1000, 2)
    second.finish(second.post("recv", 1000, 0))  # due at 101.5
    switch.clock.now += pause
    second.post("send", 1000, 0)
    assert answer[throttle.DEPARTS] == pytest.approx(101.5 + late + pause + 1.0)


# Between real ranks


def timed(function):
    """Seconds from the moment all ranks are ready to the end on this rank."""
    dist.barrier()
    time.sleep(
        2 * throttle.AT_ONCE
    )  # a rank that was woken late and sends at once would begin before `start`
    start = time.monotonic()
    function()
    return time.monotonic() - start


def time_everything():
    """Seconds of several ways to move BYTES bytes, on every rank."""
    rank, _, left, right = wire.neighbours()
    tensor, incoming = torch.zeros(2, BYTES // 4)

    def to_all():
        with_others = wire.isend if rank == 0 else wire.irecv
        for transfer in [
            with_others(tensor, peer) for peer in (wire.others(0) if rank == 0 else [0])
        ]:
            transfer.wait()

    return {
        "to all": timed(to_all),
        "exchange": timed(lambda: wire.exchange(tensor, right, incoming, left)),
        "server": timed(lambda: stage3_paramserver.average_on_server([tensor])),
        "whole": timed(lambda: stage4_ring.whole_gradient_ring(tensor)),
        "ring": timed(lambda: stage4_ring.ring_all_reduce(tensor)),
        "torch": timed(lambda: dist.all_reduce(tensor)),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_everything_takes_at_least_as_long_as_the_formula(mode, world_size):
    """Never less, and on one of three attempts not much more: the processor may be busy
    elsewhere.
    """
    steps = world_size - 1
    expected = {
        "to all": steps,
        "exchange": 1,
        "server": 2 * steps,
        "whole": steps,
        "ring": 2 * steps / world_size,
    }
    for last in (False, False, True):
        ranks = launch(
            time_everything, world_size=world_size, device="cpu", link=Link(BANDWIDTH, mode=mode)
        )
        slowest = {name: max(rank[name] for rank in ranks) / MESSAGE_SECONDS for name in ranks[0]}
        assert all(FASTER * least <= slowest[name] for name, least in expected.items()), slowest
        late = [name for name, least in expected.items() if slowest[name] >= 2 * least + 3]
        if not late:
            break
        assert not last, (late, slowest)
    if mode == "hosts":
        assert slowest["torch"] >= FASTER * expected["ring"]
    else:
        assert slowest["torch"] < 0.9 * expected["ring"], "the wire throttles our own messages only"


def to_and_fro():
    """Seconds of a small message from rank 0 to rank 1 and back."""
    small = torch.zeros(1)
    first, second = [(wire.send, wire.recv), (wire.recv, wire.send)][dist.get_rank()]
    peer = 1 - dist.get_rank()
    return timed(lambda: (first(small, peer), second(small, peer)))


def test_latency_of_the_wire_counts_once_each_way():
    seconds = launch(
        to_and_fro, world_size=2, device="cpu", link=Link("100Mbit", "50ms", mode="wire")
    )
    assert 0.099 < max(seconds) < 0.4


def two_hosts():
    """Seconds from rank 0 to its neighbour on the same host, and on to the other host."""
    rank, tensor = dist.get_rank(), torch.zeros(BYTES // 4)
    between = []
    for sender, receiver in ((0, 1), (1, 2), (2, 3)):
        if rank == sender:
            between.append(timed(partial(wire.send, tensor, receiver)))
        elif rank == receiver:
            between.append(timed(partial(wire.recv, tensor, sender)))
        else:
            between.append(timed(lambda: None))
    return socket.gethostname(), between


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_one_host_reach_each_other_fast(mode):
    ranks = launch(two_hosts, world_size=4, device="cpu", link=Link("16Mbit", hosts=2, mode=mode))
    inside, across, inside_too = (
        max(seconds) for seconds in zip(*(rank[1] for rank in ranks), strict=True)
    )
    assert across >= FASTER * BYTES * 8 / 16e6
    assert max(inside, inside_too) < 0.5 * across
    names = [name for name, _ in ranks]
    described = Link("16Mbit", mode=mode).describe()
    assert (described["mode"], described["bandwidth_bits_s"]) == (mode, 16e6)
    assert described["carries_torch"] == (mode == "hosts")
    assert names == (
        ["host0", "host0", "host1", "host1"] if mode == "hosts" else [socket.gethostname()] * 4
    )
