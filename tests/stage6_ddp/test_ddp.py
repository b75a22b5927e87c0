"""The wrapper's own promises: inputs on their way to a device, what `Join` asks for."""

import pytest
import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.stage6_ddp import DistributedDataParallel


class Noting(torch.nn.Module):
    """Notes on which devices its inputs are."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.met = []

    def forward(self, first, *, others):
        self.met = [first.device.type, others["more"].device.type, others["name"]]
        return self.weight * 1


def on_a_device():
    """Inputs as they arrive with `device_ids`; "meta" plays the GPU."""
    parallel = DistributedDataParallel(Noting())
    arrived = []
    for ids in (None, [0]):
        parallel.device_ids = ids
        if ids:
            parallel.device = torch.device("meta")
        parallel(torch.ones(1), others={"more": torch.ones(1), "name": "kept"})
        arrived.append(parallel.module.met)
    return arrived


def test_inputs_move_to_the_device_of_the_module():
    [arrived] = launch(on_a_device, world_size=1)
    assert arrived == [["cpu", "cpu", "kept"], ["meta", "meta", "kept"]]


def started():
    """Return how a wrapper begins: rank 0's weights, and buffers unless the older name says no."""
    found = {}
    for name, settings in {
        "default": {},
        "newer": {"forward_sync_buffers": False},
        "newer, both": {"forward_sync_buffers": False, "broadcast_buffers": False},
        "older": {"broadcast_buffers": False},
        "none": {"init_sync": False},
    }.items():
        model = torch.nn.BatchNorm1d(2)
        model.weight.data.fill_(dist.get_rank() + 5)
        model.running_mean.fill_(dist.get_rank() + 7)
        DistributedDataParallel(model, **settings)
        found[name] = model.weight[0].item(), model.running_mean[0].item()
    return found


@pytest.mark.filterwarnings("ignore:broadcast_buffers is deprecated")
def test_rank_0_is_copied_in_the_beginning():
    for rank, found in enumerate(launch(started, world_size=3)):
        assert found == {
            "default": (5, 7),
            "newer": (5, 7),
            "newer, both": (5, 7),
            "older": (5, 7 + rank),
            "none": (5 + rank, 7 + rank),
        }
