"""What is refused before the first step, function by function; devices are played by "meta", which needs no GPU."""

from types import SimpleNamespace

import pytest
import torch

from ddp_course.stage6_ddp import checks


def parameters(device="cpu"):
    return dict(torch.nn.Linear(3, 2, device=device).named_parameters())


def test_a_group_comes_from_one_argument():
    mesh = SimpleNamespace(ndim=1, get_group=lambda mesh_dim: ["group of dimension", mesh_dim])
    assert checks.group_of("group", None) == "group"
    assert checks.group_of(None, mesh) == ["group of dimension", 0]
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
        checks.group_of("group", mesh)
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        checks.group_of(None, SimpleNamespace(ndim=2))


def test_devices_are_those_of_a_module_on_one_gpu():
    assert checks.devices_of(parameters(), None, None) == (None, None)
    assert checks.devices_of(parameters("meta"), None, None) == (None, None)
    assert checks.devices_of(parameters("meta"), [3], None) == ([3], 3)
    assert checks.devices_of(parameters("meta"), [3], 1) == ([3], 1)
    with pytest.raises(ValueError, match="can only be None or contain a single element"):
        checks.devices_of(parameters("meta"), [0, 1], None)
    for ids, output in (([0], None), (None, 1)):
        with pytest.raises(ValueError, match="only work with modules on a single GPU"):
            checks.devices_of(parameters(), ids, output)
    spread = {**parameters(), "other": torch.empty(1, device="meta")}
    assert checks.devices_of(spread, None, None) == (None, None)
    with pytest.raises(ValueError, match="only work with modules on a single GPU"):
        checks.devices_of(spread, [0], None)


def test_torchs_batch_statistics_are_refused_on_the_cpu_only():
    module = torch.nn.Sequential(torch.nn.SyncBatchNorm(3))
    checks.refuse_gpu_batchnorm(module, "cuda")
    checks.refuse_gpu_batchnorm(torch.nn.Linear(1, 1), "cpu")
    with pytest.raises(ValueError, match=r"ddp_course.stage6_ddp.SyncBatchNorm runs anywhere"):
        checks.refuse_gpu_batchnorm(module, "cpu")


def test_strides_are_those_of_the_gradient():
    image = torch.empty(2, 3, 4, 4)
    assert checks.empty_strides(image) == image.stride()
    last = image.to(memory_format=torch.channels_last)
    assert checks.empty_strides(last) == last.stride() != image.stride()
    assert checks.empty_strides(image[:, ::2]) == (32, 16, 4, 1), "a gradient is packed"


def test_a_difference_is_told_with_both_names():
    ours = [("a", (2,), "float32", (1,)), ("b", (3,), "float32", (1,))]
    theirs = [("a", (2,), "float32", (1,)), ("c", (3,), "float64", (1,))]
    said = "parameter 1 (b) has dtype float32 on rank 0, and (c) float64 on rank 2"
    assert checks.first_difference(ours, theirs, 2) == said
    assert checks.first_difference(ours, ours, 2) is None
    said = "rank 0 has 2 parameters and rank 1 has 1; only one of them has b"
    assert checks.first_difference(ours, ours[:1], 1) == said
    said = "rank 0 has 1 parameters and rank 1 has 2; only one of them has b"
    assert checks.first_difference(ours[:1], ours, 1) == said


@pytest.mark.parametrize("what", checks.UNSUPPORTED)
def test_what_is_not_supported_is_named(what):
    checks.refuse_unsupported(None, None)
    with pytest.raises(NotImplementedError, match=f"{what} is not supported"):
        checks.refuse_unsupported(*(1 if name == what else None for name in checks.UNSUPPORTED))


def test_what_can_be_trained():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    assert list(checks.trainable(model, {"1.bias"})) == ["0.weight", "1.weight"]
    with pytest.raises(RuntimeError, match="no parameter that requires a gradient"):
        checks.trainable(model.requires_grad_(False), ())
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight is not initialised yet"):
        checks.trainable(torch.nn.Sequential(torch.nn.LazyLinear(2)), ())
    mixed = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match="different types of device: cpu, meta"):
        checks.trainable(mixed, ())
    checks.trainable(mixed, {"1.weight", "1.bias"})
