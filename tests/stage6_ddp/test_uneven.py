"""`join`, looked at from inside and from after: whose buffers go on, and what a wrapper keeps of it."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_course import launch
from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_course.stage6_ddp.uneven import Shadow

CLASSES = {"torch": TorchDDP, "ours": DistributedDataParallel}


def train(parallel, steps):
    """Some passes; the running mean that each of them begins with."""
    began = []
    handle = parallel.module.register_forward_pre_hook(lambda module, _: began.append(module.running_mean.tolist()))
    for step in range(steps):
        batch = torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        parallel(batch).square().sum().backward()
    handle.remove()
    return began


def joined_twice(kind):
    """Means at the beginning of all passes: rank 0 has data for longer; after it; in a join that is switched off."""
    parallel = CLASSES[kind](torch.nn.BatchNorm1d(2))
    with parallel.join():
        seen = train(parallel, 3 - 2 * dist.get_rank())
    seen += train(parallel, 2)
    with parallel.join(enable=False):
        seen += train(parallel, 2)
    with parallel.join():
        seen += train(parallel, 1 + dist.get_rank())
    return seen + train(parallel, 2)


def test_the_buffers_that_go_on_are_those_that_go_on_with_torch():
    """A rank with data decides, then the last one, and where join is switched off rank 0; it shows in the values."""
    ranks = launch(lambda: {kind: joined_twice(kind) for kind in CLASSES}, world_size=2, timeout=60)
    for rank in ranks:
        assert rank["ours"] == rank["torch"]
    longer, shorter = (rank["ours"] for rank in ranks)
    assert len(longer) == 3 + 2 + 2 + 1 + 2 and len(shorter) == 1 + 2 + 2 + 2 + 2
    assert longer[0] != longer[1] != longer[2], "rank 0's own went on while rank 1 was out of data"


def kept():
    """Collectives of a pass that Python starts, before a join and after it, and what the logger says."""
    parallel = DistributedDataParallel(torch.nn.Linear(2, 1))
    found = []
    for joins in (False, True):
        if joins:
            with parallel.join():
                parallel(torch.ones(1, 2)).sum().backward()
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            parallel(torch.ones(1, 2)).sum().backward()
        found.append((all_reduce.call_count, parallel._get_ddp_logging_data()["join_uneven_inputs"]))
    return found


def test_after_a_join_a_pass_costs_what_it_cost_before():
    assert launch(kept, world_size=2) == [[(0, 0), (0, 1)]] * 2


def divisors():
    """By what a wrapper divides while others are out of data, as its hook for `Join` is asked for."""
    parallel, found = DistributedDataParallel(torch.nn.Linear(1, 1)), []
    for ask in (
        parallel.join_hook,
        lambda: parallel.join_hook(divide_by_initial_world_size=False),
        lambda: Shadow(parallel),
    ):
        ask()
        found.append(parallel.divides_by_initial_world_size)
    return found


def test_all_ranks_share_a_sum_unless_it_is_said_otherwise():
    assert launch(divisors, world_size=1) == [[True, False, True]]
