"""The course's own collectives in virtual time: they take the seconds of the formulas."""

import pytest

from ddp_course import Link, average_on_server, collectives, stage4_ring
from ddp_course.lab.measuring import theory
from ddp_course.lab.measuring.simulate import Network
from ddp_course.lab.measuring.simulate.step import on_hosts
from ddp_course.lab.measuring.timing import time_collective

NBYTES = 12 * 2**16
LINK = Link("800Mbit", "1ms")
COSTS = theory.Costs.of_link(LINK.bandwidth, LINK.latency)


def on_server(tensor):
    average_on_server([tensor])


OWN = {
    "parameter_server": on_server,
    "ring": stage4_ring.ring_all_reduce,
    "whole_gradient_ring": stage4_ring.whole_gradient_ring,
    "tree": collectives.tree_all_reduce,
    "halving_doubling": collectives.halving_doubling_all_reduce,
}
# A rank goes on when its message has left: of messages that it sends in a row, one latency counts.
LATENCIES_SAVED = {("parameter_server", 3): 1, ("parameter_server", 4): 2, ("tree", 3): 1}


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("algorithm", OWN)
def test_own_messages_take_the_seconds_of_the_formula(algorithm, world_size):
    seconds = time_collective(OWN[algorithm], NBYTES, world_size, LINK, repeats=1)
    formulas = {name: theory.seconds(name, NBYTES, world_size, COSTS) for name in OWN}
    saved_s = LATENCIES_SAVED.get((algorithm, world_size), 0) * COSTS.alpha
    assert seconds == pytest.approx(formulas.pop(algorithm) - saved_s, rel=1e-6)
    # As a control, no other formula gives these seconds.
    assert world_size < 4 or all(abs(other / seconds - 1) > 1e-3 for other in formulas.values())


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_on_two_hosts_they_take_the_seconds_of_the_formula(algorithm):
    """Inside a host an emulated link takes no time."""
    own = {
        **OWN,
        "hierarchical": lambda tensor: collectives.hierarchical_all_reduce(
            tensor, ranks_per_host=2
        ),
    }
    link = Link("800Mbit", "1ms", hosts=2)
    seconds = time_collective(own[algorithm], NBYTES, 4, link, repeats=1)
    network = Network(COSTS, theory.Costs(0.0, 0.0), per_host=2)
    assert seconds == pytest.approx(on_hosts(algorithm, NBYTES, 4, network), rel=1e-6)


def test_on_hosts_halving_and_doubling_begins_with_the_nearest_partner():
    """With the farthest first, the largest halves would share the hosts' cables."""
    halves = collectives.halving_doubling_all_reduce
    seconds = time_collective(halves, NBYTES, 4, Link("800Mbit", hosts=2), repeats=1)
    # A quarter of the bytes crosses twice, of both ranks of a host over one cable.
    assert seconds == pytest.approx(2 * 2 * NBYTES / 4 * COSTS.beta, rel=1e-6)
