"""Sizes only: what needs no value runs as ever, in the same time; what needs one is told so."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from manyranks import Device, Link, clocks, launch
from manyranks.devices.memory import Memory
from manyranks.errors import EmulationError, RankError

SETTING = {"device": Device("100GFLOP/s", "20GB/s", streams=True), "link": Link("1Gbit")}


def by_ddp(model, batches):
    """Train with torch's DDP on batches of a DataLoader with workers."""
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()


def by_tensor_parallelism(model, batches):
    """Divide the layers by DTensor, whose collectives are operations of torch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    divided = parallelize_module(model, mesh, plan)
    for inputs, targets in batches:
        F.cross_entropy(divided(inputs), targets).backward()


def trained_in(ways):
    """Return the moments at which each way of training ends, and an object that is sent to all."""
    warnings.simplefilter("ignore")
    moments = []
    for way in ways:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))
        sampler = DistributedSampler(data)
        batches = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)
        way(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), batches)
        torch.cpu.synchronize()
        moments.append(clocks.moment())
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    return moments, objects


def test_torchs_own_classes_take_the_same_time_with_values_and_without():
    ways = (by_ddp, by_tensor_parallelism)
    real = launch(trained_in, ways, world_size=2, **SETTING)
    sizes = launch(trained_in, ways, world_size=2, sizes_only=True, **SETTING)
    assert sizes == real
    moments, objects = sizes[0]
    assert 0 < moments[0] < moments[1]
    assert objects == [{"rank": 0}, {"rank": 1}]


def asks(question):
    """Ask one question about a tensor."""
    x = torch.ones(4, 4)
    questions = {
        "item": lambda: x.sum().item(),
        "format": lambda: f"{x.sum():.2f}",
        "decide": lambda: "yes" if x.sum() > 3 else "no",
        "whole": lambda: int(x.argmax()),
        "list": lambda: x[0].tolist(),
        "equal": lambda: torch.equal(x, x + 1),
        "numpy": lambda: x.numpy(),
        "mask": lambda: x[x > 0],
        "known": lambda: (torch.arange(6) + 1).sum().item(),
    }
    return questions[question]()


@pytest.mark.parametrize("question", ["item", "format", "decide", "list", "equal", "numpy", "mask"])
def test_a_question_for_a_value_is_refused_with_its_line_and_advice(question):
    with pytest.raises(RankError) as caught:
        launch(asks, question, world_size=1, sizes_only=True)
    assert caught.value.type_name == "NoValueError"
    assert "test_sizes.py line" in caught.value.message
    advice = "torch.where(mask, x, 0)" if question == "mask" else "--answer 0"
    assert advice in caught.value.message


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("item", 2.5),
        ("format", "2.50"),
        ("decide", "yes"),
        ("whole", 2),
        ("list", [2.5] * 4),
        ("equal", True),
        ("known", 21),
    ],
)
def test_a_number_answers_all_questions_but_those_whose_answer_is_known(question, answer):
    assert launch(asks, question, world_size=1, sizes_only=True, answer=2.5) == [answer]


def large_tensors(count):
    """Make tensors of 1 GB, of which one is freed, and one lends and gives back its storage."""
    tensors = [torch.empty(250_000_000) for _ in range(count)]
    del tensors[0]
    tensors.append(tensors[0].view(1000, -1))
    storage = tensors[0].untyped_storage()
    storage.resize_(0)
    storage.resize_(1_000_000_000)
    return Memory.current.peak


def test_memory_is_that_of_live_storage_and_may_run_out():
    assert launch(large_tensors, 3, world_size=1, sizes_only=True) == [3_000_000_000]
    with pytest.raises(RankError) as caught:
        launch(large_tensors, 17, world_size=1, sizes_only=True, device=Device("laptop"))
    assert caught.value.type_name == "OutOfMemoryError"
    assert "out of memory at test_sizes.py line" in caught.value.message
    assert caught.value.message.endswith("17 of 16 GB")


class Keeper:
    """Keeps a tensor, and itself: only the collection of reference cycles frees the two."""

    def __init__(self):
        self.tensor = torch.empty(250_000_000)
        self.myself = self


def tensors_in_cycles(objects_before):
    """Make and drop one tensor of 1 GB after another, when Python has made so many objects."""
    kept = [[] for _ in range(objects_before)]
    for _ in range(20):
        Keeper()
    kept.clear()
    return Memory.current.peak


@pytest.mark.parametrize("objects_before", [0, 300, 600])
def test_what_nobody_can_reach_is_freed_at_the_same_moments_in_each_run(objects_before):
    # Of two objects of 1 GB the first one is found to be garbage when the second one is made.
    peaks = launch(tensors_in_cycles, objects_before, world_size=1, sizes_only=True)
    assert peaks == [1_000_000_000]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="sizes_only=True"):
        launch(print, world_size=1, answer=0)
    with pytest.raises(EmulationError, match="virtual"):
        launch(print, world_size=1, sizes_only=True, link=Link(mode="hosts"))


def peaks_of_a_model_on_meta():
    """Return the peak once a layer has been made on the device "meta", and once it was moved."""
    with torch.device("meta"):
        layer = nn.Linear(1000, 1000, bias=False)
    before = Memory.current.peak
    layer.to_empty(device="cpu")
    return before, Memory.current.peak


def test_a_model_on_the_device_meta_takes_memory_once_it_is_moved():
    [(before, after)] = launch(peaks_of_a_model_on_meta, world_size=1, sizes_only=True, **SETTING)
    assert (before, after) == (0, 7813 * 512)
