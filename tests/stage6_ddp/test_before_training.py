"""What is refused before the first step, function by function.

Devices are played by "meta", which needs no GPU.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from ddp_course.same_model import first_difference
from ddp_course.stage6_ddp import DistributedDataParallel, before_training


def parameters(device="cpu"):
    return dict(nn.Linear(3, 2, device=device).named_parameters())


def in_other_tensors(layer):
    """Like a DTensor, which needs several ranks."""
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()))
    return layer


SPREAD = {**parameters(), "other": torch.empty(1, device="meta")}
MIXED = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
ONE_GPU = "only work with modules on a single GPU"


def sharded_by_torch():
    """Return a layer of torch's FSDP without ranks."""
    layer = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(layer)
    return layer


REFUSED = [
    (
        partial(before_training.group_of, "group", SimpleNamespace(ndim=1)),
        RuntimeError,
        "Cannot specify both process_group",
    ),
    (
        partial(before_training.group_of, None, SimpleNamespace(ndim=2)),
        RuntimeError,
        "Only 1D device mesh is supported",
    ),
    (
        partial(before_training.devices_of, parameters("meta"), [0, 1], None),
        ValueError,
        "None or contain a single element",
    ),
    (partial(before_training.devices_of, parameters(), [0], None), ValueError, ONE_GPU),
    (partial(before_training.devices_of, parameters(), None, 1), ValueError, ONE_GPU),
    (partial(before_training.devices_of, SPREAD, [0], None), ValueError, ONE_GPU),
    (
        partial(before_training.refuse_modules, nn.Sequential(nn.SyncBatchNorm(3))),
        ValueError,
        "SyncBatchNorm runs anywh",
    ),
    (
        partial(before_training.refuse_modules, nn.Sequential(sharded_by_torch())),
        ValueError,
        "torch's FSDP has sharded a part",
    ),
    (
        partial(DistributedDataParallel, MIXED, param_to_hook_all_reduce=[]),
        NotImplementedError,
        "are not supported",
    ),
    (
        partial(before_training.trainable, nn.Linear(1, 1).requires_grad_(False), ()),
        RuntimeError,
        "requires a gradient",
    ),
    (
        partial(before_training.trainable, nn.Sequential(nn.LazyLinear(2)), ()),
        RuntimeError,
        r"0\.weight is not initialised yet",
    ),
    (
        partial(before_training.trainable, in_other_tensors(nn.Linear(3, 2)), ()),
        ValueError,
        "parameter weight is a TwoTensor, which has its elements in other tensors",
    ),
    (
        partial(before_training.trainable, MIXED, ()),
        ValueError,
        "different types of device: cpu, meta",
    ),
]


@pytest.mark.parametrize("check, kind, words", REFUSED, ids=[words for _, _, words in REFUSED])
def test_refused(check, kind, words):
    with pytest.raises(kind, match=words):
        check()


def test_accepted():
    mesh = SimpleNamespace(ndim=1, get_group=lambda mesh_dim: ["group of dimension", mesh_dim])
    assert before_training.group_of("group", None) == "group"
    assert before_training.group_of(None, mesh) == ["group of dimension", 0]
    assert before_training.devices_of(parameters("meta"), [3], None) == ([3], 3)
    assert before_training.devices_of(parameters("meta"), [3], 1) == ([3], 1)
    assert (
        before_training.devices_of(SPREAD, None, None)
        == before_training.devices_of(parameters(), None, None)
        == (None, None)
    )
    before_training.refuse_modules(nn.Sequential(nn.SyncBatchNorm(3)).to("meta"))
    before_training.trainable(MIXED, {"1.weight", "1.bias"})
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    assert list(before_training.trainable(frozen, ())) == ["weight"]


def test_a_difference_is_told_with_both_names():
    ours = [("a", "shape (2,)"), ("b", "shape (3,)")]
    theirs = [("a", "shape (2,)"), ("c", "shape (4,)")]
    said = "parameter 1 (b) has shape (3,) on rank 0, and (c) shape (4,) on rank 2"
    assert first_difference(ours, theirs, 2) == said
    assert first_difference(ours, ours, 2) is None
    said = "rank 0 has 2 parameters and rank 1 has 1; only one of them has b"
    assert first_difference(ours, ours[:1], 1) == said
    said = "rank 0 has 1 parameters and rank 1 has 2; only one of them has b"
    assert first_difference(ours[:1], ours, 1) == said
