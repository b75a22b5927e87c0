"""Real messages, played on links of any speed: they take the seconds of the formulas."""

import pytest
import torch
import torch.distributed as dist

from ddp_course import average_on_server, collectives, launch, stage4_ring
from ddp_course.measuring import theory
from ddp_course.measuring.simulate import Network, play, replay
from ddp_course.measuring.simulate.step import on_hosts


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize(
    "algorithm", ["parameter_server", "ring", "whole_gradient_ring", "tree", "halving_doubling"]
)
def test_replayed_messages_take_the_seconds_of_the_formula(algorithm, world_size):
    own = {
        "parameter_server": on_server,
        "ring": stage4_ring.ring_all_reduce,
        "whole_gradient_ring": stage4_ring.whole_gradient_ring,
        "tree": collectives.tree_all_reduce,
        "halving_doubling": collectives.halving_doubling_all_reduce,
    }
    costs = theory.Costs(1e-3, 1e-8)
    seconds = replay(own[algorithm], 12 * 2**16, world_size, Network(costs))
    formulas = {name: theory.seconds(name, 12 * 2**16, world_size, costs) for name in own}
    assert seconds == pytest.approx(formulas.pop(algorithm), rel=1e-6)
    assert world_size < 4 or all(
        abs(other / seconds - 1) > 1e-3 for other in formulas.values()
    )  # control


def on_server(tensor):
    average_on_server([tensor])


@pytest.mark.parametrize(
    "algorithm", ["ring", "whole_gradient_ring", "parameter_server", "hierarchical_ring"]
)
def test_replayed_messages_on_two_hosts_take_the_seconds_of_the_formula(algorithm):
    own = {
        "ring": stage4_ring.ring_all_reduce,
        "whole_gradient_ring": stage4_ring.whole_gradient_ring,
        "parameter_server": on_server,
        "hierarchical_ring": lambda tensor: collectives.hierarchical_all_reduce(
            tensor, ranks_per_host=2
        ),
    }
    network = Network(theory.Costs(2e-4, 1e-8), theory.Costs(2e-5, 1e-9), per_host=2)
    seconds = replay(own[algorithm], 2**16, 4, network)
    assert seconds == pytest.approx(on_hosts(algorithm, 2**16, 4, network), rel=1e-6)


def test_halving_and_doubling_has_the_partners_that_the_simulator_gives_it(world_size=6):
    """On hosts of 2 it counts who the partners are: with the farthest first, the largest halves
    would share a cable.
    """
    network = Network(theory.Costs(1e-3, 1e-8), theory.Costs(1e-4, 1e-9), per_host=2)
    seconds = replay(collectives.halving_doubling_all_reduce, 12 * 2**16, world_size, network)
    assert seconds == pytest.approx(
        play("halving_doubling", 12 * 2**16, world_size, network), rel=1e-6
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_duplex_server_adds_up_and_takes_half_the_time(world_size):
    assert all(launch(sums_like_torch, world_size=world_size, device="cpu"))
    costs = theory.Costs(0, 1e-8)
    seconds = replay(collectives.duplex_server_all_reduce, 2**20, world_size, Network(costs))
    assert seconds < 0.56 * theory.seconds("parameter_server", 2**20, world_size, costs)


def sums_like_torch():
    mine = torch.arange(1001.0) * (dist.get_rank() + 1)
    theirs = mine.clone()
    dist.all_reduce(theirs)
    return torch.equal(collectives.duplex_server_all_reduce(mine), theirs)
