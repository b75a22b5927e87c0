"""What stages 3 and 4 send takes as long over a link as their formulas say."""

import time

import pytest
import torch
import torch.distributed as dist

from ddp_course import stage3_paramserver, stage4_ring
from manyranks import Link, launch, links

MODES = [
    pytest.param(
        "hosts",
        marks=pytest.mark.skipif(bool(links.available()["hosts"]), reason="no virtual hosts here"),
    ),
    "virtual",
]
BYTES = 1 << 20
MESSAGE_SECONDS = BYTES * 8 / 80e6  # 0.105
FASTER = 0.95  # A token bucket lets the first few kB of a message pass at once.


def timed(function, argument):
    """Return the seconds from the moment all ranks are ready to the end on this rank."""
    dist.barrier()
    start = time.perf_counter()
    function(argument)
    return time.perf_counter() - start


def time_each():
    """Return the seconds of each way to sum BYTES bytes, on every rank."""
    tensor = torch.zeros(BYTES // 4)
    return {
        "server": timed(stage3_paramserver.average_on_server, [tensor]),
        "whole": timed(stage4_ring.whole_gradient_ring, tensor),
        "ring": timed(stage4_ring.ring_all_reduce, tensor),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_takes_as_long_as_its_formula(mode, world_size):
    """The time is exact in virtual time; over real sockets it is at least as long."""
    steps = world_size - 1
    expected = {"server": 2 * steps, "whole": steps, "ring": 2 * steps / world_size}
    link = Link("80Mbit", mode=mode)
    ranks = launch(time_each, world_size=world_size, device="cpu", link=link)
    for name, least in expected.items():
        slowest = max(rank[name] for rank in ranks) / MESSAGE_SECONDS
        if mode == "hosts":
            assert slowest >= FASTER * least, name
        else:
            assert slowest == pytest.approx(least, rel=1e-5), name  # Thirds of a tensor differ.
