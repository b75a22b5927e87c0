"""The wrapper's own promises: buckets for checkpoints, inputs on their way to a device, what `Join` asks for."""

import pytest
import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.stage6_ddp import DistributedDataParallel


def branches(rank):
    """A model of several small buckets whose gradients become ready in another order on each rank."""
    torch.manual_seed(0)
    left, right = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(inputs):
        order = (left, right) if rank else (right, left)
        return sum(layer(inputs) for layer in order)

    model = torch.nn.ModuleList([left, right])
    model.forward = forward
    return DistributedDataParallel(model, bucket_cap_mb=0.001)


def layouts():
    """Of one that trains: before and after its first pass, and which passes change it; of one that loads it."""
    trained, loaded = branches(dist.get_rank()), branches(dist.get_rank())
    seen = [trained.bucket_layout()]
    for _ in range(2):
        trained(torch.ones(1, 16)).sum().backward()
        seen.append(trained.bucket_layout())
    loaded.load_bucket_layout(None)
    seen.append(loaded.bucket_layout())
    loaded.load_bucket_layout(seen[1])
    sizes = [bucket.flat.numel() for bucket in loaded.reducer.buckets]
    loaded(torch.ones(1, 16)).sum().backward()
    with pytest.raises(ValueError, match="of another model"):
        loaded.load_bucket_layout([*seen[1], ["2.weight"]])
    return seen, loaded.bucket_layout(), sizes


def test_the_buckets_of_stage_6_are_saved_and_loaded():
    ranks = launch(layouts, world_size=2)
    for (before, first, second, untouched), loaded, sizes in ranks:
        assert before is None and untouched is None and first == second == loaded == ranks[0][0][1]
        names = sorted(name for bucket in first for name in bucket)
        assert names == ["0.bias", "0.weight", "1.bias", "1.weight"] and len(sizes) == len(first) > 1


class Noting(torch.nn.Module):
    """Notes on which devices its inputs are."""

    def __init__(self):
        super().__init__()
        self.weight, self.met = torch.nn.Parameter(torch.ones(1)), []

    def forward(self, first, *, others):
        self.met = [first.device.type, others["more"].device.type, others["name"]]
        return self.weight * 1


def on_a_device():
    """Inputs as they arrive with `device_ids`; "meta" plays the GPU."""
    parallel = DistributedDataParallel(Noting())
    arrived = []
    for ids in (None, [0]):
        parallel.device_ids, parallel.device = ids, torch.device("meta") if ids else parallel.device
        parallel(torch.ones(1), others={"more": torch.ones(1), "name": "kept"})
        arrived.append(parallel.module.met)
    return arrived


def test_inputs_move_to_the_device_of_the_module():
    [arrived] = launch(on_a_device, world_size=1)
    assert arrived == [["cpu", "cpu", "kept"], ["meta", "meta", "kept"]]


def started():
    """How a wrapper begins: rank 0's weights, and buffers unless the older name says no."""
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
