"""The communication thread of a process group: what shares it keeps one order.

What does not share it cannot mix.
"""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_course import communication, launch
from ddp_course.communication import communication_thread
from ddp_course.stage4_ring import ring_all_reduce
from ddp_course.stage5_bucketed import BucketedDDP
from ddp_course.stage6_ddp import DistributedDataParallel, SyncBatchNorm

CAP = 0.0005  # MB: with it each layer has buckets of its own
WRAPS = {
    "5": partial(BucketedDDP, bucket_cap_mb=CAP),
    "6": partial(DistributedDataParallel, bucket_cap_mb=CAP, all_reduce=ring_all_reduce),
    "6 unused": partial(
        DistributedDataParallel,
        bucket_cap_mb=CAP,
        all_reduce=ring_all_reduce,
        find_unused_parameters=True,
    ),
}


def layers(width):
    """Return uneven layers, so that buckets of two wrappers that mix differ.

    They differ in size, or at least in content.
    """
    return nn.Sequential(
        nn.Linear(6, width), SyncBatchNorm(width), nn.Tanh(), nn.Linear(width, 6)
    ).double()


def inputs(rank, step):
    return torch.randn(
        5, 6, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64
    )


ARRANGED = {"nested": lambda a, b, x: b(a(x)), "side by side": lambda a, b, x: a(x) + b(x)}


def two_wrappers(name, arranged, steps=4):
    """Return how far the gradients of two models, each wrapped, are from those on one device.

    They are both together on the whole batch there.
    """
    torch.manual_seed(0)
    pair = layers(40), layers(30)
    wrapped = [WRAPS[name](module) for module in pair]
    errors = []
    for step in range(steps):
        loss = ARRANGED[arranged](*wrapped, inputs(dist.get_rank(), step)).square().mean()
        nn.Module.zero_grad(pair[0]), nn.Module.zero_grad(pair[1])
        loss.backward()
        mine = torch.cat([p.grad.reshape(-1) for module in pair for p in module.parameters()])
        errors.append(
            ((mine - whole_batch(pair, arranged, step)).abs().max() / mine.abs().max()).item()
        )
    return max(errors)


def whole_batch(pair, arranged, step):
    """Return the gradients on one device, where batch normalisation sees the whole batch."""
    alone = []
    for module in pair:
        plain = nn.Sequential(
            nn.Linear(6, len(module[0].weight)), nn.BatchNorm1d(len(module[0].weight)), nn.Tanh()
        )
        plain.append(nn.Linear(len(module[0].weight), 6)).double().load_state_dict(
            module.state_dict()
        )
        alone.append(plain)
    whole = torch.cat([inputs(rank, step) for rank in range(dist.get_world_size())])
    ARRANGED[arranged](*alone, whole).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for module in alone for p in module.parameters()])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("arranged", ARRANGED)
@pytest.mark.parametrize("name", WRAPS)
def test_two_wrappers_and_the_models_own_collectives_in_one_backward_pass(
    name, arranged, world_size
):
    for error in launch(two_wrappers, name, arranged, world_size=world_size):
        assert error < 1e-12


def in_overlapping_groups():
    """Return sums in groups that overlap: they tell which messages met.

    Ranks are in different numbers of groups when their threads are made.
    """
    rank = dist.get_rank()
    sums = []
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for group in [None, *pairs]:
        if group is None or rank in dist.get_process_group_ranks(group):
            tensor = torch.full((5,), 10.0**rank)
            wait = communication_thread(group).start(
                lambda g, t=tensor: ring_all_reduce(t, group=g), tensor.device
            )
            wait()
            sums.append(tensor[4].item())
    assert communication_thread() is communication_thread(dist.group.WORLD)
    return sums


def test_every_group_has_a_thread_and_only_its_members_make_it():
    assert launch(in_overlapping_groups, world_size=3) == [[111, 11], [111, 11, 110], [111, 110]]


def one_job_fails():
    thread = communication_thread()
    said = []

    def broken(group):
        raise OSError("the network is down")

    ran = []
    waits = [thread.start(job, torch.device("cpu")) for job in (broken, ran.append)]
    for wait in waits:
        with pytest.raises((OSError, RuntimeError)) as caught:
            wait()
        said.append(str(caught.value))
    return said, ran


def test_after_a_failed_job_the_others_fail_too():
    for (first, second), ran in launch(one_job_fails, world_size=2):
        assert first == "the network is down"
        assert not ran
        assert "has failed before (OSError: the network is down)" in second
        assert "start the ranks again" in second


def threads_after_the_group():
    counts = []
    for _ in range(2):
        model = nn.Linear(2, 2)
        parallel = BucketedDDP(model)
        parallel(torch.ones(1, 2)).sum().backward()
        counts.append(sum(thread.name == "communication" for thread in threading.enumerate()))
        del parallel, model
    communication._threads.clear()  # The destruction of a process group does the same.
    gc.collect()
    [thread.join(60) for thread in threading.enumerate() if thread.name == "communication"]
    return counts, sum(thread.name == "communication" for thread in threading.enumerate())


def test_two_wrappers_one_after_the_other_use_one_thread_that_ends_with_its_group():
    assert launch(threads_after_the_group, world_size=2) == [([1, 1], 0)] * 2


def wrapped_for_one_pass(wrapper):
    """Return the gradient of a pass through a wrapper that nobody holds, twice.

    The inputs are a rank's own.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    gradients = []
    for _ in range(2):
        wrapper(model)(torch.full((4, 3), 1.0 + dist.get_rank())).sum().backward()
        gradients.append(model.weight.grad.clone())
        model.zero_grad()
    return gradients


@pytest.mark.parametrize("wrapper", [BucketedDDP, DistributedDataParallel])
def test_a_wrapper_that_nobody_holds_still_averages(wrapper):
    for passes in launch(wrapped_for_one_pass, wrapper, world_size=2, device="cpu"):
        # There are 4 samples of 1 and 4 of 2.
        assert all(torch.equal(gradient, torch.full((2, 3), 6.0)) for gradient in passes)


def listening_wrappers():
    """Return how many wrappers hear of a gradient after a model was wrapped three times.

    A pass is made with the last.
    """
    model = torch.nn.Linear(3, 2)
    alive = []
    for _ in range(3):
        parallel = BucketedDDP(model)
        alive.append(weakref.ref(parallel))
        parallel(torch.ones(4, 3)).sum().backward()
    gc.collect()
    return sum(reference() is not None for reference in alive)


def test_wrappers_of_earlier_cells_do_not_listen():
    assert launch(listening_wrappers, world_size=2, device="cpu") == [1, 1]
