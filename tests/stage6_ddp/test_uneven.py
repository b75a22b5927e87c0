"""`join`, looked at from inside and from after: whose buffers go on, and what is kept of it."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_course import launch
from ddp_course.stage6_ddp import DistributedDataParallel

CLASSES = {"torch": TorchDDP, "ours": DistributedDataParallel}


def train(parallel, steps):
    """Run some passes, the second without communication.

    Return the running mean with which each of them begins.
    """
    began = []
    handle = parallel.module.register_forward_pre_hook(
        lambda module, _: began.append(module.running_mean.tolist())
    )
    for step in range(steps):
        batch = torch.randn(
            3, 2, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        )
        synchronisation = parallel.no_sync() if step == 1 else nullcontext()
        with synchronisation:
            parallel(batch).square().sum().backward()
    handle.remove()
    return began


def joined_twice(kind):
    """Return the means at the beginning of all passes, and the last gradient.

    Rank 0 has data for longer, rank 1, neither.
    """
    parallel = CLASSES[kind](torch.nn.BatchNorm1d(2))
    with parallel.join():
        seen = train(parallel, 3 - 2 * dist.get_rank())
    seen += train(parallel, 2)
    with parallel.join(enable=False):
        seen += train(parallel, 2)
    with parallel.join():
        seen += train(parallel, 1 + dist.get_rank())
    return seen + train(parallel, 2) + [parallel.module.bias.grad.tolist()]


def test_the_buffers_that_go_on_are_those_that_go_on_with_torch():
    """A rank with data decides, then the last one, and where join is switched off rank 0.

    It shows in the values.
    """
    ranks = launch(lambda: {kind: joined_twice(kind) for kind in CLASSES}, world_size=2)
    for rank in ranks:
        assert rank["ours"] == rank["torch"]
    longer, shorter = (rank["ours"] for rank in ranks)
    assert len(longer) == 3 + 2 + 2 + 1 + 2 + 1
    assert len(shorter) == 1 + 2 + 2 + 2 + 2 + 1
    assert longer[0] != longer[1] != longer[2], "rank 0's own went on while rank 1 was out of data"
